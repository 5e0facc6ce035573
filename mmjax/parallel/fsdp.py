"""Weights that rest split: gathered where a layer uses them, their gradients scattered back."""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax

from mmjax.axes import DATA_AXES
from mmjax.parallel.sharding import GATHERED_AT_USE


def gather_for_use(weight: jax.Array, array_axes: tuple[str | None, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """This device's use of a weight: whole over the mesh axes of GATHERED_AT_USE, still split over the others.

    Cast to `dtype` before the exchange. The gradient is the sum over all devices that gathered, in the dtype the weight
    rests in: a sum over hundreds of devices in bfloat16 would lose what the last of them add. Inside `shard_map`.
    """
    gathered = [(number, axis) for number, name in enumerate(array_axes) if (axis := GATHERED_AT_USE.get(name or ""))]
    if not gathered:
        return weight.astype(dtype)
    ((dimension, mesh_axes),) = gathered
    if lax.axis_size(mesh_axes) == 1:
        # Nothing to gather; XLA would copy the weight all the same.
        return make_varying(weight.astype(dtype), mesh_axes)
    return _gather(weight, mesh_axes, dimension, np.dtype(dtype), weight.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(
    weight: jax.Array, mesh_axes: tuple[str, ...], dimension: int, dtype: np.dtype, gradient_dtype: np.dtype
) -> jax.Array:
    return lax.all_gather(weight.astype(dtype), mesh_axes, axis=dimension, tiled=True)


def _gather_forward(weight: jax.Array, *static: Any) -> tuple[jax.Array, None]:
    return _gather(weight, *static), None


def _gather_backward(
    mesh_axes: tuple[str, ...], dimension: int, dtype: np.dtype, gradient_dtype: np.dtype, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    wide = cotangent.astype(gradient_dtype)
    return (lax.psum_scatter(wide, mesh_axes, scatter_dimension=dimension, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def make_varying(tree, mesh_axes: tuple[str, ...] = DATA_AXES):
    """Mark every leaf as varying over `mesh_axes`; the transpose sums its gradient over those it did not vary on.

    Done once a step, outside loops, so that a gradient is reduced once.
    """

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in mesh_axes if axis not in jax.typeof(leaf).manual_axis_type.varying)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def varying_like(array: jax.Array, reference: jax.Array) -> jax.Array:
    """`array` (a fresh constant, say) marked as varying wherever `reference` varies: what a loop's carry needs."""
    return make_varying(array, tuple(sorted(jax.typeof(reference).manual_axis_type.varying)))
