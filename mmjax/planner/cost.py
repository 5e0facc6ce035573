"""What a step costs: FLOPs by part, MFU, and the golden formula over modality branches. Plain arithmetic with units."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.config import ModelConfig, layer_kinds
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import FULL, Tuning, trained_arrays

# Forward work of a multiplication by a matrix, for each of its entries.
_FLOPS_PER_WEIGHT = 2
# Forward and backward work over forward work: two more products for each one, one for inputs and one for weights.
TRAINING_FACTOR = 3
# Parts that multiply activations with activations: frozen weights do not make their backward pass cheaper.
WEIGHTLESS_PARTS = ("linear attention recurrence", "full attention scores", "attention residuals")


def forward_flops(model: ModelConfig, row_tokens: int) -> dict[str, float]:
    """FLOPs of one position's forward pass in a document of `row_tokens` positions, by part.

        projections, experts, head:  2 for each weight used
        linear attention, per head:  6 K V + C (2 K + V) + C^2            (chunks of C)
        full attention, per head:    2 (K + V) keys,  keys = (S + 1) / 2  (document of S, causal)
        sparse attention, per head:  2 (2 L + K_shared) keys, keys = mean of min(position, top_k); L the latent width
        indexer:                     2 J K_indexer (S + 1) / 2
        attention residual:          6 D for each source of each mix

    Source: the linear attention term is that of the Kimi K3 technical report, arXiv:2607.24653.
    """
    linear, full, moe = model.linear_attention, model.full_attention, model.moe
    indexer, width = full.indexer, model.width
    kinds = layer_kinds(model)
    num_linear = sum(mixer == "linear" for mixer, _ in kinds)
    num_full = len(kinds) - num_linear
    num_moe = sum(mlp == "moe" for _, mlp in kinds)
    linear_keys, linear_values = linear.num_heads * linear.key_width, linear.num_heads * linear.value_width

    gate_rank = linear.output_gate_rank
    full_gate = linear.output_gate == "full"
    linear_weights = (
        width * (2 * linear_keys + linear_values)
        + linear.convolution_width * (2 * linear_keys + linear_values)
        + width * linear.num_heads
        + linear.decay_rank * (width + linear_keys)
        + (width * linear_values if full_gate else gate_rank * (width + linear_values))
        + linear_values * width
    )
    chunk = linear.chunk_tokens
    recurrence = linear.num_heads * (
        6 * linear.key_width * linear.value_width + chunk * (2 * linear.key_width + linear.value_width) + chunk**2
    )

    heads = full.num_heads
    query_input = full.query_rank or width
    full_weights = (
        width * full.query_rank
        + query_input * heads * full.key_width
        + width * (full.latent_width + full.shared_key_width)
        + full.latent_width * heads * (full.nope_width + full.value_width)
        + (width * heads * full.value_width if full.output_gate == "sigmoid" else 0)
        + heads * full.value_width * width
    )
    causal_keys = (row_tokens + 1) / 2
    if indexer.stage == "sparse":
        seen = min(indexer.top_k, row_tokens)
        keys = seen - seen * (seen - 1) / (2 * row_tokens)
        scores = _FLOPS_PER_WEIGHT * heads * (2 * full.latent_width + full.shared_key_width) * keys
    else:
        scores = _FLOPS_PER_WEIGHT * heads * (full.key_width + full.value_width) * causal_keys
    indexer_weights = query_input * indexer.num_heads * indexer.head_width + width * (
        indexer.head_width + indexer.num_heads
    )
    indexing = _FLOPS_PER_WEIGHT * (indexer_weights + indexer.num_heads * indexer.head_width * causal_keys)

    expert_input = moe.latent_width or width
    return {
        "linear attention projections": num_linear * _FLOPS_PER_WEIGHT * linear_weights,
        "linear attention recurrence": num_linear * recurrence,
        "full attention projections": num_full * _FLOPS_PER_WEIGHT * full_weights,
        "full attention scores": num_full * scores,
        "indexer": num_full * indexing if indexer.stage != "none" else 0,
        "router": num_moe * _FLOPS_PER_WEIGHT * width * moe.num_experts,
        "latent projections": num_moe * _FLOPS_PER_WEIGHT * 2 * width * moe.latent_width,
        "routed experts": num_moe * _FLOPS_PER_WEIGHT * moe.experts_per_token * 3 * expert_input * moe.expert_width,
        "shared experts": num_moe * _FLOPS_PER_WEIGHT * moe.num_shared_experts * 3 * width * moe.expert_width,
        "dense MLP": (len(kinds) - num_moe) * _FLOPS_PER_WEIGHT * 3 * width * moe.dense_width,
        "attention residuals": 6 * width * sum(_residual_sources(model)) if model.residual == "attention" else 0,
        "head": _FLOPS_PER_WEIGHT * width * model.vocabulary_size,
    }


def vision_forward_flops(model: ModelConfig, image_patches: int) -> float:
    """FLOPs of one patch of an image of `image_patches`; 0 without a tower.

    2 for each weight of tower and projector used, 4 K patches for each head's attention.
    """
    vision = model.vision
    if not vision.is_present:
        return 0.0
    heads_width = vision.num_heads * vision.head_width
    layer_weights = 4 * vision.width * heads_width + 2 * vision.width * vision.hidden_width
    embedding_weights = vision.channels * vision.patch_pixels**2 * vision.width
    # Four patches share one use of the projector.
    projector_weights = (vision.merged_width**2 + vision.merged_width * model.width) / 4
    weights = vision.num_layers * layer_weights + embedding_weights + projector_weights
    return _FLOPS_PER_WEIGHT * weights + vision.num_layers * 4 * heads_width * image_patches


def adapter_forward_flops(model: ModelConfig, tuning: Tuning) -> float:
    """FLOPs of one position in all adapters: 2 for each entry; of the experts' adapters, those of the experts taken."""
    moe = model.moe
    size = 0.0
    for array in trained_arrays(model, tuning):
        if array.part == "adapters":
            is_expert = "experts" in array.array_axes
            size += array.size * (moe.experts_per_token / moe.num_experts if is_expert else 1)
    return _FLOPS_PER_WEIGHT * size


