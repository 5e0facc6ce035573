"""Sparse attention by Hopper's kernels: rows laid end to end, gradients, and what the kernels cannot take."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import (
    hopper_backward,
    hopper_forward,
    hopper_scores,
    reference,
    selected_loss,
    top_k,
)
from pallas_kernels.sparse_attention.gathering import BLOCK
from pallas_kernels.sparse_attention.hopper_target import summed_probabilities

SCORES = 2**26
"""Index scores that exist at one time: 256 MiB."""
DENSE_SCORES = 2**24
"""The same where the loss is taken over all keys, of which lists and probabilities exist too."""
APART = 192
"""Keys from one query's first one to the next one's, where they take all."""


def reason_against_attention(query: Any, latent: Any, value_width: int) -> str | None:
    """Why the kernels cannot attend from `query` [..., H, L] to `latent` [..., L]; None if they can."""
    width = latent.shape[-1]
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if query.dtype != jnp.bfloat16 or latent.dtype != jnp.bfloat16:
        return f"needs bfloat16 queries and latents, got {query.dtype} and {latent.dtype}"
    if width != value_width + BLOCK or value_width not in (128, 256, 512):
        return f"needs latents of 64 more than 128, 256 or 512 value columns, got {width} and {value_width}"
    if query.shape[-2] % 8:
        return f"needs a multiple of 8 heads, got {query.shape[-2]}"
    return None


def reason_against_selection(
    index_query: Any, index_key: Any, num_selected: int, score_dtype: str = "own"
) -> str | None:
    """Why the kernels cannot select keys for `index_query` [..., J, K]; None if they can."""
    num_heads, width = index_query.shape[-2:]
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if index_query.dtype != jnp.bfloat16 or index_key.dtype != jnp.bfloat16:
        return f"needs bfloat16 index queries and keys, got {index_query.dtype} and {index_key.dtype}"
    if score_dtype != "own" and width != 128:
        return f"needs index heads of width 128 for products of {score_dtype}, got {width}"
    if width not in (64, 128) or num_heads not in (8, 16, 32, 64, 128):
        return f"needs 8, 16, 32, 64 or 128 index heads of width 64 or 128, got {num_heads} of {width}"
    if num_selected & (num_selected - 1) or not 64 <= num_selected <= 4096:
        return f"needs a number of selected keys that is a power of two from 64 to 4096, got {num_selected}"
    return None


def reason_against_loss(index_query: Any, index_key: Any, query: Any, latent: Any) -> str | None:
    """Why the kernels cannot take the indexer's loss over selected keys; None if they can."""
    if reason := reason_against_attention(query, latent, latent.shape[-1] - BLOCK):
        return reason
    if reason := reason_against_selection(index_query, index_key, BLOCK):
        return reason
    num_heads = index_query.shape[-2]
    return None if num_heads >= 16 else f"needs at least 16 index heads, got {num_heads}"


class Options(NamedTuple):
    """What a compiled program depends on beside its arrays."""

    scale: float
    value_width: int
    is_deterministic: bool


def end_to_end(indices: jax.Array, num_keys: int) -> jax.Array:
    """[B, Q, N] -> [B * Q, N']: keys numbered over all rows, N' a multiple of 128, filled with holes."""
    rows, queries, width = indices.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    indices = jnp.where(indices >= 0, indices + row * num_keys, -1).reshape(rows * queries, width)
    return jnp.pad(indices, ((0, 0), (0, -width % (2 * BLOCK))), constant_values=-1)


