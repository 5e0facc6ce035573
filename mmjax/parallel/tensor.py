"""Projections split over the tensor axis: by output in `column`, by input in `row`."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from mmjax.axes import TENSOR


def column(equation: str, inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, inputs, weight)` with this device's share of the outputs (heads, hidden width, vocabulary)."""
    return product(equation, inputs, weight)


def row(equation: str, inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, inputs, weight)`, both with this device's share of the summed axis; summed over devices."""
    return lax.psum(product(equation, inputs, weight), TENSOR)


def product(equation: str, inputs: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, inputs, weight)`; as one product of two matrices wherever it is one.

    The gradients of such a product are products of matrices too. Those of an einsum over several axes (rows and
    positions, heads and their width) are not, and XLA writes transposed copies of weights and activations for them.
    """
    left, result = equation.split("->")
    taken, letters = left.split(",")
    num_summed = sum(letter not in result for letter in letters)
    rest, summed = taken[: len(taken) - num_summed], letters[:num_summed]
    if num_summed == 0 or taken != rest + summed or result != rest + letters[num_summed:]:
        return jnp.einsum(equation, inputs, weight)
    leading, width = inputs.shape[: inputs.ndim - num_summed], math.prod(weight.shape[:num_summed])
    matrix = weight.reshape(width, math.prod(weight.shape[num_summed:]))
    return (inputs.reshape(math.prod(leading), width) @ matrix).reshape(*leading, *weight.shape[num_summed:])
