"""Kimi Delta Attention (KDA): short convolutions, decay gate, delta rule, gated norm of each head."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.axes import TENSOR
from mmjax.config import ModelConfig
from mmjax.models.layers import at_least_float32, normal, ones, parameter, use
from mmjax.parallel.fsdp import make_varying
from mmjax.parallel.tensor import column, row
from pallas_kernels.linear_attention.api import decay_gate, delta_rule, l2_normalise, short_convolution


def uniform_taps(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Taps [W, ...] of a convolution, uniform within 1 / sqrt(W)."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def log_uniform_rate(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """ln U(1, 16), for the softplus gate."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def inverse_softplus_of_steps(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Decay bias whose softplus is log-uniform in 1e-3 to 1e-1, as in Mamba-2 and Gated DeltaNet."""
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, np.log(1e-3), np.log(1e-1)))
    return steps + jnp.log(-jnp.expm1(-steps))


class KimiDeltaAttention(nnx.Module):
    """Linear attention whose state forgets by channel; heads are split over the tensor axis.

        q, k, v = silu(convolution(x W))        q = l2(q) / sqrt(K)        k = l2(k)
        log decay = gate(x W_down W_up + bias)  beta = sigmoid(x W_beta)
        y = [sigmoid(gate(x)) * scale * o / rms(o)] W_o,  o = delta_rule(q, k, v, log decay, beta)

    Source: Kimi K3 technical report, arXiv:2607.24653, equations 1 to 6; Kimi Linear, arXiv:2510.26692.
    """

    def __init__(self, model: ModelConfig):
        linear = model.linear_attention
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        # Rates, biases and the norm act through exponentials: never below float32.
        wide = at_least_float32(dtype)
        self.config, self.norm_epsilon = linear, model.norm_epsilon
        heads, keys, values = linear.num_heads, linear.key_width, linear.value_width

        def heads_from(width: int, axis: str | None, head_width: int) -> nnx.Variable:
            return parameter(initializer, (width, heads, head_width), (axis, "heads", None), dtype)

        def taps(head_width: int) -> nnx.Variable:
            return parameter(uniform_taps, (linear.convolution_width, heads, head_width), (None, "heads", None), dtype)

        def down(rank: int) -> nnx.Variable:
            return parameter(initializer, (model.width, rank), ("model_weight", None), dtype)

        self.query, self.query_convolution = heads_from(model.width, "model_weight", keys), taps(keys)
        self.key, self.key_convolution = heads_from(model.width, "model_weight", keys), taps(keys)
        self.value, self.value_convolution = heads_from(model.width, "model_weight", values), taps(values)
        # Ranks are small (128 in Kimi-K3): split over hundreds of devices they would not divide.
        self.decay_down, self.decay_up = down(linear.decay_rank), heads_from(linear.decay_rank, None, keys)
        initial_rate = jax.nn.initializers.zeros if linear.decay == "bounded" else log_uniform_rate
        self.log_rate = parameter(initial_rate, (heads,), ("heads",), wide)
        self.decay_bias = parameter(inverse_softplus_of_steps, (heads, keys), ("heads", None), wide)
        self.beta = parameter(initializer, (model.width, heads), ("model_weight", "heads"), dtype)
        if linear.output_gate == "full":
            self.output_gate = heads_from(model.width, "model_weight", values)
        else:
            self.output_gate_down = down(linear.output_gate_rank)
            self.output_gate_up = heads_from(linear.output_gate_rank, None, values)
        self.output_norm = ones(values, wide)
        self.output = parameter(initializer, (heads, values, model.width), ("heads", None, "model_weight"), dtype)

    def __call__(self, inputs: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """`inputs` [b, s, D], normalised, and segments [b, s] -> [b, s, D] of the same dtype."""
        config, dtype = self.config, inputs.dtype
        wide = at_least_float32(dtype)
        # Once for all projections, so that the backward pass sums over the tensor axis once.
        inputs = make_varying(inputs, (TENSOR,))

        def convolved(weight: nnx.Variable, taps: nnx.Variable) -> jax.Array:
            projected = column("bsd,dhk->bshk", inputs, use(weight, dtype))
            return short_convolution(projected, use(taps, wide), segment_ids)

        def through(down: nnx.Variable, up: nnx.Variable) -> jax.Array:
            latent = jnp.einsum("bsd,dr->bsr", inputs, use(down, dtype))
            return column("bsr,rhk->bshk", latent, use(up, dtype))

        query = l2_normalise(convolved(self.query, self.query_convolution)) * config.key_width**-0.5
        key = l2_normalise(convolved(self.key, self.key_convolution))
        value = convolved(self.value, self.value_convolution)
        log_decay = decay_gate(
            through(self.decay_down, self.decay_up),
            use(self.log_rate, wide),
            use(self.decay_bias, wide),
            kind=config.decay,
            lower_bound=config.decay_lower_bound,
        )
        beta = jax.nn.sigmoid(column("bsd,dh->bsh", inputs, use(self.beta, dtype)).astype(wide))
        mixed, _ = delta_rule(query, key, value, log_decay, beta, segment_ids, chunk_tokens=config.chunk_tokens)

        if config.output_gate == "full":
            gate = column("bsd,dhv->bshv", inputs, use(self.output_gate, dtype))
        else:
            gate = through(self.output_gate_down, self.output_gate_up)
        mixed = mixed.astype(wide)
        mixed *= jax.lax.rsqrt(jnp.mean(jnp.square(mixed), axis=-1, keepdims=True) + self.norm_epsilon)
        mixed *= use(self.output_norm, wide)[None, None, None] * jax.nn.sigmoid(gate.astype(wide))
        return row("bshv,hvd->bsd", mixed.astype(dtype), use(self.output, dtype))
