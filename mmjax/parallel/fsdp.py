"""Weights that rest split: gathered where a layer uses them, their gradients scattered back."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import DATA_AXES, GATHERED_AT_USE
from mmjax.parallel.sharding import RULES, rests_on


def gather_for_use(
    weight: jax.Array,
    array_axes: tuple[str | None, ...],
    whole_shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """This device's use of a weight: whole over the mesh axes of GATHERED_AT_USE, still split over the others.

    `whole_shape` is the weight's over the whole mesh: over which of those axes it rests split depends on it.
    Cast to `dtype` before the exchange. The gradient is the sum over all devices that gathered, in the dtype the weight
    rests in: a sum over hundreds of devices in bfloat16 would lose what the last of them add. Inside `shard_map`.
    """
    gathered = [(number, name) for number, name in enumerate(array_axes) if name in GATHERED_AT_USE]
    if not gathered:
        return weight.astype(dtype)
    ((dimension, name),) = gathered
    sizes = {axis: lax.axis_size(axis) for axis in RULES[name]}
    resting = rests_on(name, whole_shape[dimension], sizes)
    mesh_axes = tuple(axis for axis in GATHERED_AT_USE[name] if axis in resting)
    # Over an axis it is not split over, the gradient is summed here, unless the weight came in as varying.
    weight = make_varying(weight, GATHERED_AT_USE[name])
    if math.prod(sizes[axis] for axis in mesh_axes) == 1:
        # Nothing to gather; XLA would copy the weight all the same.
        return weight.astype(dtype)
    # Layers lie in stacks; a table of a vocabulary does not.
    keeps_layout = dimension > 0 and "vocabulary" not in array_axes
    return gather(weight, mesh_axes, dimension, np.dtype(dtype), weight.dtype, keeps_layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def gather(
    array: jax.Array,
    mesh_axes: tuple[str, ...],
    dimension: int,
    dtype: np.dtype,
    gradient_dtype: np.dtype,
    keeps_layout: bool = False,
) -> jax.Array:
    """The shards of all devices as `dtype`, one after the other; gradients are summed as `gradient_dtype`, that of
    `array`.

    To gather along another axis than the first, XLA has that one lie outermost in memory, shards and result, and
    before a loop over layers it copies their whole stack so. `keeps_layout` copies what was gathered instead.
    """
    if not keeps_layout:
        return lax.all_gather(array.astype(dtype), mesh_axes, axis=dimension, tiled=True)
    shards = lax.all_gather(array.astype(dtype), mesh_axes)
    shape = (*array.shape[:dimension], -1, *array.shape[dimension + 1 :])
    return jnp.moveaxis(shards, 0, dimension).reshape(shape)


def _gather_forward(weight: jax.Array, *static: Any) -> tuple[jax.Array, None]:
    return gather(weight, *static), None


def _gather_backward(
    mesh_axes: tuple[str, ...],
    dimension: int,
    dtype: np.dtype,
    gradient_dtype: np.dtype,
    keeps_layout: bool,
    _: None,
    cotangent: jax.Array,
) -> tuple[jax.Array]:
    wide = cotangent.astype(gradient_dtype)
    return (lax.psum_scatter(wide, mesh_axes, scatter_dimension=dimension, tiled=True),)


gather.defvjp(_gather_forward, _gather_backward)


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
