"""Layers of several residual blocks as one loop, whose backward pass keeps the sum of each block once.

Differentiated by JAX, a loop keeps what it carries for every turn, here the sums of all blocks. But a finished sum
changes no more, and one that is not finished takes no part: those there are at the end serve every turn.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.models.conditional import Pullback, real_leaves, without_known
from mmjax.parallel.conditions import together
from mmjax.parallel.fsdp import varying_like

Sums = tuple[jax.Array, ...]


class TakingPart(NamedTuple):
    """Which sums are mixed for a layer."""

    num_finished: jax.Array
    """int32: the first so many of the blocks' sums."""
    is_live: jax.Array | None
    """bool: whether the running sum takes part in the first mix; not where the layer begins a block. None: it does."""


def scan_across_blocks(
    run_layer: Callable[[int, Any, Any, jax.Array, Sums, TakingPart, Any], tuple[jax.Array, Any]],
    trained: tuple,
    others: tuple,
    running_sum: jax.Array,
    finished: Sums,
    starts: np.ndarray,
    shared: Any,
) -> tuple[jax.Array, Sums, tuple]:
    """Run layers in order, `starts` [repeats, positions] bool says which of them begin a residual block.

    `run_layer(position, trained, others, running_sum, sums, taking_part, shared)` gives the running sum behind a layer
    and its record. `trained` and `others` hold, for each position, what it gets of its layers, with a leading axis of
    repeats; `shared` is the same for all. Gradients go to `trained`, the running sum and the sums, and are those of the
    layers written one after the other. `sums` are `finished`, then zeros until the layers finish theirs.

    Returns the running sum, all sums, and the records of each position with a leading axis of repeats.
    """
    num_positions = starts.shape[1]
    # Sums finished before a layer; the one that ends where it begins a block is not counted.
    num_before = (len(finished) + np.cumsum(starts).reshape(starts.shape) - starts).astype(np.int32)
    ended_at = [sorted({*num_before[starts[:, position], position].tolist()}) for position in range(num_positions)]

    def loop(run: Callable, trained: tuple, others: tuple, running_sum: jax.Array, finished: Sums, shared: Any):
        nothing = varying_like(jnp.zeros_like(running_sum), running_sum)

        def turn(carry, layers):
            running_sum, sums = carry
            trained, others, begins, before = layers
            results = []
            for position in range(num_positions):
                is_live = None
                for number in ended_at[position]:
                    is_end = begins[position] & (before[position] == number)
                    sums = (*sums[:number], jnp.where(is_end, running_sum, sums[number]), *sums[number + 1 :])
                if ended_at[position]:
                    is_live = ~begins[position]
                    running_sum = jnp.where(is_live, running_sum, 0)
                part = TakingPart(before[position] + begins[position].astype(jnp.int32), is_live)
                running_sum, result = run(
                    position, trained[position], others[position], running_sum, sums, part, shared
                )
                results.append(result)
            return (running_sum, sums), tuple(results)

        sums = (*finished, *(nothing,) * int(starts.sum()))
        (running_sum, sums), results = lax.scan(turn, (running_sum, sums), (trained, others, starts, num_before))
        return running_sum, sums, results

    @jax.custom_vjp
    def run_all(trained: tuple, others: tuple, running_sum: jax.Array, finished: Sums, shared: Any):
        return loop(run_layer, trained, others, running_sum, finished, shared)

    def forward(trained: tuple, others: tuple, running_sum: jax.Array, finished: Sums, shared: Any):
        pullbacks: dict[int, Pullback] = {}

        def run_and_keep(position, trained, others, running_sum, sums, part, shared):
            def differentiated(trained, running_sum, sums):
                running_sum, record = run_layer(position, trained, others, running_sum, sums, part, shared)
                return (running_sum, real_leaves(record)), record

            (running_sum, _), pullback, record = jax.vjp(differentiated, trained, running_sum, sums, has_aux=True)
            pullbacks[position], kept = without_known(pullback, (trained, others, sums, shared))
            return running_sum, (record, kept)

        running_sum, sums, results = loop(run_and_keep, trained, others, running_sum, finished, shared)
        records, kept = zip(*results, strict=True)
        saved = trained, others, sums, shared, kept, tuple(pullbacks[position] for position in range(num_positions))
        return (running_sum, sums, records), saved

    def backward(saved: tuple, gradients: tuple) -> tuple:
        trained, others, sums, shared, kept, pullbacks = saved
        of_running, of_sums, of_records = gradients

        def turn(carry, turn_layers):
            of_running, of_sums = carry
            trained, others, kept, of_records, begins, before = turn_layers
            of_layers: list[Any] = [None] * num_positions
            for position in reversed(range(num_positions)):
                known = trained[position], others[position], sums, shared
                # Nothing is computed again before it is its turn; weights may be gathered.
                of_running, arrays = together((of_running, kept[position]))
                found = pullbacks[position].call(known, arrays, (of_running, of_records[position]))
                of_layers[position], of_running, of_mixed = found
                of_sums = jax.tree.map(jnp.add, of_sums, of_mixed)
                if position + 1 < num_positions:
                    # What one layer's gradients are made of does not outlast the layer before it.
                    of_running, of_layers[position + 1] = together((of_running, of_layers[position + 1]))
                for number in ended_at[position]:
                    is_end = begins[position] & (before[position] == number)
                    of_running = jnp.where(is_end, of_sums[number], of_running)
            return (of_running, of_sums), tuple(of_layers)

        of_records = tuple(map(real_leaves, of_records))
        (of_running, of_sums), of_trained = lax.scan(
            turn, (of_running, of_sums), (trained, others, kept, of_records, starts, num_before), reverse=True
        )
        return of_trained, None, of_running, of_sums[: len(finished)], None

    run_all.defvjp(forward, backward)
    return run_all(trained, others, running_sum, finished, shared)
