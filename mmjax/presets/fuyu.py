"""Fuyu: sizes, and how its processor turns a picture into patches, placeholders and newlines."""

import math

from mmjax.config import GroupedAttentionConfig, ModelConfig, MoeConfig, RotaryConfig, VisionConfig

PIXEL_MEAN = (0.5, 0.5, 0.5)
PIXEL_DEVIATION = (0.5, 0.5, 0.5)
"""Pixels are (x / 255 - mean) / deviation, by channel."""

MAX_HEIGHT = 1080
MAX_WIDTH = 1920
"""A larger picture is scaled down."""

PADDING_PIXEL = 1
"""Value, from 0 to 255, of what is padded at the bottom and at the right to whole patches."""


def fuyu_8b() -> ModelConfig:
    """Fuyu-8B: 9.4 B parameters.

    Source: config.json of adept/fuyu-8b.
    """
    return ModelConfig(
        width=4096,
        num_layers=36,
        vocabulary_size=262_144,
        full_attention_layers=tuple(range(36)),
        full_attention_kind="grouped",
        residual="plain",
        norm="layer",
        norm_epsilon=1e-5,
        dense_mlp="relu_squared",
        mlp_bias=True,
        grouped_attention=GroupedAttentionConfig(
            num_heads=64,
            num_key_heads=64,
            head_width=64,
            projection_bias=True,
            output_bias=True,
            head_norm=True,
            rotary=RotaryConfig(width=32, base=25_000.0),
        ),
        moe=MoeConfig(num_dense_layers=36, dense_width=16_384),
        vision=VisionConfig(kind="fuyu", patch_pixels=30),
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
    )


def fitted_size(height: int, width: int, max_height: int = MAX_HEIGHT, max_width: int = MAX_WIDTH) -> tuple[int, int]:
    """(height, width) of a picture scaled down to fit, its shape kept; a smaller one is left as it is."""
    if width <= max_width and height <= max_height:
        return height, width
    scale = min(max_height / height, max_width / width)
    return int(height * scale), int(width * scale)


def grid(height: int, width: int, patch_pixels: int = 30) -> tuple[int, int]:
    """(rows, columns) of patches of a fitted picture after padding; a newline token ends each row."""
    return math.ceil(height / patch_pixels), math.ceil(width / patch_pixels)
