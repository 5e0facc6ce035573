"""The softmax of a chunk's logits in plain JAX; greedy tokens over chunks, the vocabulary whole or split."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def measure(logits: jax.Array, targets: jax.Array, soft_cap: float | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of logits [C, W] and targets [C]: the largest, the sum of exponentials relative to it, and the target's or 0."""
    capped, _ = _cap(logits, soft_cap)
    largest = jnp.max(capped, axis=-1)
    total = jnp.sum(jnp.exp(capped - largest[:, None]), axis=-1)
    return largest, total, jnp.sum(jnp.where(_is_target(capped, targets), capped, 0), axis=-1)


def differentiate(
    logits: jax.Array,
    targets: jax.Array,
    log_total: jax.Array,
    of_total: jax.Array,
    of_target: jax.Array,
    dtype: jax.typing.DTypeLike,
    soft_cap: float | None,
) -> jax.Array:
    """`of_total * softmax(logits) - of_target * one_hot(targets)` [C, W], with the derivative of the cap."""
    capped, slope = _cap(logits, soft_cap)
    gradient = of_total[:, None] * jnp.exp(capped - log_total[:, None])
    gradient = gradient - jnp.where(_is_target(capped, targets), of_target[:, None], 0)
    return (gradient if slope is None else gradient * slope).astype(dtype)


def _cap(logits: jax.Array, soft_cap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """In at least float32: the logits as they count, and their derivative by those given."""
    wide = logits.astype(np.promote_types(logits.dtype, np.float32))
    if soft_cap is None:
        return wide, None
    bent = jnp.tanh(wide / soft_cap)
    return soft_cap * bent, 1 - jnp.square(bent)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :] == targets[:, None]


def greedy_tokens(
    hidden: jax.Array, head: jax.Array, is_wanted: jax.Array, *, chunk_tokens: int, vocabulary_axis: str | None
) -> jax.Array:
    """See `api.greedy_tokens`."""
    offset = 0 if vocabulary_axis is None else lax.axis_index(vocabulary_axis) * head.shape[1]
    num_tokens = hidden.shape[0]
    order = jnp.argsort(~is_wanted, stable=True)

    def best_tokens(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(
            jnp.any(chunk[1]), wanted_tokens, lambda hidden: jnp.zeros_like(hidden[:, 0], np.int32), chunk[0]
        )

    def wanted_tokens(hidden: jax.Array) -> jax.Array:
        wide = np.promote_types(hidden.dtype, np.float32)
        logits = jnp.einsum("td,dw->tw", hidden, head, preferred_element_type=wide)
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


def _chunks(chunk_tokens: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays `[T, ...]` as `[N, C, ...]` with the fewest chunks of at most `chunk_tokens`, padded with zeros."""
    num_tokens = arrays[0].shape[0]
    num_chunks = max(1, -(-num_tokens // chunk_tokens))
    padding = -num_tokens % num_chunks
    return tuple(
        jnp.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1))).reshape(num_chunks, -1, *array.shape[1:])
        for array in arrays
    )
