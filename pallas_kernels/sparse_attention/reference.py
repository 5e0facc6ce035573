"""Attention and its indexer as defined: whole score matrices, selections as masks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def widen(array: jax.Array) -> jax.Array:
    """In at least float32."""
    # NumPy's rule: JAX's own refuses to name a common type when promotion is strict.
    return array.astype(np.promote_types(array.dtype, np.float32))


def places_of_queries(segment_ids: jax.Array, query_positions: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Document and position [B, Q] of each query: all tokens of the row, or those at `query_positions` [Q] of it."""
    if query_positions is None:
        segments, query_positions = segment_ids, jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    else:
        segments = segment_ids.at[:, query_positions].get(mode="promise_in_bounds")
    return segments, jnp.broadcast_to(query_positions[None], segments.shape)


def document_mask(
    query_segments: jax.Array, query_positions: jax.Array, key_segments: jax.Array, *, is_causal: bool
) -> jax.Array:
    """[B, Q, S]: which keys a query may see: those of its own document, not later than itself if `is_causal`."""
    mask = (query_segments[:, :, None] == key_segments[:, None, :]) & (query_segments != 0)[:, :, None]
    return mask & cache_mask(query_positions, key_segments.shape[1]) if is_causal else mask


def cache_mask(positions: jax.Array, num_keys: int) -> jax.Array:
    """[B, Q] -> [B, Q, num_keys]: the keys of a cache up to a token's own position; none for padding (-1)."""
    return jnp.arange(num_keys, dtype=positions.dtype)[None, None] <= positions[:, :, None]


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis among the entries of `mask`; zeros elsewhere, also where a row has none."""
    # The lowest finite number, not -inf: a row without entries then has neither NaN values nor NaN gradients.
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1), 0)


def probabilities(query: jax.Array, key: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """[B, Q, H, K], [B, S, G, K], [B, Q, S] -> [B, G, H/G, Q, S], in at least float32."""
    rows, queries, num_heads, width = query.shape
    num_groups = key.shape[2]
    grouped = widen(query).reshape(rows, queries, num_groups, num_heads // num_groups, width)
    scores = scale * jnp.einsum("bqghk,bsgk->bghqs", grouped, widen(key))
    return masked_softmax(scores, mask[:, None, None])


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """[B, Q, H, V] in the dtype of `query`: the values weighted by `probabilities`."""
    weights = probabilities(query, key, mask, scale)
    mixed = jnp.einsum("bghqs,bsgv->bqghv", weights, widen(value))
    return mixed.reshape(*query.shape[:3], value.shape[3]).astype(query.dtype)


def index_scores(index_query: jax.Array, index_key: jax.Array, head_weight: jax.Array) -> jax.Array:
    """[B, Q, J, K], [B, S, K], [B, Q, J] -> [B, Q, S], in at least float32."""
    products = jnp.einsum("bqjk,bsk->bqjs", widen(index_query), widen(index_key))
    scaled = jax.nn.relu(index_query.shape[-1] ** -0.5 * products)
    return jnp.einsum("bqj,bqjs->bqs", widen(head_weight), scaled)


def to_float8(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., K] as numbers of type float8_e4m3fn, and what to multiply them by [...]: the last axis shares one scale."""
    array = widen(array)
    largest = jnp.max(jnp.abs(array), axis=-1)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(jnp.float8_e4m3fn).max), 1)
    return (array / scale[..., None]).astype(jnp.float8_e4m3fn), scale


def rounded_to_float8(array: jax.Array) -> jax.Array:
    """In at least float32, what `to_float8` leaves of an array."""
    values, scale = to_float8(array)
    return values.astype(scale.dtype) * scale[..., None]


def kl_divergence(target: jax.Array, logits: jax.Array, mask: jax.Array) -> jax.Array:
    """KL(target / sum(target) || softmax(logits)) over the last axis among the entries of `mask`; 0 if there are none.

    `target` is zero outside `mask`. The gradient of `logits` is softmax(logits) - target / sum(target).
    """
    total = target.sum(axis=-1, keepdims=True)
    target = target / jnp.where(total > 0, total, 1)
    predicted = jax.nn.log_softmax(jnp.where(mask, logits, jnp.finfo(logits.dtype).min), axis=-1)
    return jnp.sum(jax.scipy.special.xlogy(target, target) - target * predicted, axis=-1)


