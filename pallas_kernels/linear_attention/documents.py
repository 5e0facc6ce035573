"""What every form of the delta rule shares: documents, the state a row starts with, common dtypes, groups of heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import launcher


def document_starts(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """True where a token belongs to another document than the token before it; False at the first token of a row."""
    first = jnp.zeros_like(segment_ids[:, :1], bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def document_index(segment_ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """0 for the tokens of a row's first document, 1 for those of the second, whatever their ids."""
    return jnp.cumsum(document_starts(segment_ids).astype(jnp.int32), axis=1)


def wide_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The widest dtype of the arrays, at least float32."""
    # NumPy's rule: JAX's own refuses to name a common type when promotion is strict.
    return functools.reduce(np.promote_types, (array.dtype for array in arrays), np.dtype(np.float32))


def starting_state(
    initial_state: Float[Array, "B H K V"] | None,
    query: Float[Array, "B S H K"],
    value: Float[Array, "B S H V"],
    *others: jax.Array,
) -> Float[Array, "B H K V"]:
    """`initial_state`, or zeros, in the widest dtype of the arguments, at least float32.

    Inside `shard_map` it varies wherever one of the arguments does, as the carry of a loop over them must.
    """
    arrays = (query, value, *others)
    if initial_state is None:
        batch, _, heads, key_width = query.shape
        state = jnp.zeros((batch, heads, key_width, value.shape[-1]), wide_dtype(*arrays))
    else:
        state = initial_state.astype(wide_dtype(*arrays, initial_state))
    return launcher.vary_together(state, *arrays)[0]


def per_value_head(array: Float[Array, "B S G K"], heads: int) -> Float[Array, "B S H K"]:
    """Each head of a query or key once for every value head it serves."""
    return array if array.shape[2] == heads else jnp.repeat(array, heads // array.shape[2], axis=2)
