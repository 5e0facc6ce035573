"""Multi-head latent attention (MLA), its rotation and output gate, and its lightning indexer (DSA)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import TENSOR
from mmjax.config import ModelConfig
from mmjax.models.cache import LatentCache, write
from mmjax.models.fused_attention import packed_attention
from mmjax.models.layers import at_least_float32, layer_norm, normal, ones, parameter, project, rms_norm, spread
from mmjax.models.rotary import rotate, rotation
from mmjax.parallel import context
from mmjax.parallel.fsdp import make_varying, varying_like
from pallas_kernels.sparse_attention.api import (
    cached_attention,
    has_loss_kernels,
    indexer_loss,
    select_cached_keys,
    select_keys,
    selected_attention,
)


@jax.custom_vjp
def agreed(index_key: jax.Array) -> jax.Array:
    """`index_key` as it is. Its gradient is the mean of those that the devices of the tensor axis find.

    They are one number but for rounding: kernels sum it in no fixed order. Without this, copies of the indexer drift
    apart, and with them the keys that they select.
    """
    return index_key


agreed.defvjp(
    lambda index_key: (index_key, None),
    lambda _, gradient: (lax.pmean(make_varying(gradient, (TENSOR,)), TENSOR),),
)


class Indexer(nnx.Module):
    """Small heads that score keys for every query; all of them on every device of the tensor axis.

    They read detached inputs: their gradient comes from the indexer loss only, and stops here.
    """

    def __init__(self, model: ModelConfig):
        full, indexer = model.full_attention, model.full_attention.indexer
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        self.config = indexer
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

    def __call__(
        self, inputs: jax.Array, query_inputs: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[b, s, D], [b, s, query rank or D] -> queries [b, s, J, K], keys [b, s, K], head weights [b, s, J]."""
        config = self.config
        inputs, query_inputs = lax.stop_gradient(inputs), lax.stop_gradient(query_inputs)
        query = project("bsr,rjk->bsjk", query_inputs, self.query_up)
        bias = self.key_norm_bias.get_value() if config.key_norm_bias else None
        key = project("bsd,dk->bsk", inputs, self.key)
        key = layer_norm(key, self.key_norm_scale.get_value(), bias, config.key_norm_epsilon)
        if config.rotary.width:
            turned = rotation(config.rotary, positions, inputs.dtype)
            query, key = rotate(query, turned, config.rotary), rotate(key, turned, config.rotary)
        head_weight = project("bsd,dj->bsj", inputs, self.head_weight)
        return query, key, head_weight * head_weight.shape[-1] ** -0.5