def training_flops(model: ModelConfig, row_tokens: int, tuning: Tuning = FULL) -> dict[str, float]:
    """FLOPs of one position's forward and backward pass, by part.

        trained weights, products of activations:  3 x forward
        frozen weights (LoRA):                     2 x forward: their inputs need a gradient, they do not
        frozen indexer:                            1 x forward: it reads detached inputs
        adapters:                                  3 x 2 for each entry used

    No rematerialisation: these are the FLOPs of MFU.
    """
    forward = forward_flops(model, row_tokens)
    if tuning.kind == "full":
        return {part: TRAINING_FACTOR * flops for part, flops in forward.items()}
    factors = {part: TRAINING_FACTOR if part in WEIGHTLESS_PARTS else 2 for part in forward} | {"indexer": 1}
    trained = {part: factors[part] * flops for part, flops in forward.items()}
    return trained | {"adapters": TRAINING_FACTOR * adapter_forward_flops(model, tuning)}


def vision_training_flops(model: ModelConfig, image_patches: int, tuning: Tuning = FULL) -> float:
    """FLOPs of one patch: 3 x forward; under LoRA the tower is frozen and nothing before it learns: 1 x forward."""
    factor = TRAINING_FACTOR if tuning.kind == "full" else 1
    return factor * vision_forward_flops(model, image_patches)


@dataclass(frozen=True)
class BatchFlops:
    """FLOPs of the forward and backward passes of real tokens and real patches; padding counts nothing."""

    text: float
    vision: float

    @property
    def total(self) -> float:
        return self.text + self.vision


def batch_flops(
    model: ModelConfig, document_tokens: Iterable[int], image_patches: Iterable[int], tuning: Tuning = FULL
) -> BatchFlops:
    """FLOPs of a packed batch: each document attends to itself, each image to itself.

    `document_tokens` are the lengths of all documents, image placeholders included; `image_patches` the patches of all
    images before the merge. More images cost vision FLOPs, not a dearer text token.
    """
    text = sum(
        number * tokens * sum(training_flops(model, tokens, tuning).values())
        for tokens, number in Counter(document_tokens).items()
    )
    vision = sum(
        number * patches * vision_training_flops(model, patches, tuning)
        for patches, number in Counter(image_patches).items()
    )
    return BatchFlops(text=text, vision=vision)


def model_flops_utilisation(flops: float, seconds: float, num_devices: int, peak_flops_per_second: float) -> float:
    """MFU: FLOPs the model needed, over what the devices could have done meanwhile.

    mfu = FLOPs of the step / (seconds of the step * devices * peak FLOP/s of a device)
    """
    return flops / (seconds * num_devices * peak_flops_per_second)


