"""Cross-entropy over chunks of tokens, gradients taken together with the loss: logits are computed once.

A chunk's logits [C, W] are made, turned into their gradient in the same memory, and multiplied with the head and with
the hidden values. So a step takes three matrix products, or two where the head is not trained, where a backward pass
that made the logits again would take one more.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import launcher
from pallas_kernels.cross_entropy import pallas_triton, xla


class Options(NamedTuple):
    """What a compiled program depends on beside its arrays."""

    chunk_tokens: int
    vocabulary_axis: str | None
    is_head_trained: bool
    head_gradient_dtype: Any
    """Of the sum over chunks."""
    logits_dtype: Any
    """In which a chunk's logits are held."""
    soft_cap: float | None
    z_loss: float
    kernels: pallas_triton.Settings | None
    """Of those that make softmax and its gradient; None for plain JAX."""


class Results(NamedTuple):
    """The loss and, if asked for, what its gradients are for a cotangent of 1."""

    loss: jax.Array
    to_hidden: jax.Array | None
    to_head: jax.Array | None
    """In `head_gradient_dtype`."""


def evaluate(
    options: Options,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    is_differentiated: bool,
) -> Results:
    """The loss, and its gradients if `is_differentiated`.

    `hidden` and `head` vary over the same mesh axes. Chunks of tokens of weight 0 alone are not computed, the first
    one excepted.
    """
    wide, num_tokens, vocabulary_axis = (
        np.promote_types(hidden.dtype, np.float32),
        hidden.shape[0],
        options.vocabulary_axis,
    )
    num_chunks = max(1, -(-num_tokens // options.chunk_tokens))
    chunk_tokens = -(-num_tokens // num_chunks)
    # Those that count come first. The places behind the last token are filled up with none.
    order = jnp.argsort(weights == 0, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, num_chunks * chunk_tokens - num_tokens), constant_values=num_tokens)
    num_counted = jnp.sum(weights != 0, dtype=jnp.int32)
    offset = 0 if vocabulary_axis is None else lax.axis_index(vocabulary_axis) * head.shape[1]
    is_whole = vocabulary_axis is None or lax.axis_size(vocabulary_axis) == 1
    measure, differentiate = xla.measure, xla.differentiate
    if options.kernels is not None:
        measure = functools.partial(pallas_triton.measure, settings=options.kernels)
        differentiate = functools.partial(pallas_triton.differentiate, settings=options.kernels)

    def over(combine, array: jax.Array) -> jax.Array:
        return array if vocabulary_axis is None else combine(array, vocabulary_axis)

    def add_chunk(number: jax.Array | int, carry: Results, *, is_first: bool = False) -> Results:
        loss, to_hidden, to_head = carry
        place = lax.dynamic_slice_in_dim(order, number * chunk_tokens, chunk_tokens)
        rows = hidden.at[place].get(mode="fill", fill_value=0, unique_indices=True)
        target = targets.at[place].get(mode="fill", fill_value=-1, unique_indices=True) - offset
        weight = weights.at[place].get(mode="fill", fill_value=0, unique_indices=True).astype(wide)
        # What does not count may hold no number.
        rows = jnp.where((weight != 0)[:, None], rows, 0)
        # Sums are wide whatever they are stored in; a conversion of its own would hold both.
        logits = jnp.einsum("td,dw->tw", rows, head, preferred_element_type=options.logits_dtype)
        to_logits = None
        if options.kernels is not None and to_hidden is not None and is_whole:
            to_logits, log_total, target_logit = pallas_triton.measure_and_differentiate(
                logits, target, weight, hidden.dtype, options.soft_cap, options.z_loss, options.kernels
            )
            # Over one device: no sum, but from here on they count as equal on all of the axis.
            log_total, target_logit = over(lax.psum, log_total), over(lax.psum, target_logit)
        else:
            largest, total, target_logit = measure(logits, target, options.soft_cap)
            largest_of_all = over(lax.pmax, largest)
            log_total = largest_of_all + jnp.log(over(lax.psum, total * jnp.exp(largest - largest_of_all)))
            target_logit = over(lax.psum, target_logit)
        loss += jnp.sum(weight * (log_total - target_logit + options.z_loss * jnp.square(log_total)))
        if to_hidden is None:
            return Results(loss, None, None)
        if to_logits is None:
            of_total = weight * (1 + 2 * options.z_loss * log_total)
            to_logits = differentiate(logits, target, log_total, of_total, weight, hidden.dtype, options.soft_cap)
        to_rows = jnp.einsum("tw,dw->td", to_logits, head, preferred_element_type=hidden.dtype)
        to_hidden = to_hidden.at[place].set(to_rows, mode="drop", unique_indices=True)
        if to_head is not None:
            # The sum of the product with what is there already is one call of the library of matrix products.
            of_chunk = jnp.einsum("td,tw->dw", rows, to_logits, preferred_element_type=to_head.dtype)
            to_head = of_chunk if is_first else to_head + of_chunk
        return Results(loss, to_hidden, to_head)

    carry = Results(
        jnp.zeros((), wide),
        jnp.zeros_like(hidden) if is_differentiated else None,
        jnp.zeros_like(head, options.head_gradient_dtype) if is_differentiated and options.is_head_trained else None,
    )
    # What a loop carries must vary over the mesh axes over which what it adds to it does.
    everywhere = _varying(hidden) | _varying(head)
    by_token = (everywhere | _varying(targets) | _varying(weights)) - {vocabulary_axis}
    carry = Results(_vary(carry.loss, by_token), *(_vary(array, everywhere | by_token) for array in carry[1:]))
    hidden, head = _vary(hidden, everywhere | by_token), _vary(head.astype(hidden.dtype), everywhere | by_token)
    targets, weights, order = (_vary(array, by_token) for array in (targets, weights, order))
    # The first chunk's gradient of the head is the sum so far: no zeros are written and read again.
    num_done = 0
    if carry.to_head is not None:
        carry, num_done = add_chunk(0, carry, is_first=True), 1
    return lax.fori_loop(num_done, -(-num_counted // chunk_tokens), add_chunk, carry)


def _varying(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def _vary(array: Any, axes: frozenset[str]) -> Any:
    """The array, or None, marked as varying over these mesh axes too."""
    if array is None or not axes - _varying(array):
        return array
    # Sorted: every process must compile the same program.
    return lax.pcast(array, tuple(sorted(axes - _varying(array))), to="varying")


def cross_entropy(
    options: Options, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """See `api.cross_entropy`."""
    if not options.is_head_trained:
        head = lax.stop_gradient(head)
    # Outside of the derivative: its transpose sums gradients over the devices.
    hidden, head = launcher.vary_together(hidden, head)
    return _cross_entropy(options, hidden, head, targets, lax.stop_gradient(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(options, hidden, head, targets, weights):
    return evaluate(options, hidden, head, targets, weights, is_differentiated=False).loss


def _forward(options, hidden, head, targets, weights):
    results = evaluate(options, hidden, head, targets, weights, is_differentiated=True)
    # Of no head's gradient only its shape and dtype are needed.
    return results.loss, (results.to_hidden, results.to_head, head, weights)


def _backward(options, saved, cotangent):
    to_hidden, to_head, head, weights = saved
    wide = cotangent.dtype

    def scale(array: jax.Array, dtype) -> jax.Array:
        factor = _vary(cotangent, _varying(array))
        return (array.astype(np.promote_types(array.dtype, wide)) * factor).astype(dtype)

    to_head = jnp.zeros_like(head) if to_head is None else scale(to_head, head.dtype)
    return scale(to_hidden, to_hidden.dtype), to_head, None, jnp.zeros_like(weights)


_cross_entropy.defvjp(_forward, _backward)
