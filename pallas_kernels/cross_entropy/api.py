"""Cross-entropy of a language-model head, and its greedy tokens, without ever holding all logits."""

from typing import Literal

from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.cross_entropy import reference, xla

Implementation = Literal["auto", "xla", "reference"]


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D W"],
    targets: Int32[Array, " T"],
    weights: Float[Array, " T"],
    *,
    chunk_tokens: int,
    vocabulary_axis: str | None = None,
    is_head_trained: bool = True,
    implementation: Implementation = "auto",
) -> Float[Array, ""]:
    """Weighted sum of the tokens' cross-entropies; dividing by the sum of the weights is the caller's.

        loss = sum_t weights[t] * (logsumexp_w(logits[t]) - logits[t, targets[t]]),   logits = hidden @ head

    Logits are accumulated, and all that follows is computed and returned, in at least float32; the head's gradient is
    summed over chunks in it too, for which a copy of the head in it is held unless `is_head_trained` is False: then the
    head gets no gradient. A token of weight 0 may have any target, also one outside the vocabulary (-100). The
    weights are constants: they get no gradient.
    At most `chunk_tokens` tokens have logits at one time, forward and backward; T need not be a multiple of it. The
    tokens that count come first, and chunks of others are left out: where answers alone count, prompts cost nothing.
    Under `vocabulary_axis`, inside `shard_map`, `head` is this device's slice of the vocabulary in the order of that
    mesh axis, targets index the whole vocabulary, and the loss is the same on every device of the axis.

    Raises:
      ValueError: `chunk_tokens` below 1, or the reference asked for a split vocabulary.
    """
    _check(chunk_tokens, vocabulary_axis, implementation)
    if implementation == "reference":
        head = head if is_head_trained else lax.stop_gradient(head)
        return reference.cross_entropy(hidden, head, targets, weights)
    return xla.cross_entropy(
        hidden,
        head,
        targets,
        weights,
        chunk_tokens=chunk_tokens,
        vocabulary_axis=vocabulary_axis,
        is_head_trained=is_head_trained,
    )


def greedy_tokens(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D W"],
    is_wanted: Bool[Array, " T"],
    *,
    chunk_tokens: int,
    vocabulary_axis: str | None = None,
    implementation: Implementation = "auto",
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


def _check(chunk_tokens: int, vocabulary_axis: str | None, implementation: Implementation) -> None:
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}; expected at least 1")
    if implementation == "reference" and vocabulary_axis is not None:
        raise ValueError(f"the reference needs the whole vocabulary, not a slice over {vocabulary_axis!r}; use 'xla'")
