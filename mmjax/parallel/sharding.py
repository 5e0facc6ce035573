"""The sharding table: which mesh axes each array axis rests on (`axes.GATHERED_AT_USE`: and which a layer gathers)."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from mmjax.axes import (
    ARRAY_AXIS_OF_EXPERTS,
    CONTEXT,
    FSDP,
    MESH_AXES_OF_EXPERTS,
    PIPE,
    ROW_AXES,
    TENSOR,
    WEIGHT_AXES,
    resting_axes,
)

# Array axis -> mesh axes it is split over at rest, as far as `axes.resting_axes` finds that its size allows.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ROW_AXES,
    "position": (CONTEXT,),
    "stage": (PIPE,),  # slots of a pipeline's devices, in a stack of layers
    "model_weight": WEIGHT_AXES,  # model (or vision) width of a dense weight
    "rank_weight": WEIGHT_AXES,  # latent width of a low-rank projection's second factor
    "vocabulary": (TENSOR,),
    "heads": (TENSOR,),
    "hidden": (TENSOR,),  # width between the two halves of a dense MLP
    **{ARRAY_AXIS_OF_EXPERTS[choice]: mesh_axes for choice, mesh_axes in MESH_AXES_OF_EXPERTS.items()},
    "expert_hidden": (TENSOR, FSDP),  # tensor first, so that gathering over fsdp gives one tensor shard whole
}


def spec(*array_axes: str | None) -> PartitionSpec:
    """`spec("batch", "position", None)` -> the PartitionSpec of such an array. An unknown name is a KeyError."""
    return PartitionSpec(*(RULES[axis] if axis else None for axis in array_axes))


def rests_on(array_axis: str, size: int, mesh_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that a weight's axis of `size` (over the whole mesh) rests split over."""
    return resting_axes(array_axis, RULES[array_axis], size, mesh_sizes)


def variable_spec(variable: nnx.Variable[Any], mesh_sizes: Mapping[str, int]) -> PartitionSpec:
    """PartitionSpec of a model variable on a mesh; of stacked layers' leading axis only `stack_axis` is split."""
    metadata, num_dimensions = variable.get_metadata(), variable.get_value().ndim
    array_axes, whole_shape = metadata["array_axes"], metadata["whole_shape"]
    leading = [None] * (num_dimensions - len(array_axes))
    if stack_axis := metadata.get("stack_axis"):
        leading[0] = RULES[stack_axis]
    return PartitionSpec(
        *leading,
        *(
            rests_on(axis, size, mesh_sizes) if axis else None
            for axis, size in zip(array_axes, whole_shape, strict=True)
        ),
    )


def state_specs(state: Any, mesh_sizes: Mapping[str, int]) -> Any:
    """The tree of `state` with a PartitionSpec in place of each leaf. Variables without `array_axes` are an error."""
    return jax.tree.map(
        lambda variable: variable.replace(variable_spec(variable, mesh_sizes)),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
