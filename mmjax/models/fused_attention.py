"""Attention of packed documents by cuDNN's fused kernels on NVIDIA GPUs, where they can take it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launcher
from pallas_kernels.sparse_attention.api import attention


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

    What a batch holds decides on the device: cuDNN takes rows of one document each, plain JAX the others.
    """
    plain = functools.partial(attention, scale=scale, query_chunk_tokens=query_chunk_tokens)
    reason = reason_against(query, key, value)
    launcher.log_once(f"attention: {'plain, cuDNN ' + reason if reason else 'cuDNN'}")
    if reason is not None:
        return plain(query, key, value, segment_ids, query_positions)
    fused = functools.partial(_whole_rows, scale=scale)
    return lax.cond(jnp.max(segment_ids) > 1, plain, fused, query, key, value, segment_ids)


def _whole_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Rows of one document, number 1, and padding of number 0 behind it."""
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
    # What stands behind the document is not written.
    return jnp.where((segment_ids > 0)[:, :, None, None], mixed, 0)
