"""Buffers in which chosen rows travel between the devices of experts: one for each pair, or packed without gaps."""

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import DATA_AXES
from mmjax.parallel.fsdp import make_varying, varying_like
from pallas_kernels.moe import api
from pallas_kernels.moe.grouping import group_rows, starts


class Places(NamedTuple):
    """Which choice of which token lies where in a buffer of N rows."""

    choice: jax.Array
    """[N] int32: the choice (token * A + a) that a row is for; t * A for an empty row."""
    slot: jax.Array
    """[t, A] int32: the row of a choice; beyond N, each its own, for one that is not in the buffer."""


class Chunk(NamedTuple):
    """One part of one round: how its rows get to their experts' devices and back."""

    way: tuple
    expert: jax.Array
    """[N] int32: of each row that arrives here, among this device's experts; -1 for an empty row."""
    weight: jax.Array
    """[N]: that of its choice, 0 for an empty row."""


class Buffers(abc.ABC):
    """One exchange: where every choice goes is decided once, then each chunk of each round is sent and fetched."""

    max_rounds: int
    num_rounds: jax.Array
    num_beyond: jax.Array
    """int32: choices of this device that do not fit the first round."""

    def __init__(
        self,
        index: jax.Array,
        *,
        num_experts: int,
        capacity_factor: float,
        num_chunks: int,
        mesh_axes: tuple[str, ...],
    ):
        self._mesh_axes, self._num_chunks = mesh_axes, num_chunks
        self._index, self._num_devices = index, lax.axis_size(mesh_axes)
        self._local_experts = num_experts // self._num_devices
        # [t, A]: -1 for a choice of none.
        self._device = jnp.where(index >= 0, index // self._local_experts, -1)
        self._grouping = group_rows(self._device.reshape(-1), self._num_devices)
        self._plan_rounds(capacity_factor)

    @abc.abstractmethod
    def _plan_rounds(self, capacity_factor: float) -> None:
        """Set the buffers' sizes and what is said of rounds."""

    @abc.abstractmethod
    def chunks(self, number: jax.Array | int, weight: jax.Array) -> list[Chunk]:
        """Those of round `number`. Tells all devices which experts their rows will be for, and their weights [t, A]."""

    def send_ahead(self, rows: jax.Array, chunk: Chunk) -> jax.Array:
        """What the chunk's rows, of `rows` [t, R], are taken from: `rows`, or those that another node sends."""
        del chunk
        return rows

    @abc.abstractmethod
    def dispatch(self, ahead: jax.Array, chunk: Chunk) -> jax.Array:
        """Send the chunk's rows to the devices of their experts."""

    @abc.abstractmethod
    def combine(self, outputs: jax.Array, dtype: jax.typing.DTypeLike, chunk: Chunk) -> jax.Array:
        """Bring the weighted results back and add them up [t, R] in `dtype`; 0 for what the chunk did not hold."""


def place(slot: jax.Array, is_in: jax.Array, num_rows: int) -> Places:
    """Places in a buffer of `num_rows`, where the choices `is_in` [t, A] take the row `slot` [t, A]."""
    number = jnp.arange(slot.size, dtype=jnp.int32)
    slot = jnp.where(is_in, slot, num_rows + number.reshape(slot.shape))
    empty = varying_like(jnp.full((num_rows,), slot.size, jnp.int32), slot)
    choice = empty.at[slot.reshape(-1)].set(varying_like(number, slot), mode="drop", unique_indices=True)
    return Places(choice, slot)


# The transposes of these are written out because autodiff would scatter into arrays of a row for each choice.
@jax.custom_vjp
def take_rows(rows: jax.Array, places: Places) -> jax.Array:
    """The row of each place's token, `rows` [t, R] -> [N, R]; 0 in empty places."""
    return api.take_rows(rows, places.choice // places.slot.shape[1])


def _take_forward(rows: jax.Array, places: Places) -> tuple[jax.Array, Places]:
    return take_rows(rows, places), places


def _take_backward(places: Places, gradient: jax.Array) -> tuple[jax.Array, None]:
    return api.add_rows(gradient, places.slot, dtype=gradient.dtype), None


take_rows.defvjp(_take_forward, _take_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_rows(values: jax.Array, places: Places, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sum over a of values[slot[t, a]], `values` [N, R] -> [t, R] in `dtype`, in order."""
    return api.add_rows(values, places.slot, dtype=dtype)


def _add_rows_forward(values: jax.Array, places: Places, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, tuple]:
    # Of the values their dtype alone is needed.
    return add_rows(values, places, dtype), (values[:0], places)


def _add_rows_backward(dtype: jax.typing.DTypeLike, saved: tuple, gradient: jax.Array) -> tuple[jax.Array, None]:
    del dtype
    like, places = saved
    return take_rows(gradient.astype(like.dtype), places), None


add_rows.defvjp(_add_rows_forward, _add_rows_backward)


@jax.custom_vjp
def take_choices(weight: jax.Array, places: Places) -> jax.Array:
    """The weight of each place's choice, [t, A] -> [N]; 0 in empty places."""
    return _at(weight.reshape(-1), places.choice)


def _take_choices_forward(weight: jax.Array, places: Places) -> tuple[jax.Array, Places]:
    return take_choices(weight, places), places


def _take_choices_backward(places: Places, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _at(gradient, places.slot), None


take_choices.defvjp(_take_choices_forward, _take_choices_backward)


@jax.custom_vjp
def add_choices(values: jax.Array, weight: jax.Array, places: Places) -> jax.Array:
    """Sum over a of weight[t, a] values[slot[t, a]], `values` [N, R] -> [t, R] in the dtype of `weight`, in order."""
    return api.add_rows(values, places.slot, weight, dtype=weight.dtype)


def _add_forward(values: jax.Array, weight: jax.Array, places: Places) -> tuple[jax.Array, tuple]:
    return add_choices(values, weight, places), (values, weight, places)


def _add_backward(saved: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    values, weight, places = saved
    of_place = _at(gradient, places.choice // weight.shape[1])
    to_values = (_at(weight.reshape(-1), places.choice)[:, None] * of_place).astype(values.dtype)
    to_weight = jnp.sum(of_place * values.astype(weight.dtype), axis=1)
    return to_values, _at(to_weight, places.slot), None


add_choices.defvjp(_add_forward, _add_backward)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """`array[index]`, 0 beyond its end."""
    return array.at[index].get(mode="fill", fill_value=0)


class AllToAll(Buffers):
    """Each pair of devices has a buffer of `num_chunks` equal parts, to which its choices are dealt in turn."""

    def _plan_rounds(self, capacity_factor: float) -> None:
        num_choices = self._index.size
        room = min(num_choices, math.ceil(capacity_factor * num_choices / self._num_devices))
        self._part_rows = -(-room // self._num_chunks)
        self._capacity = self._part_rows * self._num_chunks
        self.max_rounds = -(-num_choices // self._capacity)
        self.num_rounds = _same_everywhere(-(-jnp.max(self._grouping.counts) // self._capacity))
        self.num_beyond = jnp.sum(jnp.maximum(self._grouping.counts - self._capacity, 0), dtype=jnp.int32)

    def chunks(self, number: jax.Array | int, weight: jax.Array) -> list[Chunk]:
        places = self._places(number)
        # Numbers and weights of all chunks at once: a second small exchange would delay a large one.
        experts = [_local_expert(self._index, part, self._local_experts).astype(weight.dtype) for part in places]
        weights = [take_choices(weight, part) for part in places]
        asked = jnp.stack([*experts, *weights]).reshape(2, self._num_chunks, self._num_devices, -1)
        # [devices, chunks, 2, rows of a part]
        asked = self._swap(asked.transpose(2, 1, 0, 3))
        return [
            Chunk((part,), asked[:, chunk, 0].reshape(-1).astype(jnp.int32), asked[:, chunk, 1].reshape(-1))
            for chunk, part in enumerate(places)
        ]

    def _places(self, number: jax.Array | int) -> list[Places]:
        rank = self._grouping.rank.reshape(self._index.shape) - number * self._capacity
        is_in = (self._device >= 0) & (rank >= 0) & (rank < self._capacity)
        slot = self._device * self._part_rows + rank // self._num_chunks
        return [
            place(slot, is_in & (rank % self._num_chunks == chunk), self._num_devices * self._part_rows)
            for chunk in range(self._num_chunks)
        ]

    def dispatch(self, ahead: jax.Array, chunk: Chunk) -> jax.Array:
        return self._swap(take_rows(ahead, *chunk.way))

    def combine(self, outputs: jax.Array, dtype: jax.typing.DTypeLike, chunk: Chunk) -> jax.Array:
        return add_rows(self._swap(outputs), *chunk.way, dtype)

    def _swap(self, buffer: jax.Array, groups: list[list[int]] | None = None) -> jax.Array:
        """Slice i of the leading axis goes to device i (of its group), what comes from device i becomes slice i."""
        return lax.all_to_all(
            buffer, self._mesh_axes, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=groups
        )


class ByNode(AllToAll):
    """Rows cross from node to node once, to the device with the same number in its node, and are shared out there.

    Of N nodes with m devices each, a chunk holds what comes from one: the buffers of its m devices, which are those of
    `AllToAll`. The first is a node's own: while its experts work on it, the others are on their way. Sums over a node's
    experts come back in the dtype of the rows.
    """

    def __init__(self, index: jax.Array, *, node_devices: int, mesh_axes: tuple[str, ...], **settings: Any):
        self._node_devices = node_devices
        self._num_nodes = lax.axis_size(mesh_axes) // node_devices
        super().__init__(index, mesh_axes=mesh_axes, **settings)

    def chunks(self, number: jax.Array | int, weight: jax.Array) -> list[Chunk]:
        (here,) = super().chunks(number, weight)
        (places,) = here.way
        # [N, m * part]: the places of each node's devices, to that node; then those of its rows that each node sends.
        of_nodes = self._swap(places.choice.reshape(self._num_nodes, -1), self._rails())
        experts, weights = (array.reshape(self._num_nodes, -1) for array in (here.expert, here.weight))
        node = lax.axis_index(self._mesh_axes) // self._node_devices
        chunks = []
        for hop in range(self._num_nodes):
            of_hop = functools.partial(
                lax.dynamic_index_in_dim, index=(node - hop) % self._num_nodes, axis=0, keepdims=False
            )
            chunks.append(Chunk((hop, self._placed(of_hop(of_nodes))), of_hop(experts), of_hop(weights)))
        return chunks

    def send_ahead(self, rows: jax.Array, chunk: Chunk) -> jax.Array:
        return self._pass_on(rows, chunk.way[0])

    def dispatch(self, ahead: jax.Array, chunk: Chunk) -> jax.Array:
        return self._swap(take_rows(ahead, chunk.way[1]), self._nodes())

    def combine(self, outputs: jax.Array, dtype: jax.typing.DTypeLike, chunk: Chunk) -> jax.Array:
        hop, places = chunk.way
        total = cast(jax.Array, add_rows(self._swap(outputs, self._nodes()), places, dtype))
        return self._pass_on(total.astype(outputs.dtype), -hop).astype(dtype) if hop else total

    def _placed(self, choice: jax.Array) -> Places:
        row, num_choices = jnp.arange(choice.size, dtype=jnp.int32), self._index.size
        beyond = varying_like(jnp.arange(num_choices, dtype=jnp.int32) + choice.size, choice)
        target = jnp.where(choice < num_choices, choice, num_choices + row)
        slot = beyond.at[target].set(varying_like(row, choice), mode="drop", unique_indices=True)
        return Places(choice, slot.reshape(self._index.shape))

    def _pass_on(self, array: jax.Array, hop: int) -> jax.Array:
        """To the device with the same number, `hop` nodes further on."""
        if not hop:
            return array
        step = hop * self._node_devices
        pairs = [(device, (device + step) % self._num_devices) for device in range(self._num_devices)]
        return lax.ppermute(array, self._mesh_axes, pairs)

    def _nodes(self) -> list[list[int]]:
        """Devices that share a node."""
        return np.arange(self._num_devices).reshape(self._num_nodes, -1).tolist()

    def _rails(self) -> list[list[int]]:
        """Devices with the same number in their nodes."""
        return np.arange(self._num_devices).reshape(self._num_nodes, -1).T.tolist()


class Ragged(Buffers):
    """A device takes in a stream of all senders' rows without gaps, a buffer's length in each round.

    Every device knows how many rows go from whom to whom, so all agree on the cuts without asking.
    """

    def _plan_rounds(self, capacity_factor: float) -> None:
        # [senders, receivers]
        self._counts = lax.all_gather(self._grouping.counts, self._mesh_axes)
        num_choices, num_chunks = self._index.size, self._num_chunks
        self._sent_rows = min(num_choices, num_choices // num_chunks + self._num_devices)
        worst = self._num_devices * self._sent_rows
        self._capacity = min(worst, math.ceil(capacity_factor * num_choices / num_chunks))
        self.max_rounds = -(-worst // self._capacity)
        totals = jnp.stack([jnp.sum(self._part(chunk)[1], axis=0, dtype=jnp.int32) for chunk in range(num_chunks)])
        self.num_rounds = _same_everywhere(-(-jnp.max(totals) // self._capacity))
        fitting = jnp.stack([self._mine(self._cut(0, chunk).sizes, 0) for chunk in range(num_chunks)])
        self.num_beyond = jnp.sum(self._grouping.counts, dtype=jnp.int32) - jnp.sum(fitting, dtype=jnp.int32)

    def _part(self, chunk: int) -> tuple[jax.Array, jax.Array]:
        """(first, number) of the ranks of each pair in a chunk."""
        first, end = (self._counts * number // self._num_chunks for number in (chunk, chunk + 1))
        return first, end - first

    def _mine(self, of_pairs: jax.Array, axis: int) -> jax.Array:
        """This device's as sender (0) or as receiver (1)."""
        return lax.dynamic_index_in_dim(of_pairs, lax.axis_index(self._mesh_axes), axis, keepdims=False)

    def _cut(self, number: jax.Array | int, chunk: int) -> "_Cut":
        _, num_rows = self._part(chunk)
        begin = jnp.cumsum(num_rows, axis=0) - num_rows
        low, high = (jnp.clip(end * self._capacity - begin, 0, num_rows) for end in (number, number + 1))
        sizes = high - low
        at_sender = jnp.cumsum(num_rows, axis=1) - num_rows + low
        return _Cut(sizes, at_sender, jnp.where(sizes > 0, begin + low - number * self._capacity, 0))

    def chunks(self, number: jax.Array | int, weight: jax.Array) -> list[Chunk]:
        return [self._chunk(number, weight, chunk) for chunk in range(self._num_chunks)]

    def _chunk(self, number: jax.Array | int, weight: jax.Array, chunk: int) -> Chunk:
        first, num_rows = (self._mine(part, 0) for part in self._part(chunk))
        device = jnp.maximum(self._device, 0)
        rank = self._grouping.rank.reshape(self._index.shape) - first[device]
        is_in = (self._device >= 0) & (rank >= 0) & (rank < num_rows[device])
        places = place(starts(num_rows)[device] + rank, is_in, self._sent_rows)
        cut = self._cut(number, chunk)
        sent, taken = ([self._mine(part, axis) for part in cut] for axis in (0, 1))
        out, back = _Way(*sent, *taken), _Way(*_turned(taken), *_turned(sent))
        expert = _local_expert(self._index, places, self._local_experts)
        # One more than the number, so that what nothing was written to is -1; with the weights as one array, [N, 2].
        asked = jnp.stack([(expert + 1).astype(weight.dtype), take_choices(weight, places)], axis=1)
        arrived = cast(jax.Array, _send(asked, out, back, self._capacity, self._mesh_axes))
        return Chunk((places, out, back), arrived[:, 0].astype(jnp.int32) - 1, arrived[:, 1])

    def dispatch(self, ahead: jax.Array, chunk: Chunk) -> jax.Array:
        places, out, back = chunk.way
        return _send(take_rows(ahead, places), out, back, self._capacity, self._mesh_axes)

    def combine(self, outputs: jax.Array, dtype: jax.typing.DTypeLike, chunk: Chunk) -> jax.Array:
        places, out, back = chunk.way
        return add_rows(_send(outputs, back, out, self._sent_rows, self._mesh_axes), places, dtype)


class _Cut(NamedTuple):
    """What one chunk of one round carries, [senders, receivers] int32 each."""

    sizes: jax.Array
    at_sender: jax.Array
    """First row of the slice in the sender's buffer."""
    at_receiver: jax.Array


class _Way(NamedTuple):
    """Slices that a device sends to each, and those that it takes in from each: sizes and first rows at both ends."""

    sizes: jax.Array
    from_row: jax.Array
    to_row: jax.Array
    taken_sizes: jax.Array
    taken_from: jax.Array
    taken_to: jax.Array


def _turned(slices: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same slices in the other direction."""
    sizes, from_row, to_row = slices
    return sizes, to_row, from_row


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _send(buffer: jax.Array, out: _Way, back: _Way, num_rows: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    """`_move`, whose transpose is the way back.

    Written out: JAX's own asks the other devices for the places, which are known here.
    """
    return _move(buffer, out, num_rows, mesh_axes)


def _move(buffer: jax.Array, out: _Way, num_rows: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    """A buffer of `num_rows` with the slices taken in, 0 elsewhere."""
    nothing = varying_like(jnp.zeros((num_rows, *buffer.shape[1:]), buffer.dtype), buffer)
    return lax.ragged_all_to_all(
        buffer, nothing, out.from_row, out.sizes, out.to_row, out.taken_sizes, axis_name=mesh_axes
    )


def _send_forward(buffer: jax.Array, out: _Way, back: _Way, *static) -> tuple[jax.Array, tuple]:
    # Of the buffer its length alone is needed: an array of that many empty rows.
    return _send(buffer, out, back, *static), (buffer[:, :0], out, back)


def _send_backward(num_rows: int, mesh_axes: tuple[str, ...], saved: tuple, gradient: jax.Array) -> tuple:
    like, out, back = saved
    return _send(gradient, back, out, like.shape[0], mesh_axes), None, None


_send.defvjp(_send_forward, _send_backward)


def _local_expert(index: jax.Array, places: Places, local_experts: int) -> jax.Array:
    expert = index.reshape(-1).at[places.choice].get(mode="fill", fill_value=-1)
    return jnp.where(expert >= 0, expert % local_experts, -1)


def _same_everywhere(num_rounds: jax.Array) -> jax.Array:
    """The largest, at least 1: all devices of the mesh enter each round together."""
    return jnp.maximum(lax.pmax(make_varying(num_rounds), DATA_AXES), 1)
