"""Projections split over the tensor axis: by output in `column`, by input in `row`."""

import jax
import jax.numpy as jnp
from jax import lax

from mmjax.axes import TENSOR


def column(equation: str, inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, inputs, weight)` with this device's share of the outputs (heads, hidden width, vocabulary)."""
    return jnp.einsum(equation, inputs, weight)


def row(equation: str, inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, inputs, weight)`, both with this device's share of the summed axis; summed over devices."""
    return lax.psum(jnp.einsum(equation, inputs, weight), TENSOR)
