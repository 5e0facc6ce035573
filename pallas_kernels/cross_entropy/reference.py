"""Definition of the cross-entropy and of greedy tokens: all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D W"],
    targets: Int32[Array, " T"],
    weights: Float[Array, " T"],
    *,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """Weighted sum of `logsumexp(logits) - logits[target]`; a target outside the vocabulary has logit 0."""
    logits = _logits(hidden, head)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    target_logits = jnp.sum(logits * jax.nn.one_hot(targets, logits.shape[1], dtype=logits.dtype), axis=-1)
    weights = jax.lax.stop_gradient(weights).astype(logits.dtype)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.sum(weights * (log_total - target_logits + z_loss * jnp.square(log_total)))


def greedy_tokens(
    hidden: Float[Array, "T D"], head: Float[Array, "D W"], is_wanted: Bool[Array, " T"]
) -> Int32[Array, " T"]:
    """Index of the largest logit, the lowest of equal ones; 0 where it is not wanted."""
    return jnp.where(is_wanted, jnp.argmax(_logits(hidden, head), axis=-1), 0).astype(jnp.int32)


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    wide = np.promote_types(hidden.dtype, np.float32)
    return jnp.einsum("td,dw->tw", hidden, head, preferred_element_type=wide)
