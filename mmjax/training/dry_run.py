"""What a run will cost, before it starts: parameters, FLOPs by part, bytes on each device. Arithmetic alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mmjax import axes
from mmjax.config import DataConfig, ModelConfig, RunConfig
from mmjax.models.layers import at_least_float32
from mmjax.planner import cost
from mmjax.planner.cost import TRAINING_FACTOR, forward_flops
from mmjax.planner.parameters import num_active_parameters
from mmjax.planner.units import format_bytes, format_flops
from mmjax.training.step import TrainState, abstract_state


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
            ("training FLOPs of a token", f"{format_flops(TRAINING_FACTOR * forward)} (3 x forward)"),
            *(
                (f"  forward: {part}", f"{format_flops(flops)}  {flops / forward:.1%}")
                for part, flops in parts
                if flops
            ),
            ("training FLOPs of a patch", format_flops(TRAINING_FACTOR * self.vision_forward_flops)),
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
    row_flops = sum(forward.values()) * config.data.row_tokens + vision * config.data.row_patches
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves((state.parameters, state.router_biases)))
    parameters = jax.tree.leaves(state.parameters)
    return Estimate(
        num_parameters=num_parameters,
        num_active_parameters=num_active_parameters(config.model),
        forward_flops=forward,
        vision_forward_flops=vision,
        training_step_flops=TRAINING_FACTOR * row_flops * config.data.rows,
        parameter_bytes=_device_bytes(parameters),
        optimizer_bytes=_device_bytes(jax.tree.leaves(state.optimizer)),
        gradient_bytes=sum(_device_size(leaf) * at_least_float32(leaf.dtype).itemsize for leaf in parameters),
    )


def vision_forward_flops(model: ModelConfig, data: DataConfig) -> float:
    """FLOPs of one patch, as if its image were as large as allowed."""
    return cost.vision_forward_flops(model, data.image_max_patches)


def _device_bytes(leaves: Iterable[Any]) -> int:
    return sum(_device_size(leaf) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def _device_size(leaf: Any) -> int:
    """Elements of the array that one device holds."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))
