"""Weights that rest split: gathered where a layer uses them, their gradients scattered back."""

import jax
from jax import lax

from mmjax.axes import DATA_AXES
from mmjax.parallel.sharding import GATHERED_AT_USE


def gather_for_use(weight: jax.Array, array_axes: tuple[str | None, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """This device's use of a weight: whole over the mesh axes of GATHERED_AT_USE, still split over the others.

    Cast to `dtype` before the exchange. The transpose is a reduce-scatter, so the gradient is the sum over all devices
    that gathered. Inside `shard_map`.
    """
    weight = weight.astype(dtype)
    for dimension, array_axis in enumerate(array_axes):
        if mesh_axes := GATHERED_AT_USE.get(array_axis or ""):
            weight = lax.all_gather(weight, mesh_axes, axis=dimension, tiled=True)
    return weight


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
    return make_varying(array, tuple(jax.typeof(reference).manual_axis_type.varying))
