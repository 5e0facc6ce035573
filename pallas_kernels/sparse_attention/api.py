"""Attention of packed documents, and DeepSeek sparse attention: selection of keys, attention over them, its loss."""

import logging
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import hopper, reference, xla

Implementation = Literal["auto", "pallas", "xla", "reference"]
PlainImplementation = Literal["auto", "xla", "reference"]
ScoreDtype = Literal["own", "float8_e4m3fn"]


def attention(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"],
    segment_ids: Int[Array, "B S"],
    query_positions: Int[Array, " Q"] | None = None,
    *,
    scale: float,
    is_causal: bool = True,
    query_chunk_tokens: int = 512,
    implementation: PlainImplementation = "auto",
) -> Float[Array, "B Q H V"]:
    """Softmax attention inside each document of a row.

        out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) value[s, g],    g = h * G // H

    over the keys s of t's document, up to t if `is_causal`. Segment 0 is padding: its rows are zero, and none sees it.
    The queries are those of all tokens, or of the tokens at `query_positions` of each row.
    Scores, softmax and sums are in at least float32, the result in the dtype of `query`. `xla` holds the scores of
    `query_chunk_tokens` queries at a time, and computes them again in the backward pass.

    Raises:
      ValueError: the number of heads is no multiple of the number of key/value heads.
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads cannot share {key.shape[2]} key heads; give a multiple of them")
    if implementation == "reference":
        return reference.attention(query, key, value, segment_ids, query_positions, scale=scale, is_causal=is_causal)
    return xla.attention(
        query,
        key,
        value,
        segment_ids,
        query_positions,
        scale=scale,
        is_causal=is_causal,
        query_chunk_tokens=query_chunk_tokens,
    )


def select_keys(
    index_query: Float[Array, "B Q J K"],
    index_key: Float[Array, "B S K"],
    head_weight: Float[Array, "B Q J"],
    segment_ids: Int[Array, "B S"],
    query_positions: Int[Array, " Q"] | None = None,
    *,
    top_k: int,
    score_dtype: ScoreDtype = "own",
    query_chunk_tokens: int = 512,
    implementation: Implementation = "auto",
) -> Int[Array, "B Q {top_k}"]:
    """The `top_k` keys with the highest index score among those of the query's document up to itself, in their order.

        score[t, s] = sum_j head_weight[t, j] relu(K^-1/2 index_query[t, j] . index_key[s])

    Keys are counted along the row, int32, ascending; then -1 fills the slots of a query that has fewer keys, all slots
    of padding (segment 0). The queries are those of all tokens, or of the tokens at `query_positions` of each row. Of
    equal scores the earlier key wins. Scores are in at least float32. No gradient. `pallas` holds the scores of as many
    queries as make 2^26 of them.

    With `score_dtype` float8_e4m3fn every query of a head and every key is rounded to that type first, scaled so that
    its largest number becomes 448.

    Raises:
      ValueError: `pallas` is asked for and cannot take these arguments; the message says why.

    Source: lightning indexer, DeepSeek-V3.2-Exp report, section 2.1.
    """
    index_query, index_key, head_weight = lax.stop_gradient((index_query, index_key, head_weight))
    reason = hopper.reason_against_selection(index_query, index_key, top_k, score_dtype)
    implementation = _choose("select_keys", implementation, reason)
    if implementation == "pallas":
        places = reference.places_of_queries(segment_ids, query_positions)
        ranges = reference.key_ranges(segment_ids, *places)
        return hopper.select_keys(index_query, index_key, head_weight, *ranges, top_k, score_dtype)
    if score_dtype != "own":
        index_query, index_key = map(reference.rounded_to_float8, (index_query, index_key))
    if implementation == "reference":
        return reference.select_keys(index_query, index_key, head_weight, segment_ids, query_positions, top_k=top_k)
    return xla.select_keys(
        index_query,
        index_key,
        head_weight,
        segment_ids,
        query_positions,
        top_k=top_k,
        query_chunk_tokens=query_chunk_tokens,
    )


def cached_attention(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"],
    positions: Int[Array, "B Q"],
    *,
    scale: float,
    query_chunk_tokens: int = 512,
    implementation: PlainImplementation = "auto",
) -> Float[Array, "B Q H V"]:
    """Softmax attention of a row's newest tokens over a cache that holds the keys of that row by their position.

        out[t, h] = sum_s softmax_s(scale * query[t, h] . key[s, g]) value[s, g],    g = h * G // H,  s <= positions[t]

    Padding has position -1 and gives zeros. Entries of the cache behind a token's position must be finite. Scores,
    softmax and sums are in at least float32, the result in the dtype of `query`.
    """
    if implementation == "reference":
        return reference.attend(query, key, value, reference.cache_mask(positions, key.shape[1]), scale)
    return xla.cached_attention(query, key, value, positions, scale=scale, query_chunk_tokens=query_chunk_tokens)


def select_cached_keys(
    index_query: Float[Array, "B Q J K"],
    index_key: Float[Array, "B S K"],
    head_weight: Float[Array, "B Q J"],
    positions: Int[Array, "B Q"],
    *,
    top_k: int,
    score_dtype: ScoreDtype = "own",
    query_chunk_tokens: int = 512,
    implementation: Implementation = "auto",
) -> Int[Array, "B Q {top_k}"]:
    """As `select_keys`, among the keys of a cache (see `cached_attention`) up to each token's position."""
    reason = hopper.reason_against_selection(index_query, index_key, top_k, score_dtype)
    implementation = _choose("select_cached_keys", implementation, reason)
    if implementation == "pallas":
        first = jnp.zeros_like(positions)
        return hopper.select_keys(index_query, index_key, head_weight, first, positions + 1, top_k, score_dtype)
    if score_dtype != "own":
        index_query, index_key = map(reference.rounded_to_float8, (index_query, index_key))
    if implementation == "reference":
        mask = reference.cache_mask(positions, index_key.shape[1])
        return reference.best_keys(reference.index_scores(index_query, index_key, head_weight), mask, top_k)
    return xla.select_cached_keys(
        index_query, index_key, head_weight, positions, top_k=top_k, query_chunk_tokens=query_chunk_tokens
    )


