"""Rows to their places among an expert's rows, and back: a gather, and a sum in the router's order."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher

UNROLLED = 8
"""Rows that a warpgroup reads before it writes the first."""


def _layout(width: int):
    """A row across the threads of a warpgroup, in the widest pieces."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // 128, 8))


def reason_against(rows: jax.Array, num_taken: int = 0) -> str | None:
    """Why the kernels cannot copy from `rows` [N, R] so many of them, or add rows up; None if they can."""
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if rows.dtype != jnp.bfloat16:
        return f"needs bfloat16 rows, got {rows.dtype}"
    if rows.shape[1] % 128:
        return f"needs a width that is a multiple of 128, got {rows.shape[1]}"
    return f"takes multiples of {UNROLLED} rows, got {num_taken}" if num_taken % UNROLLED else None


@launcher.traced_once
def take_all(_: None, rows: jax.Array, token: jax.Array) -> jax.Array:
    """`take_rows` of every token, as many as a multiple of `UNROLLED`."""
    return take_rows(rows, token, jnp.full((1,), token.size // UNROLLED, jnp.int32), UNROLLED)


@launcher.traced_once
def add_all(dtype: jnp.dtype, values: jax.Array, slot: jax.Array, weight: jax.Array | None) -> jax.Array:
    """`add_choices` in `dtype`."""
    return add_choices(values, slot, weight, dtype)


def take_rows(rows: jax.Array, token: jax.Array, num_blocks: jax.Array, block: int) -> jax.Array:
    """`rows[token]` [N, R] where `token` [N] is below the number of rows, else 0. Only `num_blocks` [1] are written."""
    num_tokens, width = rows.shape
    layout = _layout(width)

    def body(blocks_gmem, token_gmem, rows_gmem, taken_gmem):
        start = lax.axis_index("part") * UNROLLED

        @pl.when(start < blocks_gmem[0] * block)
        def _():
            tokens = [token_gmem[start + number] for number in range(UNROLLED)]
            values = [launcher.load(rows_gmem.at[jnp.minimum(token, num_tokens - 1)], layout) for token in tokens]
            for number, (token, value) in enumerate(zip(tokens, values, strict=True)):
                is_row = lax.broadcast(token < num_tokens, (width,))
                taken_gmem[start + number] = jnp.where(is_row, value, jnp.zeros_like(value))

    return launcher.launch(
        body,
        (num_blocks, token, rows),
        [jax.ShapeDtypeStruct((token.shape[0], width), rows.dtype)],
        scratch={},
        grid=(token.shape[0] // UNROLLED,),
        grid_names=("part",),
        name="moe_take_rows",
    )[0]


def add_choices(
    values: jax.Array, slot: jax.Array, weight: jax.Array | None, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Sum over a of weight[t, a] values[slot[t, a]] in order, in float32. A slot beyond the values gives nothing.

    `values` [N, R], `slot` [T, A] int32, `weight` [T, A] float32 or None for 1. Returns [T, R] in `dtype`, or else in
    that of `weight`, or of `values` where there is none.
    """
    dtype = dtype or (values.dtype if weight is None else weight.dtype)
    num_slots, width = values.shape
    num_tokens, num_choices = slot.shape
    layout = _layout(width)

    def body(slot_gmem, *refs):
        weight_gmem = None if weight is None else refs[0]
        values_gmem, total_gmem = refs[-2:]
        token = lax.axis_index("token")
        total = None
        for start in range(0, num_choices, UNROLLED):
            choices = range(start, min(start + UNROLLED, num_choices))
            slots = [slot_gmem[token, choice] for choice in choices]
            read = [launcher.load(values_gmem.at[jnp.minimum(slot, num_slots - 1)], layout) for slot in slots]
            for choice, slot, value in zip(choices, slots, read, strict=True):
                is_slot = lax.broadcast(slot < num_slots, (width,))
                value = jnp.where(is_slot, value.astype(jnp.float32), jnp.zeros(value.shape, jnp.float32))
                value = value if weight_gmem is None else value * weight_gmem[token, choice]
                total = value if total is None else total + value
        assert total is not None
        total_gmem[token] = total.astype(dtype)

    return launcher.launch(
        body,
        (slot, *(() if weight is None else (weight,)), values),
        [jax.ShapeDtypeStruct((num_tokens, width), dtype)],
        scratch={},
        grid=(num_tokens,),
        grid_names=("token",),
        name="moe_add_choices",
    )[0]