def compute_entropy(semantic_bits: float, flops: float, redundancy: float) -> float:
    """H of a modality in bits per FLOP: semantic bits / (FLOPs * redundancy).

    `semantic_bits` is what the samples say, in bits: for text the cross-entropy of its tokens under a good model.
    `redundancy` >= 1 says how many times over the input says it (patches of an even sky say little: high).
    """
    if flops <= 0 or redundancy < 1:
        raise ConfigurationError(
            "compute entropy",
            found=f"FLOPs {flops:g}, redundancy {redundancy:g}",
            expected="FLOPs above 0 and a redundancy of at least 1",
            remedy="count the modality's FLOPs with batch_flops; a redundancy of 1 repeats nothing",
        )
    return semantic_bits / (flops * redundancy)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One exchange of a branch's communication graph."""

    num_bytes: float
    bandwidth: float
    """Bytes a second of the slowest link it crosses, alone on it."""
    hops: int
    latency_seconds: float
    """Of one hop."""
    contention: float = 1.0
    """How many such exchanges share that link at once."""


def communication_seconds(messages: Sequence[Message]) -> float:
    """Comm(k): what a communication graph costs beyond its bytes at full bandwidth, in seconds.

        sum over messages of  hops * latency + (contention - 1) * bytes / bandwidth

    The bytes at full bandwidth are the term G_k / C_k of the golden formula.
    """
    return sum(
        message.hops * message.latency_seconds + (message.contention - 1) * message.num_bytes / message.bandwidth
        for message in messages
    )


def alignment_penalty(finish_seconds: Mapping[str, Sequence[float]]) -> float:
    """Integral of the time offset between modality streams over the progress of a step, in seconds.

        penalty = integral over u in [0, 1] of  max_k t_k(u) - min_k t_k(u)        (trapezoids)

    `finish_seconds[k][i]` is when stream k has done micro-batch i; all streams do equally many. 0 for one stream.

    Raises:
      ConfigurationError: streams with different numbers of micro-batches, or none.
    """
    lengths = {name: len(times) for name, times in finish_seconds.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ConfigurationError(
            "alignment of modality streams",
            found=", ".join(f"{name}: {length} micro-batches" for name, length in lengths.items()) or "no stream",
            expected="the same number of micro-batches, at least 1, for every stream",
            remedy="give one finish time for each micro-batch of each stream",
        )
    times = np.array(list(finish_seconds.values()), dtype=np.float64)
    offsets = times.max(axis=0) - times.min(axis=0)
    if len(offsets) == 1:
        return float(offsets[0])
    return float(np.trapezoid(offsets, dx=1 / (len(offsets) - 1)))


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One modality's share of a step, on devices of its own."""

    name: str
    forward_flops: float
    """F_k, of all its devices together."""
    flops_per_second: float
    """B_k: the rate it reaches, all its devices together."""
    exchanged_bytes: float
    """G_k: bytes of gradients (or other data) that each of its devices exchanges."""
    bandwidth: float
    """C_k: bytes a second of the link used, for one device."""
    communication_seconds: float = 0.0
    """Comm(k)."""


@dataclass(frozen=True, kw_only=True)
class BranchTerms:
    """Seconds of one branch, by term."""

    name: str
    compute: float
    exchange: float
    communication: float
    """alpha * Comm(k)"""

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.communication


@dataclass(frozen=True, kw_only=True)
class GoldenCost:
    """The golden formula with every term visible, in seconds."""

    branches: tuple[BranchTerms, ...]
    alignment: float
    """beta * AlignmentPenalty"""

    @property
    def slowest(self) -> BranchTerms:
        return max(self.branches, key=lambda terms: terms.total)

    @property
    def total(self) -> float:
        return self.slowest.total + self.alignment


def golden_cost(
    branches: Sequence[Branch], *, alpha: float = 1.0, beta: float = 1.0, alignment_seconds: float = 0.0
) -> GoldenCost:
    """T_total = max over branches k of [F_k / B_k + G_k / C_k + alpha Comm(k)] + beta AlignmentPenalty, in seconds.

    alpha and beta have no unit; 1 takes the terms as predicted, a fit replaces them. What a training step adds to it
    (backward, recomputation, bubble, exposed exchange) is in `step_time`.
    """
    if not branches:
        raise ConfigurationError(
            "golden formula", found="no branch", expected="at least one modality branch", remedy="give the text branch"
        )
    terms = tuple(
        BranchTerms(
            name=branch.name,
            compute=branch.forward_flops / branch.flops_per_second,
            exchange=branch.exchanged_bytes / branch.bandwidth if branch.exchanged_bytes else 0.0,
            communication=alpha * branch.communication_seconds,
        )
        for branch in branches
    )
    return GoldenCost(branches=terms, alignment=beta * alignment_seconds)


def _residual_sources(model: ModelConfig) -> Iterable[int]:
    """How many sources each mix of the network reads: two mixes a layer and one before the head."""
    frozen = 0
    for layer in range(model.num_layers):
        starts_block = layer % model.residual_block_layers == 0
        frozen += starts_block
        # The running sum of a block is a source once its first mixer has added to it.
        yield from (frozen + (not starts_block), frozen + 1)
    yield frozen + 1