def selected_attention(
    options: Options, query: jax.Array, latent: jax.Array, indices: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output [B, Q, H, V], and natural logarithms of the sums of exponentials [B, Q, H], without gradient."""
    query, latent, indices = launcher.vary_together(query, latent, indices)
    rows, queries, num_heads, width = query.shape
    out, sums = _attend(  # pyright: ignore[reportGeneralTypeIssues]
        options, query.reshape(-1, num_heads, width), latent.reshape(-1, width), end_to_end(indices, latent.shape[1])
    )
    sums = lax.stop_gradient(sums[:, :num_heads]) * jnp.log(jnp.float32(2))
    return out.reshape(rows, queries, num_heads, -1), sums.reshape(rows, queries, num_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, query, latent, indices):
    return _forward(options, query, latent, indices)[0]


@launcher.traced_once
def _forward(options: Options, query, latent, indices):
    scale, value_width, _ = options
    out, sums = hopper_forward.forward(query, latent, indices, scale=scale, value_width=value_width)
    return (out, sums), (query, latent, indices, out, sums)


@launcher.traced_once
def _backward(options: Options, kept, gradients):
    scale, _, is_deterministic = options
    query, latent, indices, out, sums = kept
    gradient = gradients[0].astype(query.dtype)
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=2)
    inner = jnp.pad(inner, ((0, 0), (0, sums.shape[1] - inner.shape[1])))
    unit = None
    if is_deterministic:

        def longest(array):
            return jnp.sqrt(jnp.max(jnp.sum(array.astype(jnp.float32) ** 2, axis=-1)))

        # No number of the sum exceeds the largest of one query's parts times the number of queries.
        largest = longest(gradient) * (1 + 2 * scale * longest(latent) * longest(query)) * query.shape[1]
        unit = jnp.maximum(largest * query.shape[0] * 2.0**-62, 2.0**-100)[None]
    query_gradient, latent_gradient = hopper_backward.backward(
        query, latent, indices, sums, gradient, inner, scale=scale, unit=unit
    )
    return query_gradient, latent_gradient.astype(latent.dtype), None


_attend.defvjp(_forward, _backward)


def select_keys(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    first: jax.Array,
    end: jax.Array,
    num_selected: int,
    score_dtype: str,
) -> jax.Array:
    """int32 [B, Q, num_selected]: of the keys from `first` [B, Q] to before `end` the best, ascending, then -1."""
    arrays = launcher.vary_together(index_query, index_key, head_weight, first, end)
    return _select((num_selected, score_dtype), *arrays)


@launcher.traced_once
def _select(options: tuple[int, str], index_query, index_key, head_weight, first, end):
    num_selected, score_dtype = options
    rows, queries, num_heads, width = index_query.shape
    num_keys = index_key.shape[1]
    group = hopper_scores.ROWS // num_heads
    chunk = min(max(SCORES // num_keys // group, 1) * group, -(-queries // group) * group)
    chunks = -(-queries // chunk)
    weight = head_weight.astype(jnp.float32) * width**-0.5
    keys = (index_key,)
    if score_dtype != "own":
        # Both scales are positive: they pass the ReLU.
        (index_query, scale), keys = reference.to_float8(index_query), reference.to_float8(index_key)
        weight *= scale

    def block(arguments):
        number, query, weight, first, end = arguments
        key, *scale = (lax.dynamic_index_in_dim(array, number // chunks, keepdims=False) for array in keys)
        scores = hopper_scores.index_scores(query, key, weight, first, end, *scale)
        return top_k.top_k_of_rows(scores, first, end, num_selected, interpret=launcher.is_simulated())

    number = jnp.arange(rows * chunks, dtype=jnp.int32)
    blocks = [number, *[_cut(array, chunk) for array in (index_query, weight, first, end)]]
    blocks = launcher.vary_together(*blocks)
    selected = lax.map(block, tuple(blocks)) if rows * chunks > 1 else block([array[0] for array in blocks])
    return selected.reshape(rows, chunks * chunk, num_selected)[:, :queries]


def _cut(array: jax.Array, chunk: int) -> jax.Array:
    """[B, Q, ...] -> [B * chunks, chunk, ...], filled up with zeros."""
    padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % chunk)) + ((0, 0),) * (array.ndim - 2))
    return padded.reshape(-1, chunk, *array.shape[2:])


def indexer_loss(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    query: jax.Array,
    latent: jax.Array,
    indices: jax.Array,
    sums: jax.Array | None,
    *,
    scale: float,
    head_axis: str | None,
    is_deterministic: bool,
) -> jax.Array:
    """KL divergences [B, Q] over selected keys, float32. `sums` [B, Q, H] as `selected_attention` gives them."""
    query, latent = lax.stop_gradient((query, latent))
    if sums is None:
        sums = selected_attention(Options(scale, latent.shape[-1] - BLOCK, False), query, latent, indices)[1]
    rows, queries, num_heads, width = query.shape
    num_keys = latent.shape[1]
    flat_indices = end_to_end(indices, num_keys)
    sums = lax.stop_gradient(sums).reshape(-1, num_heads) * jnp.log2(jnp.exp(jnp.float32(1)))
    sums = jnp.pad(sums, ((0, 0), (0, -num_heads % hopper_forward.HEADS)))
    arrays = launcher.vary_together(query.reshape(-1, num_heads, width), latent.reshape(-1, width), flat_indices, sums)
    target = jnp.sum(summed_probabilities(*arrays, scale=scale), axis=0)
    target = jnp.where(arrays[2] >= 0, target, 0)
    if head_axis is not None:
        target = lax.psum(target, head_axis)
    total = jnp.sum(target, axis=1, keepdims=True)
    target = target / jnp.where(total > 0, total, 1)
    arrays = launcher.vary_together(
        index_query.reshape(-1, *index_query.shape[2:]),
        index_key.reshape(-1, index_key.shape[2]),
        head_weight.reshape(-1, head_weight.shape[2]).astype(jnp.float32),
        flat_indices,
        target,
    )
    losses: Any = _divergence(is_deterministic, *arrays)  # pyright: ignore[reportGeneralTypeIssues]
    return losses.reshape(rows, queries)


def dense_indexer_loss(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    query: jax.Array,
    latent: jax.Array,
    first: jax.Array,
    end: jax.Array,
    **options: Any,
) -> jax.Array:
    """KL divergences [B, Q] over the keys from `first` [B, Q] to before `end`, float32: each selects them all.

    As many queries at a time as have `DENSE_SCORES` keys to choose from; gradients compute them again.
    """
    rows, queries = first.shape
    num_keys = latent.shape[1]
    width = -(-num_keys // (2 * BLOCK)) * 2 * BLOCK
    chunk = min(max(DENSE_SCORES // width, 1), queries)
    chunks = -(-queries // chunk)
    # Gradients of chunks add up in float32.
    index_key = index_key.astype(jnp.float32)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(arguments):
        number, index_query, head_weight, query, first, end = arguments
        keys = (lax.dynamic_index_in_dim(array, number // chunks) for array in (index_key, latent))
        own_index_key, own_latent = keys
        slot, count = lax.broadcasted_iota(jnp.int32, (chunk, width), 1), (end - first)[:, None]
        # Neighbours begin at different keys, so that they do not add to the same ones at the same time.
        begin = lax.rem(lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) * APART, jnp.maximum(count, 1))
        place = slot + begin
        place = jnp.where(place >= count, place - count, place) + first[:, None]
        indices = jnp.where(slot < count, place, -1)
        own_index_key = own_index_key.astype(index_query.dtype)
        arrays = index_query[None], own_index_key, head_weight[None], query[None], own_latent, indices[None]
        return indexer_loss(*arrays, None, **options)[0]

    number = jnp.arange(rows * chunks, dtype=jnp.int32)
    blocks = [_cut(array, chunk) for array in (index_query, head_weight, query, first, end)]
    losses = lax.map(block, tuple(launcher.vary_together(number, *blocks)))
    return losses.reshape(rows, chunks * chunk)[:, :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(is_deterministic, index_query, index_key, head_weight, indices, target):
    return _divergence_forward(is_deterministic, index_query, index_key, head_weight, indices, target)[0]


def _divergence_forward(_, index_query, index_key, head_weight, indices, target):
    arrays = index_query, index_key, head_weight, indices, target
    losses, normals, highest = selected_loss.loss(*arrays, interpret=launcher.is_simulated())
    return losses, (*arrays, normals, highest)


def _divergence_backward(is_deterministic, kept, loss_gradient):
    index_query, index_key, head_weight, indices, target, normals, highest = kept
    most = None
    if is_deterministic:
        # A score's gradient is the difference of two probabilities; a little more, for rounding.
        by_score = jnp.maximum(jnp.exp(highest - normals), jnp.max(target, axis=1)) * jnp.abs(loss_gradient)
        by_heads = jnp.abs(head_weight) * jnp.max(jnp.abs(index_query.astype(jnp.float32)), axis=2)
        most = 1.02 * index_query.shape[2] ** -0.5 * jnp.sum(by_score * jnp.sum(by_heads, axis=1))
    by_query, by_key, by_weight = selected_loss.gradients(
        index_query,
        index_key,
        head_weight,
        indices,
        target,
        normals,
        loss_gradient,
        most=most,
        interpret=launcher.is_simulated(),
    )
    return by_query.astype(index_query.dtype), by_key.astype(index_key.dtype), by_weight, None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)
