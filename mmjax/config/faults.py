"""`check`: all faults of a configuration at once, each with what was given and what to do."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmjax import axes
from mmjax.config.settings import MeshConfig, ModelConfig, RunConfig
from mmjax.errors import ConfigurationError

# Whole numbers are at least 1, except these, which are at least 0, ...
_MAY_BE_ZERO = {
    "seed",
    "model.full_attention.query_rank",
    "model.full_attention.shared_key_width",
    "model.moe.latent_width",
    "model.moe.num_shared_experts",
    "model.moe.num_dense_layers",
    "model.vision.num_layers",
    "data.row_patches",
    "data.prefetch_batches",
    "data.eval_samples",
    "optimizer.warmup_steps",
    "checkpoint.every_steps",
    "training.eval_every_steps",
}
# ... and fractional ones are above 0, except these: (smallest, limit), the limit itself being outside.
_RANGES = {
    "model.linear_attention.decay_lower_bound": (-math.inf, 0.0),
    "model.full_attention.indexer.loss_coefficient": (0.0, math.inf),
    "model.moe.router.sign_rate": (0.0, math.inf),
    "model.initializer_range": (0.0, math.inf),
    "optimizer.learning_rate": (0.0, math.inf),
    "optimizer.final_learning_rate_fraction": (0.0, math.inf),
    "optimizer.weight_decay": (0.0, math.inf),
    "optimizer.max_gradient_norm": (0.0, math.inf),
    "optimizer.beta1": (0.0, 1.0),
    "optimizer.beta2": (0.0, 1.0),
    "optimizer.muon_momentum": (0.0, 1.0),
}

# What `parallel/sharding.py` splits array axes over, for axes whose size is a setting (a test compares the two).
SPLIT_OVER = {
    "model_weight": axes.WEIGHT_AXES,
    "rank_weight": axes.WEIGHT_AXES,
    "vocabulary": (axes.TENSOR,),
    "heads": (axes.TENSOR,),
    "hidden": (axes.TENSOR,),
    "experts": (axes.EXPERT,),
    "expert_hidden": (axes.TENSOR, axes.FSDP),
}

# Mesh axes over which nothing is split yet, and those that can take their devices.
UNBUILT_AXES = {"mesh.pipe": "fsdp or expert", "mesh.context": "fsdp or tensor"}

# Tokens of the byte tokenizer: 256 bytes, padding, three roles, the image and the end of a message.
BYTE_TOKENIZER_SIZE = 262


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing wrong with a configuration."""

    path: str
    """Dotted name of the setting, e.g. `model.moe.num_experts`."""
    found: str
    """What was given, with the numbers that clash."""
    remedy: str
    """What is possible and what to do."""


class ConfigurationFaults(ConfigurationError):
    """All faults of one configuration."""

    def __init__(self, where: str, faults: Sequence[Fault]):
        self.faults = tuple(faults)
        super().__init__(
            where,
            found="; ".join(f"{fault.path}: {fault.found}" for fault in faults),
            expected="settings that fit together",
            remedy="; ".join(f"{fault.path}: {fault.remedy}" for fault in faults),
        )


def check(config: RunConfig) -> list[Fault]:
    """All faults of a configuration that can be seen without a device or a file.

    While a value has a wrong type or size, faults of combinations are not looked for: they would be noise.
    """
    faults = list(_value_faults(config, ""))
    if not faults:
        faults = [*_mesh_faults(config.mesh), *_model_faults(config.model), *_data_faults(config)]
        faults += [*_training_faults(config), *mesh_split_faults(config)]
    return faults


