"""How many decoder layers each pipeline stage gets: equal work, towers and head counted where they stand."""

import dataclasses
import itertools
from typing import NamedTuple

from mmjax.config import LayerKind, ModelConfig, RunConfig, layer_kinds
from mmjax.planner.cost import forward_flops, vision_forward_flops
from mmjax.planner.pipeline_cut import Block, cut_pipeline


def with_stages(config: RunConfig) -> RunConfig:
    """`config` with the layers of each pipeline stage, unless they are given or there is no pipeline."""
    num_stages = config.mesh.pipe * config.model.pipeline_chunks
    if config.mesh.pipe == 1 or config.model.pipeline_stages:
        return config
    model = dataclasses.replace(config.model, pipeline_stages=choose_stages(config, num_stages))
    return dataclasses.replace(config, model=model)


def choose_stages(config: RunConfig, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, so that the slowest has least to do: FLOPs of a row, forward.

    The first stage has the vision tower, unless all stages share its work, and all layers that its deep features are
    added to; the last one the head.
    """
    parts, together = part_flops(config), max(1, len(config.model.vision.deep_layers))
    work = list(parts.layers)
    if config.training.pipeline_edges == "first_stage":
        work[0] += parts.tower
    work[-1] += parts.head
    blocks = [Block(name="first layers", seconds=sum(work[:together]))]
    blocks += [Block(name=f"layer {together + n}", seconds=seconds) for n, seconds in enumerate(work[together:])]
    ends = [0, *(boundary + together - 1 for boundary in cut_pipeline(blocks, num_stages).boundaries[1:])]
    return tuple(end - start for start, end in itertools.pairwise(ends))


class PartFlops(NamedTuple):
    """FLOPs of a row's forward pass on one device of a stage: what `tensor` splits is its share."""

    layers: tuple[float, ...]
    tower: float
    head: float


def part_flops(config: RunConfig) -> PartFlops:
    """Those of each decoder layer, of the vision tower with its projector, and of the head."""
    model, data = config.model, config.data
    by_kind = {kind: _layer_flops(model, kind, data.row_tokens) for kind in set(layer_kinds(model))}
    tower = vision_forward_flops(model, data.image_max_patches) * data.row_patches if model.vision.is_present else 0.0
    of_token = data.row_tokens / config.mesh.tensor
    return PartFlops(
        layers=tuple(by_kind[kind] * of_token for kind in layer_kinds(model)),
        # Whole on every device of the tensor axis.
        tower=tower,
        head=forward_flops(model, data.row_tokens)["head"] * of_token,
    )


def _layer_flops(model: ModelConfig, kind: LayerKind, row_tokens: int) -> float:
    """Of one position, in one layer of a kind."""
    mixer, mlp = kind
    one = dataclasses.replace(
        model,
        num_layers=1,
        full_attention_layers=(0,) if mixer == "full" else (),
        moe=dataclasses.replace(model.moe, num_dense_layers=int(mlp == "dense")),
    )
    return sum(flops for part, flops in forward_flops(one, row_tokens).items() if part != "head")
