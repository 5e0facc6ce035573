"""Faults of single values: their type and range."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator
from typing import Any, Literal

from mmjax.config.fault import Fault

_WITH_ROTATION = ("grouped_attention", "full_attention", "full_attention.indexer")
# Whole numbers are at least 1, except these, which are at least 0, ...
_MAY_BE_ZERO = {
    "seed",
    "lora.rank",
    "lora.expert_rank",
    "model.full_attention.query_rank",
    "model.full_attention.shared_key_width",
    *(f"model.{name}.rotary.{size}" for name in _WITH_ROTATION for size in ("width", "original_positions")),
    "model.moe.resident_experts",
    "model.moe.latent_width",
    "model.moe.num_shared_experts",
    "model.moe.shared_width",
    "model.moe.num_dense_layers",
    "model.vision.num_layers",
    "model.vision.min_pixels",
    "model.vision.max_pixels",
    "model.audio.num_layers",
    "data.row_patches",
    "data.row_clips",
    "data.prefetch_batches",
    "data.max_bad_samples",
    "data.video.length",
    "data.signal.length",
    "data.eval_samples",
    "optimizer.warmup_steps",
    "checkpoint.every_steps",
    "training.eval_every_steps",
}
# JAX draws with 32 bits of it, so that larger ones would be the same as a smaller one.
_LARGEST = {"seed": 2**32 - 1}
# ... and fractional ones are above 0, except these: (smallest, limit), the limit itself being outside.
_RANGES = {
    "model.linear_attention.decay_lower_bound": (-math.inf, 0.0),
    "model.full_attention.indexer.loss_coefficient": (0.0, math.inf),
    "model.moe.router.sign_rate": (0.0, math.inf),
    "model.moe.router.balance_coefficient": (0.0, math.inf),
    "model.moe.router.z_coefficient": (0.0, math.inf),
    "model.initializer_range": (0.0, math.inf),
    "data.max_bad_share": (0.0, 1.0),
    **{f"data.{stream}.largest_stretch": (1.0, math.inf) for stream in ("video", "signal")},
    **{f"data.{stream}.pad_value": (-math.inf, math.inf) for stream in ("video", "signal")},
    "data.quotas.tolerance": (0.0, 1.0),
    "optimizer.learning_rate": (0.0, math.inf),
    "optimizer.final_learning_rate_fraction": (0.0, math.inf),
    "optimizer.weight_decay": (0.0, math.inf),
    "optimizer.max_gradient_norm": (0.0, math.inf),
    "optimizer.beta1": (0.0, 1.0),
    "optimizer.beta2": (0.0, 1.0),
    "optimizer.muon_momentum": (0.0, 1.0),
}


def value_faults(config: Any, prefix: str) -> Iterator[Fault]:
    """Values of settings whose type or size is wrong, each by its path."""
    kinds = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kind, path = getattr(config, field.name), kinds[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from value_faults(value, f"{path}.")
        elif remedy := _reason_against_value(value, kind, path):
            yield Fault(path=path, found=repr(value), remedy=remedy)


def _reason_against_value(value: Any, kind: Any, path: str) -> str | None:
    """What a value must be, if it is not that."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        nearest = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return None if value in choices else f"give one of {', '.join(choices)}{hint}"
    if kind == tuple[str, ...]:
        is_good = isinstance(value, tuple) and all(type(item) is str and item for item in value)
        return None if is_good else "give texts that are not empty"
    if kind == tuple[float, ...]:
        is_good = isinstance(value, tuple) and all(type(item) in (int, float) and math.isfinite(item) for item in value)
        return None if is_good else "give finite numbers"
    if typing.get_origin(kind) is tuple:
        is_good = isinstance(value, tuple) and all(type(item) is int and item >= 0 for item in value)
        return None if is_good else "give whole numbers of at least 0"
    if kind is int:
        smallest = 0 if path in _MAY_BE_ZERO else 1
        largest = _LARGEST.get(path, math.inf)
        is_good = type(value) is int and (smallest <= value <= largest or (path.startswith("mesh.") and value == -1))
        upper = f" and at most {largest}" if largest < math.inf else ""
        open_axis = ", or -1 for all devices that are left" if path.startswith("mesh.") else ""
        return None if is_good else f"give a whole number of at least {smallest}{upper}{open_axis}"
    if kind is float:
        is_number = type(value) in (int, float) and math.isfinite(value)
        if path not in _RANGES:
            return None if is_number and value > 0 else "give a finite number above 0"
        smallest, limit = _RANGES[path]
        bounds = [f"at least {smallest:g}"] * (smallest > -math.inf) + [f"below {limit:g}"] * (limit < math.inf)
        return None if is_number and smallest <= value < limit else f"give a finite number {' and '.join(bounds)}"
    return None if type(value) is kind else {"str": "give text", "bool": "give true or false"}[kind.__name__]
