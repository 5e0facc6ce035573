"""Grouped-query attention: rotated queries and keys, fewer key heads than query heads, an optional output gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import TENSOR
from mmjax.config import ModelConfig
from mmjax.models.cache import GroupedCache, write
from mmjax.models.fused_attention import packed_attention
from mmjax.models.layers import (
    add_bias,
    at_least_float32,
    norm_weight,
    normal,
    parameter,
    project,
    scaled_norm,
    use,
    zeros,
)
from mmjax.models.rotary import rotate, rotation
from mmjax.parallel import context
from mmjax.parallel.fsdp import make_varying
from pallas_kernels.sparse_attention.api import cached_attention


class GroupedAttention(nnx.Module):
    """Softmax attention whose key heads each serve a group of query heads; heads are split over the tensor axis.

        q = turn(norm(x W_q))    k = turn(norm(x W_k))    v = x W_v        (norms with head_norm or joint_norm)
        y = [sigmoid(x W_g) * softmax(q k / sqrt(head width), causal) v] W_o

    Source: grouped-query attention, arXiv:2305.13245; rotation, arXiv:2104.09864; gate: Qwen3-Next.
    """

    def __init__(self, model: ModelConfig):
        config = model.grouped_attention
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        self.model, self.config = model, config
        width, heads, key_heads = config.head_width, config.num_heads, config.num_key_heads

        def heads_from(num_heads: int) -> nnx.Variable:
            return parameter(initializer, (model.width, num_heads, width), ("model_weight", "heads", None), dtype)

        self.query, self.key, self.value = heads_from(heads), heads_from(key_heads), heads_from(key_heads)
        if config.projection_bias:
            self.query_bias = zeros((heads, width), ("heads", None), dtype)
            self.key_bias = zeros((key_heads, width), ("heads", None), dtype)
            self.value_bias = zeros((key_heads, width), ("heads", None), dtype)
        if config.head_norm:
            self.query_norm = norm_weight(model, width)
            self.key_norm = norm_weight(model, width)
        if config.joint_norm:
            self.query_norm = parameter(jax.nn.initializers.ones, (heads, width), ("heads", None), dtype)
            self.key_norm = parameter(jax.nn.initializers.ones, (key_heads, width), ("heads", None), dtype)
        if config.output_gate == "sigmoid":
            self.output_gate = heads_from(heads)
        self.output = parameter(initializer, (heads, width, model.width), ("heads", None, "model_weight"), dtype)
        if config.output_bias:
            self.output_bias = zeros((model.width,), (None,), dtype)

    def __call__(self, inputs: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """`inputs` [b, s, D], normalised; segments [b, s]; positions [b, s] or [3, b, s] -> [b, s, D], same dtype."""
        inputs, query, key, value = self._project(inputs, positions)
        key, value = context.gather_positions(key, value)
        (segment_ids,) = context.gather_positions(segment_ids)
        mixed = packed_attention(
            query,
            key,
            value,
            segment_ids,
            context.query_positions(query.shape[1]),
            scale=self.config.head_width**-0.5,
            query_chunk_tokens=self.config.query_chunk_tokens,
            keeps_scores=self.model.remat == "layer",
        )
        return self._finish(inputs, checkpoint_name(mixed, "attention"))

    def extend(
        self, inputs: jax.Array, slots: jax.Array, positions: jax.Array, cache: GroupedCache
    ) -> tuple[jax.Array, GroupedCache]:
        """The same for tokens at `slots` [b, s] behind those that `cache` holds; and the cache of both."""
        inputs, query, key, value = self._project(inputs, positions)
        cache = GroupedCache(write(cache.key, slots, key), write(cache.value, slots, value))
        mixed = cached_attention(
            query,
            *cache,
            slots,
            scale=self.config.head_width**-0.5,
            query_chunk_tokens=self.config.query_chunk_tokens,
        )
        return self._finish(inputs, mixed), cache

    def empty_cache(self, rows: int, capacity: int, dtype: jax.typing.DTypeLike) -> GroupedCache:
        """Of `rows` rows with room for `capacity` tokens."""
        shape = (rows, capacity, self.config.num_key_heads, self.config.head_width)
        return GroupedCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def _project(self, inputs: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The inputs as they go on, then queries, keys and values [b, s, heads, K]."""
        config = self.config
        # Once for all projections, so that the backward pass sums over the tensor axis once.
        inputs = make_varying(inputs, (TENSOR,))
        query, key, value = (project("bsd,dhk->bshk", inputs, w) for w in (self.query, self.key, self.value))
        if config.projection_bias:
            query, key = add_bias(query, self.query_bias), add_bias(key, self.key_bias)
            value = add_bias(value, self.value_bias)
        if config.head_norm:
            query = scaled_norm(query, self.query_norm, self.model)
            key = scaled_norm(key, self.key_norm, self.model)
        if config.joint_norm:
            assert isinstance(self.query_norm, nnx.Variable) and isinstance(self.key_norm, nnx.Variable)
            query = joint_rms_norm(query, self.query_norm, self.model.norm_epsilon)
            key = joint_rms_norm(key, self.key_norm, self.model.norm_epsilon)
        if config.rotary.width:
            turned = rotation(config.rotary, positions, inputs.dtype)
            query, key = rotate(query, turned, config.rotary), rotate(key, turned, config.rotary)
        return inputs, query, key, value

    def _finish(self, inputs: jax.Array, mixed: jax.Array) -> jax.Array:
        config = self.config
        if config.output_gate == "sigmoid":
            mixed *= jax.nn.sigmoid(project("bsd,dhv->bshv", inputs, self.output_gate))
        output = project("bshv,hvd->bsd", mixed, self.output, is_row=True)
        return add_bias(output, self.output_bias) if config.output_bias else output


def joint_rms_norm(inputs: jax.Array, scale: nnx.Variable, epsilon: float) -> jax.Array:
    """RMSNorm of [b, s, heads, K] over all heads, those of the other devices of the tensor axis included."""
    wide = inputs.astype(at_least_float32(inputs.dtype))
    mean_square = lax.pmean(jnp.mean(jnp.square(wide), axis=(-2, -1), keepdims=True), TENSOR)
    normalised = (wide * lax.rsqrt(mean_square + epsilon)).astype(inputs.dtype)
    return normalised * jnp.broadcast_to(use(scale, wide.dtype), inputs.shape).astype(inputs.dtype)
