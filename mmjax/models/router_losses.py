"""Losses of a router: one that keeps its experts' loads equal, one that keeps its logits small."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from mmjax.axes import CONTEXT, DATA_AXES
from mmjax.parallel.context import is_split
from mmjax.parallel.fsdp import make_varying


def load_balance_loss(
    scores: jax.Array, index: jax.Array, segment_ids: jax.Array, over: Literal["batch", "document"]
) -> jax.Array:
    """The sum over this device's real tokens of the loss that is least where experts are taken equally often.

        loss = sum over groups of T E sum_e f[e] P[e]
        f[e] = share of the group's choices that fell on e,   P[e] = mean over its T tokens of score[e] / sum of scores

    A group is a micro-batch, all devices' parts of it together, or one document. Where all experts are taken equally
    often a token's share is 1. `scores` [b, s, E], differentiable, `index` [b, s, A] int32, `segment_ids` [b, s] int32,
    0 for padding, which counts nowhere. f has no gradient, so a token's share has none for other tokens.

    Neither the mesh nor packing changes the loss over documents, nor does accumulation. Over a batch accumulation does:
    the f of other micro-batches are not known yet.

    Source: Switch Transformer, arXiv:2101.03961, equation 4; by sequence: DeepSeek-V3, arXiv:2412.19437, equation 17.
    """
    is_real = (segment_ids > 0)[:, :, None]
    num_experts = scores.shape[-1]
    share = jnp.where(is_real, scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20), 0)
    taken = jnp.sum(jax.nn.one_hot(index, num_experts, dtype=jnp.int32), axis=2, dtype=jnp.int32)
    taken = jnp.where(is_real, taken, 0)
    if over == "batch":
        counts = lax.psum(make_varying(jnp.sum(taken, axis=(0, 1), dtype=jnp.int32)), DATA_AXES)[None, None, :]
    else:
        counts = document_counts(taken, segment_ids)
    total = jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
    fraction = counts.astype(share.dtype) / total.astype(share.dtype)
    return num_experts * jnp.sum(lax.stop_gradient(fraction) * share)


def z_loss(logits: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum over this device's real tokens of log(sum_e exp(logits[e]))^2, `logits` [b, s, E].

    Source: ST-MoE, arXiv:2202.08906, equation 5.
    """
    return jnp.sum(jnp.where(segment_ids > 0, jax.nn.logsumexp(logits, axis=-1), 0) ** 2)


def document_counts(taken: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """At each token the sum of `taken` [b, s, E] int32 over its whole document, on other devices too."""
    # Inside a chunk of contiguous positions a document is a run; `parallel.context` gives a device two chunks of a row.
    num_chunks = 2 if is_split() else 1
    rows, num_positions, num_experts = taken.shape
    ids = segment_ids.reshape(rows, num_chunks, -1)
    chunks = taken.reshape(rows, num_chunks, -1, num_experts)
    place = jnp.broadcast_to(jnp.arange(ids.shape[2], dtype=jnp.int32)[None, None, :], ids.shape)
    changes = ids[:, :, 1:] != ids[:, :, :-1]
    edge = jnp.ones_like(ids[:, :, :1], dtype=bool)
    first = lax.cummax(jnp.where(jnp.concatenate([edge, changes], axis=2), place, 0), axis=2)
    last = jnp.where(jnp.concatenate([changes, edge], axis=2), place, num_positions)
    last = lax.cummin(last, axis=2, reverse=True)
    cumulative = jnp.cumsum(chunks, axis=2)
    at = lambda array, index: jnp.take_along_axis(array, index[:, :, :, None], axis=2)  # noqa: E731
    own = at(cumulative, last) - at(cumulative - chunks, first)
    if not is_split():
        return own.reshape(taken.shape)
    # What goes on in another chunk, of this or another device, lies at the edges of both.
    edge_ids = jnp.stack([ids[:, :, 0], jnp.where(ids[:, :, 0] == ids[:, :, -1], -1, ids[:, :, -1])], axis=2)
    edge_counts = jnp.stack([own[:, :, 0], own[:, :, -1]], axis=2)
    all_ids, all_counts = (lax.all_gather(array, CONTEXT, axis=1, tiled=True) for array in (edge_ids, edge_counts))
    is_same = edge_ids[:, :, :, None, None] == all_ids[:, None, None, :, :]
    whole = jnp.sum(jnp.where(is_same[..., None], all_counts[:, None, None], 0), axis=(3, 4), dtype=jnp.int32)
    for number in range(2):
        is_at_edge = ids == edge_ids[:, :, number, None]
        own = jnp.where(is_at_edge[..., None], whole[:, :, number, None, :], own)
    return own.reshape(taken.shape)
