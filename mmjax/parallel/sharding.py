"""The sharding table: which mesh axes each array axis rests on, and which of them are gathered at use."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from mmjax.axes import CONTEXT, EXPERT, FSDP, ROW_AXES, TENSOR, WEIGHT_AXES

# Array axis -> mesh axes it is split over at rest.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ROW_AXES,
    "position": (CONTEXT,),
    "model_weight": WEIGHT_AXES,  # model (or vision) width of a dense weight
    "rank_weight": WEIGHT_AXES,  # latent width of a low-rank projection's second factor
    "vocabulary": (TENSOR,),
    "heads": (TENSOR,),
    "hidden": (TENSOR,),  # width between the two halves of a dense MLP
    "experts": (EXPERT,),
    "expert_hidden": (TENSOR, FSDP),  # tensor first, so that gathering over fsdp gives one tensor shard whole
}

# Array axis -> the mesh axes of RULES that a layer gathers before it uses the weight.
GATHERED_AT_USE: dict[str, tuple[str, ...]] = {
    "model_weight": WEIGHT_AXES,
    "rank_weight": WEIGHT_AXES,
    "expert_hidden": (FSDP,),
}


def spec(*array_axes: str | None) -> PartitionSpec:
    """`spec("batch", "position", None)` -> the PartitionSpec of such an array. An unknown name is a KeyError."""
    return PartitionSpec(*(RULES[axis] if axis else None for axis in array_axes))


def variable_spec(variable: nnx.Variable[Any], num_dimensions: int) -> PartitionSpec:
    """PartitionSpec of a model variable from its `array_axes`; leading axes of stacked layers are not split."""
    array_axes = variable.get_metadata()["array_axes"]
    return spec(*(None,) * (num_dimensions - len(array_axes)), *array_axes)


def state_specs(state: Any) -> Any:
    """The tree of `state` with a PartitionSpec in place of each leaf. Variables without `array_axes` are an error."""
    return jax.tree.map(
        lambda variable: variable.replace(variable_spec(variable, variable.get_value().ndim)),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
