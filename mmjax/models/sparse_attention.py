"""Multi-head latent attention without rotation (MLA), its output gate, and its lightning indexer (DSA)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import TENSOR
from mmjax.config import ModelConfig
from mmjax.models.layers import at_least_float32, normal, ones, parameter, rms_norm, use
from mmjax.parallel.fsdp import varying_like
from mmjax.parallel.tensor import column, row
from pallas_kernels.sparse_attention.api import attention, indexer_loss, select_keys, selected_attention


def layer_norm(inputs: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float) -> jax.Array:
    """`(inputs - mean) / sqrt(variance + epsilon) * scale + bias` over the last axis, in at least float32."""
    wide = inputs.astype(at_least_float32(inputs.dtype))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normalised = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    result = normalised * jnp.broadcast_to(scale, inputs.shape).astype(wide.dtype)
    if bias is not None:
        result += jnp.broadcast_to(bias, inputs.shape).astype(wide.dtype)
    return result.astype(inputs.dtype)


class Indexer(nnx.Module):
    """Small heads that score keys for every query; all of them on every device of the tensor axis.

    They read detached inputs: their gradient comes from the indexer loss only, and stops here.
    """

    def __init__(self, model: ModelConfig):
        full, indexer = model.full_attention, model.full_attention.indexer
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        self.key_norm_epsilon, self.has_key_norm_bias = model.norm_epsilon, indexer.key_norm_bias
        # Without a query latent the queries come from the layer's input.
        input_width, input_axis = (full.query_rank, "rank_weight") if full.query_rank else (model.width, "model_weight")
        self.query_up = parameter(
            initializer, (input_width, indexer.num_heads, indexer.head_width), (input_axis, None, None), dtype
        )
        self.key = parameter(initializer, (model.width, indexer.head_width), ("model_weight", None), dtype)
        self.key_norm_scale = ones(indexer.head_width, dtype)
        if indexer.key_norm_bias:
            self.key_norm_bias = parameter(jax.nn.initializers.zeros, (indexer.head_width,), (None,), dtype)
        self.head_weight = parameter(initializer, (model.width, indexer.num_heads), ("model_weight", None), dtype)

    def __call__(self, inputs: jax.Array, query_inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[b, s, D], [b, s, query rank or D] -> queries [b, s, J, K], keys [b, s, K], head weights [b, s, J]."""
        inputs, query_inputs, dtype = lax.stop_gradient(inputs), lax.stop_gradient(query_inputs), inputs.dtype
        query = jnp.einsum("bsr,rjk->bsjk", query_inputs, use(self.query_up, dtype))
        bias = self.key_norm_bias.get_value() if self.has_key_norm_bias else None
        key = jnp.einsum("bsd,dk->bsk", inputs, use(self.key, dtype))
        key = layer_norm(key, self.key_norm_scale.get_value(), bias, self.key_norm_epsilon)
        head_weight = jnp.einsum("bsd,dj->bsj", inputs, use(self.head_weight, dtype))
        return query, key, head_weight * head_weight.shape[-1] ** -0.5


