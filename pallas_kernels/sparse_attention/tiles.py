"""Products and vectors of a warpgroup's tiles [64, columns], on Hopper's tensor cores or simulated."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher

ROWS = 64
"""Rows of a product: the heads of a tile, or the keys of a block."""


def product(columns: int, *factors: tuple[Any, Any]) -> jax.Array:
    """The sum of products [64, C] @ [C, columns] of bfloat16 matrices in shared memory, in float32."""
    if launcher.is_simulated():
        products = [jnp.dot(left[...], right[...], preferred_element_type=jnp.float32) for left, right in factors]
        return sum(products[1:], products[0])

    def scope(total):
        for left, right in factors:
            plgpu.wgmma(total, left, right)
        return total[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((ROWS, columns)))


def products_in_turn(columns: int, factors: Sequence[tuple[Any, Any]], use: Callable[[int, jax.Array], None]) -> None:
    """`use(turn, product)` of each product [64, C] @ [C, columns], while those after it are computed."""
    if launcher.is_simulated():
        for turn, factor in enumerate(factors):
            use(turn, product(columns, factor))
        return

    def scope(*totals):
        for total, (left, right) in zip(totals, factors, strict=True):
            plgpu.wgmma(total, left, right)
        for turn, total in enumerate(totals):
            # What is done with a product must not be moved before the wait for it.
            use(turn, lax.optimization_barrier(plgpu.wgmma_accumulator_load(total, wait_n=len(factors) - 1 - turn)))

    pl.run_scoped(scope, *[plgpu.WGMMAAccumulatorRef((ROWS, columns)) for _ in factors])


def accumulate(totals: Sequence[jax.Array], factors: Sequence[tuple[Any, Any]]) -> Sequence[jax.Array]:
    """Each total [64, C] plus its product."""
    if launcher.is_simulated():
        return [
            total + jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
            for total, (left, right) in zip(totals, factors, strict=True)
        ]

    def add(totals):
        for total, (left, right) in zip(totals, factors, strict=True):
            plgpu.wgmma(total, left, right)

    # What is run on refs gives values back.
    return cast(Sequence[jax.Array], pl.run_state(add)([plgpu.WGMMAAccumulatorRef.init(total) for total in totals]))


def turned(ref: Any) -> Any:
    return ref[...].T if launcher.is_simulated() else ref.transpose((1, 0))


def zeros(columns: int) -> jax.Array:
    array = jnp.zeros((ROWS, columns), jnp.float32)
    return array if launcher.is_simulated() else plgpu.layout_cast(array, plgpu.Layout.WGMMA)


def row_constant(value: float) -> jax.Array:
    """One number for each of 64 rows."""
    array = jnp.full((ROWS,), value, jnp.float32)
    return array if launcher.is_simulated() else plgpu.layout_cast(array, launcher.row_layout())


def row(ref: Any) -> jax.Array:
    """One number a row, from shared memory."""
    return launcher.load(ref, launcher.row_layout())


def matrix(ref: Any) -> jax.Array:
    return launcher.load(ref, plgpu.Layout.WGMMA)


def down(vector: jax.Array, columns: int) -> jax.Array:
    """One number a row, for all columns."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), (0,))


def hole_bias(index: Any) -> jax.Array:
    """[64, 64] to add to scores: minus infinity in the columns of holes."""
    values = launcher.load(index, plgpu.Layout.WGMMA.reduce(0))
    bias = jnp.where(values >= 0, jnp.float32(0), jnp.float32(-jnp.inf))
    return lax.broadcast_in_dim(bias, (ROWS, index.shape[0]), (1,))


def whole(heads: jax.Array) -> jax.Array:
    """[T, H, C] with whole tiles of heads where copies are simulated; those of the GPU clip and pad themselves."""
    missing = -heads.shape[1] % ROWS if launcher.is_simulated() else 0
    return jnp.pad(heads, ((0, 0), (0, missing), (0, 0))) if missing else heads
