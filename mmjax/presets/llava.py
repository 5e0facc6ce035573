"""LLaVA 1.5 and LLaVA-NeXT: sizes, and how their processors turn a picture into tiles, patches and placeholders."""

import dataclasses

import numpy as np

from mmjax.config import (
    ActivationConfig,
    GroupedAttentionConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    VisionConfig,
)

# A placeholder that the learned newline stands in for, among numbers of features.
NEWLINE = -2

PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Pixels are (x / 255 - mean) / deviation, by channel."""

NEXT_TILINGS = (1, 2, 2, 1, 2, 2, 3, 1, 1, 3)
"""Rows, columns, rows, columns, ... of the tilings that LLaVA-NeXT may cut a picture into."""


def llava_1_5_7b() -> ModelConfig:
    """LLaVA 1.5 on Vicuna 7B, 7.06 B parameters.

    Source: config.json of llava-hf/llava-1.5-7b-hf; LLaVA-1.5, arXiv:2310.03744.
    """
    return ModelConfig(
        width=4096,
        num_layers=32,
        vocabulary_size=32_064,
        full_attention_layers=tuple(range(32)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=1e-5,
        grouped_attention=GroupedAttentionConfig(
            num_heads=32, num_key_heads=32, head_width=128, rotary=RotaryConfig(width=128)
        ),
        moe=MoeConfig(num_dense_layers=32, dense_width=11_008),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(
            kind="clip",
            num_layers=24,
            width=1024,
            num_heads=16,
            head_width=64,
            hidden_width=4096,
            patch_pixels=14,
            table_rows=24,
            table_columns=24,
            norm_epsilon=1e-5,
            activation="quick_gelu",
            feature_depths=(23,),
        ),
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
    )


def llava_next_vicuna_7b() -> ModelConfig:
    """LLaVA-NeXT (1.6) on Vicuna 7B.

    Source: config.json of llava-hf/llava-v1.6-vicuna-7b-hf.
    """
    model = llava_1_5_7b()
    vision = dataclasses.replace(model.vision, newline="learned", tilings=NEXT_TILINGS)
    return dataclasses.replace(model, vision=vision)


def covering_size(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width) of a picture of LLaVA 1.5 scaled so that its shorter side is `side`; its middle is cut out."""
    shorter, longer = sorted((height, width))
    scaled = int(side * longer / shorter)
    return (side, scaled) if height <= width else (scaled, side)


def best_tiling(height: int, width: int, tilings: tuple[int, ...], side: int) -> tuple[int, int]:
    """(rows, columns) of the tiling that keeps most of a picture's pixels; among equal ones that with least padding."""

    def merit(tiling: tuple[int, int]) -> tuple[int, int]:
        rows, columns = tiling
        scale = min(columns * side / width, rows * side / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - rows * columns * side**2

    return max(zip(tilings[::2], tilings[1::2], strict=True), key=merit)


def fitted_size(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """(height, width) of a picture scaled to fit the target, the rest of which is padded black on both sides."""
    by_width, by_height = target_width / width, target_height / height
    if by_width < by_height:
        return min(-int(-height * by_width // 1), target_height), target_width
    return target_height, min(-int(-width * by_height // 1), target_width)


def tile_slots(height: int, width: int, vision: VisionConfig, tiling: tuple[int, int]) -> np.ndarray:
    """For each placeholder of a picture cut by `tiling` the patch slot that stands in its place, or NEWLINE.

    The slots of a picture are those of the whole picture (its class token, then its patches), then those of each tile.
    Features are those of the whole picture, then those of the tiles, row by row over all of them, without the rows or
    columns that only hold padding, and a newline after each row.
    """
    rows, columns = vision.table_rows, vision.table_columns
    per_tile = 1 + rows * columns
    row, column = np.arange(tiling[0] * rows)[:, None], np.arange(tiling[1] * columns)[None]
    tile = 1 + row // rows * tiling[1] + column // columns
    slots = tile * per_tile + 1 + row % rows * columns + column % columns
    top, left = _padding(height, width, *slots.shape)
    slots = slots[top : slots.shape[0] - top, left : slots.shape[1] - left]
    lines = np.pad(slots, ((0, 0), (0, 1)), constant_values=NEWLINE)
    return np.concatenate([np.arange(1, per_tile), lines.reshape(-1)]).astype(np.int32)


def _padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """How many of `rows` at either end, and of `columns`, hold padding only."""
    # Rounded to 7 places before it is cut, as the released processors do: 6.9999999 patches are 7.
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2
