"""Samples with pictures as batches: each in a row of its own, or several packed into one."""

import dataclasses

import numpy as np

from mmjax.data.batch import Batch

# In `Sample.feature`: not a placeholder; the learned newline.
TEXT, NEWLINE = -1, -2


@dataclasses.dataclass
class Sample:
    """One document. Patches and features are numbered from 0."""

    tokens: np.ndarray
    feature: np.ndarray
    """[n]: which feature stands in a token's place, TEXT or NEWLINE."""
    patches: np.ndarray
    """[p, values]."""
    segment: np.ndarray
    """[p]: its pictures are 1, 2, ..."""
    position: np.ndarray
    """[p, 3]."""
    grid: np.ndarray
    """[p, 3]."""


def join(pieces: list, *, values: int, patches_per_feature: int = 1) -> Sample:
    """A sample of texts (lists of tokens) and pictures (samples of their own), one after the other."""
    texts = [piece if isinstance(piece, Sample) else _text(piece, values) for piece in pieces]
    patches = np.cumsum([0] + [len(piece.patches) for piece in texts])
    pictures = np.cumsum([0] + [piece.segment.max(initial=0) for piece in texts])
    shifts = patches // patches_per_feature
    return Sample(
        tokens=np.concatenate([piece.tokens for piece in texts]),
        feature=np.concatenate(
            [np.where(p.feature >= 0, p.feature + shift, p.feature) for p, shift in zip(texts, shifts, strict=False)]
        ),
        patches=np.concatenate([piece.patches for piece in texts]),
        segment=np.concatenate([piece.segment + shift for piece, shift in zip(texts, pictures, strict=False)]),
        position=np.concatenate([piece.position for piece in texts]),
        grid=np.concatenate([piece.grid for piece in texts]),
    )


def _text(tokens: list[int], values: int) -> Sample:
    none, places = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)
    return Sample(np.asarray(tokens, np.int32), np.full(len(tokens), TEXT), np.zeros((0, values)), none, places, places)


def batch_of(
    rows: list[list[Sample]], *, values: int, patches_per_feature: int, row_tokens: int, row_patches: int
) -> Batch:
    """The rows' samples one after the other, then padding with arbitrary tokens and pixels."""
    random = np.random.default_rng(7)
    shape, slots = (len(rows), row_tokens), (len(rows), row_patches)
    batch = Batch(
        tokens=random.integers(3, 20, shape).astype(np.int32),
        targets=np.zeros(shape, np.int32),
        loss_weight=np.zeros(shape, np.float32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        feature_index=np.full(shape, -1, np.int32),
        patches=random.normal(size=(*slots, values)),
        patch_segment_ids=np.zeros(slots, np.int32),
        patch_position=np.zeros((*slots, 3), np.int32),
        patch_grid=np.ones((*slots, 3), np.int32),
        patch_feature=np.full((len(rows), row_patches // 4), -1, np.int32),
        spectrograms=np.zeros((len(rows), 0, 0, 0), np.float32),
        sound_index=np.full(shape, -1, np.int32),
    )
    for row, samples in enumerate(rows):
        token = patch = picture = 0
        for document, sample in enumerate(samples, start=1):
            length, num_patches = len(sample.tokens), len(sample.patches)
            here, there = slice(token, token + length), slice(patch, patch + num_patches)
            batch.tokens[row, here] = sample.tokens
            batch.targets[row, token : token + length - 1] = sample.tokens[1:]
            batch.loss_weight[row, token : token + length - 1] = sample.feature[1:] == TEXT
            batch.segment_ids[row, here] = document
            batch.positions[row, here] = np.arange(length)
            feature = np.where(sample.feature >= 0, sample.feature + patch // patches_per_feature, -1)
            batch.feature_index[row, here] = np.where(sample.feature == NEWLINE, row_patches, feature)
            if num_patches:
                batch.patches[row, there] = sample.patches
                batch.patch_segment_ids[row, there] = sample.segment + picture
                batch.patch_position[row, there] = sample.position
                batch.patch_grid[row, there] = sample.grid
                picture += sample.segment.max()
            token, patch = token + length, patch + num_patches
    return batch
