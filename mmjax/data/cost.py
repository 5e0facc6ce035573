"""What samples cost, as packing and balancing count it: whole numbers, so that every machine decides alike."""

import dataclasses

import numpy as np

from mmjax.config import DataConfig, ModelConfig, VisionConfig
from mmjax.data.packing import Room
from mmjax.planner.cost import audio_training_flops, training_flops, vision_training_flops

UNIT = 1024
"""Cost of a document of one token."""
# Lengths at which the cost of a token is worked out; between them it is taken as a straight line.
_LENGTHS = 64


def predicted_costs(sizes: np.ndarray, model: ModelConfig | None) -> np.ndarray:
    """int64 [n]: training FLOPs of samples of `sizes` [n, 5] (see `align.Sizes`), in 1 / UNIT of those of one token.

    Without a model, a token costs UNIT, a patch a quarter of it and a clip of sound nothing but its features' tokens.
    """
    tokens, patches, _, squared_patches, clips = (sizes[:, column].astype(np.float64) for column in range(5))
    if model is None:
        return np.rint(UNIT * tokens + UNIT / 4 * patches).astype(np.int64)
    longest = max(2, int(tokens.max(initial=2)))
    lengths = np.unique(np.geomspace(1, longest, _LENGTHS).round())
    per_token = np.array([sum(training_flops(model, int(length)).values()) for length in lengths])
    text = tokens * np.interp(tokens, lengths, per_token)
    one, two = (vision_training_flops(model, number) for number in (1, 2))
    vision = patches * (2 * one - two) + squared_patches * (two - one)
    sound = clips * audio_training_flops(model)
    return np.rint((text + vision + sound) * (UNIT / per_token[0])).astype(np.int64)


def row_room(data: DataConfig, vision: VisionConfig, model: ModelConfig | None) -> Room:
    """What a row holds, its quotas applied."""
    patches = data.row_patches if vision.is_present else 0
    of_token, of_patch = memory_weights(vision, model)
    memory = of_token * data.row_tokens + of_patch * patches
    return Room(
        tokens=data.row_tokens,
        patches=patches,
        image_patches=min(patches, int(min(1.0, data.quotas.image_memory) * memory / of_patch)),
        image_rows=min(1.0, data.quotas.image_rows),
        clips=data.row_clips,
    )


def memory_weights(vision: VisionConfig, model: ModelConfig | None) -> tuple[float, float]:
    """Numbers kept for each layer by a token and by a patch."""
    return (1.0, 0.25) if model is None else (float(model.width), float(vision.width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuotaReport:
    """What pictures take of some rows."""

    image_memory: float
    """Share of patches in the fullest row's memory, of the row where it is largest."""
    image_rows: float
    """Share of rows with pictures."""
    num_breaches: int
    """Rows above the memory quota and, if the share of rows is above its quota, one more; tolerance included."""


def quota_report(
    tokens: np.ndarray, patches: np.ndarray, data: DataConfig, vision: VisionConfig, model: ModelConfig | None
) -> QuotaReport:
    """Of rows with these `tokens` [rows] and `patches` [rows]."""
    of_token, of_patch = memory_weights(vision, model)
    memory = of_token * data.row_tokens + of_patch * (data.row_patches if vision.is_present else 0)
    shares = of_patch * patches / memory
    image_rows = float(np.mean(patches > 0)) if len(patches) else 0.0
    quotas = data.quotas
    breaches = int(np.sum(shares > quotas.image_memory + quotas.tolerance))
    return QuotaReport(
        image_memory=float(shares.max(initial=0.0)),
        image_rows=image_rows,
        num_breaches=breaches + (image_rows > quotas.image_rows + quotas.tolerance),
    )
