"""A schedule's table carried out: a scan over its ticks, with two exchanges between neighbouring stages in each."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import PIPE
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


Operate = Callable[[Any, Work], tuple[Any, Message, Message]]
"""(totals, work) -> (totals, what goes to the next stage, gradient for the stage before)."""


def run_schedule(
    schedule: Schedule,
    operations: Sequence[Operate],
    operation_of: Callable[[Kind, int], int | None],
    totals: Any,
    message: Message,
    is_needed: Callable[[int, int], bool],
) -> Any:
    """`totals` after all ticks. Inside `shard_map`; every device of the pipe axis runs it.

    `operation_of(kind, stage)` is the index in `operations` of what the stage does, None if there is nothing to do; an
    operation may hold collectives over the other mesh axes, since all devices of a stage do the same. `message` gives
    shapes, and zeros; `is_needed(stage, number)` says whether a stage wants that array of it: if not it is not sent.

    With latency 2 what a tick computed travels during the next tick: neither waits for the other. Inputs stay in a
    buffer of as many slots as the schedule needs, from their arrival until their last use. Where forward and backward
    passes take turns, each tick sends in one direction alone: of two exchanges at a time XLA hides one.
    """
    slots, device = schedule.slots(), lax.axis_index(PIPE)
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
            for name in ("stored_input", "stored_cotangent", "used_input", "used_cotangent")
        },
    }

    def buffer(num_slots: int) -> Message:
        return tuple(varying_like(jnp.zeros((max(1, num_slots), *m.shape), m.dtype), m) for m in message)

    def travel(sent: set[Kind], output: Message, cotangent: Message) -> tuple[Message | None, Message | None]:
        """What arrives from the stages before and behind, of ticks that do what is in `sent`."""
        there = back = None
        if Kind.FORWARD in sent:
            there = tuple(_send(leaf, pairs[number]) for number, leaf in enumerate(output))
        if Kind.BACKWARD in sent:
            back = tuple(_send(leaf, [(b, a) for a, b in pairs[number]]) for number, leaf in enumerate(cotangent))
        return there, back

    def run_tick(state: tuple, tick: dict[str, jax.Array], turn: int) -> tuple:
        totals, inputs, cotangents, *leaving = state
        arriving = travel(kinds[turn - 1], *leaving) if leaving else ()
        work = Work(
            _read(inputs, tick["used_input"]),
            _read(cotangents, tick["used_cotangent"]),
            tick["micro_batch"],
            tick["stage"],
        )
        able = {number: operations[number] for number in sorted(set(chosen[turn::period].flatten().tolist()) - {-1})}
        totals, *results = _do(able, tick["operation"], totals, message, work)
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
    state = (totals, buffer(slots.num_inputs), buffer(slots.num_cotangents), *leaving)
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


def _do(able: Mapping[int, Operate], number: jax.Array, totals: Any, message: Message, work: Work) -> tuple:
    """(totals, output, gradient for the stage before) after operation `number`, or after nothing if it is none of them.

    A loop that runs once or not at all stands for each condition: it adds to the totals in place, where a conditional's
    results are buffers of their own, copied back in every tick.
    """

    def once(state: tuple, operate: Operate) -> tuple:
        is_left, totals, *_ = state
        return jnp.zeros_like(is_left), *operate(totals, work)

    state = (totals, message, message)
    for index, operate in able.items():
        is_chosen = number == index
        _, *state = lax.while_loop(lambda s: s[0], functools.partial(once, operate=operate), (is_chosen, *state))
    return tuple(state)


def _pairs(schedule: Schedule, number: int, is_needed: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """(sender, receiver) of the devices between which array `number` of a message travels forward."""
    devices = schedule.num_devices
    receivers = {stage % devices for stage in range(1, schedule.num_stages) if is_needed(stage, number)}
    return sorted(((receiver - 1) % devices, receiver) for receiver in receivers)


def _send(leaf: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    return lax.ppermute(leaf, PIPE, pairs) if pairs else leaf


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
    """`arriving` in `slot`, unless that is -1."""

    def store(leaf: jax.Array, new: jax.Array) -> jax.Array:
        place = jnp.maximum(slot, 0)
        old = lax.dynamic_index_in_dim(leaf, place, keepdims=False)
        return lax.dynamic_update_index_in_dim(leaf, jnp.where(slot >= 0, new, old), place, 0)

    return tuple(store(leaf, new) for leaf, new in zip(buffer, arriving, strict=True))