class Selected(NamedTuple):
    """What attention over selected keys gives."""

    mixed: Float[Array, "B Q H V"]
    log_sums: Float[Array, "B Q H"]
    """Natural logarithms of the sums of exponentials, in at least float32; 0 without keys. No gradient."""


def selected_attention(
    query: Float[Array, "B Q H L"],
    latent: Float[Array, "B S L"],
    indices: Int[Array, "B Q N"],
    *,
    scale: float,
    value_width: int,
    is_deterministic: bool = False,
    query_chunk_tokens: int = 512,
    implementation: Implementation = "auto",
) -> Selected:
    """Attention over selected keys in absorbed form: all heads share one key, whose first part is the value.

        mixed[t, h] = sum_i softmax_i(scale * query[t, h] . latent[indices[t, i]]) latent[indices[t, i], :value_width]

    Holes (index -1) are left out; a query with holes only gives zeros. Indices of a query are distinct. Scores, softmax
    and sums are in at least float32, the result in the dtype of `query`. `xla` gathers the latents of
    `query_chunk_tokens` queries at a time. The latents' gradient adds up over queries; in `pallas` in whatever order
    they come, or, if `is_deterministic`, in integers, bitwise the same every time; where the kernels cannot be used, a
    warning says once that they are not.

    Raises:
      ValueError: `pallas` is asked for and cannot take these arguments; the message says why.

    Source: DeepSeek-V3.2-Exp report, section 2.1; absorbed form, DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
    """
    reason = hopper.reason_against_attention(query, latent, value_width)
    match _choose("selected_attention", implementation, reason, is_deterministic=is_deterministic):
        case "pallas":
            options = hopper.Options(scale, value_width, is_deterministic)
            return Selected(*hopper.selected_attention(options, query, latent, indices))
        case "reference":
            return Selected(*reference.selected_attention(query, latent, indices, scale=scale, value_width=value_width))
    return Selected(
        *xla.selected_attention(
            query, latent, indices, scale=scale, value_width=value_width, query_chunk_tokens=query_chunk_tokens
        )
    )


