"""Products of float32 that tensor cores form, out of parts in bfloat16."""

import jax
import jax.numpy as jnp
from jax import lax

# Tensor cores cut off digits as they add: what is longer loses more than float32 does.
_LONGEST_SUM = 1024


@jax.custom_vjp
def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """`rows @ weight` for `rows` [t, d] bfloat16 and `weight` [d, e] float32, which vary alike, in float32.

    Three parts hold all digits of the weight, and products of two bfloat16 are exact in float32: only sums are rounded.
    """
    leading, *others = _parts(weight, 3)
    width = rows.shape[1]
    num_pieces = next(
        number for number in range(1, width + 1) if width <= number * _LONGEST_SUM and width % number == 0
    )
    pieces = jnp.einsum(
        "tcd,cde->cte",
        rows.reshape(-1, num_pieces, width // num_pieces),
        leading.reshape(num_pieces, -1, weight.shape[1]),
        preferred_element_type=jnp.float32,
    )
    return _sum_of_products("td,de->te", [rows], others) + jnp.sum(pieces, axis=0)


def _forward(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return multiply(rows, weight), (rows, weight)


def _backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, weight = kept
    # Rounded to bfloat16 in the end: twice its digits are enough.
    of_rows = _sum_of_products("te,de->td", _parts(gradient, 2), _parts(weight, 2))
    return of_rows.astype(rows.dtype), _sum_of_products("td,te->de", [rows], _parts(gradient, 3))


multiply.defvjp(_forward, _backward)


def _parts(values: jax.Array, number: int) -> list[jax.Array]:
    """Their leading digits, the next ones, and so on, in bfloat16."""
    parts = []
    for _ in range(number):
        # XLA may leave out a cast there and back, never this.
        leading = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
        parts.append(leading.astype(jnp.bfloat16))
        values = values - leading
    return parts


def _sum_of_products(equation: str, one: list[jax.Array], other: list[jax.Array]) -> jax.Array:
    """Of all parts that reach into the digits of the sum, the smallest first."""
    number = max(len(one), len(other))
    pairs = [(i, j) for i in range(len(one)) for j in range(len(other)) if i + j < number]
    products = (
        jnp.einsum(equation, one[i], other[j], preferred_element_type=jnp.float32)
        for i, j in sorted(pairs, key=sum, reverse=True)
    )
    total = next(products)
    for product in products:
        total = total + product
    return total
