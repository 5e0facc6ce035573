"""What is trained: everything, or low-rank adapters over a frozen base that may be packed."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from mmjax.config import ModelConfig
from mmjax.planner.parameters import ParameterArray, is_projection, parameter_arrays, wide

# Parts whose matrices adapters are put on; routed experts besides, when they have a rank.
ADAPTED_PARTS = ("linear attention", "full attention", "dense MLP", "shared experts")


# The same, and the experts', as `lora.targets`.
ADAPTED_NAMES = (r".*\.mixer\.(?!indexer\.).*", r".*\.mlp\.(shared\.)?(gate|up|down)")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a run trains."""

    kind: Literal["full", "lora"] = "full"
    rank: int = 16
    """Of the adapters on attention, dense and shared MLPs (`lora` only)."""
    expert_rank: int = 0
    """Of the adapters on each routed expert; 0 puts none there (`lora` only)."""
    experts_at_rest: Literal["parameter_dtype", "mxfp4"] = "parameter_dtype"
    """How frozen routed experts are held (`lora` only)."""
    has_shared_down: bool = False
    """The first factor of routed experts' adapters is one for all experts of a layer (`lora` only)."""
    adapted: tuple[tuple[str, str, int], ...] | None = None
    """(part, path, layers) of what adapters are on (`lora` only); None: attention, MLPs and, with a rank, experts."""


FULL = Tuning()


def trained_arrays(model: ModelConfig, tuning: Tuning = FULL) -> list[ParameterArray]:
    """The arrays of `model` as a run holds them: with LoRA all frozen, and two adapter arrays for each adapted matrix.

        W [in..., out...] + A [in..., r] B [r, out...]:   r (inputs + outputs) entries

    A rests split as the inputs of W, B as its outputs.
    """
    arrays = parameter_arrays(model)
    if tuning.kind == "full":
        return arrays
    frozen = [
        dataclasses.replace(
            array,
            is_trained=False,
            is_packed=array.part == "routed experts" and tuning.experts_at_rest == "mxfp4",
        )
        for array in arrays
    ]
    return frozen + [adapter for array in arrays for adapter in _adapters(array, tuning)]


def _adapters(array: ParameterArray, tuning: Tuning) -> list[ParameterArray]:
    is_expert = array.part == "routed experts"
    rank = tuning.expert_rank if is_expert else tuning.rank
    if not rank or not is_projection(array.name, len(array.shape)):
        return []
    count = array.count if is_expert or array.part in ADAPTED_PARTS else 0
    if tuning.adapted is not None:
        count = sum(layers for part, path, layers in tuning.adapted if (part, path) == (array.part, array.path))
    if not count:
        return []
    stacked = int(is_expert)
    split = stacked + array.num_input_axes
    experts, expert_axes = array.shape[:stacked], array.array_axes[:stacked]
    first = stacked if tuning.has_shared_down else 0
    down = ((*array.shape[first:split], rank), (*array.array_axes[first:split], None))
    up = ((*experts, rank, *array.shape[split:]), (*expert_axes, None, *array.array_axes[split:]))
    return [
        dataclasses.replace(
            array,
            path=f"{array.path}.{name}",
            part="adapters",
            adapted_part=array.part,
            shape=shape,
            array_axes=array_axes,
            count=count,
            dtype=wide(array.dtype),
        )
        for name, (shape, array_axes) in {"down": down, "up": up}.items()
    ]
