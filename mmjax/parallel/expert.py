"""Exchange of token rows with the devices that hold their experts, in bounded buffers."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from mmjax.axes import DATA_AXES, EXPERT
from mmjax.parallel.fsdp import make_varying, varying_like
from pallas_kernels.moe.grouping import group_rows, starts


def exchange_experts(
    rows: jax.Array,
    index: jax.Array,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    num_experts: int,
    capacity_factor: float,
    overflow: Literal["rounds", "drop"],
) -> tuple[jax.Array, jax.Array]:
    """Apply to each token's row the experts it takes, wherever they live. Inside `shard_map`.

        outputs[t, a] = apply(rows[t], expert index[t, a])

    `rows` [t, R]; `index` [t, A] int32 counts experts over the whole mesh, -1 is sent nowhere and gives 0. Each device
    of the expert axis holds an equal slice of the experts, in order. `apply(rows [n, R], local_expert [n]) -> [n, R]`
    works on one device's slice, must give 0 for expert -1 and hold no collective: what it closes over, and `rows`,
    should already vary over every mesh axis that its output varies on, so that gradients are summed over devices once,
    outside.

    Returns outputs [t, A, R] in the router's order and the number of choices dropped (int32, this device's). A buffer
    holds `capacity` = ceil(capacity_factor * t * A / devices) rows for each device. Choices beyond it travel in further
    rounds, as many as the fullest buffer of the mesh needs ("rounds"), or are dropped: the last tokens' first ("drop").
    On an expert axis of size 1 nothing is sent and nothing dropped.
    """
    num_tokens, num_choices = index.shape
    num_devices = lax.axis_size(EXPERT)
    # Copied first, so that the transpose sums a token's gradients in order instead of scattering them onto each other.
    row_of_choice = jnp.broadcast_to(rows[:, None, :], (num_tokens, num_choices, rows.shape[1]))
    row_of_choice = row_of_choice.reshape(num_tokens * num_choices, -1)
    expert = index.reshape(-1)
    num_dropped = varying_like(jnp.zeros((), jnp.int32), expert)
    if num_devices == 1:
        return apply(row_of_choice, expert).reshape(num_tokens, num_choices, -1), num_dropped

    num_rows = num_tokens * num_choices
    local_experts = num_experts // num_devices
    capacity = min(num_rows, math.ceil(capacity_factor * num_rows / num_devices))
    device = jnp.where(expert >= 0, expert // local_experts, -1)
    grouping = group_rows(device, num_devices)

    def run_round(number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """(outputs, whether this round carried them) of all choices."""
        rank = number * capacity + jnp.arange(capacity, dtype=jnp.int32)
        is_filled = rank[None, :] < grouping.counts[:, None]
        place = jnp.minimum(starts(grouping.counts)[:, None] + rank[None, :], num_rows - 1)
        # Empty places read beyond the rows, each at its own index, so that indices are unique and give nothing.
        beyond = num_rows + jnp.arange(num_devices * capacity, dtype=jnp.int32)
        choice = jnp.where(is_filled.reshape(-1), grouping.order[place.reshape(-1)], beyond)
        sent_rows = row_of_choice.at[choice].get(mode="fill", fill_value=0, unique_indices=True)
        sent_expert = expert.at[choice].get(mode="fill", fill_value=-1, unique_indices=True)
        sent_expert = jnp.where(sent_expert >= 0, sent_expert % local_experts, -1)
        returned = _all_to_all(apply(_all_to_all(sent_rows), _all_to_all(sent_expert)))
        is_carried = (device >= 0) & (grouping.rank // capacity == number)
        slot = device * capacity + grouping.rank - number * capacity
        beyond = num_devices * capacity + jnp.arange(num_rows, dtype=jnp.int32)
        slot = jnp.where(is_carried, slot, beyond)
        return returned.at[slot].get(mode="fill", fill_value=0, unique_indices=True), is_carried

    outputs, _ = run_round(0)
    num_rounds = -(-num_rows // capacity)
    if overflow == "drop":
        num_dropped = jnp.sum(jnp.maximum(grouping.counts - capacity, 0), dtype=jnp.int32)
    elif num_rounds > 1:
        # The same number on every device: they enter each further round together.
        fullest = lax.pmax(make_varying(jnp.max(grouping.counts)), DATA_AXES)

        # Only inputs are kept for the backward pass, not a buffer for each round that might have been needed.
        @jax.checkpoint
        def run_further_rounds(outputs: jax.Array) -> jax.Array:
            return lax.cond(fullest > capacity, scan_rounds, lambda outputs: outputs, outputs)

        def scan_rounds(outputs: jax.Array) -> jax.Array:
            return lax.scan(step, outputs, jnp.arange(1, num_rounds, dtype=jnp.int32))[0]

        def step(outputs: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            run = jax.checkpoint(run_if_needed, prevent_cse=False)
            return run(outputs, number), None

        def run_if_needed(outputs: jax.Array, number: jax.Array) -> jax.Array:
            return lax.cond(number * capacity < fullest, run_and_fill, lambda outputs, _: outputs, outputs, number)

        def run_and_fill(outputs: jax.Array, number: jax.Array) -> jax.Array:
            further, is_carried = run_round(number)
            return jnp.where(is_carried[:, None], further, outputs)

        outputs = run_further_rounds(outputs)
    return outputs.reshape(num_tokens, num_choices, -1), num_dropped


def _all_to_all(buffer: jax.Array) -> jax.Array:
    """Swap equal slices of the leading axis: slice i goes to device i, what comes from device i becomes slice i."""
    return lax.all_to_all(buffer, EXPERT, split_axis=0, concat_axis=0, tiled=True)
