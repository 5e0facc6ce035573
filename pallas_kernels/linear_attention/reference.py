"""The gated delta rule token by token: the definition, and the form of small heads on a CPU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_attention.documents import document_starts, per_value_head, starting_state


def delta_rule(
    query: Float[Array, "B S G K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S H V"],
    log_decay: Float[Array, "B S H K"] | Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    segment_ids: Int[Array, "B S"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H K V"]]:
    """See `api.delta_rule`."""
    query, key = (per_value_head(array, value.shape[2]) for array in (query, key))
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    state = starting_state(initial_state, query, value, key, log_decay, beta)
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

    # Keeps one state a token for the backward pass, nothing else.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state, token):
        query, key, value, log_decay, beta, starts = token
        state = jnp.where(starts[:, None, None, None], 0, state) * jnp.exp(log_decay)[..., None]
        correction = beta[..., None] * (value - einsum("bhkv,bhk->bhv", state, key))
        state = state + key[..., None] * correction[..., None, :]
        return state, einsum("bhkv,bhk->bhv", state, query)

    tokens = [array.astype(state.dtype) for array in (query, key, value, log_decay, beta)]
    tokens = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), (*tokens, document_starts(segment_ids)))
    state, output = lax.scan(step, state, tokens)
    return jnp.moveaxis(output, 0, 1).astype(value.dtype), state
