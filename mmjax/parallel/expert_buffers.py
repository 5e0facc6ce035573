"""Buffers in which chosen rows travel between the devices of experts: one for each pair, or packed without gaps."""

import abc
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import DATA_AXES
from mmjax.parallel.fsdp import make_varying, varying_like
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
    def chunks(self, number: jax.Array | int) -> list[Chunk]:
        """Those of round `number`. Tells all devices which experts their rows will be for."""

    @abc.abstractmethod
    def dispatch(self, rows: jax.Array, chunk: Chunk) -> jax.Array:
        """Send the chunk's rows, of `rows` [t, R], to the devices of their experts."""

    @abc.abstractmethod
    def combine(self, outputs: jax.Array, weight: jax.Array, chunk: Chunk) -> jax.Array:
        """Bring the results back and add them up [t, R], weighted; 0 for what the chunk did not hold."""


def place(slot: jax.Array, is_in: jax.Array, num_rows: int) -> Places:
    """Places in a buffer of `num_rows`, where the choices `is_in` [t, A] take the row `slot` [t, A]."""
    number = jnp.arange(slot.size, dtype=jnp.int32)
    slot = jnp.where(is_in, slot, num_rows + number.reshape(slot.shape))
    empty = varying_like(jnp.full((num_rows,), slot.size, jnp.int32), slot)
    choice = empty.at[slot.reshape(-1)].set(varying_like(number, slot), mode="drop", unique_indices=True)
    return Places(choice, slot)


# The transposes of these two are written out because autodiff would scatter into arrays of a row for each choice.
@jax.custom_vjp
def take_rows(rows: jax.Array, places: Places) -> jax.Array:
    """The row of each place's token, `rows` [t, R] -> [N, R]; 0 in empty places."""
    return _at(rows, places.choice // places.slot.shape[1])


def _take_forward(rows: jax.Array, places: Places) -> tuple[jax.Array, Places]:
    return take_rows(rows, places), places


def _take_backward(places: Places, gradient: jax.Array) -> tuple[jax.Array, None]:
    # In the order of the choices, in at least float32.
    wide = np.promote_types(gradient.dtype, np.float32)
    return jnp.sum(_at(gradient, places.slot).astype(wide), axis=1).astype(gradient.dtype), None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def add_choices(values: jax.Array, weight: jax.Array, places: Places) -> jax.Array:
    """Sum over a of weight[t, a] values[slot[t, a]], `values` [N, R] -> [t, R] in the dtype of `weight`, in order."""
    return jnp.sum(weight[:, :, None] * _at(values, places.slot).astype(weight.dtype), axis=1)


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

    def chunks(self, number: jax.Array | int) -> list[Chunk]:
        rank = self._grouping.rank.reshape(self._index.shape) - number * self._capacity
        is_in = (self._device >= 0) & (rank >= 0) & (rank < self._capacity)
        slot = self._device * self._part_rows + rank // self._num_chunks
        places = [
            place(slot, is_in & (rank % self._num_chunks == chunk), self._num_devices * self._part_rows)
            for chunk in range(self._num_chunks)
        ]
        # Of all chunks at once: a second small exchange would delay a large one.
        experts = [_local_expert(self._index, part, self._local_experts) for part in places]
        experts = self._swap(jnp.stack([expert.reshape(self._num_devices, -1) for expert in experts], axis=1))
        return [Chunk((part,), experts[:, chunk].reshape(-1)) for chunk, part in enumerate(places)]

    def dispatch(self, rows: jax.Array, chunk: Chunk) -> jax.Array:
        return self._swap(take_rows(rows, *chunk.way))

    def combine(self, outputs: jax.Array, weight: jax.Array, chunk: Chunk) -> jax.Array:
        return add_choices(self._swap(outputs), weight, *chunk.way)

    def _swap(self, buffer: jax.Array) -> jax.Array:
        """Slice i of the leading axis goes to device i, what comes from device i becomes slice i."""
        return lax.all_to_all(buffer, self._mesh_axes, split_axis=0, concat_axis=0, tiled=True)


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

    def chunks(self, number: jax.Array | int) -> list[Chunk]:
        return [self._chunk(number, chunk) for chunk in range(self._num_chunks)]

    def _chunk(self, number: jax.Array | int, chunk: int) -> Chunk:
        first, num_rows = (self._mine(part, 0) for part in self._part(chunk))
        device = jnp.maximum(self._device, 0)
        rank = self._grouping.rank.reshape(self._index.shape) - first[device]
        is_in = (self._device >= 0) & (rank >= 0) & (rank < num_rows[device])
        places = place(starts(num_rows)[device] + rank, is_in, self._sent_rows)
        cut = self._cut(number, chunk)
        sent, taken = ([self._mine(part, axis) for part in cut] for axis in (0, 1))
        out, back = _Way(*sent, *taken), _Way(*_turned(taken), *_turned(sent))
        expert = _local_expert(self._index, places, self._local_experts)
        # One more than the number, so that what nothing was written to is -1.
        arrived = _move(expert + 1, out, self._capacity, self._mesh_axes) - 1
        return Chunk((places, out, back), arrived)

    def dispatch(self, rows: jax.Array, chunk: Chunk) -> jax.Array:
        places, out, back = chunk.way
        return _send(take_rows(rows, places), out, back, self._capacity, self._mesh_axes)

    def combine(self, outputs: jax.Array, weight: jax.Array, chunk: Chunk) -> jax.Array:
        places, out, back = chunk.way
        return add_choices(_send(outputs, back, out, self._sent_rows, self._mesh_axes), weight, places)


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
