"""A schedule's table carried out: a scan over its ticks, with two exchanges between neighbouring stages in each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import PIPE
from mmjax.parallel.fsdp import varying_like
from mmjax.parallel.pipeline_schedule import Kind, Schedule

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
    buffer of as many slots as the schedule needs, from their arrival until their last use.
    """
    slots, num_devices = schedule.slots(), schedule.num_devices
    pairs = [_pairs(schedule, number, is_needed) for number in range(len(message))]
    device = lax.axis_index(PIPE)

    def nothing(totals: Any, work: Work) -> tuple[Any, Message, Message]:
        return totals, message, message

    branches = [_alike(operate, totals, message) for operate in (nothing, *operations)]

    def column(table: np.ndarray) -> jax.Array:
        return lax.dynamic_index_in_dim(jnp.asarray(table, jnp.int32), device, axis=1, keepdims=False)

    def branch(kind: Kind, stage: int) -> int:
        number = operation_of(kind, stage) if kind is not Kind.IDLE else None
        return 0 if number is None else number + 1

    def table(value: Callable[[int, Any], int]) -> np.ndarray:
        return np.array([[value(d, operation) for d, operation in enumerate(tick)] for tick in schedule.ticks])

    ticks = {
        "branch": column(table(lambda d, o: branch(o.kind, schedule.stage_of(d, o.chunk)))),
        "micro_batch": column(table(lambda d, o: o.micro_batch)),
        "stage": column(table(lambda d, o: schedule.stage_of(d, o.chunk))),
        **{
            name: column(getattr(slots, name))
            for name in ("stored_input", "stored_cotangent", "used_input", "used_cotangent")
        },
    }

    def buffer(num_slots: int) -> Message:
        return tuple(varying_like(jnp.zeros((max(1, num_slots), *m.shape), m.dtype), m) for m in message)

    def travel(output: Message, input_cotangent: Message) -> tuple[Message, Message]:
        there = tuple(_send(leaf, pairs[number]) for number, leaf in enumerate(output))
        back = tuple(_send(leaf, [(b, a) for a, b in pairs[number]]) for number, leaf in enumerate(input_cotangent))
        return there, back

    def run_tick(state: tuple, tick: dict[str, jax.Array]) -> tuple[tuple, None]:
        totals, inputs, cotangents, leaving = state
        arriving = travel(*leaving) if schedule.latency == 2 else None
        work = Work(
            _read(inputs, tick["used_input"]),
            _read(cotangents, tick["used_cotangent"]),
            tick["micro_batch"],
            tick["stage"],
        )
        totals, *leaving = lax.switch(tick["branch"], branches, totals, work)
        if arriving is None:
            arriving = travel(*leaving)
        inputs = _store(inputs, tick["stored_input"], arriving[0])
        cotangents = _store(cotangents, tick["stored_cotangent"], arriving[1])
        return (totals, inputs, cotangents, tuple(leaving) if schedule.latency == 2 else ()), None

    assert num_devices == lax.axis_size(PIPE)
    leaving = (message, message) if schedule.latency == 2 else ()
    state = (totals, buffer(slots.num_inputs), buffer(slots.num_cotangents), leaving)
    (totals, *_), _ = lax.scan(run_tick, state, ticks)
    return totals


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