def _value_faults(config: Any, prefix: str) -> Iterator[Fault]:
    kinds = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kind, path = getattr(config, field.name), kinds[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from _value_faults(value, f"{path}.")
        elif remedy := _reason_against_value(value, kind, path):
            yield Fault(path=path, found=repr(value), remedy=remedy)


def _reason_against_value(value: Any, kind: Any, path: str) -> str | None:
    """What a value must be, if it is not that."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        nearest = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return None if value in choices else f"give one of {', '.join(choices)}{hint}"
    if typing.get_origin(kind) is tuple:
        is_good = isinstance(value, tuple) and all(type(item) is int and item >= 0 for item in value)
        return None if is_good else "give whole numbers of at least 0"
    if kind is int:
        smallest = 0 if path in _MAY_BE_ZERO else 1
        is_good = type(value) is int and (value >= smallest or (path.startswith("mesh.") and value == -1))
        open_axis = ", or -1 for all devices that are left" if path.startswith("mesh.") else ""
        return None if is_good else f"give a whole number of at least {smallest}{open_axis}"
    if kind is float:
        is_number = type(value) in (int, float) and math.isfinite(value)
        if path not in _RANGES:
            return None if is_number and value > 0 else "give a finite number above 0"
        smallest, limit = _RANGES[path]
        bounds = [f"at least {smallest:g}"] * (smallest > -math.inf) + [f"below {limit:g}"] * (limit < math.inf)
        return None if is_number and smallest <= value < limit else f"give a finite number {' and '.join(bounds)}"
    return None if type(value) is kind else {"str": "give text", "bool": "give true or false"}[kind.__name__]


def _mesh_faults(mesh: MeshConfig) -> Iterator[Fault]:
    open_axes = [name for name, size in mesh.sizes.items() if size == -1]
    if len(open_axes) > 1:
        found = f"-1 for {', '.join(open_axes)}"
        yield Fault(path="mesh", found=found, remedy="only one axis may be -1; give the others a size")
    for path, instead in UNBUILT_AXES.items():
        name = path.removeprefix("mesh.")
        if (size := mesh.sizes[name]) != 1:
            yield Fault(
                path=path,
                found=str(size),
                remedy=f"splitting over {name!r} is not built yet; use {name}=1 and put the devices on {instead}",
            )


def _model_faults(model: ModelConfig) -> Iterator[Fault]:
    moe, layers = model.moe, model.full_attention_layers
    if bad := [layer for layer in layers if layer >= model.num_layers]:
        yield Fault(
            path="model.full_attention_layers",
            found=f"{bad} with num_layers={model.num_layers}",
            remedy=f"layers are counted from 0: give numbers up to {model.num_layers - 1}",
        )
    if len(set(layers)) < len(layers):
        yield Fault(path="model.full_attention_layers", found=f"{layers}", remedy="give each layer once")
    if moe.num_dense_layers > model.num_layers:
        found = f"{moe.num_dense_layers} with num_layers={model.num_layers}"
        yield Fault(path="model.moe.num_dense_layers", found=found, remedy=f"give at most {model.num_layers}")
    if moe.num_dense_layers < model.num_layers:
        yield from _router_faults(model)
    if model.vision.is_present and model.vision.channels not in (1, 3):
        found = str(model.vision.channels)
        yield Fault(path="model.vision.channels", found=found, remedy="give 1 (grey) or 3 (colour)")
    if model.vision.is_present and model.vision.head_width % 4:
        found, remedy = str(model.vision.head_width), "give a multiple of 4: rotary pairs alternate between two axes"
        yield Fault(path="model.vision.head_width", found=found, remedy=remedy)


def _router_faults(model: ModelConfig) -> Iterator[Fault]:
    moe, router = model.moe, model.moe.router
    if moe.num_experts % router.num_groups:
        yield Fault(
            path="model.moe.router.num_groups",
            found=f"{router.num_groups} with num_experts={moe.num_experts}",
            remedy=f"give a divisor of {moe.num_experts}: {_divisors(moe.num_experts)}",
        )
        return
    if router.top_groups > router.num_groups:
        found = f"{router.top_groups} with num_groups={router.num_groups}"
        yield Fault(path="model.moe.router.top_groups", found=found, remedy=f"give at most {router.num_groups}")
        return
    reachable = moe.num_experts // router.num_groups * router.top_groups
    # Quantile balancing compares with the best expert that was not taken.
    largest = reachable - 1 if router.balancing == "quantile" else reachable
    if moe.experts_per_token > largest:
        yield Fault(
            path="model.moe.experts_per_token",
            found=f"{moe.experts_per_token} of {reachable} experts a token may take, balancing={router.balancing!r}",
            remedy=f"give at most {largest}, or more experts",
        )


def _data_faults(config: RunConfig) -> Iterator[Fault]:
    data, model = config.data, config.model
    shards = config.mesh.num_row_shards * config.training.accumulation
    if -1 not in config.mesh.sizes.values() and data.rows % shards:
        mesh, nearest = config.mesh, max(shards, data.rows // shards * shards)
        yield Fault(
            path="data.rows",
            found=f"{data.rows}, split over replica={mesh.replica} x fsdp={mesh.fsdp} x expert={mesh.expert}"
            f" x accumulation={config.training.accumulation} = {shards} parts",
            remedy=f"give a multiple of {shards}, e.g. {nearest}",
        )
    if data.tokenizer == "bytes" and model.vocabulary_size < BYTE_TOKENIZER_SIZE:
        found = f"{model.vocabulary_size} with tokenizer='bytes'"
        yield Fault(path="model.vocabulary_size", found=found, remedy=f"give at least {BYTE_TOKENIZER_SIZE}")
    if model.vision.is_present:
        for name in ("row_patches", "image_max_patches"):
            if (patches := getattr(data, name)) % 4 or patches == 0:
                remedy = f"give a multiple of 4 (patches are merged 2 x 2), e.g. {max(4, patches // 4 * 4)}"
                yield Fault(path=f"data.{name}", found=str(patches), remedy=remedy)
        if data.row_patches < data.image_max_patches:
            yield Fault(
                path="data.row_patches",
                found=f"{data.row_patches} with image_max_patches={data.image_max_patches}",
                remedy="a row must hold one image: give at least image_max_patches, or lower image_max_patches",
            )
        if data.row_tokens <= data.image_max_patches // 4:
            yield Fault(
                path="data.row_tokens",
                found=f"{data.row_tokens}; one image may take {data.image_max_patches // 4} (image_max_patches / 4)",
                remedy="a row must hold one image and its text: give more, or lower image_max_patches",
            )
    elif data.source == "digits":
        found = "0 with data.source='digits', which has pictures"
        yield Fault(path="model.vision.num_layers", found=found, remedy="give at least 1, or a source without pictures")


def _training_faults(config: RunConfig) -> Iterator[Fault]:
    if config.model.parameter_dtype == "bfloat16":
        yield Fault(
            path="model.parameter_dtype",
            found="bfloat16, in which small updates of a trained weight vanish",
            remedy="give float32, with model.compute_dtype=bfloat16 for speed",
        )
    chunk = config.model.linear_attention.chunk_tokens
    if chunk < 16 or chunk & (chunk - 1):
        yield Fault(
            path="model.linear_attention.chunk_tokens",
            found=str(chunk),
            remedy="give 16 times a power of two, such as 64",
        )
    if config.model.vision.is_present and config.model.vision.width % 2:
        yield Fault(
            path="model.vision.width",
            found=str(config.model.vision.width),
            remedy="give an even number: half of it are sines of the frame, half cosines",
        )
    if config.optimizer.warmup_steps > config.training.steps:
        yield Fault(
            path="optimizer.warmup_steps",
            found=f"{config.optimizer.warmup_steps} with training.steps={config.training.steps}",
            remedy=f"give at most {config.training.steps}",
        )


def split_sizes(model: ModelConfig) -> Iterator[tuple[str, int, str]]:
    """(setting, size, array axis) of every array axis that a mesh splits and whose size is a setting."""
    linear, full, moe, vision = model.linear_attention, model.full_attention, model.moe, model.vision
    yield "model.width", model.width, "model_weight"
    yield "model.vocabulary_size", model.vocabulary_size, "vocabulary"
    if len(model.full_attention_layers) < model.num_layers:
        yield "model.linear_attention.num_heads", linear.num_heads, "heads"
    if model.full_attention_layers:
        yield "model.full_attention.num_heads", full.num_heads, "heads"
        yield "model.full_attention.latent_width", full.latent_width, "rank_weight"
        if full.query_rank:
            yield "model.full_attention.query_rank", full.query_rank, "rank_weight"
    if moe.num_dense_layers:
        yield "model.moe.dense_width", moe.dense_width, "hidden"
    if moe.num_dense_layers < model.num_layers:
        yield "model.moe.num_experts", moe.num_experts, "experts"
        yield "model.moe.expert_width", moe.expert_width, "expert_hidden"
    if vision.is_present:
        yield "model.vision.width", vision.width, "model_weight"


def mesh_split_faults(config: RunConfig) -> Iterator[Fault]:
    """Sizes that the mesh does not divide. An open axis (-1) is taken for 1."""
    for path, size, array_axis in split_sizes(config.model):
        mesh_axes = [axis for axis in SPLIT_OVER[array_axis] if config.mesh.sizes[axis] > 1]
        parts = math.prod(config.mesh.sizes[axis] for axis in mesh_axes)
        if size % parts:
            split = " x ".join(f"{axis}={config.mesh.sizes[axis]}" for axis in mesh_axes)
            larger = -(-size // parts) * parts
            yield Fault(
                path=path,
                found=f"{size} ({array_axis}) over {split}" + (f" = {parts}" if len(mesh_axes) > 1 else ""),
                remedy=f"give a multiple of {parts}, e.g. {larger}, or mesh sizes whose product divides {size}:"
                f" {_divisors(size)}",
            )


def _divisors(number: int) -> str:
    divisors = [divisor for divisor in range(1, min(number, 1024) + 1) if number % divisor == 0]
    return ", ".join(str(divisor) for divisor in divisors[:12]) + (", ..." if len(divisors) > 12 else "")
