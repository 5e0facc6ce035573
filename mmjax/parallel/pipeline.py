"""A schedule's table carried out: a scan over its ticks, with two exchanges between neighbouring stages in each."""

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
from mmjax.parallel.pipeline_schedule import Kind, Operation, Schedule

Message = tuple[jax.Array, ...]
"""What a stage hands to the next one, or the gradient of it: arrays of one shape for all stages."""


class Work(NamedTuple):
    """What an operation gets."""

    input: Message
    """What the stage before has sent; anything on the first stage."""
    cotangent: Message
    """The gradient that the stage behind has sent; anything on the last stage."""
    micro_batch: jax.Array
    """int32."""
    stage: jax.Array
    """int32."""
    kept: jax.Array
    """int32: the slot for what the stage keeps of this micro-batch."""


Operate = Callable[[Any, Work], tuple[Any, Message, Message]]
"""(totals, work) -> (totals, what goes to the next stage, gradient for the stage before)."""


def run_schedule(
    schedule: Schedule,
    operations: Sequence[Operate],
    operation_of: Callable[[Kind, int], int | None],
    totals: Any,
    message: Message,
    is_needed: Callable[[int, int], bool],
    *,
    runs_again: bool = True,
) -> Any:
    """`totals` after all ticks. Inside `shard_map`; every device of the pipe axis runs it.

    `operation_of(kind, stage)` is the index in `operations` of what the stage does, None if there is nothing to do; an
    operation may hold collectives over the other mesh axes, since all devices of a stage do the same. `message` gives
    shapes, and zeros; `is_needed(stage, number)` says whether a stage wants that array of it. `runs_again`: backward
    passes need the inputs of their stages too.

    With latency 2 what a tick computed travels during the next tick: neither waits for the other. All arrays of a
    message go as one over all borders then, since XLA has few permutations under way at a time; where forward and
    backward passes take turns, each tick sends in one direction alone. With latency 1 an array crosses those borders
    only behind which it is needed. Inputs stay in a buffer of as many slots as the schedule needs, from their arrival
    until their last use.
    """
    slots, device = schedule.slots(runs_again=runs_again), lax.axis_index(PIPE)
    pairs = [_pairs(schedule, number, is_needed) for number in range(len(message))]
    assert schedule.num_devices == lax.axis_size(PIPE)

    operations = [_alike(operate, totals, message) for operate in operations]

    def table(value: Callable[[int, Operation], int | None]) -> np.ndarray:
        """[ticks, devices], -1 for None."""
        found = [[value(d, operation) for d, operation in enumerate(tick)] for tick in schedule.ticks]
        return np.array([[-1 if number is None else number for number in row] for row in found])

    chosen = table(lambda d, o: None if o.kind is Kind.IDLE else operation_of(o.kind, schedule.stage_of(d, o.chunk)))
    kinds = _kinds_in_turn(schedule)
    period = len(kinds)

    def column(table: np.ndarray) -> jax.Array:
        """[ticks of a turn, turns] of this device."""
        own = lax.dynamic_index_in_dim(jnp.asarray(table, jnp.int32), device, axis=1, keepdims=False)
        return own.reshape(-1, period)

    ticks = {
        "operation": column(chosen),
        "micro_batch": column(table(lambda d, o: o.micro_batch)),
        "stage": column(table(lambda d, o: schedule.stage_of(d, o.chunk))),
        **{
            name: column(getattr(slots, name))
            for name in ("stored_input", "stored_cotangent", "used_input", "used_cotangent", "kept")
        },
    }

    def buffer(slots_of_device: Sequence[int], step: int) -> Message:
        """Slots of each array for the device that keeps most of it, of those that get it from `step` devices before."""
        numbers = [
            max([slots_of_device[(receiver + min(0, step)) % len(slots_of_device)] for _, receiver in pairs[number]])
            if pairs[number]
            else 1
            for number in range(len(message))
        ]
        return tuple(
            varying_like(jnp.zeros((max(1, n), *m.shape), m.dtype), m) for n, m in zip(numbers, message, strict=True)
        )

    def travel(sent: set[Kind], output: Message, cotangent: Message) -> tuple[Message | None, Message | None]:
        """What arrives from the stages before and behind, of ticks that do what is in `sent`."""
        turned = [[(b, a) for a, b in of_array] for of_array in pairs]
        there = _exchange(output, pairs, schedule.latency == 2) if Kind.FORWARD in sent else None
        back = _exchange(cotangent, turned, schedule.latency == 2) if Kind.BACKWARD in sent else None
        return there, back

    def run_tick(state: tuple, tick: dict[str, jax.Array], turn: int) -> tuple:
        totals, inputs, cotangents, *leaving = state
        arriving = travel(kinds[turn - 1], *leaving) if leaving else ()
        work = Work(
            _read(inputs, tick["used_input"]),
            _read(cotangents, tick["used_cotangent"]),
            tick["micro_batch"],
            tick["stage"],
            tick["kept"],
        )
        in_turn = chosen[turn::period]
        state = (totals, message, message)
        for number in sorted(set(in_turn.flatten().tolist()) - {-1}):
            share = int((in_turn == number).sum()), in_turn.size
            state = run_once(tick["operation"] == number, _of_state(operations[number]), state, work, share)
        if arriving:
            # Else XLA lets what travels arrive before the operation that hides it.
            state, arriving = together((state, arriving))
        totals, *results = state
        arriving_input, arriving_cotangent = arriving or travel(kinds[turn], *results)
        if arriving_input is not None:
            inputs = _store(inputs, tick["stored_input"], arriving_input)
        if arriving_cotangent is not None:
            cotangents = _store(cotangents, tick["stored_cotangent"], arriving_cotangent)
        return totals, inputs, cotangents, *(results if leaving else ())

    def run_turns(state: tuple, ticks: dict[str, jax.Array]) -> tuple[tuple, None]:
        for turn in range(period):
            state = run_tick(state, {name: values[turn] for name, values in ticks.items()}, turn)
        return state, None

    leaving = (message, message) if schedule.latency == 2 else ()
    buffers = buffer(slots.inputs_of_device, 1), buffer(slots.cotangents_of_device, -1)
    state = (totals, *buffers, *leaving)
    (totals, *_), _ = lax.scan(run_turns, state, ticks)
    return totals


