"""Attention of packed documents by cuDNN's fused kernels on NVIDIA GPUs, where they can take it."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launcher
from pallas_kernels.sparse_attention.api import attention

MOST_DOCUMENTS = 16
"""Of a row, for cuDNN to be told where each begins: it is launched for as many, whether they are there or not."""
WIDEST = 256
"""Largest width of a head that cuDNN takes on Hopper, forward and backward."""


def _cudnn() -> Any:
    """What of JAX knows cuDNN. Its public function takes no values of another width than keys, and no offsets."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


@contextlib.contextmanager
def for_described_gpus() -> Iterator[None]:
    """Within: JAX, which asks the GPU that is here what it can, takes all forms; programs may be for described GPUs."""
    cudnn = _cudnn()
    asks, cudnn.check_compute_capability = cudnn.check_compute_capability, lambda _: True
    try:
        yield
    finally:
        cudnn.check_compute_capability = asks


def _asks_hopper() -> bool:
    """Whether JAX takes what cuDNN can do on Hopper alone: it sees such a GPU, or is told to."""
    return _cudnn().check_compute_capability("9.0")


def reason_against(query: jax.Array, key: jax.Array, value: jax.Array) -> str | None:
    """Why cuDNN cannot take queries [b, s, H, K], keys [b, S, G, K] and values [b, S, G, V]; None if it can."""
    if not launcher.is_hopper() or launcher.is_simulated():
        return "needs a Hopper GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs 16-bit floats, got {query.dtype}"
    if query.shape[1] != key.shape[1]:
        return "needs the queries of whole rows"
    if any(width % 8 or width > WIDEST for width in (key.shape[3], value.shape[3])):
        return f"needs widths that are multiples of 8 up to {WIDEST}, got {key.shape[3]}, {value.shape[3]}"
    if value.shape[3] > key.shape[3]:
        return f"needs values no wider than keys, got {value.shape[3]} and {key.shape[3]}"
    if (key.shape[3] > 128 or key.shape[3] != value.shape[3]) and not _asks_hopper():
        return "needs the GPU here for keys wider than 128 or than values"
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
    keeps_scores: bool = True,
) -> jax.Array:
    """`attention` (causal, inside each document), by cuDNN where `reason_against` has nothing against it.

    What a batch holds decides on the device: rows of one document each, rows of up to `MOST_DOCUMENTS`, or plain JAX
    for more. What each of these keeps for its backward pass has a place whichever is taken: of plain JAX what it has
    for each pair of tokens, unless it computes that again, not `keeps_scores`. In a layer that is itself computed
    again they are better kept.
    """
    plain = functools.partial(attention, scale=scale, query_chunk_tokens=query_chunk_tokens)
    reason = reason_against(query, key, value)
    launcher.log_once(f"attention: {'plain, cuDNN ' + reason if reason else 'cuDNN'}")
    if reason is not None:
        return plain(query, key, value, segment_ids, query_positions)
    forms, most = [functools.partial(_whole_rows, scale=scale)], [1]
    if _asks_hopper():
        forms, most = [*forms, functools.partial(_several_documents, scale=scale)], [*most, MOST_DOCUMENTS]
    form = functools.reduce(jnp.add, [(jnp.max(segment_ids) > limit).astype(jnp.int32) for limit in most])
    last = plain if keeps_scores else jax.checkpoint(plain)
    return lax.switch(form, [*forms, last], query, key, value, segment_ids)


def _whole_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Rows of one document, number 1, and padding of number 0 behind it."""
    is_token = (segment_ids > 0)[:, :, None, None]
    # Neither results nor gradients are written behind the document.
    query, key, value = (jnp.where(is_token, array, 0) for array in (query, key, value))
    # A row of padding alone is taken for one token, whose result is not used.
    length = jnp.maximum(jnp.sum(segment_ids, axis=1, dtype=jnp.int32), 1)
    return jnp.where(is_token, _by_cudnn(query, key, value, scale=scale, q_seqlen=length, kv_seqlen=length), 0)


def _several_documents(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Rows of at most `MOST_DOCUMENTS`, numbered from 1 on, one behind the other, and padding of number 0 behind."""
    is_token = (segment_ids > 0)[:, :, None, None]
    # Neither results nor gradients are written behind the documents.
    query, key, value = (jnp.where(is_token, array, 0) for array in (query, key, value))
    # JAX reckons the places of keys by the number of query heads, and those of values by the width of keys. Repeated in
    # float32, so that the gradients of heads add up in it.
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(a.astype(jnp.float32), repeats, axis=2).astype(a.dtype) for a in (key, value))
    width = value.shape[3]
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[3] - width)))
    number = jnp.arange(1, MOST_DOCUMENTS + 1, dtype=jnp.int32)
    lengths = jnp.sum(segment_ids[:, None, :] == number[None, :, None], axis=-1, dtype=jnp.int32)
    # A row of padding alone is taken for one token.
    lengths = lengths.at[:, 0].max(1)
    begins = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths, -1)
    begins = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)
    lengths = jnp.where(lengths > 0, lengths, -1)
    places = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": begins, "kv_offsets": begins}
    mixed = _by_cudnn(query, key, value, scale=scale, **places)[..., :width]
    return jnp.where(is_token, mixed, 0)


def _by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, **places: jax.Array) -> jax.Array:
    """Causal attention within `places`."""
    mask_type = _cudnn().MaskType.PADDING_CAUSAL
    return _cudnn().dot_product_attention(
        query, key, value, scale=scale, mask_type=mask_type, qkv_layout="BTNH", **places
    )
