"""The batch: what the data pipeline hands to the model."""

import hashlib
from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """B packed rows of S positions, P image patches and C clips of sound.

    NumPy arrays from the loader, JAX arrays inside the step.

    Documents of a row are numbered 1, 2, ... and so are its images; 0 is padding. Images stand in the order of their
    placeholders. What a patch and a feature are depends on the tower:

    moonvit, qwen3_vl   four consecutive patches are one 2x2 group ((0, 0), (0, 1), (1, 0), (1, 1)), groups row-major
                        within an image, and give one feature: that of the group's number
    clip                an image (or tile) is a slot for its class token, at (0, -1, -1), then its patches row by row;
                        slot p gives feature p, and feature P is the learned newline
    fuyu                patches row by row; patch p gives feature p

    Pixels are normalised as the tower's processor does, a patch flattened to [C, p, p]; of qwen3_vl to
    [C, frames, p, p], of fuyu to [p, p, C].
    """

    tokens: Any
    """[B, S] int32."""
    targets: Any
    """[B, S] int32: the next token of the same document."""
    loss_weight: Any
    """[B, S] float32: 1 where the target belongs to an answer (its end token included), else 0."""
    segment_ids: Any
    """[B, S] int32: the document of each position."""
    positions: Any
    """[B, S] int32: position within the document."""
    feature_index: Any
    """[B, S] int32: feature of the row that stands in place of this token's embedding; -1 none."""
    patches: Any
    """[B, P, values of a patch] float32."""
    patch_segment_ids: Any
    """[B, P] int32: the image (or tile) of each patch."""
    patch_position: Any
    """[B, P, 3] int32: frame, row and column within the image, in patches."""
    patch_grid: Any
    """[B, P, 3] int32: frames, rows and columns of the image; ones in padding, so that dividing by it is safe."""
    patch_feature: Any
    """[B, P/4] int32: feature that each 2x2 group gives; -1 in padding, and where patches are not merged."""
    spectrograms: Any
    """[B, C, frames, bins] float32: clips of sounds in the order of their placeholders; unused ones hold silence."""
    sound_index: Any
    """[B, S] int32: feature of the row's clips that stands in place of this token's embedding; -1 none."""


def digest(batch: Batch) -> str:
    """SHA-256 over names, dtypes, shapes and values."""
    total = hashlib.sha256()
    for name, array in zip(batch._fields, batch, strict=True):
        array = np.ascontiguousarray(array)
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def supervised_tokens(batch: Batch) -> int:
    """How many targets count in the loss."""
    return int(np.count_nonzero(np.asarray(batch.loss_weight)))


def fill_rate(batch: Batch) -> float:
    """Share of the positions that hold a document."""
    return float(np.mean(np.asarray(batch.segment_ids) > 0))
