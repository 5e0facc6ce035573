"""Mixture of experts: choosing and weighing experts per token, and the MLP of each row's expert."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import launcher
from pallas_kernels.gated_activation.api import Activation
from pallas_kernels.moe import copying, hopper, parts, reference, xla
from pallas_kernels.moe import rows as row_kernels
from pallas_kernels.moe.mxfp4 import PackedWeight

Scoring = Literal["sigmoid", "softmax"]
Implementation = Literal["auto", "pallas", "xla", "reference"]


class Selection(NamedTuple):
    """The experts a token takes, best first, and the score the next best one has."""

    index: Int32[Array, "T A"]
    threshold: Float[Array, " T"]


def router_logits(tokens: Float[Array, "T D"], router: Float[Array, "D E"]) -> Float[Array, "T E"]:
    """`tokens @ router` in at least float32, whatever precision products have by default.

    A rounded logit takes another expert. Tokens in bfloat16 meet three parts of a float32 router (`parts`).
    """
    if tokens.dtype == jnp.bfloat16 and router.dtype == jnp.float32:
        return parts.multiply(*launcher.vary_together(tokens, router))
    wide = np.promote_types(np.promote_types(tokens.dtype, router.dtype), np.float32)
    return jnp.einsum("td,de->te", tokens.astype(wide), router.astype(wide), precision=lax.Precision.HIGHEST)


def router_scores(logits: Float[Array, "T E"], scoring: Scoring) -> Float[Array, "T E"]:
    """Scores of all experts, `sigmoid(logits)` or `softmax(logits)`, in at least float32."""
    wide = logits.astype(np.promote_types(logits.dtype, np.float32))
    return jax.nn.sigmoid(wide) if scoring == "sigmoid" else jax.nn.softmax(wide, axis=-1)


def select_experts(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    *,
    experts_per_token: int,
    scoring: Scoring,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Selection:
    """Take the experts with the largest biased scores; no gradient.

        index = top-A of (score + bias),   threshold = the (A+1)-th largest of (score + bias)

    Of equal values the lower index comes first. With several groups (equal slices of the experts) only the `top_groups`
    groups with the largest sum of their two best biased scores take part. Where exactly A experts take part, the
    threshold is the A-th largest. Biased scores are in at least float32.

    Raises:
      ValueError: the groups do not divide the experts, or fewer than A experts take part.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; threshold: Kimi K3 technical report, section 2.3.3.
    """
    num_experts = logits.shape[1]
    if num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups={top_groups} of num_groups={num_groups} do not fit {num_experts} experts")
    num_taking_part = num_experts // num_groups * top_groups
    if not 1 <= experts_per_token <= num_taking_part:
        raise ValueError(f"experts_per_token={experts_per_token}; expected 1 to {num_taking_part}")
    scores = lax.stop_gradient(router_scores(logits, scoring))
    biased = scores + lax.stop_gradient(bias).astype(scores.dtype)[None, :]
    if top_groups < num_groups:
        grouped = biased.reshape(-1, num_groups, num_experts // num_groups)
        group_scores = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        chosen_groups = lax.top_k(group_scores, top_groups)[1]
        is_chosen = jnp.any(chosen_groups[:, :, None] == jnp.arange(num_groups, dtype=jnp.int32)[None, None, :], axis=1)
        biased = jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
    largest, index = lax.top_k(biased, min(experts_per_token + 1, num_taking_part))
    return Selection(index[:, :experts_per_token], largest[:, -1])


def weigh_experts(
    logits: Float[Array, "T E"],
    index: Int32[Array, "T A"],
    *,
    scoring: Scoring,
    renormalise: bool,
    scale: float,
) -> Float[Array, "T A"]:
    """Weights of the taken experts; differentiable in the logits, and a function of logits and index alone.

        weight[a] = scale * score[index[a]] / (sum_a score[index[a]] + 1e-20)        (undivided unless `renormalise`)

    In at least float32. The correction bias never enters.
    """
    weights = jnp.take_along_axis(router_scores(logits, scoring), index, axis=1)
    if renormalise:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return weights * scale


def expert_mlp(
    rows: Float[Array, "N R"],
    expert: Int32[Array, " N"],
    gate: Float[Array, "E R F"] | PackedWeight,
    up: Float[Array, "E R F"] | PackedWeight,
    down: Float[Array, "E F R"] | PackedWeight,
    *,
    activation: Activation,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    adapters: Mapping[str, tuple[Float[Array, "E _ Z"], Float[Array, "E Z _"]]] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "N R"]:
    """Each row through the gated MLP of its expert.

        out[n] = activation(rows[n] @ gate[e], rows[n] @ up[e]) @ down[e],   e = expert[n]

    Weights may be packed in MXFP4 (`mxfp4`: codes [E, out, in/2], scales [E, out, in/32]); they are then frozen, and
    unpacked exactly where they are used: by the kernels tile by tile, by the plain form expert by expert of its blocks.

    `adapters` holds, for any of "gate", "up" and "down", factors (A, B) with which `x @ W[e]` becomes
    `x @ W[e] + (x @ A[e]) @ B[e]`; weights that are not differentiated then cost no gradient.

    A row of expert -1 is an empty slot: it is not read, its output is 0 and it gives no gradient. Products and the
    activation accumulate in at least float32; hidden values and outputs have the dtype of `rows`. How rows spread over
    experts, none for some included, does not change the cost.

    Raises:
      ValueError: the named implementation cannot take these arguments; the message says why.

    Source: SiTU-GLU and routed experts, Kimi K3 technical report, arXiv:2607.24653, section 2.3.
    """
    settings = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
    factors = adapters or {}
    match _choose("expert_mlp", implementation, hopper.reason_against(rows, expert.size, gate)):
        case "pallas":
            return _run_kernels(settings, rows, expert[:, None], None, gate, up, down, factors)
        case "xla":
            return xla.expert_mlp(rows, expert, gate, up, down, **settings, adapters=factors)
        case _:
            return reference.expert_mlp(rows, expert, gate, up, down, **settings, adapters=factors)


def routed_experts(
    rows: Float[Array, "T R"],
    index: Int32[Array, "T A"],
    weight: Float[Array, "T A"],
    gate: Float[Array, "E R F"] | PackedWeight,
    up: Float[Array, "E R F"] | PackedWeight,
    down: Float[Array, "E F R"] | PackedWeight,
    *,
    activation: Activation,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    adapters: Mapping[str, tuple[Float[Array, "E _ Z"], Float[Array, "E Z _"]]] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "T R"]:
    """The weighted sum of what each token's experts make of its row.

        out[t] = sum_a weight[t, a] * (activation(rows[t] @ gate[e], rows[t] @ up[e]) @ down[e]),   e = index[t, a]

    Choice -1 adds nothing. The sum runs in the order of the choices, in the dtype of `weight` (at least float32), which
    is the result's; all else as in `expert_mlp`. The kernels' results are bitwise repeatable.

    Raises:
      ValueError: the named implementation cannot take these arguments; the message says why.

    Source: Kimi K3 technical report, arXiv:2607.24653, section 2.3; router gradients without the experts' outputs:
    SonicMoE, arXiv:2512.14080.
    """
    settings = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
    factors = adapters or {}
    chosen = _choose("routed_experts", implementation, hopper.reason_against(rows, index.size, gate, weight.dtype))
    if chosen == "pallas":
        return _run_kernels(settings, rows, index, weight, gate, up, down, factors)
    # Copied first, so that the transpose sums a token's gradients in order instead of scattering them onto each other,
    # and in at least float32.
    copies = jnp.broadcast_to(rows.astype(weight.dtype)[:, None, :], (*index.shape, rows.shape[1]))
    copies = copies.reshape(index.size, -1).astype(rows.dtype)
    form = xla if chosen == "xla" else reference
    outputs = form.expert_mlp(copies, index.reshape(-1), gate, up, down, **settings, adapters=factors)
    outputs = outputs.reshape(*index.shape, -1).astype(weight.dtype)
    return jnp.einsum("ta,tar->tr", weight, outputs)


def take_rows(
    values: Float[Array, "T R"], token: Int32[Array, " N"], *, implementation: Implementation = "auto"
) -> Float[Array, "N R"]:
    """`values[token]`, 0 for a token beyond their end. No gradient: that of taking is adding up, and the reverse.

    Raises:
      ValueError: the named implementation cannot take these arguments; the message says why.
    """
    if _choose("take_rows", implementation, row_kernels.reason_against(values, token.size)) == "pallas":
        return row_kernels.take_all(None, *launcher.vary_together(values, token))
    return values.at[token].get(mode="fill", fill_value=0)


def add_rows(
    values: Float[Array, "N R"],
    slot: Int32[Array, "T A"],
    weight: Float[Array, "T A"] | None = None,
    *,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation = "auto",
) -> Float[Array, "T R"]:
    """Each token's rows added up in order, in at least float32, given in `dtype`. No gradient.

        out[t] = sum_a weight[t, a] * values[slot[t, a]]         weight 1 if there is none; a slot beyond the end adds 0

    Raises:
      ValueError: the named implementation cannot take these arguments; the message says why.
    """
    reason = row_kernels.reason_against(values)
    if weight is not None and weight.dtype != jnp.float32:
        reason = reason or f"needs float32 weights, got {weight.dtype}"
    if _choose("add_rows", implementation, reason) == "pallas":
        given = launcher.vary_together(values, slot, *(() if weight is None else (weight,)))
        return row_kernels.add_all(jnp.dtype(dtype), *given, *((None,) if weight is None else ()))
    wide = np.promote_types(values.dtype if weight is None else weight.dtype, np.float32)
    taken = values.at[slot].get(mode="fill", fill_value=0).astype(wide)
    return jnp.sum(taken if weight is None else weight[:, :, None] * taken, axis=1).astype(dtype)


def _run_kernels(settings, rows, index, weight, gate, up, down, adapters) -> jax.Array:
    weights = [copying.arrange(cast(PackedWeight, w)) if isinstance(w, dict) else w for w in (gate, up, down)]
    arrays = (rows, index, weight, *weights, hopper.join_adapters(adapters))
    leaves, structure = jax.tree.flatten(arrays)
    return hopper.routed_experts(hopper.Options(**settings), *structure.unflatten(launcher.vary_together(*leaves)))


def _choose(
    operation: str, implementation: Implementation, reason: str | None
) -> Literal["pallas", "xla", "reference"]:
    """The implementation to use, where `reason` speaks against the kernels."""
    if implementation == "auto":
        launcher.log_once(f"{operation}: {'pallas' if reason is None else f'xla (pallas {reason})'}")
        return "pallas" if reason is None else "xla"
    if implementation == "pallas" and reason is not None:
        raise ValueError(f"implementation 'pallas' of {operation} {reason}; 'auto' takes one that can")
    return implementation
