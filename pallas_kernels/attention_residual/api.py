"""Attention residual: each token mixes earlier outputs of the network, weighted by a learned query."""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def attention_residual(
    sources: Sequence[Float[Array, "*T D"]],
    norm_scale: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    epsilon: float,
    is_live: Bool[Array, ""] | None = None,
) -> Float[Array, "*T D"]:
    """Mix Z sources over depth, token by token.

        score[z, t] = sum_d source[z, t, d] / sqrt(mean_d source[z, t]^2 + epsilon) * norm_scale[d] * query[d]
        out[t]      = sum_z softmax_z(score[:, t])[z] * source[z, t]

    The mixed values are not normalised, and there is no 1/sqrt(D). Computed in at least float32, returned in the dtype
    of the sources. Where `is_live` is False the last source takes no part: a running sum that is still zero.
    The sources are not stacked, so no copy of them is made. Only they are kept for the backward pass, which computes
    the rest again: autodiff alone would keep a float32 copy of every source for every mix.

    Raises:
      ValueError: no source, or `is_live` given with no source besides the last.

    Source: "Attention Residuals", arXiv:2603.15031, block form; Kimi K3 technical report, arXiv:2607.24653, eq. 10.
    """
    if len(sources) < (1 if is_live is None else 2):
        raise ValueError(f"{len(sources)} sources; expected at least one that always takes part")

    @jax.checkpoint
    def mix(sources: tuple[jax.Array, ...], norm_scale: jax.Array, query: jax.Array) -> jax.Array:
        wide = np.promote_types(sources[0].dtype, np.float32)
        direction = norm_scale.astype(wide) * query.astype(wide)
        scores = []
        for source in sources:
            value = source.astype(wide)
            inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1) + epsilon)
            scores.append(jnp.sum(value * jnp.broadcast_to(direction, value.shape), axis=-1) * inverse_rms)
        if is_live is not None:
            scores[-1] = jnp.where(is_live, scores[-1], -jnp.inf)
        shares = jax.nn.softmax(jnp.stack(scores), axis=0)
        parts = [share[..., None] * source.astype(wide) for share, source in zip(shares, sources, strict=True)]
        return reduce(jnp.add, parts).astype(sources[0].dtype)

    return mix(tuple(sources), norm_scale, query)
