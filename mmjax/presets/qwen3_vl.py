"""Qwen3-VL: sizes, and how its processor turns a picture into patches and placeholders."""

import dataclasses
import math

from mmjax.config import (
    ActivationConfig,
    GroupedAttentionConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RouterConfig,
    VisionConfig,
)

PIXEL_MEAN = (0.5, 0.5, 0.5)
PIXEL_DEVIATION = (0.5, 0.5, 0.5)
"""Pixels are (x / 255 - mean) / deviation, by channel."""

MIN_PIXELS = 65_536
MAX_PIXELS = 16_777_216
"""A picture is scaled to between so many pixels."""

MAX_ASPECT = 200


def _tower(width: int, hidden_width: int, num_layers: int, deep_layers: tuple[int, ...]) -> VisionConfig:
    return VisionConfig(
        kind="qwen3_vl",
        num_layers=num_layers,
        width=width,
        num_heads=16,
        head_width=width // 16,
        hidden_width=hidden_width,
        patch_pixels=16,
        frames_per_patch=2,
        table_rows=48,
        table_columns=48,
        norm_epsilon=1e-6,
        projector_norm_epsilon=1e-6,
        deep_layers=deep_layers,
    )


def _text(width: int, num_layers: int, num_heads: int, num_key_heads: int, moe: MoeConfig) -> ModelConfig:
    rotary = RotaryConfig(width=128, base=5_000_000.0, sections=(24, 20, 20), section_order="interleaved")
    return ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=151_936,
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=1e-6,
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads, num_key_heads=num_key_heads, head_width=128, head_norm=True, rotary=rotary
        ),
        moe=moe,
        activation=ActivationConfig(kind="silu"),
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
    )


def qwen3_vl_4b() -> ModelConfig:
    """Qwen3-VL-4B.

    Source: config.json of Qwen/Qwen3-VL-4B-Instruct.
    """
    text = _text(2560, 36, 32, 8, MoeConfig(num_dense_layers=36, dense_width=9728))
    return dataclasses.replace(text, tied_head=True, vision=_tower(1024, 4096, 24, (5, 11, 17)))


def qwen3_vl_30b_a3b() -> ModelConfig:
    """Qwen3-VL-30B-A3B: 128 experts, 8 for each token.

    Source: config.json of Qwen/Qwen3-VL-30B-A3B-Instruct.
    """
    moe = MoeConfig(
        num_experts=128,
        experts_per_token=8,
        expert_width=768,
        latent_width=0,
        latent_norm=False,
        num_shared_experts=0,
        num_dense_layers=0,
        dense_width=6144,
        router=RouterConfig(scoring="softmax", balancing="none", correction_bias=False),
    )
    return dataclasses.replace(_text(2048, 48, 32, 4, moe), vision=_tower(1152, 4304, 27, (8, 16, 24)))


def fitted_size(
    height: int, width: int, *, factor: int = 32, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """(height, width) that a picture is resized to: multiples of `factor` (window side x patch side), nearly its shape.

    Rounded to the nearest multiples, and scaled where those hold more or fewer pixels than allowed.

    Raises:
      ValueError: one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"a picture of {width} x {height} pixels; one side may be at most {MAX_ASPECT} times the other"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
    return rows * factor, columns * factor