class LatentAttention(nnx.Module):
    """Gated MLA: keys and values come from one narrow latent per token; heads are split over the tensor axis.

        c_q = norm(x W_qd)                q = c_q W_qu              (or q = x W_q)
        (c, k_s) = x W_d;  c = norm(c)    k = (c W_ku | k_s)        v = c W_vu
        y = [sigmoid(x W_g) * softmax(q k / sqrt(key width), causal) v] W_o

    With an indexer in stage `sparse` each query attends to its `top_k` best keys, in absorbed form: q W_ku against the
    latents themselves. Rows of at most `top_k` positions attend to all keys, which is the same.

    Source: Kimi K3 report, section 2.1.2; DeepSeek-V3.2-Exp report, section 2.1.
    """

    def __init__(self, model: ModelConfig):
        full = model.full_attention
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        self.config = full

        def heads_from(width: int, axis: str, head_width: int) -> nnx.Variable:
            return parameter(initializer, (width, full.num_heads, head_width), (axis, "heads", None), dtype)

        if full.query_rank:
            down_shape = (model.width, full.query_rank)
            self.query_down = parameter(initializer, down_shape, ("model_weight", None), dtype)
            self.query_norm = ones(full.query_rank, dtype)
            self.query_up = heads_from(full.query_rank, "rank_weight", full.key_width)
        else:
            self.query = heads_from(model.width, "model_weight", full.key_width)
        down_shape = (model.width, full.latent_width + full.shared_key_width)
        self.latent_down = parameter(initializer, down_shape, ("model_weight", None), dtype)
        self.latent_norm = ones(full.latent_width, dtype)
        self.key_up = heads_from(full.latent_width, "rank_weight", full.nope_width)
        self.value_up = heads_from(full.latent_width, "rank_weight", full.value_width)
        if full.output_gate == "sigmoid":
            self.output_gate = heads_from(model.width, "model_weight", full.value_width)
        output_shape = (full.num_heads, full.value_width, model.width)
        self.output = parameter(initializer, output_shape, ("heads", None, "model_weight"), dtype)
        self.indexer = Indexer(model) if full.indexer.stage != "none" else None

    def __call__(self, inputs: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`inputs` [b, s, D], normalised, and segments [b, s] -> ([b, s, D], indexer loss).

        The loss is the sum of the KL divergences of this device's tokens, in at least float32; 0 without an indexer.
        """
        config, dtype = self.config, inputs.dtype
        scale, chunk = config.key_width**-0.5, config.query_chunk_tokens
        query_inputs = inputs
        if config.query_rank:
            query_inputs = jnp.einsum("bsd,dr->bsr", inputs, use(self.query_down, dtype))
            query_inputs = rms_norm(query_inputs, self.query_norm.get_value(), config.latent_norm_epsilon)
        query = column("bsr,rhk->bshk", query_inputs, use(self.query_up if config.query_rank else self.query, dtype))
        down = jnp.einsum("bsd,dr->bsr", inputs, use(self.latent_down, dtype))
        latent, shared_key = jnp.split(down, [config.latent_width], axis=-1)
        latent = rms_norm(latent, self.latent_norm.get_value(), config.latent_norm_epsilon)
        key_up, value_up = use(self.key_up, dtype), use(self.value_up, dtype)

        index = None if self.indexer is None else self.indexer(inputs, query_inputs)
        indices = None
        if index is not None and config.indexer.stage == "sparse" and inputs.shape[1] > config.indexer.top_k:
            indices = select_keys(*index, segment_ids, top_k=config.indexer.top_k, query_chunk_tokens=chunk)
            # Saved, never decided again: a recomputed score could round to another choice.
            indices = checkpoint_name(indices, "selected_keys")

        if indices is None:
            shape = (*query.shape[:3], config.shared_key_width)
            key = jnp.concatenate(
                [column("bsr,rhn->bshn", latent, key_up), jnp.broadcast_to(shared_key[:, :, None], shape)], axis=-1
            )
            value = column("bsr,rhv->bshv", latent, value_up)
            mixed = attention(query, key, value, segment_ids, scale=scale, query_chunk_tokens=chunk)
        else:
            nope_query, shared_query = jnp.split(query, [config.nope_width], axis=-1)
            query = jnp.concatenate([column("bshn,rhn->bshr", nope_query, key_up), shared_query], axis=-1)
            key = jnp.concatenate([latent, shared_key], axis=-1)
            mixed = selected_attention(
                query, key, indices, scale=scale, value_width=config.latent_width, query_chunk_tokens=chunk
            )
            mixed, key = column("bshr,rhv->bshv", mixed, value_up), key[:, :, None]

        loss = varying_like(jnp.zeros((), at_least_float32(dtype)), inputs)
        if index is not None:
            loss = indexer_loss(
                *index, query, key, segment_ids, indices, scale=scale, head_axis=TENSOR, query_chunk_tokens=chunk
            ).sum()
        if config.output_gate == "sigmoid":
            mixed *= jax.nn.sigmoid(column("bsd,dhv->bshv", inputs, use(self.output_gate, dtype)))
        return row("bshv,hvd->bsd", mixed, use(self.output, dtype)), loss
