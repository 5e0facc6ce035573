"""Attention of packed documents by cuDNN's fused kernels on NVIDIA GPUs, where they can take it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launcher
from pallas_kernels.sparse_attention.api import attention

MOST_DOCUMENTS = 16
"""Of a row, for cuDNN to be told where each begins: it is launched for as many, whether they are there or not."""


def reason_against(query: jax.Array, key: jax.Array, value: jax.Array) -> str | None:
    """Why cuDNN cannot take queries [b, s, H, K], keys [b, S, G, K] and values [b, S, G, V]; None if it can."""
    if not launcher.is_hopper() or launcher.is_simulated():
        return "needs a Hopper GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs 16-bit floats, got {query.dtype}"
    if query.shape[1] != key.shape[1]:
        return "needs the queries of whole rows"
    if query.shape[3] != value.shape[3] or query.shape[3] % 8 or query.shape[3] > 128:
        return f"needs one width for keys and values, a multiple of 8 up to 128, got {key.shape[3]}, {value.shape[3]}"
    return None


def packed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    query_positions: jax.Array | None,
    *,
    scale: float,
    query_chunk_tokens: int,
) -> jax.Array:
    """`attention` (causal, inside each document), by cuDNN where `reason_against` has nothing against it.

    What a batch holds decides on the device: rows of one document each, rows of up to `MOST_DOCUMENTS`, or plain JAX
    for more.
    """
    plain = functools.partial(attention, scale=scale, query_chunk_tokens=query_chunk_tokens)
    reason = reason_against(query, key, value)
    launcher.log_once(f"attention: {'plain, cuDNN ' + reason if reason else 'cuDNN'}")
    if reason is not None:
        return plain(query, key, value, segment_ids, query_positions)
    forms, most = [functools.partial(_whole_rows, scale=scale)], [1]
    # JAX takes several documents only where it sees the GPU; a program compiled without one has the plain form instead.
    if jax.default_backend() == "gpu":
        forms, most = [*forms, functools.partial(_several_documents, scale=scale)], [*most, MOST_DOCUMENTS]
    form = functools.reduce(jnp.add, [(jnp.max(segment_ids) > limit).astype(jnp.int32) for limit in most])
    return lax.switch(form, [*forms, plain], query, key, value, segment_ids)


def _whole_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Rows of one document, number 1, and padding of number 0 behind it."""
    is_token = (segment_ids > 0)[:, :, None, None]
    # Neither results nor gradients are written behind the document.
    query, key, value = (jnp.where(is_token, array, 0) for array in (query, key, value))
    # A row of padding alone is taken for one token, whose result is not used.
    length = jnp.maximum(jnp.sum(segment_ids, axis=1, dtype=jnp.int32), 1)
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        implementation="cudnn",
    )
    return jnp.where(is_token, mixed, 0)


def _several_documents(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Rows of at most `MOST_DOCUMENTS`, numbered from 1 on, one behind the other, and padding of number 0 behind."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    is_token = (segment_ids > 0)[:, :, None, None]
    # Neither results nor gradients are written behind the documents.
    query, key, value = (jnp.where(is_token, array, 0) for array in (query, key, value))
    # JAX reckons the places of keys by the number of query heads.
    key, value = (jnp.repeat(array, query.shape[2] // key.shape[2], axis=2) for array in (key, value))
    number = jnp.arange(1, MOST_DOCUMENTS + 1, dtype=jnp.int32)
    lengths = jnp.sum(segment_ids[:, None, :] == number[None, :, None], axis=-1, dtype=jnp.int32)
    # A row of padding alone is taken for one token.
    lengths = lengths.at[:, 0].max(1)
    begins = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths, -1)
    begins = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)
    lengths = jnp.where(lengths > 0, lengths, -1)
    mixed: Any = dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=begins,
        kv_offsets=begins,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL,
        qkv_layout="BTNH",
    )
    return jnp.where(is_token, mixed, 0)
