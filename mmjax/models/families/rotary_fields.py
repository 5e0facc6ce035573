"""Rotary settings of released configs: `rope_parameters`, or `rope_theta` and `rope_scaling` of older ones."""

import dataclasses
import math
from typing import Literal, NamedTuple

from mmjax.config import RotaryConfig
from mmjax.models.families.fields import Fields


class RotaryFields(NamedTuple):
    """What a config says of rotation."""

    rotary: RotaryConfig
    score_factor: float
    """By which models with latent attention multiply their scores: (0.1 mscale_all_dim ln(factor) + 1)^2 for yarn."""


def read_rotary(
    fields: Fields,
    head_width: int,
    *,
    pairs: Literal["half", "interleaved"] = "half",
    partial_factor: float = 1.0,
    default_base: float = 10_000.0,
) -> RotaryFields:
    """The rotation of heads of `head_width` entries, of which a share turns (`partial_factor` unless the config says).

    Raises:
      ConfigurationError: a kind of scaling that is not built, or a field that is not understood.
    """
    given = fields.take("rope_parameters", default=None)
    if given:
        # Written a second time, under its older name, by some tools.
        fields.expect("rope_scaling", None, given)
    part = fields.part("rope_parameters" if given else "rope_scaling")
    kinds = ("default", "linear", "llama3", "yarn", "mrope")
    part.expect("rope_type", *kinds)
    part.expect("type", *kinds)
    kind = part.take("rope_type", "type", default="default")
    base = fields.take("rope_theta", default=None) or default_base
    if inner_base := part.take("rope_theta", default=None):
        fields.expect("rope_theta", inner_base, None)
        base = inner_base
    share = fields.take("partial_rotary_factor", default=None) or partial_factor
    longest = fields.take("max_position_embeddings", default=0)
    original = part.take("original_max_position_embeddings", default=None) or longest
    rotary = RotaryConfig(
        width=int(head_width * (part.take("partial_rotary_factor", default=None) or share)),
        base=float(base),
        pairs=pairs,
        sections=tuple(part.take("mrope_section", default=())),
        section_order="interleaved" if part.take("mrope_interleaved", default=False) else "blocks",
    )
    score_factor = 1.0
    match kind:
        case "linear":
            rotary = dataclasses.replace(rotary, scaling="linear", factor=float(part.take("factor")))
        case "llama3":
            rotary = dataclasses.replace(
                rotary,
                scaling="llama3",
                factor=float(part.take("factor")),
                original_positions=original,
                low_frequency_factor=float(part.take("low_freq_factor")),
                high_frequency_factor=float(part.take("high_freq_factor")),
            )
        case "yarn":
            factor = float(part.take("factor", default=None) or longest / original)
            scale, scale_all = part.take("mscale", default=None), part.take("mscale_all_dim", default=None)
            attention_factor = part.take("attention_factor", default=None)
            if attention_factor is None:
                both = scale and scale_all
                attention_factor = _sharpening(factor, scale) / _sharpening(factor, scale_all) if both else None
            rotary = dataclasses.replace(
                rotary,
                scaling="yarn",
                factor=factor,
                original_positions=original,
                beta_fast=float(part.take("beta_fast", default=None) or 32),
                beta_slow=float(part.take("beta_slow", default=None) or 1),
                truncate=part.take("truncate", default=True),
                attention_factor=float(_sharpening(factor) if attention_factor is None else attention_factor),
            )
            score_factor = _sharpening(factor, scale_all) ** 2 if scale_all else 1.0
    part.finish()
    return RotaryFields(rotary, score_factor)


def _sharpening(factor: float, scale: float = 1.0) -> float:
    """How much yarn multiplies for rows `factor` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
