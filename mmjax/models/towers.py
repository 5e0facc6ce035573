"""The vision tower and projector of a model's kind, and what they give its decoder."""

from typing import NamedTuple

import jax
from flax import nnx

from mmjax.config import ModelConfig
from mmjax.data.batch import Batch
from mmjax.models.clip import ClipProjector, ClipTower
from mmjax.models.patch_projection import PatchProjection
from mmjax.models.qwen_vision import QwenMerger, QwenTower
from mmjax.models.vision import Projector, VisionTower


class VisualFeatures(NamedTuple):
    """Features of each row's pictures, in the order that `Batch.feature_index` counts them."""

    features: jax.Array
    """[b, F, D]: what stands in place of placeholder tokens."""
    deep: jax.Array | None
    """[N, b, F, D]: what is added to the outputs of the first N decoder layers there."""


def make_tower(model: ModelConfig) -> nnx.Module:
    vision, options = model.vision, (model.initializer_range, model.parameter_dtype)
    match vision.kind:
        case "moonvit":
            return VisionTower(vision, *options)
        case "clip":
            return ClipTower(vision, *options)
        case "qwen3_vl":
            return QwenTower(vision, *options)
        case "fuyu":
            return PatchProjection(vision, model.width, *options)


def make_projector(model: ModelConfig) -> nnx.Module | None:
    """None where the tower itself gives the text width."""
    vision, width, options = model.vision, model.width, (model.initializer_range, model.parameter_dtype)
    match vision.kind:
        case "moonvit":
            return Projector(vision, width, model.parameter_dtype)
        case "clip":
            return ClipProjector(vision, width, *options)
        case "qwen3_vl":
            return QwenMerger(vision, width, *options)
        case "fuyu":
            return None


def read_pictures(tower: nnx.Module, projector: nnx.Module | None, patches: jax.Array, batch: Batch) -> VisualFeatures:
    """`patches` are those of `batch` in the compute dtype; features are in it, or wider beside a learned newline."""
    segment_ids, position, grid = batch.patch_segment_ids, batch.patch_position, batch.patch_grid
    match tower, projector:
        case VisionTower(), Projector():
            hidden = tower(patches, segment_ids, position, grid, batch.patch_feature)
            return VisualFeatures(projector(hidden), None)
        case ClipTower(), ClipProjector():
            return VisualFeatures(projector(tower(patches, segment_ids, position)), None)
        case QwenTower(), QwenMerger():
            return VisualFeatures(*projector(*tower(patches, segment_ids, position, grid)))
        case PatchProjection(), None:
            return VisualFeatures(tower(patches, segment_ids), None)
    raise AssertionError(f"no such pair of tower and projector: {type(tower)}, {type(projector)}")
