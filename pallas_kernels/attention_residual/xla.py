"""Attention residuals in plain JAX: sources are not stacked, and all but they is computed again backward."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np


def mix(
    sources: tuple[jax.Array, ...],
    norm_scale: jax.Array,
    query: jax.Array,
    is_live: jax.Array | None,
    output_scale: jax.Array | None,
    epsilon: float,
) -> jax.Array:
    """See `api.attention_residual`. Autodiff alone would keep a float32 copy of every source for every mix."""

    @jax.checkpoint
    def run(sources: tuple[jax.Array, ...], norm_scale: jax.Array, query: jax.Array) -> jax.Array:
        wide = np.promote_types(sources[0].dtype, np.float32)
        direction = norm_scale.astype(wide) * query.astype(wide)
        scores = []
        for source in sources:
            value = source.astype(wide)
            inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(value), axis=-1) + epsilon)
            scores.append(jnp.sum(value * jnp.broadcast_to(direction, value.shape), axis=-1) * inverse_rms)
        if is_live is not None:
            places = [-1] if is_live.ndim == 0 else range(len(sources))
            for place, live in zip(places, is_live.reshape(-1), strict=True):
                scores[place] = jnp.where(live, scores[place], -jnp.inf)
        shares = jax.nn.softmax(jnp.stack(scores), axis=0)
        parts = [share[..., None] * source.astype(wide) for share, source in zip(shares, sources, strict=True)]
        return reduce(jnp.add, parts).astype(sources[0].dtype)

    mixed = run(sources, norm_scale, query)
    return mixed if output_scale is None else _rms_norm(mixed, output_scale, epsilon)


def _rms_norm(inputs: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = inputs.astype(np.promote_types(inputs.dtype, np.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return normed.astype(inputs.dtype) * jnp.broadcast_to(scale, inputs.shape).astype(inputs.dtype)
