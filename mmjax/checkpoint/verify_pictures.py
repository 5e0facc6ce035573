"""Rows with pictures for `verify`, and the same pictures as the models of transformers take them."""

from typing import Any

import numpy as np

from mmjax.config import DataConfig, ModelConfig, VisionConfig
from mmjax.config.faults import smallest_picture
from mmjax.data.align import Document, PlacedPicture
from mmjax.data.batch import Batch
from mmjax.data.packing import PackedDocument, fill
from mmjax.data.picture_layout import cut, lay_out

# Of pictures: at most so many patches, if the tower's smallest picture allows it.
_MAX_PATCHES = 64
# (height, width) as multiples of the side of a patch: a wide one, a tall one.
_SHAPES = ((3.2, 6.5), (7.5, 4.1))
# Text before a picture, and at least so much behind it.
_BEFORE, _BEHIND = 3, 8


def pictured_rows(model: ModelConfig, image_token: int) -> tuple[Batch, dict[str, np.ndarray]] | None:
    """Two rows of tokens with a picture each, and what a transformers model gets beside the tokens.

    None where the model has no tower.
    """
    vision = model.vision
    if not vision.is_present:
        return None
    random = np.random.default_rng(0)
    budget = max(_MAX_PATCHES, 5 * smallest_picture(vision))
    sizes = [(int(rows * vision.patch_pixels), int(columns * vision.patch_pixels)) for rows, columns in _SHAPES]
    pictures = [random.integers(0, 256, (*size, vision.channels)).astype(np.uint8) for size in sizes]
    placed = [PlacedPicture(picture=p, layout=lay_out(p.shape[0], p.shape[1], vision, budget)) for p in pictures]
    patches = [cut(one, other.layout, vision) for one, other in zip(pictures, placed, strict=True)]
    length = _BEFORE + max(one.num_features for one in placed) + _BEHIND
    documents = []
    for one in placed:
        tokens = random.integers(0, model.vocabulary_size, length).astype(np.int32)
        tokens[tokens == image_token] = 0
        is_feature = np.zeros(length, bool)
        is_feature[_BEFORE : _BEFORE + one.num_features] = True
        tokens[is_feature] = one.tokens(image_token, 0, "a picture")
        documents.append(
            Document(
                where="a picture",
                tokens=tokens,
                is_supervised=np.zeros(length, bool),
                is_feature=is_feature,
                pictures=(one,),
                is_sound=np.zeros(length, bool),
                sounds=(),
                answer_start=length,
            )
        )
    room = 4 * -(-max(len(one) for one in patches) // 4)
    data = DataConfig(rows=len(placed), row_tokens=length, row_patches=room, image_max_patches=budget)
    batch = fill([[PackedDocument(*pair)] for pair in zip(documents, patches, strict=True)], data, vision, 0)
    return batch, _their_inputs(vision, placed, patches, sizes, batch)


def _their_inputs(
    vision: VisionConfig,
    placed: list[PlacedPicture],
    patches: list[np.ndarray],
    sizes: list[tuple[int, int]],
    batch: Batch,
) -> dict[str, Any]:
    if vision.kind == "fuyu":
        return {"pixel_values": np.concatenate(patches)[None]}
    if vision.kind == "qwen3_vl":
        return {
            "pixel_values": np.concatenate(patches),
            "image_grid_thw": np.stack([one.layout.grid[0] for one in placed]).astype(np.int64),
            "mm_token_type_ids": (batch.feature_index >= 0).astype(np.int64),
        }
    tiles = [_squares(one, vision) for one in patches]
    if not vision.tilings:
        return {"pixel_values": np.concatenate(tiles)}
    most = max(len(one) for one in tiles)
    padded = [np.pad(one, ((0, most - len(one)), (0, 0), (0, 0), (0, 0))) for one in tiles]
    return {"pixel_values": np.stack(padded), "image_sizes": np.array(sizes, np.int64)}


def _squares(patches: np.ndarray, vision: VisionConfig) -> np.ndarray:
    """[tiles, C, side, side] of the slots of a picture of CLIP, class tokens left out."""
    rows, columns, side = vision.table_rows, vision.table_columns, vision.patch_pixels
    cells = patches.reshape(-1, 1 + rows * columns, vision.patch_values)[:, 1:]
    cells = cells.reshape(-1, rows, columns, vision.channels, side, side).transpose(0, 3, 1, 4, 2, 5)
    return cells.reshape(len(cells), vision.channels, rows * side, columns * side)