def key_ranges(
    segment_ids: jax.Array, query_segments: jax.Array, query_positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32 [B, Q] each: the first key of a query's document, and the key behind the query; the same for padding."""
    position = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = lax.cummax(jnp.where(segment_ids != before, position, 0), axis=1)
    first = jnp.take_along_axis(starts, query_positions, axis=1)
    return first, jnp.where(query_segments != 0, query_positions + 1, first)


def selection_mask(indices: jax.Array, num_keys: int) -> jax.Array:
    """[B, S, k] -> [B, S, num_keys]: which keys are selected. Holes (-1) select none."""
    return (indices[..., None] == jnp.arange(num_keys, dtype=indices.dtype)[None, None, None]).any(axis=2)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    query_positions: jax.Array | None,
    *,
    scale: float,
    is_causal: bool,
) -> jax.Array:
    places = places_of_queries(segment_ids, query_positions)
    return attend(query, key, value, document_mask(*places, segment_ids, is_causal=is_causal), scale)


def select_keys(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    segment_ids: jax.Array,
    query_positions: jax.Array | None,
    *,
    top_k: int,
) -> jax.Array:
    mask = document_mask(*places_of_queries(segment_ids, query_positions), segment_ids, is_causal=True)
    return best_keys(index_scores(index_query, index_key, head_weight), mask, top_k)


def best_keys(scores: jax.Array, mask: jax.Array, top_k: int) -> jax.Array:
    """[B, Q, S], [B, Q, S] -> int32 [B, Q, top_k], ascending, -1 in what is left."""
    scores = jnp.where(mask, scores, -jnp.inf)
    order = jnp.argsort(scores, axis=-1, stable=True, descending=True)[..., :top_k]
    return in_order(order, jnp.take_along_axis(mask, order, axis=-1), top_k)


def in_order(order: jax.Array, is_key: jax.Array, top_k: int) -> jax.Array:
    """int32 [B, Q, top_k]: those of `order` [B, Q, N] that are keys, ascending, then -1."""
    last = jnp.iinfo(jnp.int32).max
    selected = jnp.sort(jnp.where(is_key, order, last).astype(jnp.int32), axis=-1)
    selected = jnp.where(selected == last, -1, selected)
    return jnp.pad(selected, ((0, 0), (0, 0), (0, top_k - selected.shape[-1])), constant_values=-1)


def selected_attention(
    query: jax.Array, latent: jax.Array, indices: jax.Array, *, scale: float, value_width: int
) -> tuple[jax.Array, jax.Array]:
    key, mask = latent[:, :, None], selection_mask(indices, latent.shape[1])
    scores = scale * jnp.einsum("bqhk,bsk->bqhs", widen(query), widen(latent))
    return attend(query, key, key[..., :value_width], mask, scale), log_sums(scores, mask[:, :, None])


def log_sums(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Logarithms of the sums of exponentials over the last axis among the entries of `mask`, 0 if there are none."""
    sums = jax.nn.logsumexp(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return lax.stop_gradient(jnp.where(mask.any(axis=-1), sums, 0))


def indexer_loss(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    query: jax.Array,
    key: jax.Array,
    segment_ids: jax.Array,
    indices: jax.Array | None,
    query_positions: jax.Array | None,
    *,
    scale: float,
    head_axis: str | None,
) -> jax.Array:
    mask = document_mask(*places_of_queries(segment_ids, query_positions), segment_ids, is_causal=True)
    if indices is not None:
        mask &= selection_mask(indices, key.shape[1])
    target = lax.stop_gradient(probabilities(query, key, mask, scale).sum(axis=(1, 2)))
    if head_axis is not None:
        target = lax.psum(target, head_axis)
    return kl_divergence(target, index_scores(index_query, index_key, head_weight), mask)
