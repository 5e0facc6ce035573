"""Mixture of experts: choosing and weighing experts per token, and the MLP of each row's expert."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_activation.api import Activation
from pallas_kernels.moe import reference, xla

Scoring = Literal["sigmoid", "softmax"]
Implementation = Literal["auto", "xla", "reference"]


class Selection(NamedTuple):
    """The experts a token takes, best first, and the score the next best one has."""

    index: Int32[Array, "T A"]
    threshold: Float[Array, " T"]


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
    gate: Float[Array, "E R F"],
    up: Float[Array, "E R F"],
    down: Float[Array, "E F R"],
    *,
    activation: Activation,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    implementation: Implementation = "auto",
) -> Float[Array, "N R"]:
    """Each row through the gated MLP of its expert.

        out[n] = activation(rows[n] @ gate[e], rows[n] @ up[e]) @ down[e],   e = expert[n]

    A row of expert -1 is an empty slot: it is not read, its output is 0 and it gives no gradient. Products and the
    activation accumulate in at least float32; hidden values and outputs have the dtype of `rows`. How rows spread over
    experts, none for some included, does not change the cost.

    Source: SiTU-GLU and routed experts, Kimi K3 technical report, arXiv:2607.24653, section 2.3.
    """
    form = reference if implementation == "reference" else xla
    return form.expert_mlp(rows, expert, gate, up, down, activation=activation, beta=beta, linear_beta=linear_beta)
