"""Gated DeltaNet: linear attention that forgets by head, with fewer key heads than value heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import TENSOR
from mmjax.config import ModelConfig
from mmjax.models.cache import DeltaCache
from mmjax.models.layers import at_least_float32, normal, ones, parameter, project, use
from mmjax.models.linear_attention import (
    ContinuedRow,
    Row,
    inverse_softplus_of_steps,
    log_uniform_rate,
    row_of,
    uniform_taps,
)
from mmjax.parallel.fsdp import make_varying
from pallas_kernels.linear_attention.gates import DecayGate


class GatedDeltaNet(nnx.Module):
    """Linear attention whose state forgets as a whole, head by head; heads are split over the tensor axis.

        q, k, v = silu(convolution(x W))                 q = l2(q) / sqrt(K)        k = l2(k)
        log decay = -exp(rate) softplus(x W_a + bias)    beta = sigmoid(x W_beta)   one number a value head each
        y = [silu(x W_g) * scale * o / rms(o)] W_o,  o = delta_rule(q, k, v, log decay, beta)

    Each head of q and k serves as many consecutive heads of v.

    Source: Gated Delta Networks, arXiv:2412.06464; Qwen3-Next.
    """

    def __init__(self, model: ModelConfig):
        config = model.gated_delta_net
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        # Rates, biases and the norm act through exponentials: never below float32.
        wide = at_least_float32(dtype)
        self.config, self.norm_epsilon = config, model.norm_epsilon
        heads, values = config.num_value_heads, config.value_width

        def heads_from(num_heads: int, head_width: int) -> nnx.Variable:
            return parameter(initializer, (model.width, num_heads, head_width), ("model_weight", "heads", None), dtype)

        def taps(num_heads: int, head_width: int) -> nnx.Variable:
            shape = (config.convolution_width, num_heads, head_width)
            return parameter(uniform_taps, shape, (None, "heads", None), dtype)

        def number_from() -> nnx.Variable:
            return parameter(initializer, (model.width, heads), ("model_weight", "heads"), dtype)

        keys = (config.num_key_heads, config.key_width)
        self.query, self.query_convolution = heads_from(*keys), taps(*keys)
        self.key, self.key_convolution = heads_from(*keys), taps(*keys)
        self.value, self.value_convolution = heads_from(heads, values), taps(heads, values)
        self.decay, self.beta = number_from(), number_from()
        self.log_rate = parameter(log_uniform_rate, (heads,), ("heads",), wide)
        self.decay_bias = parameter(inverse_softplus_of_steps, (heads,), ("heads",), wide)
        self.output_gate = heads_from(heads, values)
        self.output_norm = ones(values, wide)
        self.output = parameter(initializer, (heads, values, model.width), ("heads", None, "model_weight"), dtype)

    def __call__(self, inputs: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """`inputs` [b, s, D], normalised, and segments [b, s] -> [b, s, D] of the same dtype."""
        return self._mix(inputs, row_of(segment_ids, self.config.chunk_tokens))

    def extend(
        self, inputs: jax.Array, slots: jax.Array, positions: jax.Array, cache: DeltaCache
    ) -> tuple[jax.Array, DeltaCache]:
        """The same for tokens at `slots` [b, s] behind those that `cache` holds; and the cache of both."""
        row = ContinuedRow(slots, cache, self.config.chunk_tokens)
        return self._mix(inputs, row), row.cache

    def empty_cache(self, rows: int, capacity: int, dtype: jax.typing.DTypeLike) -> DeltaCache:
        """Of `rows` rows that hold nothing yet."""
        config = self.config
        keys, values = (config.num_key_heads, config.key_width), (config.num_value_heads, config.value_width)
        tails = (jnp.zeros((rows, config.convolution_width - 1, *heads), dtype) for heads in (keys, keys, values))
        state = jnp.zeros((rows, values[0], config.key_width, config.value_width), at_least_float32(dtype))
        return DeltaCache(state, tuple(tails))

    def _mix(self, inputs: jax.Array, row: Row) -> jax.Array:
        config, dtype = self.config, inputs.dtype
        wide = at_least_float32(dtype)
        # Once for all projections, so that the backward pass sums over the tensor axis once.
        inputs = make_varying(inputs, (TENSOR,))

        query, key, value = row.convolve(
            [project("bsd,dhk->bshk", inputs, weight) for weight in (self.query, self.key, self.value)],
            [use(taps, wide) for taps in (self.query_convolution, self.key_convolution, self.value_convolution)],
            (config.key_width**-0.5, 1.0, None),
        )
        decay = project("bsd,dh->bsh", inputs, self.decay)
        gate = DecayGate(use(self.log_rate, wide), use(self.decay_bias, wide), kind="softplus")
        beta = jax.nn.sigmoid(project("bsd,dh->bsh", inputs, self.beta).astype(wide))
        mixed = checkpoint_name(row.recur(query, key, value, decay, beta, gate), "attention").astype(wide)
        output_gate = project("bsd,dhv->bshv", inputs, self.output_gate)
        mixed *= lax.rsqrt(jnp.mean(jnp.square(mixed), axis=-1, keepdims=True) + self.norm_epsilon)
        mixed *= use(self.output_norm, wide)[None, None, None] * jax.nn.silu(output_gate.astype(wide))
        return project("bshv,hvd->bsd", mixed.astype(dtype), self.output, is_row=True)
