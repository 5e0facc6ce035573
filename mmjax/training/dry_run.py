"""What a run will cost, before it starts: parameters, FLOPs by part, bytes on each device. Arithmetic alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mmjax import axes
from mmjax.checkpoint.adapters import matched_projections
from mmjax.config import DataConfig, ModelConfig, RunConfig
from mmjax.models.layers import at_least_float32
from mmjax.models.layout import parameter_stacks
from mmjax.models.lora import Projection
from mmjax.planner import cost
from mmjax.planner.adapters import Tuning
from mmjax.planner.cost import forward_flops
from mmjax.planner.parameters import num_active_parameters
from mmjax.planner.units import format_bytes, format_flops
from mmjax.training import trained_flops
from mmjax.training.step import TrainState, abstract_state


@dataclass(frozen=True)
class Estimate:
    """Arithmetic about one step. FLOPs count the model's own work: no rematerialisation, no padding of experts."""

    num_parameters: int
    num_trained: int
    num_active_parameters: int
    """What a text token is multiplied with: no expert that it does not visit, no embedding table, no vision."""
    forward_flops: dict[str, float]
    """Of one text position, by part; attention as if each row were one document."""
    vision_forward_flops: float
    """Of one image patch, its share of the projector included; attention as if the image were as large as allowed."""
    training_token_flops: float
    """Forward and backward of one text position; frozen weights get no gradient."""
    training_patch_flops: float
    """Of one image patch."""
    training_clip_flops: float
    """Of one clip of sound; 0 without a tower for them."""
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
            ("  of them trained", f"{self.num_trained:,}"),
            ("active parameters of a token", f"{self.num_active_parameters:,}"),
            (
                "training FLOPs of a token",
                f"{format_flops(self.training_token_flops)} ({self.training_token_flops / forward:.3g} x forward)",
            ),
            *(
                (f"  forward: {part}", f"{format_flops(flops)}  {flops / forward:.1%}")
                for part, flops in parts
                if flops
            ),
            ("training FLOPs of a patch", format_flops(self.training_patch_flops)),
            *([("training FLOPs of a clip", format_flops(clip))] if (clip := self.training_clip_flops) else []),
            ("training FLOPs of a step", format_flops(self.training_step_flops)),
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
    vision = vision_forward_flops(config.model, config.data)
    groups = (state.parameters, state.router_biases, state.frozen)
    held = jax.tree.leaves(groups)
    parameters = jax.tree.leaves(state.parameters)
    if config.trained:
        text = trained_flops.token_flops(config.model, config.data.row_tokens, state.parameters)
        pictures = trained_flops.patch_flops(config.model, config.data.image_max_patches, state.parameters)
        sounds = trained_flops.clip_flops(config.model, state.parameters)
    else:
        tuning = tuning_of(config)
        text = sum(cost.training_flops(config.model, config.data.row_tokens, tuning).values())
        pictures = cost.vision_training_flops(config.model, config.data.image_max_patches, tuning)
        sounds = cost.audio_training_flops(config.model, tuning)
    of_row = text * config.data.row_tokens + pictures * config.data.row_patches + sounds * config.data.row_clips
    return Estimate(
        num_parameters=sum(_num_weights(path, leaf) for group in groups for path, leaf in group.items()),
        num_trained=sum(leaf.size for leaf in parameters),
        num_active_parameters=num_active_parameters(config.model),
        forward_flops=forward,
        vision_forward_flops=vision,
        training_token_flops=text,
        training_patch_flops=pictures,
        training_clip_flops=sounds,
        training_step_flops=of_row * config.data.rows,
        parameter_bytes=_device_bytes(held),
        optimizer_bytes=_device_bytes(jax.tree.leaves(state.optimizer)),
        gradient_bytes=sum(_device_size(leaf) * at_least_float32(leaf.dtype).itemsize for leaf in parameters),
    )


def tuning_of(config: RunConfig) -> Tuning:
    """What the planner calls a run's adapters."""
    lora, moe = config.lora, config.model.moe
    if not lora.rank:
        return Tuning()
    matched = matched_projections(config.model, lora, config.weights)
    return Tuning(
        kind="lora",
        rank=lora.rank,
        expert_rank=lora.expert_rank or max(1, lora.rank // moe.experts_per_token),
        experts_at_rest="mxfp4" if moe.expert_storage == "mxfp4" else "parameter_dtype",
        has_shared_down=lora.experts == "shared_down",
        adapted=tuple(_planned(config.model, projection) for projection in matched),
    )


def _planned(model: ModelConfig, projection: Projection) -> tuple[str, str, int]:
    """(part, path, layers) of a projection as the planner lists it."""
    count = math.prod(projection.shape[: projection.num_stacked])
    words = projection.path.split(".")
    if words[0] != "decoder":
        part = "projector" if words[0].endswith("projector") else words[0]
        below = [word for word in words if word != "layers"]
        is_layer = words[:2] == ["vision", "layers"]
        return part, ".".join(below[1:] if is_layer else below), count
    path = ".".join(words[5:])
    if words[5] == "mixer":
        mixer, _ = parameter_stacks(model)[int(words[2])].kinds[int(words[4])]
        return "indexer" if words[6] == "indexer" else f"{mixer} attention", path, count
    if projection.num_experts:
        return "routed experts", path, count
    parts = {"shared": "shared experts", "latent_down": "latent projections", "latent_up": "latent projections"}
    return parts.get(words[6], "dense MLP"), path, count


def vision_forward_flops(model: ModelConfig, data: DataConfig) -> float:
    """FLOPs of one patch, as if its image were as large as allowed."""
    return cost.vision_forward_flops(model, data.image_max_patches)


def _num_weights(path: str, leaf: Any) -> int:
    """Numbers that an array stands for: two a byte of codes, none of scales."""
    return leaf.size * {"codes": 2, "scales": 0}.get(path.rsplit("_", 1)[-1], 1)


def _device_bytes(leaves: Iterable[Any]) -> int:
    return sum(_device_size(leaf) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def _device_size(leaf: Any) -> int:
    """Elements of the array that one device holds."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))
