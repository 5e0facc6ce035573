"""What a run will cost, before it starts: parameters, FLOPs by part, bytes on each device. Arithmetic alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mmjax import axes
from mmjax.config import DataConfig, ModelConfig, RunConfig, layer_kinds
from mmjax.models.layers import at_least_float32
from mmjax.models.multimodal import define
from mmjax.training.step import TrainState, abstract_state

# Forward work of a multiplication by a matrix, for each of its entries.
_FLOPS_PER_WEIGHT = 2
# The backward pass costs twice the forward pass.
_TRAINING_FACTOR = 3


@dataclass(frozen=True)
class Estimate:
    """Arithmetic about one step. FLOPs count the model's own work: no rematerialisation, no padding of experts."""

    num_parameters: int
    num_active_parameters: int
    """What a text token is multiplied with: no expert that it does not visit, no embedding table, no vision."""
    forward_flops: dict[str, float]
    """Of one text position, by part; attention as if each row were one document."""
    vision_forward_flops: float
    """Of one image patch, its share of the projector included; attention as if the image were as large as allowed."""
    training_step_flops: float
    """Forward and backward of a full batch."""
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    """On one device; the gradients as they are summed, in at least float32."""

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each number, for printing."""
        forward = sum(self.forward_flops.values())
        parts = sorted(self.forward_flops.items(), key=lambda item: -item[1])
        return [
            ("parameters", f"{self.num_parameters:,}"),
            ("active parameters of a token", f"{self.num_active_parameters:,}"),
            ("training FLOPs of a token", f"{_flops(_TRAINING_FACTOR * forward)} (3 x forward)"),
            *((f"  forward: {part}", f"{_flops(flops)}  {flops / forward:.1%}") for part, flops in parts if flops),
            ("training FLOPs of a patch", _flops(_TRAINING_FACTOR * self.vision_forward_flops)),
            ("training FLOPs of a step", _flops(self.training_step_flops)),
            ("parameter bytes a device", format_bytes(self.parameter_bytes)),
            ("optimizer bytes a device", format_bytes(self.optimizer_bytes)),
            ("gradient bytes a device", format_bytes(self.gradient_bytes)),
        ]


def report(config: RunConfig) -> list[tuple[str, str]]:
    """The estimate of a run on a mesh whose devices need not exist, as (label, value)."""
    mesh = jax.sharding.AbstractMesh(tuple(config.mesh.sizes.values()), axes.MESH_AXES)
    return estimate(config, abstract_state(config, mesh)).rows()


def estimate(config: RunConfig, state: TrainState) -> Estimate:
    """`state` holds arrays or ShapeDtypeStructs with the shardings of the mesh."""
    forward = forward_flops(config.model, config.data.row_tokens)
    vision = vision_forward_flops(config.model, config.data) if config.model.vision.is_present else 0.0
    row_flops = sum(forward.values()) * config.data.row_tokens + vision * config.data.row_patches
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves((state.parameters, state.router_biases)))
    moe = config.model.moe
    num_active = 0
    for path, variable in define(config.model).parameters.items():
        if path.startswith("decoder.") and path != "decoder.embedding":
            is_routed = "experts" in variable.get_metadata()["array_axes"]
            size = state.parameters[path].size
            num_active += size * moe.experts_per_token // moe.num_experts if is_routed else size
    parameters = jax.tree.leaves(state.parameters)
    return Estimate(
        num_parameters=num_parameters,
        num_active_parameters=num_active,
        forward_flops=forward,
        vision_forward_flops=vision,
        training_step_flops=_TRAINING_FACTOR * row_flops * config.data.rows,
        parameter_bytes=_device_bytes(parameters),
        optimizer_bytes=_device_bytes(jax.tree.leaves(state.optimizer)),
        gradient_bytes=sum(_device_size(leaf) * at_least_float32(leaf.dtype).itemsize for leaf in parameters),
    )


def forward_flops(model: ModelConfig, row_tokens: int) -> dict[str, float]:
    """FLOPs of one position's forward pass, by part.

        projections, experts, head:  2 for each weight used
        linear attention, per head:  6 K V + C (2 K + V) + C^2            (chunks of C)
        full attention, per head:    2 (K + V) keys,  keys = (S + 1) / 2  (row of S, causal)
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


def vision_forward_flops(model: ModelConfig, data: DataConfig) -> float:
    """FLOPs of one patch: 2 for each weight of tower and projector used, 4 K patches for each head's attention."""
    vision = model.vision
    heads_width = vision.num_heads * vision.head_width
    layer_weights = 4 * vision.width * heads_width + 2 * vision.width * vision.hidden_width
    embedding_weights = vision.channels * vision.patch_pixels**2 * vision.width
    # Four patches share one use of the projector.
    projector_weights = (vision.merged_width**2 + vision.merged_width * model.width) / 4
    weights = vision.num_layers * layer_weights + embedding_weights + projector_weights
    return _FLOPS_PER_WEIGHT * weights + vision.num_layers * 4 * heads_width * data.image_max_patches


def format_bytes(count: float) -> str:
    """`1,234.5 MiB`, with the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _residual_sources(model: ModelConfig) -> Iterable[int]:
    """How many sources each mix of the network reads: two mixes a layer and one before the head."""
    frozen = 0
    for layer in range(model.num_layers):
        starts_block = layer % model.residual_block_layers == 0
        frozen += starts_block
        # The running sum of a block is a source once its first mixer has added to it.
        yield from (frozen + (not starts_block), frozen + 1)
    yield frozen + 1


def _device_bytes(leaves: Iterable[Any]) -> int:
    return sum(_device_size(leaf) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def _device_size(leaf: Any) -> int:
    """Elements of the array that one device holds."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _flops(count: float) -> str:
    """`1.2 GFLOP`, with the unit that fits."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:,.4g} {unit}FLOP"
        count /= 1000
    return f"{count:,.4g} EFLOP"
