"""What a step costs: FLOPs by part, MFU, and the golden formula over modality branches. Plain arithmetic with units."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.axes import holds_experts
from mmjax.config import ModelConfig, layer_kinds
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import FULL, Tuning, trained_arrays

# Forward work of a multiplication by a matrix, for each of its entries.
_FLOPS_PER_WEIGHT = 2
# Forward and backward work over forward work: two more products for each one, one for inputs and one for weights.
TRAINING_FACTOR = 3
# Parts that multiply activations with activations: frozen weights do not make their backward pass cheaper.
WEIGHTLESS_PARTS = (
    *("linear attention recurrence", "full attention scores"),
    *("attention residuals", "hyper connections"),
)


def forward_flops(model: ModelConfig, row_tokens: int) -> dict[str, float]:
    """FLOPs of one position's forward pass in a document of `row_tokens` positions, by part.

        projections, experts, head:  2 for each weight used
        linear attention, per head:  6 K V + C (2 K + V) + C^2            (chunks of C)
        full attention, per head:    2 (K + V) keys,  keys = (S + 1) / 2  (document of S, causal; grouped: K = V)
        sparse attention, per head:  2 (2 L + K_shared) keys, keys = mean of min(position, top_k); L the latent width
        indexer:                     2 J K_indexer (S + 1) / 2
        attention residual:          6 D for each source of each mix
        hyper connections:           2 n D ((2 + n) n + n + 2) for each mixer and MLP, n streams

    Source: the linear attention term is that of the Kimi K3 technical report, arXiv:2607.24653.
    """
    moe, width = model.moe, model.width
    kinds = layer_kinds(model)
    num_linear = sum(mixer == "linear" for mixer, _ in kinds)
    num_full = len(kinds) - num_linear
    num_moe = sum(mlp == "moe" for _, mlp in kinds)
    of_linear = _kimi_delta_flops if model.linear_attention_kind == "kimi_delta" else _gated_delta_net_flops
    linear_weights, recurrence = of_linear(model)
    of_full = _grouped_attention_flops if model.full_attention_kind == "grouped" else _latent_attention_flops
    full_weights, scores, indexing = of_full(model, row_tokens)

    expert_input = moe.latent_width or width
    shared_gate = width if moe.shared_hidden_width and moe.shared_gate == "sigmoid" else 0
    num_matrices = 3 if model.dense_mlp == "gated" else 2
    return {
        "linear attention projections": num_linear * linear_weights,
        "linear attention recurrence": num_linear * recurrence,
        "full attention projections": num_full * full_weights,
        "full attention scores": num_full * scores,
        "indexer": num_full * indexing,
        "router": num_moe * _FLOPS_PER_WEIGHT * width * moe.num_experts,
        "latent projections": num_moe * _FLOPS_PER_WEIGHT * 2 * width * moe.latent_width,
        "routed experts": num_moe * _FLOPS_PER_WEIGHT * moe.experts_per_token * 3 * expert_input * moe.expert_width,
        "shared experts": num_moe * _FLOPS_PER_WEIGHT * (3 * width * moe.shared_hidden_width + shared_gate),
        "dense MLP": (len(kinds) - num_moe) * _FLOPS_PER_WEIGHT * num_matrices * width * moe.dense_width,
        "attention residuals": 6 * width * sum(residual_sources(model)) if model.residual == "attention" else 0,
        "hyper connections": 2 * len(kinds) * _stream_flops(model) if model.residual == "hyper" else 0,
        "head": _FLOPS_PER_WEIGHT * width * model.vocabulary_size,
    }


def _kimi_delta_flops(model: ModelConfig) -> tuple[float, float]:
    """(projections, recurrence) of one layer."""
    linear, width = model.linear_attention, model.width
    keys, values = linear.num_heads * linear.key_width, linear.num_heads * linear.value_width
    gate_rank = linear.output_gate_rank
    weights = (
        (width + linear.convolution_width) * (2 * keys + values)
        + width * linear.num_heads
        + linear.decay_rank * (width + keys)
        + (width * values if linear.output_gate == "full" else gate_rank * (width + values))
        + values * width
    )
    recurrence = linear.num_heads * _recurrence_flops(linear.key_width, linear.value_width, linear.chunk_tokens)
    return _FLOPS_PER_WEIGHT * weights, recurrence


def _gated_delta_net_flops(model: ModelConfig) -> tuple[float, float]:
    """(projections, recurrence) of one layer."""
    net, width = model.gated_delta_net, model.width
    keys, values = net.num_key_heads * net.key_width, net.num_value_heads * net.value_width
    weights = (width + net.convolution_width) * (2 * keys + values) + 2 * width * (net.num_value_heads + values)
    recurrence = net.num_value_heads * _recurrence_flops(net.key_width, net.value_width, net.chunk_tokens)
    return _FLOPS_PER_WEIGHT * weights, recurrence


def _stream_flops(model: ModelConfig) -> int:
    """What one mixer or MLP takes from the residual streams and gives back to them."""
    streams = model.hyper_connections.num_streams
    return 2 * streams * model.width * ((2 + streams) * streams + streams + 2)


def _recurrence_flops(key_width: int, value_width: int, chunk: int) -> int:
    return 6 * key_width * value_width + chunk * (2 * key_width + value_width) + chunk**2


def _latent_attention_flops(model: ModelConfig, row_tokens: int) -> tuple[float, float, float]:
    """(projections, scores, indexer) of one layer."""
    full, indexer, width = model.full_attention, model.full_attention.indexer, model.width
    heads = full.num_heads
    query_input = full.query_rank or width
    weights = (
        width * full.query_rank
        + query_input * heads * full.key_width
        + width * (full.latent_width + full.shared_key_width)
        + full.latent_width * heads * (full.nope_width + full.value_width)
        + (width * heads * full.value_width if full.output_gate == "sigmoid" else 0)
        + heads * full.value_width * width
    )
    causal_keys = (row_tokens + 1) / 2
    if indexer.stage == "sparse":
        scores = heads * (2 * full.latent_width + full.shared_key_width) * _keys_seen(model, row_tokens)
    else:
        scores = heads * (full.key_width + full.value_width) * causal_keys
    indexing = 0.0
    if indexer.stage != "none":
        indexing = _indexer_weights(model) + indexer.num_heads * indexer.head_width * causal_keys
    return _FLOPS_PER_WEIGHT * weights, _FLOPS_PER_WEIGHT * scores, _FLOPS_PER_WEIGHT * indexing


def _keys_seen(model: ModelConfig, row_tokens: int) -> float:
    """Mean number of keys that a query takes of those that an indexer selects."""
    seen = min(model.full_attention.indexer.top_k, row_tokens)
    return seen - seen * (seen - 1) / (2 * row_tokens)


def _indexer_weights(model: ModelConfig) -> int:
    """Entries of one indexer's matrices."""
    full, indexer = model.full_attention, model.full_attention.indexer
    query_input = full.query_rank or model.width
    return query_input * indexer.num_heads * indexer.head_width + model.width * (indexer.head_width + indexer.num_heads)


