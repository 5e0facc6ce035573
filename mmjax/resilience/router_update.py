"""How correction biases of routers move after a step: quantile balancing, the sign rule, or not at all."""

import jax
import jax.numpy as jnp

from mmjax.config import RouterConfig
from mmjax.models.moe import RouterStatistics, histogram_range


def update_bias(
    bias: jax.Array,
    statistics: RouterStatistics,
    router: RouterConfig,
    experts_per_token: int,
    num_tokens: jax.Array,
) -> jax.Array:
    """The bias that the next step routes with.

    `bias` [..., E] is the one this step routed with; `statistics` (leaves [..., E], [..., E, bins]) are summed over the
    mesh and over micro-batches; `num_tokens` int32 is the number of real tokens they count. Leading axes are layers.
    A step without a real token moves nothing.

        sign:     bias + sign_rate * sign(mean load - load)
        quantile: q - mean(q),   q[e] = the (A/E)-quantile over tokens of (threshold - score[e]), from the histogram

    Source: sign rule, DeepSeek-V3, arXiv:2412.19437, section 2.1.2; quantile balancing, Kimi K3 technical report,
    arXiv:2607.24653, section 2.3.3.
    """
    match router.balancing:
        case "none":
            return bias
        case "sign":
            load = statistics.load.astype(bias.dtype)
            moved = bias + router.sign_rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        case "quantile":
            quantile = histogram_quantile(bias, statistics.histogram, experts_per_token, num_tokens)
            moved = quantile - jnp.mean(quantile, axis=-1, keepdims=True)
    return jnp.where(num_tokens > 0, moved, bias)


def histogram_quantile(
    bias: jax.Array, histogram: jax.Array, experts_per_token: int, num_tokens: jax.Array
) -> jax.Array:
    """The (A/E)-quantile [..., E] of each expert's needed bias, interpolated inside its bin.

    Within one bin width of the exact quantile. `histogram` [..., E, bins] was counted with `bias` [..., E].
    """
    num_experts, num_bins = histogram.shape[-2:]
    # rank = num_tokens * A / E as whole + part / E, in integers: exact for any number of tokens.
    quotient, remainder = num_tokens // num_experts, num_tokens % num_experts
    whole = quotient * experts_per_token + remainder * experts_per_token // num_experts
    part = remainder * experts_per_token % num_experts
    cumulative = jnp.cumsum(histogram, axis=-1)
    first = jnp.argmax(cumulative >= jnp.where(part > 0, whole + 1, whole), axis=-1, keepdims=True)
    count = jnp.take_along_axis(histogram, first, axis=-1)[..., 0]
    before = jnp.take_along_axis(cumulative, first, axis=-1)[..., 0] - count
    missing = (whole - before).astype(bias.dtype) + part.astype(bias.dtype) / num_experts
    inside = jnp.clip(missing / jnp.maximum(count, 1).astype(bias.dtype), 0, 1)
    lowest, width = histogram_range(bias, num_bins)
    return lowest[..., None] + (first[..., 0].astype(bias.dtype) + inside) * width[..., None]