class LatentAttention(nnx.Module):
    """MLA: keys and values come from one narrow latent per token; heads are split over the tensor axis.

        c_q = norm(x W_qd)                q = c_q W_qu              (or q = x W_q)
        (c, k_s) = x W_d;  c = norm(c)    k = (c W_ku | k_s)        v = c W_vu
        y = [sigmoid(x W_g) * softmax(q k / sqrt(key width), causal) v] W_o         (the gate only if the model has one)

    With `rotary` the part of q that meets k_s, and k_s, turn by position.

    With an indexer in stage `sparse` each query attends to its `top_k` best keys, in absorbed form: q W_ku against the
    latents themselves. Rows of at most `top_k` positions attend to all keys, which is the same.

    Source: Kimi K3 report, section 2.1.2; DeepSeek-V3.2-Exp report, section 2.1.
    """

    def __init__(self, model: ModelConfig):
        full = model.full_attention
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        self.model, self.config = model, full

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

    def __call__(self, inputs: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`inputs` [b, s, D], normalised; segments [b, s]; positions [b, s] or [3, b, s] -> ([b, s, D], indexer loss).

        The loss is the sum of the KL divergences of this device's tokens, in at least float32; 0 without an indexer.
        """
        config, dtype = self.config, inputs.dtype
        scale, chunk = config.score_factor * config.key_width**-0.5, config.query_chunk_tokens
        query_inputs, nope_query, shared_query, latent, shared_key = self._project(inputs, positions)
        # Queries are this device's, all that keys are made of is the whole row's.
        places = context.query_positions(inputs.shape[1])
        (segment_ids,) = context.gather_positions(segment_ids)
        index = None
        if self.indexer is None:
            latent, shared_key = context.gather_positions(latent, shared_key)
        else:
            index_query, index_key, head_weight = self.indexer(inputs, query_inputs, positions)
            latent, shared_key, index_key = context.gather_positions(latent, shared_key, index_key)
            index = index_query, agreed(index_key) if lax.axis_size(TENSOR) > 1 else index_key, head_weight
        indices = log_sums = None
        if index is not None and config.indexer.stage == "sparse" and latent.shape[1] > config.indexer.top_k:
            options = {"top_k": config.indexer.top_k, "score_dtype": config.indexer.score_dtype}
            indices = select_keys(*index, segment_ids, places, **options, query_chunk_tokens=chunk)
            # Saved, never decided again: a recomputed score could round to another choice.
            indices = checkpoint_name(indices, "selected_keys")

        if indices is None:
            query = jnp.concatenate([nope_query, shared_query], axis=-1)
            key = project("bsr,rhn->bshn", latent, self.key_up)
            shape = (*key.shape[:3], config.shared_key_width)
            key = jnp.concatenate([key, spread(shared_key[:, :, None], shape)], axis=-1)
            value = project("bsr,rhv->bshv", latent, self.value_up)
            mixed = packed_attention(
                query,
                key,
                value,
                segment_ids,
                places,
                scale=scale,
                query_chunk_tokens=chunk,
                keeps_scores=self.model.remat == "layer",
            )
        else:
            query = self._absorbed(nope_query, shared_query)
            key = jnp.concatenate([latent, shared_key], axis=-1)
            mixed, log_sums = selected_attention(
                query,
                key,
                indices,
                scale=scale,
                value_width=config.latent_width,
                is_deterministic=config.deterministic_gradients,
                query_chunk_tokens=chunk,
            )
            mixed, key = project("bshr,rhv->bshv", mixed, self.value_up), key[:, :, None]

        loss = varying_like(jnp.zeros((), at_least_float32(dtype)), inputs)
        if index is not None:
            if indices is None:
                shared = jnp.concatenate([latent, shared_key], axis=-1)
                if has_loss_kernels(*index[:2], query, shared):
                    # They take latents. Elsewhere the keys of the heads are the narrower ones.
                    query, key = self._absorbed(nope_query, shared_query), shared[:, :, None]
            loss = indexer_loss(
                *index,
                query,
                key,
                segment_ids,
                indices,
                places,
                log_sums,
                scale=scale,
                head_axis=TENSOR,
                is_deterministic=config.deterministic_gradients,
                query_chunk_tokens=chunk,
            ).sum()
        return self._finish(inputs, checkpoint_name(mixed, "attention")), loss

    def extend(
        self, inputs: jax.Array, slots: jax.Array, positions: jax.Array, cache: LatentCache
    ) -> tuple[jax.Array, LatentCache]:
        """The same, always in absorbed form, for tokens at `slots` [b, s] behind those that `cache` holds; no loss.

        Returns the output and the cache of both.
        """
        config = self.config
        scale, chunk = config.score_factor * config.key_width**-0.5, config.query_chunk_tokens
        query_inputs, nope_query, shared_query, latent, shared_key = self._project(inputs, positions)
        query = self._absorbed(nope_query, shared_query)
        key = write(cache.key, slots, jnp.concatenate([latent, shared_key], axis=-1))
        index_key = cache.index_key
        if self.indexer is None or index_key is None:
            heads_key = key[:, :, None]
            value = heads_key[..., : config.latent_width]
            mixed = cached_attention(query, heads_key, value, slots, scale=scale, query_chunk_tokens=chunk)
        else:
            index_query, new_index_key, head_weight = self.indexer(inputs, query_inputs, positions)
            index_key = write(index_key, slots, new_index_key)
            indices = select_cached_keys(
                index_query,
                index_key,
                head_weight,
                slots,
                top_k=config.indexer.top_k,
                score_dtype=config.indexer.score_dtype,
                query_chunk_tokens=chunk,
            )
            mixed, _ = selected_attention(
                query, key, indices, scale=scale, value_width=config.latent_width, query_chunk_tokens=chunk
            )
        mixed = project("bshr,rhv->bshv", mixed, self.value_up)
        return self._finish(inputs, mixed), LatentCache(key, index_key)

    def empty_cache(self, rows: int, capacity: int, dtype: jax.typing.DTypeLike) -> LatentCache:
        """Of `rows` rows with room for `capacity` tokens; with index keys if there may be more of them than `top_k`."""
        config, indexer = self.config, self.config.indexer
        index_key = None
        if indexer.stage == "sparse" and capacity > indexer.top_k:
            index_key = jnp.zeros((rows, capacity, indexer.head_width), dtype)
        return LatentCache(jnp.zeros((rows, capacity, config.latent_width + config.shared_key_width), dtype), index_key)

    def _project(self, inputs: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        """What queries come from, both parts of queries [b, s, H, ...], latents [b, s, R], keys shared by all heads."""
        config = self.config
        query_inputs = inputs
        if config.query_rank:
            query_inputs = project("bsd,dr->bsr", inputs, self.query_down)
            query_inputs = rms_norm(query_inputs, self.query_norm.get_value(), config.latent_norm_epsilon)
        query = project("bsr,rhk->bshk", query_inputs, self.query_up if config.query_rank else self.query)
        down = project("bsd,dr->bsr", inputs, self.latent_down)
        latent, shared_key = jnp.split(down, [config.latent_width], axis=-1)
        latent = rms_norm(latent, self.latent_norm.get_value(), config.latent_norm_epsilon)

        nope_query, shared_query = jnp.split(query, [config.nope_width], axis=-1)
        if config.rotary.width:
            turned = rotation(config.rotary, positions, inputs.dtype)
            shared_query = rotate(shared_query, turned, config.rotary)
            shared_key = rotate(shared_key, turned, config.rotary)
        return query_inputs, nope_query, shared_query, latent, shared_key

    def _absorbed(self, nope_query: jax.Array, shared_query: jax.Array) -> jax.Array:
        """Queries against the latents and the shared key: [b, s, H, R + K]."""
        return jnp.concatenate([project("bshn,rhn->bshr", nope_query, self.key_up), shared_query], axis=-1)

    def _finish(self, inputs: jax.Array, mixed: jax.Array) -> jax.Array:
        if self.config.output_gate == "sigmoid":
            mixed *= jax.nn.sigmoid(project("bsd,dhv->bshv", inputs, self.output_gate))
        return project("bshv,hvd->bsd", mixed, self.output, is_row=True)