def _grouped_attention_flops(model: ModelConfig, row_tokens: int) -> tuple[float, float, float]:
    """(projections, scores, 0) of one layer."""
    grouped = model.grouped_attention
    num_gates = grouped.num_heads if grouped.output_gate == "sigmoid" else 0
    weights = model.width * grouped.head_width * (2 * grouped.num_heads + 2 * grouped.num_key_heads + num_gates)
    scores = grouped.num_heads * 2 * grouped.head_width * (row_tokens + 1) / 2
    return _FLOPS_PER_WEIGHT * weights, _FLOPS_PER_WEIGHT * scores, 0.0


def vision_forward_flops(model: ModelConfig, image_patches: int) -> float:
    """FLOPs of one patch of an image of `image_patches`; 0 without a tower.

    2 for each weight of tower and projector used, 4 K patches for each head's attention. Pictures of CLIP have the size
    of its position table, whatever `image_patches`.
    """
    vision, width = model.vision, model.width
    if not vision.is_present:
        return 0.0
    if vision.kind == "fuyu":
        return _FLOPS_PER_WEIGHT * vision.patch_values * width
    heads_width = vision.num_heads * vision.head_width
    layer_weights = 4 * vision.width * heads_width + 2 * vision.width * vision.hidden_width
    num_layers = vision.num_layers
    if vision.kind == "clip":
        # Layers behind the deepest features are not run.
        num_layers, image_patches = max(vision.feature_depths), 1 + vision.table_rows * vision.table_columns
        projector_weights = len(vision.feature_depths) * vision.width * width + width**2
    else:
        # Four patches share one use of each merger.
        num_mergers = 1 + len(vision.deep_layers)
        projector_weights = num_mergers * (vision.merged_width**2 + vision.merged_width * width) / 4
    weights = num_layers * layer_weights + vision.patch_values * vision.width + projector_weights
    return _FLOPS_PER_WEIGHT * weights + num_layers * 4 * heads_width * image_patches


def adapter_forward_flops(model: ModelConfig, tuning: Tuning) -> float:
    """FLOPs of one position in all adapters of the decoder: 2 for each entry used.

    Of the experts' adapters those of the experts taken; a first factor that all experts share multiplies each of a
    token's rows, at whichever expert it is, as the others do.
    """
    return sum(flops for flops, _ in _adapter_flops(model, tuning))


def _adapter_flops(model: ModelConfig, tuning: Tuning) -> Iterator[tuple[float, int]]:
    """(forward FLOPs of one position, forward and backward over forward) of each adapter array of the decoder."""
    for array in trained_arrays(model, tuning):
        if array.part != "adapters" or not array.in_decoder_layer:
            continue
        entries = float(array.size)
        if array.adapted_part == "routed experts":
            taken = model.moe.experts_per_token
            entries *= taken / model.moe.num_resident_experts if holds_experts(array.array_axes) else taken
        # The indexer reads detached inputs: what meets them has no gradient to hand on.
        is_detached = array.adapted_part == "indexer" and array.name == "down"
        yield _FLOPS_PER_WEIGHT * entries, 2 if is_detached else TRAINING_FACTOR


