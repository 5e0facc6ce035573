"""Attention and its indexer in plain JAX: blocks of queries one after the other, selected keys gathered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sparse_attention import reference
from pallas_kernels.sparse_attention.reference import widen


def _over_query_blocks(function: Callable[..., Any], chunk_tokens: int, *arrays: jax.Array) -> Any:
    """The array or arrays `function(*blocks)` on blocks of the arrays' second axis [B, Q, ...], results joined.

    Each block is computed again in the backward pass, so that the scores of one block only exist at a time.
    """
    rows, tokens = arrays[0].shape[:2]
    if tokens <= chunk_tokens:
        return function(*arrays)
    num_blocks = -(-tokens // chunk_tokens)
    block_tokens = -(-tokens // num_blocks)

    def split(array: jax.Array) -> jax.Array:
        padding = ((0, 0), (0, num_blocks * block_tokens - tokens)) + ((0, 0),) * (array.ndim - 2)
        return jnp.moveaxis(jnp.pad(array, padding).reshape(rows, num_blocks, block_tokens, *array.shape[2:]), 1, 0)

    recomputed = jax.checkpoint(lambda block: function(*block), prevent_cse=False)
    blocks = lax.map(recomputed, tuple(map(split, arrays)))

    def join(blocks: jax.Array) -> jax.Array:
        joined = jnp.moveaxis(blocks, 0, 1)
        return joined.reshape(rows, num_blocks * block_tokens, *joined.shape[3:])[:, :tokens]

    return jax.tree.map(join, blocks)


def _gather(array: jax.Array, indices: jax.Array) -> jax.Array:
    """[B, S, K] at [B, Q, k] -> [B, Q, k, K]; a hole (-1) reads key 0, to be masked."""
    return jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds"))(array, jnp.maximum(indices, 0))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    query_positions: jax.Array | None,
    *,
    scale: float,
    is_causal: bool,
    query_chunk_tokens: int,
) -> jax.Array:
    # Widened before the blocks, so that the sum of their gradients is wide too.
    key, value = widen(key), widen(value)

    def block(query, segments, positions):
        mask = reference.document_mask(segments, positions, segment_ids, is_causal=is_causal)
        return reference.attend(query, key, value, mask, scale)

    places = reference.places_of_queries(segment_ids, query_positions)
    return _over_query_blocks(block, query_chunk_tokens, query, *places)


def select_keys(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    segment_ids: jax.Array,
    query_positions: jax.Array | None,
    *,
    top_k: int,
    query_chunk_tokens: int,
) -> jax.Array:
    def block(index_query, head_weight, segments, positions):
        mask = reference.document_mask(segments, positions, segment_ids, is_causal=True)
        return _best_keys(reference.index_scores(index_query, index_key, head_weight), mask, top_k)

    places = reference.places_of_queries(segment_ids, query_positions)
    return _over_query_blocks(block, query_chunk_tokens, index_query, head_weight, *places)


def _best_keys(scores: jax.Array, mask: jax.Array, top_k: int) -> jax.Array:
    """[B, Q, S], [B, Q, S] -> int32 [B, Q, top_k], ascending, -1 in what is left."""
    best, selected = lax.top_k(jnp.where(mask, scores, -jnp.inf), min(top_k, scores.shape[-1]))
    return reference.in_order(selected, best != -jnp.inf, top_k)


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    query_chunk_tokens: int,
) -> jax.Array:
    def block(query, positions):
        return reference.attend(query, key, value, reference.cache_mask(positions, key.shape[1]), scale)

    return _over_query_blocks(block, query_chunk_tokens, query, positions)


def select_cached_keys(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    positions: jax.Array,
    *,
    top_k: int,
    query_chunk_tokens: int,
) -> jax.Array:
    def block(index_query, head_weight, positions):
        mask = reference.cache_mask(positions, index_key.shape[1])
        return _best_keys(reference.index_scores(index_query, index_key, head_weight), mask, top_k)

    return _over_query_blocks(block, query_chunk_tokens, index_query, head_weight, positions)


def selected_attention(
    query: jax.Array,
    latent: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    value_width: int,
    query_chunk_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    latent = widen(latent)

    def block(query, indices):
        selected = _gather(latent, indices)
        scores, mask = _selected_scores(query, selected, scale), (indices >= 0)[:, :, None]
        weights = reference.masked_softmax(scores, mask)
        mixed = jnp.einsum("bqhs,bqsr->bqhr", weights, selected[..., :value_width]).astype(query.dtype)
        return mixed, reference.log_sums(scores, mask)

    return _over_query_blocks(block, query_chunk_tokens, query, indices)


def _selected_scores(query: jax.Array, selected: jax.Array, scale: float) -> jax.Array:
    return scale * jnp.einsum("bqhk,bqsk->bqhs", widen(query), selected)


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
    query_chunk_tokens: int,
) -> jax.Array:
    index_key, key = widen(index_key), lax.stop_gradient(widen(key))

    def divergence(target, logits, mask):
        if head_axis is not None:
            target = lax.psum(target, head_axis)
        return reference.kl_divergence(target, logits, mask)

    def dense_block(index_query, head_weight, query, segments, positions):
        mask = reference.document_mask(segments, positions, segment_ids, is_causal=True)
        target = reference.probabilities(query, key, mask, scale).sum(axis=(1, 2))
        return divergence(target, reference.index_scores(index_query, index_key, head_weight), mask)

    def selected_block(index_query, head_weight, query, indices):
        scores = _selected_scores(query, _gather(key[:, :, 0], indices), scale)
        target = reference.masked_softmax(scores, (indices >= 0)[:, :, None]).sum(axis=2)
        products = jnp.einsum("bqjk,bqsk->bqjs", widen(index_query), _gather(index_key, indices))
        scaled = jax.nn.relu(index_query.shape[-1] ** -0.5 * products)
        return divergence(target, jnp.einsum("bqj,bqjs->bqs", widen(head_weight), scaled), indices >= 0)

    places = reference.places_of_queries(segment_ids, query_positions)
    block, last = (dense_block, places) if indices is None else (selected_block, (indices,))
    return _over_query_blocks(block, query_chunk_tokens, index_query, head_weight, lax.stop_gradient(query), *last)
