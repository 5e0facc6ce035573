"""A schedule's table carried out: a scan over its ticks, with exchanges between neighbouring stages in each."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from mmjax.axes import PIPE
from mmjax.parallel.conditions import run_once, together
from mmjax.parallel.fsdp import varying_like
from mmjax.parallel.pipeline_parcels import parcels_of
from mmjax.parallel.pipeline_schedule import Kind, Operation, Schedule

Message = tuple[jax.Array, ...]
"""What a stage hands to the next one, or the gradient of it: arrays of one shape for all stages."""


class Work(NamedTuple):
    """What an operation gets."""

    input: Message
    """What the stage before has sent, with the sums that the device has; zeros for what is not finished."""
    cotangent: Message
    """The gradient of what the stage gives; zeros for what nobody takes."""
    micro_batch: jax.Array
    """int32."""
    stage: jax.Array
    """int32."""
    kept: jax.Array
    """int32: the slot for what the stage keeps of this micro-batch."""


Places = tuple[jax.Array | None, ...]
"""Of each array of a message [places, ...], None where it is never kept."""

Operate = Callable[[Any, Work], tuple[Any, Message, Message]]
"""(totals, work) -> (totals, what goes to the next stage, gradient for the stage before)."""


# XLA keeps so many exchanges between pairs under way.
_MOST_UNDER_WAY = 4


def run_schedule(
    schedule: Schedule,
    operations: Sequence[Operate],
    operation_of: Callable[[Kind, int], int | None],
    totals: Any,
    message: Message,
    num_arrays: Sequence[int],
    *,
    runs_again: bool = True,
) -> Any:
    """`totals` after all ticks. Inside `shard_map`; every device of the pipe axis runs it.

    `operation_of(kind, stage)` is the index in `operations` of what the stage does, None if there is nothing to do; an
    operation may hold collectives over the other mesh axes, since all devices of a stage do the same. `message` gives
    shapes, and zeros; of its arrays a stage is given the first `num_arrays[stage]`. `runs_again`: backward passes need
    the inputs of their stages too.

    Only those arrays travel that the device of the next stage does not have, and their gradients back. With latency 2
    what a tick computed travels during the next tick: neither waits for the other. Where forward and backward passes
    take turns, each tick sends in one direction alone. Arrays stay in buffers of as many places as the schedule needs,
    from their arrival until their last use.
    """
    slots, device = schedule.slots(num_arrays, runs_again=runs_again), lax.axis_index(PIPE)
    places_of = {name: getattr(slots, name) for name in ("inputs", "own_inputs", "cotangents", "own_cotangents")}
    kinds = _kinds_in_turn(schedule)
    period, is_hidden = len(kinds), schedule.latency == 2
    goes_both_ways = any({Kind.FORWARD, Kind.BACKWARD} <= of_tick for of_tick in kinds)
    most = _MOST_UNDER_WAY // 2 if is_hidden and goes_both_ways else _MOST_UNDER_WAY
    parcels = parcels_of(schedule, num_arrays, most)
    assert schedule.num_devices == lax.axis_size(PIPE)

    def table(value: Callable[[int, Operation], int | None]) -> np.ndarray:
        """[ticks, devices], -1 for None."""
        found = [[value(d, operation) for d, operation in enumerate(tick)] for tick in schedule.ticks]
        return np.array([[-1 if number is None else number for number in row] for row in found])

    def column(table: np.ndarray) -> jax.Array:
        """[ticks, devices, ...] -> [turns, ticks of a turn, ...] of this device."""
        own = lax.dynamic_index_in_dim(jnp.asarray(table, jnp.int32), device, axis=1, keepdims=False)
        return own.reshape(-1, period, *own.shape[1:])

    chosen = table(lambda d, o: None if o.kind is Kind.IDLE else operation_of(o.kind, schedule.stage_of(d, o.chunk)))
    stage = table(lambda d, o: schedule.stage_of(d, o.chunk))
    # Whose results travel in a tick, and to where on their way forward; nobody takes those of the last stage.
    sender = np.roll(stage, schedule.latency - 1, axis=0)
    target = np.minimum(sender + 1, schedule.num_stages - 1)
    ticks = {
        "operation": chosen,
        "micro_batch": table(lambda d, o: o.micro_batch),
        "stage": stage,
        "kept": slots.kept,
        "rows": {
            "inputs": (parcels.array_of_row[target], parcels.row_of_array[np.roll(target, 1, axis=1)]),
            "cotangents": (parcels.array_of_row[sender], parcels.row_of_array[np.roll(sender, -1, axis=1)]),
        },
        "stored": {name: places.stored for name, places in places_of.items()},
        "used": {name: places.used for name, places in places_of.items()},
    }
    ways = {
        "inputs": (Kind.FORWARD, parcels.pairs),
        "cotangents": (Kind.BACKWARD, [[(b, a) for a, b in pairs] for pairs in parcels.pairs]),
    }

    def perform(number: int, state: tuple, held: tuple) -> tuple:
        """Operation `number` on (totals, output, gradient for the stage before)."""
        buffers, tick = held
        read = functools.partial(_read, buffers, tick["used"], message)
        places = (tick[name] for name in ("micro_batch", "stage", "kept"))
        work = Work(read("inputs", "own_inputs"), read("cotangents", "own_cotangents"), *places)
        new, *sent = operations[number](state[0], work)
        return new, *((*arrays, *message[len(arrays) :]) for arrays in sent)

    def travel(sent: set[Kind], tick: dict[str, Any], output: Message, cotangent: Message) -> dict[str, Message]:
        """The parcels that arrive from the stages before and behind, of ticks that do what is in `sent`."""
        leaving = {"inputs": output, "cotangents": cotangent}
        return {
            name: _exchange(leaving[name], tick["rows"][name][0], parcels.sizes, pairs)
            for name, (kind, pairs) in ways.items()
            if kind in sent
        }

    def run_tick(state: tuple, tick: dict[str, Any], turn: int) -> tuple:
        totals, buffers, *leaving = state
        arriving = travel(kinds[turn - 1], tick, *leaving) if leaving else {}
        in_turn = chosen[turn::period]
        state = (totals, message, message)
        for number in sorted(set(in_turn.flatten().tolist()) - {-1}):
            share = int((in_turn == number).sum()), in_turn.size
            operate = functools.partial(perform, number)
            # What is read is read inside: out here each array would be copied.
            state = run_once(tick["operation"] == number, operate, state, (buffers, tick), share)
        if leaving:
            # Else XLA lets what travels arrive before the operation that hides it.
            state, arriving = together((state, arriving))
        totals, output, cotangent = state
        arriving = arriving if leaving else travel(kinds[turn], tick, output, cotangent)
        given = {name: _unpacked(arrived, tick["rows"][name][1]) for name, arrived in arriving.items()}
        given |= {"own_inputs": output, "own_cotangents": cotangent}
        stored = {name: _store(buffers[name], tick["stored"][name], arrays) for name, arrays in given.items()}
        return totals, buffers | stored, *((output, cotangent) if leaving else ())

    def run_turns(state: tuple, ticks: dict[str, Any]) -> tuple[tuple, None]:
        for turn in range(period):
            state = run_tick(state, jax.tree.map(lambda values, turn=turn: values[turn], ticks), turn)
        return state, None

    leaving = (message, message) if is_hidden else ()
    buffers = {name: _empty(places.num_places, message) for name, places in places_of.items()}
    (totals, *_), _ = lax.scan(run_turns, (totals, buffers, *leaving), jax.tree.map(column, ticks))
    return totals


def _kinds_in_turn(schedule: Schedule) -> list[set[Kind]]:
    """What ticks do: all of them, or the even ones and the odd ones where those do different things."""

    def kinds(ticks: Sequence[Sequence[Operation]]) -> set[Kind]:
        return {operation.kind for operations in ticks for operation in operations} - {Kind.IDLE}

    even, odd = kinds(schedule.ticks[::2]), kinds(schedule.ticks[1::2])
    if schedule.latency == 2 and not even & odd and len(schedule.ticks) % 2 == 0:
        return [even, odd]
    return [even | odd]


def _exchange(
    arrays: Message, rows: jax.Array, sizes: Sequence[int], pairs: Sequence[Sequence[tuple[int, int]]]
) -> Message:
    """The parcels [arrays of it, ...] that arrive; in row r of them, one after the other, array `rows[r]` is sent."""
    stacked, ends = jnp.stack(arrays), itertools.accumulate(sizes)
    found = []
    # Else XLA counts a message among what an operation exchanges, and starts none beside one that exchanges anything.
    with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
        for size, end, of_parcel in zip(sizes, ends, pairs, strict=True):
            parcel = jnp.stack([_at(stacked, rows[row]) for row in range(end - size, end)])
            found.append(lax.ppermute(parcel, PIPE, of_parcel))
    return tuple(found)


def _unpacked(parcels: Message, rows: jax.Array) -> Message:
    """The arrays that lie in `rows` of the parcels."""
    arrived = jnp.concatenate(parcels)
    return tuple(_at(arrived, row) for row in rows)


def _at(array: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(array, number, keepdims=False)


def _empty(num_places: Sequence[int], message: Message) -> Places:
    return tuple(
        varying_like(jnp.zeros((number, *leaf.shape), leaf.dtype), leaf) if number else None
        for number, leaf in zip(num_places, message, strict=True)
    )


def _read(buffers: dict[str, Places], used: dict[str, jax.Array], zeros: Message, *names: str) -> Message:
    """The sums of what lies in the used places of these buffers; zeros where that is -1."""

    def read(number: int, nothing: jax.Array) -> jax.Array:
        found = [
            jnp.where(used[name][number] < 0, nothing, _at(leaf, jnp.maximum(used[name][number], 0)))
            for name in names
            if (leaf := buffers[name][number]) is not None
        ]
        return functools.reduce(jnp.add, found) if found else nothing

    return tuple(read(number, nothing) for number, nothing in enumerate(zeros))


def _store(buffer: Places, stored: jax.Array, arrays: Message) -> Places:
    """The buffer with each array in its place, unless that is -1."""

    def store(leaf: jax.Array | None, slot: jax.Array, new: jax.Array) -> jax.Array | None:
        if leaf is None:
            return None
        place = jnp.maximum(slot, 0)
        return lax.dynamic_update_index_in_dim(leaf, jnp.where(slot < 0, _at(leaf, place), new), place, 0)

    return tuple(store(*one) for one in zip(buffer, stored, arrays, strict=True))
