"""Manifold-constrained hyper-connections: several residual streams a token, mixed by doubly stochastic matrices."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mmjax.config import ModelConfig
from mmjax.models.layers import at_least_float32, normal, ones, parameter, use, zeros

# GPUs round what they multiply to 10 bits where no precision is asked for.
wide_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class StreamWeights(NamedTuple):
    """How a block's output and the streams before it make the streams after it, in at least float32."""

    output: jax.Array
    """[b, s, n]: share of the output that each stream gets."""
    mix: jax.Array
    """[b, s, n, n]: from stream, to stream."""


class HyperConnection(nnx.Module):
    """What one block (a mixer or an MLP) takes from the n streams of a token, and gives back to them.

        c = rms(vec X) W                                  c = (c_in [n] | c_out [n] | c_mix [n, n])
        input = sum_i (sigmoid(a_1 c_in + b_in) + e)_i X_i
        X_j <- 2 sigmoid(a_2 c_out + b_out)_j output + sum_i M_ij X_i
        M = softmax over j of (a_3 c_mix + b_mix), + e, then columns and rows divided by their sums in turn

    Source: Manifold-Constrained Hyper-Connections, arXiv:2512.24880; GLM-5.
    """

    def __init__(self, model: ModelConfig):
        config, dtype = model.hyper_connections, model.parameter_dtype
        wide, streams = at_least_float32(dtype), config.num_streams
        self.config, self.norm_epsilon = config, model.norm_epsilon
        num_weights = (2 + streams) * streams
        shape = (streams * model.width, num_weights)
        self.projection = parameter(normal(model.initializer_range), shape, ("model_weight", None), dtype)
        self.base = zeros((num_weights,), (None,), wide)
        self.scale = ones(3, wide)

    def enter(self, streams: jax.Array) -> tuple[jax.Array, StreamWeights]:
        """`streams` [b, s, n, d] -> the block's input [b, s, d] of the same dtype, and what `leave` needs."""
        config = self.config
        wide = streams.astype(at_least_float32(streams.dtype))
        flat = wide.reshape(*wide.shape[:2], -1)
        flat *= lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + self.norm_epsilon)
        weights = wide_product("bsf,fc->bsc", flat, use(self.projection, wide.dtype))
        num, scale, base = config.num_streams, use(self.scale, wide.dtype), use(self.base, wide.dtype)[None, None]
        parts = zip(jnp.split(weights, [num, 2 * num], -1), scale, jnp.split(base, [num, 2 * num], -1), strict=True)
        taken, output, mix = (part * factor + start for part, factor, start in parts)
        collapsed = wide_product("bsn,bsnd->bsd", jax.nn.sigmoid(taken) + config.epsilon, wide)
        mix = jax.nn.softmax(mix.reshape(*mix.shape[:2], num, num), axis=-1) + config.epsilon
        mix = self._doubly_stochastic(mix)
        return collapsed.astype(streams.dtype), StreamWeights(2 * jax.nn.sigmoid(output), mix)

    def leave(self, streams: jax.Array, output: jax.Array, weights: StreamWeights) -> jax.Array:
        """The streams [b, s, n, d] behind the block whose output is `output` [b, s, d]."""
        wide = weights.mix.dtype
        mixed = wide_product("bsij,bsid->bsjd", weights.mix, streams.astype(wide))
        return (mixed + weights.output[..., None] * output.astype(wide)[:, :, None]).astype(streams.dtype)

    def _doubly_stochastic(self, mix: jax.Array) -> jax.Array:
        """Sinkhorn: columns, then rows and columns in turn, divided by their sums."""

        def divided(matrix: jax.Array, axis: int) -> jax.Array:
            return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + self.config.epsilon)

        def step(matrix: jax.Array, _: None) -> tuple[jax.Array, None]:
            return divided(divided(matrix, -1), -2), None

        return lax.scan(step, divided(mix, -2), length=self.config.sinkhorn_steps - 1)[0]
