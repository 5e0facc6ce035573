"""Cross-entropy of a language-model head, and its greedy tokens, without ever holding all logits."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import launcher
from pallas_kernels.cross_entropy import chunked, pallas_triton, reference, xla

Implementation = Literal["auto", "pallas", "xla", "reference"]


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D W"],
    targets: Int32[Array, " T"],
    weights: Float[Array, " T"],
    *,
    chunk_tokens: int,
    vocabulary_axis: str | None = None,
    is_head_trained: bool = True,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    head_gradient_dtype: Any = None,
    logits_dtype: Any = None,
    implementation: Implementation = "auto",
) -> Float[Array, ""]:
    """Weighted sum of the tokens' cross-entropies; dividing by the sum of the weights is the caller's.

        loss = sum_t weights[t] * (log_total[t] - logits[t, targets[t]] + z_loss * log_total[t]^2)
        logits = hidden @ head, or soft_cap * tanh(hidden @ head / soft_cap);   log_total = logsumexp_w(logits)

    Logits are accumulated, and all that follows is computed and returned, in at least float32. They are held in
    `logits_dtype`, None for at least float32; their gradient in the dtype of `hidden`. The head's gradient is summed
    over chunks in `head_gradient_dtype`, None for at least float32, unless `is_head_trained` is False: then the head
    gets no gradient. A token of weight 0 may have any target, also one outside the vocabulary (-100). The weights are
    constants: they get no gradient. Gradients are computed together with the loss and scaled in the backward pass;
    there are no second derivatives.
    At most `chunk_tokens` tokens have logits at one time; T need not be a multiple of it. The tokens that count come
    first, and chunks of others are left out: where answers alone count, prompts cost nothing.
    Under `vocabulary_axis`, inside `shard_map`, `head` is this device's slice of the vocabulary in the order of that
    mesh axis, targets index the whole vocabulary, and the loss is the same on every device of the axis.
    `pallas` makes softmax and its gradient by kernels; "auto" takes it where it can, and says once what it took.

    Raises:
      ValueError: `chunk_tokens` below 1, the reference asked for a split vocabulary, or the named implementation
        cannot take these arguments; the message says why.
    """
    _check(chunk_tokens, vocabulary_axis, implementation)
    if implementation == "reference":
        head = head if is_head_trained else lax.stop_gradient(head)
        return reference.cross_entropy(hidden, head, targets, weights, soft_cap=soft_cap, z_loss=z_loss)
    options = chunked.Options(
        chunk_tokens=chunk_tokens,
        vocabulary_axis=vocabulary_axis,
        is_head_trained=is_head_trained,
        head_gradient_dtype=_at_least_float32(head_gradient_dtype, hidden),
        logits_dtype=_at_least_float32(logits_dtype, hidden),
        soft_cap=soft_cap,
        z_loss=z_loss,
        kernels=_kernels(implementation, hidden, head, chunk_tokens),
    )
    return chunked.cross_entropy(options, hidden, head, targets, weights)


class LossAndGradients(NamedTuple):
    """A loss and its gradients for a cotangent of 1."""

    loss: Float[Array, ""]
    to_hidden: Float[Array, "T D"]
    to_head: Float[Array, "D W"] | None
    """In the dtype in which it was summed over chunks; None where the head is not trained."""


def cross_entropy_and_gradients(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D W"],
    targets: Int32[Array, " T"],
    weights: Float[Array, " T"],
    *,
    chunk_tokens: int,
    is_head_trained: bool = True,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    head_gradient_dtype: Any = None,
    logits_dtype: Any = None,
    implementation: Implementation = "auto",
) -> LossAndGradients:
    """`cross_entropy` of a whole vocabulary with its gradients, the head's as it was summed, wider than the head.

    Raises:
      ValueError: as `cross_entropy`; also of the reference, which autodiff differentiates.
    """
    _check(chunk_tokens, None, implementation)
    if implementation == "reference":
        raise ValueError("the reference has no gradients of its own; differentiate cross_entropy instead")
    options = chunked.Options(
        chunk_tokens=chunk_tokens,
        vocabulary_axis=None,
        is_head_trained=is_head_trained,
        head_gradient_dtype=_at_least_float32(head_gradient_dtype, hidden),
        logits_dtype=_at_least_float32(logits_dtype, hidden),
        soft_cap=soft_cap,
        z_loss=z_loss,
        kernels=_kernels(implementation, hidden, head, chunk_tokens),
    )
    hidden, head = launcher.vary_together(hidden, head)
    loss, to_hidden, to_head = chunked.evaluate(options, hidden, head, targets, weights, is_differentiated=True)
    assert to_hidden is not None
    return LossAndGradients(loss, to_hidden, to_head)


def greedy_tokens(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D W"],
    is_wanted: Bool[Array, " T"],
    *,
    chunk_tokens: int,
    vocabulary_axis: str | None = None,
    implementation: Literal["auto", "xla", "reference"] = "auto",
) -> Int32[Array, " T"]:
    """The token of the largest logit; of equal ones the lowest.

        tokens[t] = argmax_w (hidden @ head)[t, w] where is_wanted[t], else 0

    Logits, chunks and `vocabulary_axis` as in `cross_entropy`; no gradient.

    Raises:
      ValueError: `chunk_tokens` below 1, or the reference asked for a split vocabulary.
    """
    _check(chunk_tokens, vocabulary_axis, implementation)
    if implementation == "reference":
        return reference.greedy_tokens(hidden, head, is_wanted)
    return xla.greedy_tokens(hidden, head, is_wanted, chunk_tokens=chunk_tokens, vocabulary_axis=vocabulary_axis)


def _check(chunk_tokens: int, vocabulary_axis: str | None, implementation: str) -> None:
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}; expected at least 1")
    if implementation == "reference" and vocabulary_axis is not None:
        raise ValueError(f"the reference needs the whole vocabulary, not a slice over {vocabulary_axis!r}; use 'xla'")


def _at_least_float32(dtype: Any, hidden: Array) -> jnp.dtype:
    """The dtype, or for None the wide one of `hidden`."""
    return np.dtype(np.promote_types(hidden.dtype, np.float32) if dtype is None else dtype)


def _kernels(implementation: str, hidden: Array, head: Array, chunk_tokens: int) -> pallas_triton.Settings | None:
    if implementation == "xla":
        return None
    reason = pallas_triton.reason_against(hidden, head, chunk_tokens)
    if implementation == "auto":
        taken = "xla" if reason else "pallas"
        launcher.log_once(f"cross_entropy: {taken}" + (f" (pallas {reason})" if reason else ""))
    elif reason is not None:
        raise ValueError(f"implementation 'pallas' of cross_entropy {reason}; 'auto' takes one that can")
    return pallas_triton.Settings() if reason is None else None
