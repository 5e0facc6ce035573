"""Attention residual: each token mixes earlier outputs of the network, weighted by a learned query."""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Array, Bool, Float

from pallas_kernels import launcher
from pallas_kernels.attention_residual import hopper, xla

Implementation = Literal["auto", "pallas", "xla"]


def attention_residual(
    sources: Sequence[Float[Array, "*T D"]],
    norm_scale: Float[Array, " D"],
    query: Float[Array, " D"],
    *,
    epsilon: float,
    is_live: Bool[Array, ""] | Bool[Array, " Z"] | None = None,
    output_scale: Float[Array, " D"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*T D"]:
    """Mix Z sources over depth, token by token, and normalise the mix if `output_scale` is given.

        score[z, t] = sum_d source[z, t, d] / sqrt(mean_d source[z, t]^2 + epsilon) * norm_scale[d] * query[d]
        mix[t]      = sum_z softmax_z(score[:, t])[z] * source[z, t]
        out[t]      = mix[t], or mix[t] / sqrt(mean_d mix[t]^2 + epsilon) * output_scale

    There is no 1/sqrt(D). Computed in at least float32, returned in the dtype of the sources, to which the mix and the
    normalised mix are rounded too. Where `is_live` is False the last source takes no part: a running sum that is still
    zero. `is_live` [Z] says so of every source; the first always takes part.
    The sources are not stacked, so no copy of them is made. Of arrays of their size only they are kept for the backward
    pass, and by `pallas` the mix too, from which it takes what a source's gradient needs of the others. `pallas` reads
    each source once forward and once backward; "auto" takes it where it can, and says once what it took.

    Raises:
      ValueError: no source, `is_live` given with no source besides the last, or the named implementation cannot take
        these arguments; the message says why.

    Source: "Attention Residuals", arXiv:2603.15031, block form; Kimi K3 technical report, arXiv:2607.24653, eq. 10.
    """
    if len(sources) < (1 if is_live is None else 2):
        raise ValueError(f"{len(sources)} sources; expected at least one that always takes part")
    arguments = tuple(sources), norm_scale, query, is_live, output_scale, epsilon
    if implementation == "xla":
        return xla.mix(*arguments)
    reason = hopper.reason_against(arguments[0])
    if implementation == "auto":
        taken = "xla" if reason else "pallas"
        launcher.log_once(f"attention_residual: {taken}" + (f" (pallas {reason})" if reason else ""))
    elif reason is not None:
        raise ValueError(f"implementation 'pallas' of attention_residual {reason}; 'auto' takes one that can")
    return hopper.mix(*arguments) if reason is None else xla.mix(*arguments)