def _kinds_in_turn(schedule: Schedule) -> list[set[Kind]]:
    """What ticks do: all of them, or the even ones and the odd ones where those do different things."""

    def kinds(ticks: Sequence[Sequence[Operation]]) -> set[Kind]:
        return {operation.kind for operations in ticks for operation in operations} - {Kind.IDLE}

    even, odd = kinds(schedule.ticks[::2]), kinds(schedule.ticks[1::2])
    if schedule.latency == 2 and not even & odd and len(schedule.ticks) % 2 == 0:
        return [even, odd]
    return [even | odd]


def _of_state(operate: Operate) -> Callable[[tuple, Work], tuple]:
    """An operation as one that takes and gives (totals, output, gradient for the stage before)."""
    return lambda state, work: operate(state[0], work)


def _pairs(schedule: Schedule, number: int, is_needed: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """(sender, receiver) of the devices between which array `number` of a message travels forward."""
    devices = schedule.num_devices
    receivers = {stage % devices for stage in range(1, schedule.num_stages) if is_needed(stage, number)}
    return sorted(((receiver - 1) % devices, receiver) for receiver in receivers)


def _exchange(arrays: Message, pairs: list[list[tuple[int, int]]], as_one: bool) -> Message:
    # Else XLA counts a message among what an operation exchanges, and starts none beside one that exchanges anything.
    with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
        if as_one and len(arrays) > 1:
            # The running sum crosses every border.
            return (lax.ppermute(jnp.stack(arrays), PIPE, pairs[0]),)
        return tuple(lax.ppermute(leaf, PIPE, p) if p else leaf for leaf, p in zip(arrays, pairs, strict=True))


def _alike(operate: Operate, totals: Any, message: Message) -> Operate:
    """`operate` with results that vary over the mesh as their accumulators do, which all branches must agree on."""

    def run(old: Any, work: Work) -> tuple[Any, Message, Message]:
        new, output, input_cotangent = operate(old, work)
        return jax.tree.map(varying_like, new, totals), pad(output), pad(input_cotangent)

    def pad(sent: Message) -> Message:
        whole = (*sent, *message[len(sent) :])
        return tuple(varying_like(leaf, like) for leaf, like in zip(whole, message, strict=True))

    return run


def _read(buffer: Message, slot: jax.Array) -> Message:
    return tuple(lax.dynamic_index_in_dim(leaf, jnp.maximum(slot, 0), keepdims=False) for leaf in buffer)


def _store(buffer: Message, slot: jax.Array, arriving: Message) -> Message:
    """`arriving` in `slot`, unless that is -1; what came as one array is taken apart."""
    arriving = arriving if len(arriving) == len(buffer) else tuple(arriving[0])

    def store(leaf: jax.Array, new: jax.Array) -> jax.Array:
        place = jnp.maximum(slot, 0)
        old = lax.dynamic_index_in_dim(leaf, place, keepdims=False)
        return lax.dynamic_update_index_in_dim(leaf, jnp.where(slot >= 0, new, old), place, 0)

    return tuple(store(leaf, new) for leaf, new in zip(buffer, arriving, strict=True))