def training_flops(model: ModelConfig, row_tokens: int, tuning: Tuning = FULL) -> dict[str, float]:
    """FLOPs of one position's forward and backward pass, by part.

        trained weights, products of activations:  3 x forward
        frozen weights (LoRA):                     2 x forward: their inputs need a gradient, they do not
        indexer's weights, which read detached inputs:       2 x forward trained, 1 x frozen
        indexer's scores:  1 x forward; where it learns, 2 x more over the keys that its loss sees (stage sparse: taken)
        adapters:                                  3 x 2 for each entry used, 2 x 2 of those that read detached inputs

    No rematerialisation: these are the FLOPs of MFU.
    """
    forward = forward_flops(model, row_tokens)
    learns = tuning.kind == "full" or any(part == "indexer" for part, *_ in tuning.adapted or ())
    weight_factor = TRAINING_FACTOR if tuning.kind == "full" else 2
    factors = {part: TRAINING_FACTOR if part in WEIGHTLESS_PARTS else weight_factor for part in forward}
    trained = {part: factors[part] * flops for part, flops in forward.items()}
    if forward["indexer"]:
        num_full = sum(mixer == "full" for mixer, _ in layer_kinds(model))
        indexer = model.full_attention.indexer
        seen = _keys_seen(model, row_tokens) if indexer.stage == "sparse" else (row_tokens + 1) / 2
        learning = num_full * 2 * _FLOPS_PER_WEIGHT * indexer.num_heads * indexer.head_width * seen if learns else 0.0
        of_weights = num_full * _FLOPS_PER_WEIGHT * _indexer_weights(model) if tuning.kind == "full" else 0.0
        trained["indexer"] = forward["indexer"] + of_weights + learning
    if tuning.kind == "full":
        return trained
    return trained | {"adapters": sum(factor * flops for flops, factor in _adapter_flops(model, tuning))}


def vision_training_flops(model: ModelConfig, image_patches: int, tuning: Tuning = FULL) -> float:
    """FLOPs of one patch: 3 x forward; 2 x in a frozen tower with adapters, and 3 x 2 for each entry of these; 1 x in
    one without. Merged patches share one use of a projector."""
    if tuning.kind == "full":
        return TRAINING_FACTOR * vision_forward_flops(model, image_patches)
    size = 0.0
    for array in trained_arrays(model, tuning):
        is_projector = array.adapted_part == "projector" and not array.path.startswith("audio")
        if is_projector or array.adapted_part == "vision":
            size += array.size / (model.vision.patches_per_feature if is_projector else 1)
    return (2 if size else 1) * vision_forward_flops(model, image_patches) + TRAINING_FACTOR * _FLOPS_PER_WEIGHT * size


def audio_forward_flops(model: ModelConfig) -> float:
    """FLOPs of one clip of sound; 0 without a tower.

    2 for each weight of convolutions, encoder and projector at each value or frame it works on, and each clip's
    attention to itself. Clips are filled with silence, which costs as much.
    """
    audio = model.audio
    if not audio.is_present:
        return 0.0
    heads_width, taps = audio.num_heads * audio.head_width, 3
    convolutions = audio.clip_frames * taps * audio.mel_bins * audio.width
    convolutions += audio.clip_values * taps * audio.width**2
    layer_weights = 4 * audio.width * heads_width + 2 * audio.width * audio.hidden_width
    encoder = audio.num_layers * audio.clip_values * layer_weights
    joined = audio.values_per_feature * audio.width
    projector = audio.clip_features * audio.projector_width * (joined + model.width)
    attention = audio.num_layers * 4 * heads_width * audio.clip_values**2
    return _FLOPS_PER_WEIGHT * (convolutions + encoder + projector) + attention


def audio_training_flops(model: ModelConfig, tuning: Tuning = FULL) -> float:
    """FLOPs of one clip: 3 x forward; 2 x in a frozen tower with adapters, 1 x in one without."""
    has_adapters = any(part == "audio" or path.startswith("audio") for part, path, _ in tuning.adapted or ())
    factor = TRAINING_FACTOR if tuning.kind == "full" else 2 if has_adapters else 1
    return factor * audio_forward_flops(model)


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


def residual_sources(model: ModelConfig) -> Iterable[int]:
    """How many sources each mix of the network reads: two mixes a layer and one before the head."""
    frozen = 0
    for layer in range(model.num_layers):
        starts_block = layer % model.residual_block_layers == 0
        frozen += starts_block
        # The running sum of a block is a source once its first mixer has added to it.
        yield from (frozen + (not starts_block), frozen + 1)
    yield frozen + 1
