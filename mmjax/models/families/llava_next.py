"""LLaVA-NeXT (1.6): LLaVA whose large pictures are also cut into tiles, with a learned newline after each row."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import llava
from mmjax.models.families.encoder_tensors import plain
from mmjax.models.families.fields import Fields
from mmjax.models.families.released import ReleasedTensor

MODEL_TYPES = ("llava_next",)

# (height, width) in pixels that transformers takes where a released config is silent.
DEFAULT_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a LLaVA-NeXT -> our settings."""
    fields = Fields(config)
    fields.expect("use_image_newline_parameter", True)
    # With class tokens among the features no grid of tiles can be laid out.
    fields.expect("vision_feature_select_strategy", "default")
    sizes = fields.take("image_grid_pinpoints", default=None) or DEFAULT_SIZES
    model = llava.read_parts(fields)
    fields.finish()
    side = model.vision.table_rows * model.vision.patch_pixels
    if uneven := [size for size in sizes if size[0] % side or size[1] % side]:
        raise ConfigurationError(
            "config.json: image_grid_pinpoints",
            found=f"sizes {uneven}",
            expected=f"multiples of the tower's {side} pixels",
            remedy="this model needs something that is not built",
        )
    tilings = tuple(length // side for size in sizes for length in size)
    return dataclasses.replace(model, vision=dataclasses.replace(model.vision, newline="learned", tilings=tilings))


canonical_name = llava.canonical_name


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from llava.released_tensors(model)
    yield plain("image_newline", (model.width,), "projector.newline")
