"""Cross-entropy and greedy tokens over chunks of tokens, the vocabulary whole or split over a mesh axis."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk_tokens: int,
    vocabulary_axis: str | None,
    is_head_trained: bool,
) -> jax.Array:
    """See `api.cross_entropy`."""
    wide, weights = np.promote_types(hidden.dtype, np.float32), lax.stop_gradient(weights)
    if hidden.shape[0] > chunk_tokens:
        # Those that count come first: chunks of the others alone need no logits.
        hidden, targets, weights = _taken(jnp.argsort(weights == 0, stable=True), hidden, targets, weights)
    # Wide outside the loop, so that the loop's backward pass sums the head's gradient over chunks in that precision.
    hidden, head_wide = _alike(hidden, head.astype(wide) if is_head_trained else lax.stop_gradient(head))
    offset = _vocabulary_offset(head, vocabulary_axis)

    # Keeps the chunk's inputs: neither pass holds the logits of more than one chunk.
    @jax.checkpoint
    def chunk_loss(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, targets, weights = chunk
        return lax.cond(jnp.any(weights != 0), counted_loss, no_loss, hidden, targets, weights)

    def counted_loss(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        logits = _logits(hidden, head_wide.astype(hidden.dtype))
        largest = _over(lax.pmax, lax.stop_gradient(jnp.max(logits, axis=-1)), vocabulary_axis)
        total = _over(lax.psum, jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1), vocabulary_axis)
        is_target = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :] == (targets - offset)[:, None]
        target_logit = _over(lax.psum, jnp.sum(jnp.where(is_target, logits, 0), axis=-1), vocabulary_axis)
        return jnp.sum(weights.astype(wide) * (largest + jnp.log(total) - target_logit))

    def no_loss(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        # Of the same kind as a loss, varying over the same mesh axes.
        return jnp.sum(jnp.zeros_like(weights, wide))

    return jnp.sum(lax.map(chunk_loss, _chunks(chunk_tokens, hidden, targets, weights)))


def greedy_tokens(
    hidden: jax.Array, head: jax.Array, is_wanted: jax.Array, *, chunk_tokens: int, vocabulary_axis: str | None
) -> jax.Array:
    """See `api.greedy_tokens`."""
    offset, num_tokens = _vocabulary_offset(head, vocabulary_axis), hidden.shape[0]
    order = jnp.argsort(~is_wanted, stable=True)

    def best_tokens(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(
            jnp.any(chunk[1]), wanted_tokens, lambda hidden: jnp.zeros_like(hidden[:, 0], np.int32), chunk[0]
        )

    def wanted_tokens(hidden: jax.Array) -> jax.Array:
        logits = _logits(hidden, head)
        best = jnp.max(logits, axis=-1)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32) + offset
        if vocabulary_axis is None:
            return token
        is_behind = best < lax.pmax(best, vocabulary_axis)
        return lax.pmin(jnp.where(is_behind, jnp.iinfo(jnp.int32).max, token), vocabulary_axis)

    tokens = lax.map(best_tokens, _chunks(chunk_tokens, *_taken(order, hidden, is_wanted))).reshape(-1)[:num_tokens]
    (in_order,) = _taken(jnp.argsort(order), tokens)
    return jnp.where(is_wanted, in_order, 0)


def _taken(order: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays [T, ...] in another order: `order` holds each place once."""
    return tuple(array.at[order].get(mode="promise_in_bounds", unique_indices=True) for array in arrays)


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    wide = np.promote_types(hidden.dtype, np.float32)
    return jnp.einsum("td,dw->tw", hidden, head, preferred_element_type=wide)


def _vocabulary_offset(head: jax.Array, vocabulary_axis: str | None) -> jax.Array | int:
    """Vocabulary index of this device's first column."""
    return 0 if vocabulary_axis is None else lax.axis_index(vocabulary_axis) * head.shape[1]


def _over(combine: Callable, array: jax.Array, mesh_axis: str | None) -> jax.Array:
    return array if mesh_axis is None else combine(array, mesh_axis)


def _chunks(chunk_tokens: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays `[T, ...]` as `[N, C, ...]` with the fewest chunks of at most `chunk_tokens`, padded with zeros."""
    num_tokens = arrays[0].shape[0]
    num_chunks = max(1, -(-num_tokens // chunk_tokens))
    padding = -num_tokens % num_chunks
    return tuple(
        jnp.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1))).reshape(num_chunks, -1, *array.shape[1:])
        for array in arrays
    )


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays varying over the same mesh axes, so that a loop's gradients are summed over devices once, after it."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    everywhere = frozenset().union(*varying)
    # Sorted: every process must compile the same program.
    missing = [tuple(sorted(everywhere - own)) for own in varying]
    return tuple(
        lax.pcast(array, axes, to="varying") if axes else array for array, axes in zip(arrays, missing, strict=True)
    )