def indexer_loss(
    index_query: Float[Array, "B Q J K"],
    index_key: Float[Array, "B S K"],
    head_weight: Float[Array, "B Q J"],
    query: Float[Array, "B Q H L"],
    key: Float[Array, "B S G L"],
    segment_ids: Int[Array, "B S"],
    indices: Int[Array, "B Q N"] | None = None,
    query_positions: Int[Array, " Q"] | None = None,
    log_sums: Float[Array, "B Q H"] | None = None,
    *,
    scale: float,
    head_axis: str | None = None,
    is_deterministic: bool = False,
    query_chunk_tokens: int = 512,
    implementation: Implementation = "auto",
) -> Float[Array, "B Q"]:
    """How far the indexer is from the attention it serves: a KL divergence for each query, 0 for padding.

        p[t, s] = sum_h P[h, t, s] / sum_s sum_h P[h, t, s],    P = softmax(scale * query key)    (no gradient)
        loss[t] = sum_s p[t, s] (log p[t, s] - log softmax_s(score[t, s])),    score as in `select_keys`

    over the keys of t's document up to t, or over the selected `indices` (-1 is a hole) of it; then P is normalised
    over those too, and `key` has one head (the latents). The gradient of `score` is softmax(score) - p; `query` and
    `key` get none. In at least float32. The queries are those of all tokens, or of the tokens at `query_positions` of
    each row. Where the heads are split over a mesh axis, `head_axis` names it: the sum over heads then covers all.
    `log_sums` of `selected_attention` spare `pallas` a pass over the selected keys. Without `indices`, `pallas` needs a
    `key` of one head, takes the losses of some queries at a time, and computes them again for the gradients. The keys'
    gradient adds up over queries: in `pallas` in whatever order they come, or, if `is_deterministic`, in whole
    numbers.

    Raises:
      ValueError: `indices` are given and `key` has more than one head; or `pallas` is asked for and cannot take these
        arguments; the message says why.

    Source: DeepSeek-V3.2-Exp report, section 2.1.1.
    """
    if indices is not None and key.shape[2] != 1:
        raise ValueError(f"selected keys are latents that all heads share; got {key.shape[2]} key heads, give 1")
    reason = f"needs latents that all heads share, got {key.shape[2]} key heads"
    if key.shape[2] == 1:
        reason = hopper.reason_against_loss(index_query, index_key, query, key)
    implementation = _choose("indexer_loss", implementation, reason, is_deterministic=is_deterministic)
    if implementation == "pallas":
        options: dict[str, Any] = {"scale": scale, "head_axis": head_axis, "is_deterministic": is_deterministic}
        arrays = index_query, index_key, head_weight, query, key[:, :, 0]
        if indices is not None:
            return hopper.indexer_loss(*arrays, indices, log_sums, **options)
        ranges = reference.key_ranges(segment_ids, *reference.places_of_queries(segment_ids, query_positions))
        return hopper.dense_indexer_loss(*arrays, *ranges, **options)
    arrays = (index_query, index_key, head_weight, query, key, segment_ids, indices, query_positions)
    if implementation == "reference":
        return reference.indexer_loss(*arrays, scale=scale, head_axis=head_axis)
    return xla.indexer_loss(*arrays, scale=scale, head_axis=head_axis, query_chunk_tokens=query_chunk_tokens)


def has_loss_kernels(index_query: Any, index_key: Any, query: Any, latent: Any) -> bool:
    """Whether `indexer_loss` of heads `query` [..., H, any] over latents [..., L] that all share runs in kernels.

    It decides which keys to give the loss over all keys: latents, or, three times narrower, those of the heads.
    """
    return hopper.reason_against_loss(index_query, index_key, query, latent) is None


def _choose(
    operation: str, implementation: Implementation, reason: str | None, *, is_deterministic: bool = False
) -> Literal["pallas", "xla", "reference"]:
    """The implementation to use, where `reason` speaks against the kernels."""
    if implementation == "auto":
        launcher.log_once(f"{operation}: {'pallas' if reason is None else f'xla (pallas {reason})'}")
        if is_deterministic and reason is not None:
            launcher.log_once(
                f"{operation}: gradients of keys are not summed in integers, as deterministic ones are, since pallas"
                f" {reason}; xla sums them in the same order every time on a CPU, in any on a GPU",
                logging.WARNING,
            )
        return "pallas" if reason is None else "xla"
    if implementation == "pallas" and reason is not None:
        raise ValueError(f"implementation 'pallas' of {operation} {reason}; 'auto' takes one that can")
    return implementation
