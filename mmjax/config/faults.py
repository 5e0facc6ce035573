"""`check`: all faults of a configuration at once, each with what was given and what to do."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmjax import axes
from mmjax.config.settings import (
    AudioConfig,
    FullAttentionConfig,
    GroupedAttentionConfig,
    MeshConfig,
    ModelConfig,
    RematResult,
    RotaryConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.errors import ConfigurationError

_WITH_ROTATION = ("grouped_attention", "full_attention", "full_attention.indexer")
# Whole numbers are at least 1, except these, which are at least 0, ...
_MAY_BE_ZERO = {
    "seed",
    "lora.rank",
    "lora.expert_rank",
    "model.full_attention.query_rank",
    "model.full_attention.shared_key_width",
    *(f"model.{name}.rotary.{size}" for name in _WITH_ROTATION for size in ("width", "original_positions")),
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
    "model.moe.router.balance_coefficient": (0.0, math.inf),
    "model.moe.router.z_coefficient": (0.0, math.inf),
    "model.initializer_range": (0.0, math.inf),
    "data.max_bad_share": (0.0, 1.0),
    "data.video.largest_stretch": (1.0, math.inf),
    "data.video.pad_value": (-math.inf, math.inf),
    "data.quotas.tolerance": (0.0, 1.0),
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
    "spread_experts": (axes.CONTEXT, axes.EXPERT),
    "expert_hidden": (axes.TENSOR, axes.FSDP),
}

# Inputs that share a scale in MXFP4.
MXFP4_GROUP = 32

# Tokens of the byte tokenizer: 256 bytes, padding, three roles, the image and the end of a message.
BYTE_TOKENIZER_SIZE = 263


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
        faults += [*_training_faults(config), *_adapter_faults(config), *mesh_split_faults(config)]
        faults += _pipeline_faults(config)
    return faults


def check_model(model: ModelConfig) -> list[Fault]:
    """All faults of a model, whatever a run does with it."""
    return list(_value_faults(model, "model.")) or list(_model_faults(model))


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
    if model.residual == "hyper" and model.vision.deep_layers:
        remedy = "features of a tower join one running sum: give residual='plain' or 'attention'"
        yield Fault(path="model.residual", found="'hyper' with model.vision.deep_layers", remedy=remedy)
    net, has_linear = model.gated_delta_net, len(set(layers)) < model.num_layers
    if has_linear and model.linear_attention_kind == "gated_delta_net" and net.num_value_heads % net.num_key_heads:
        yield Fault(
            path="model.gated_delta_net.num_key_heads",
            found=f"{net.num_key_heads} with num_value_heads={net.num_value_heads}",
            remedy=f"give a divisor of {net.num_value_heads}: {_divisors(net.num_value_heads)}",
        )
    if model.full_attention_layers and model.full_attention_kind == "grouped":
        yield from _grouped_attention_faults(model.grouped_attention)
    elif model.full_attention_layers:
        yield from _latent_attention_faults(model.full_attention)
    yield from _remat_faults(model)
    if model.vision.is_present:
        yield from _vision_faults(model)
    if model.audio.is_present:
        yield from _audio_faults(model.audio)


def _remat_faults(model: ModelConfig) -> Iterator[Fault]:
    known = typing.get_args(RematResult)
    for path, names in (("model.remat_keep", model.remat_keep), ("model.remat_offload", model.remat_offload)):
        if unknown := [name for name in names if name not in known]:
            yield Fault(path=path, found=f"{unknown}", remedy=f"give some of {', '.join(known)}")
        elif names and model.remat == "none":
            yield Fault(path=path, found=f"{list(names)} with remat=none", remedy="everything is kept: give none")
    if twice := set(model.remat_keep) & set(model.remat_offload):
        found, remedy = f"{sorted(twice)} in remat_keep too", "keep each result in one place"
        yield Fault(path="model.remat_offload", found=found, remedy=remedy)


def _vision_faults(model: ModelConfig) -> Iterator[Fault]:
    vision = model.vision
    if vision.channels not in (1, 3):
        found = str(vision.channels)
        yield Fault(path="model.vision.channels", found=found, remedy="give 1 (grey) or 3 (colour)")
    for name in ("pixel_mean", "pixel_deviation"):
        numbers = getattr(vision, name)
        is_zero = name == "pixel_deviation" and any(number <= 0 for number in numbers)
        if len(numbers) not in (0, vision.channels) or is_zero:
            remedy = f"give {vision.channels} numbers{' above 0' * is_zero}, one for each channel, or none"
            yield Fault(path=f"model.vision.{name}", found=str(list(numbers)), remedy=remedy)
    if vision.max_pixels and vision.max_pixels < (smallest := max(vision.min_pixels, 4 * vision.patch_pixels**2)):
        yield Fault(
            path="model.vision.max_pixels",
            found=f"{vision.max_pixels} with min_pixels={vision.min_pixels}, patch_pixels={vision.patch_pixels}",
            remedy=f"give at least {smallest}, or 0",
        )
    if vision.patches_per_feature == 4 and vision.head_width % 4:
        found, remedy = str(vision.head_width), "give a multiple of 4: rotary pairs alternate between two axes"
        yield Fault(path="model.vision.head_width", found=found, remedy=remedy)
    if vision.kind == "moonvit" and vision.width % 2:
        remedy = "give an even number: half of it are sines of the frame, half cosines"
        yield Fault(path="model.vision.width", found=str(vision.width), remedy=remedy)
    depths, deep = vision.feature_depths, vision.deep_layers
    if vision.kind == "clip" and (not depths or max(depths) > vision.num_layers):
        found = f"{list(depths)} with num_layers={vision.num_layers}"
        remedy = f"give one or more depths of at most {vision.num_layers}"
        yield Fault(path="model.vision.feature_depths", found=found, remedy=remedy)
    if len(vision.tilings) % 2 or 0 in vision.tilings:
        found, remedy = str(list(vision.tilings)), "give rows, columns, rows, columns, ... of at least 1"
        yield Fault(path="model.vision.tilings", found=found, remedy=remedy)
    if vision.tilings and (vision.newline == "none" or vision.class_feature == "keep"):
        yield Fault(
            path="model.vision.tilings",
            found=f"{list(vision.tilings)} with newline={vision.newline!r}, class_feature={vision.class_feature!r}",
            remedy="rows of a tiled picture end with a newline and have no class tokens: give newline='learned' and"
            " class_feature='drop'",
        )
    if deep and (list(deep) != sorted(set(deep)) or deep[-1] >= vision.num_layers or len(deep) > model.num_layers):
        yield Fault(
            path="model.vision.deep_layers",
            found=f"{list(deep)} with num_layers={vision.num_layers} and {model.num_layers} decoder layers",
            remedy=f"give rising numbers below {vision.num_layers}, no more than there are decoder layers",
        )
    if deep and vision.kind != "qwen3_vl":
        found = f"{list(deep)} with kind={vision.kind!r}"
        yield Fault(path="model.vision.deep_layers", found=found, remedy="leave it empty, or give kind='qwen3_vl'")
    if model.grouped_attention.rotary.sections and vision.kind != "qwen3_vl":
        yield Fault(
            path="model.grouped_attention.rotary.sections",
            found=f"{list(model.grouped_attention.rotary.sections)} with model.vision.kind={vision.kind!r}",
            remedy="only windows of qwen3_vl have rows and columns that turn tokens: leave it empty",
        )


def _audio_faults(audio: AudioConfig) -> Iterator[Fault]:
    step = 2 * audio.values_per_feature
    if audio.clip_frames % step:
        yield Fault(
            path="model.audio.clip_frames",
            found=f"{audio.clip_frames} with values_per_feature={audio.values_per_feature}",
            remedy=f"give a multiple of {step}: two frames make a value, values_per_feature of them a feature",
        )


def _grouped_attention_faults(grouped: GroupedAttentionConfig) -> Iterator[Fault]:
    path = "model.grouped_attention"
    if grouped.num_heads % grouped.num_key_heads:
        yield Fault(
            path=f"{path}.num_key_heads",
            found=f"{grouped.num_key_heads} with num_heads={grouped.num_heads}",
            remedy=f"give a divisor of {grouped.num_heads}: {_divisors(grouped.num_heads)}",
        )
    yield from _rotary_faults(grouped.rotary, f"{path}.rotary", grouped.head_width)


def _latent_attention_faults(full: FullAttentionConfig) -> Iterator[Fault]:
    if full.rotary.width not in (0, full.shared_key_width):
        yield Fault(
            path="model.full_attention.rotary.width",
            found=f"{full.rotary.width} with shared_key_width={full.shared_key_width}",
            remedy="give the same, or 0 to turn nothing",
        )
    yield from _rotary_faults(full.rotary, "model.full_attention.rotary", full.shared_key_width)
    indexer = full.indexer
    if indexer.stage != "none":
        yield from _rotary_faults(indexer.rotary, "model.full_attention.indexer.rotary", indexer.head_width)


def _rotary_faults(rotary: RotaryConfig, path: str, largest_width: int) -> Iterator[Fault]:
    if rotary.width % 2 or rotary.width > largest_width:
        remedy = f"give an even number of at most {largest_width}"
        yield Fault(path=f"{path}.width", found=str(rotary.width), remedy=remedy)
    if rotary.scaling in ("llama3", "yarn") and not rotary.original_positions:
        found = f"0 with scaling={rotary.scaling!r}"
        yield Fault(path=f"{path}.original_positions", found=found, remedy="give the row length of the first training")
    if rotary.sections and (len(rotary.sections) != 3 or sum(rotary.sections) != rotary.width // 2):
        found = f"{list(rotary.sections)} with width={rotary.width}"
        remedy = f"give three numbers (frame, row, column) with the sum {rotary.width // 2}"
        yield Fault(path=f"{path}.sections", found=found, remedy=remedy)


def _router_faults(model: ModelConfig) -> Iterator[Fault]:
    moe, router = model.moe, model.moe.router
    if moe.transport == "ring" and moe.exchange_chunks > 1:
        found = f"{moe.exchange_chunks} with transport='ring'"
        yield Fault(path="model.moe.exchange_chunks", found=found, remedy="give 1: the steps of a ring are its chunks")
    if router.balancing != "none" and not router.correction_bias:
        found = f"{router.balancing!r} with correction_bias=False"
        remedy = "balancing moves that bias: give correction_bias=True, or balancing='none'"
        yield Fault(path="model.moe.router.balancing", found=found, remedy=remedy)
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
    yield from _position_split_faults(config)
    if data.tokenizer == "bytes" and model.vocabulary_size < BYTE_TOKENIZER_SIZE:
        found = f"{model.vocabulary_size} with tokenizer='bytes'"
        yield Fault(path="model.vocabulary_size", found=found, remedy=f"give at least {BYTE_TOKENIZER_SIZE}")
    if data.tokenizer == "bytes" and data.chat_template:
        remedy = "give data.tokenizer, the tokenizer.json of the same release, or leave the template out"
        yield Fault(path="data.chat_template", found="a template with tokenizer='bytes'", remedy=remedy)
    if model.vision.is_present:
        merged = model.vision.patches_per_feature
        for name in ("row_patches", "image_max_patches"):
            if (patches := getattr(data, name)) % merged or patches == 0:
                remedy = f"give a multiple of 4 (patches are merged 2 x 2), e.g. {max(4, patches // 4 * 4)}"
                yield Fault(path=f"data.{name}", found=str(patches), remedy=remedy)
        if data.image_max_patches < (smallest := smallest_picture(model.vision)):
            remedy = f"give at least {smallest}: the tower takes so many for the smallest picture"
            yield Fault(path="data.image_max_patches", found=str(data.image_max_patches), remedy=remedy)
        if data.row_patches < data.image_max_patches:
            yield Fault(
                path="data.row_patches",
                found=f"{data.row_patches} with image_max_patches={data.image_max_patches}",
                remedy="a row must hold one image: give at least image_max_patches, or lower image_max_patches",
            )
        if data.row_tokens <= (largest := largest_picture(model.vision, data.image_max_patches)):
            by = f"image_max_patches / {merged}" if merged > 1 else f"image_max_patches {data.image_max_patches}"
            yield Fault(
                path="data.row_tokens",
                found=f"{data.row_tokens}; one image may take {largest} ({by})",
                remedy="a row must hold one image and its text: give more, or lower image_max_patches",
            )
    elif data.source == "digits":
        found = "0 with data.source='digits', which has pictures"
        yield Fault(path="model.vision.num_layers", found=found, remedy="give at least 1, or a source without pictures")


def _position_split_faults(config: RunConfig) -> Iterator[Fault]:
    """Rows that the context axis does not cut into two chunks a device."""
    model, num_chunks, tokens = config.model, 2 * config.mesh.context, config.data.row_tokens
    linear = model.linear_attention if model.linear_attention_kind == "kimi_delta" else model.gated_delta_net
    # A convolution reaches no further back than into the chunk before.
    shortest = max(1, linear.convolution_width - 1)
    if config.mesh.context > 1 and (tokens % num_chunks or tokens < shortest * num_chunks):
        yield Fault(
            path="data.row_tokens",
            found=f"{tokens}, which context={num_chunks // 2} cuts into {num_chunks} chunks of at least {shortest}",
            remedy=f"give a multiple of {num_chunks}, e.g. {max(shortest, -(-tokens // num_chunks)) * num_chunks}",
        )


def smallest_picture(vision: VisionConfig) -> int:
    """Patches that a picture takes at the least."""
    if vision.kind != "clip":
        return vision.patches_per_feature
    pairs = zip(vision.tilings[::2], vision.tilings[1::2], strict=False)
    tiles = min((rows * columns for rows, columns in pairs), default=0)
    return (1 + tiles) * (1 + vision.table_rows * vision.table_columns)


def largest_picture(vision: VisionConfig, max_patches: int) -> int:
    """Positions that a picture may take, newline tokens left out."""
    if vision.kind == "clip" and not vision.tilings:
        return vision.table_rows * vision.table_columns + (vision.class_feature == "keep")
    return max_patches // vision.patches_per_feature


def _training_faults(config: RunConfig) -> Iterator[Fault]:
    if config.model.parameter_dtype == "bfloat16" and not config.lora.rank:
        yield Fault(
            path="model.parameter_dtype",
            found="bfloat16, in which small updates of a trained weight vanish",
            remedy="give float32, with model.compute_dtype=bfloat16 for speed; or train adapters with lora.rank",
        )
    for name in ("linear_attention", "gated_delta_net"):
        chunk = getattr(config.model, name).chunk_tokens
        if chunk < 16 or chunk & (chunk - 1):
            remedy = "give 16 times a power of two, such as 64"
            yield Fault(path=f"model.{name}.chunk_tokens", found=str(chunk), remedy=remedy)
    if config.optimizer.warmup_steps > config.training.steps:
        yield Fault(
            path="optimizer.warmup_steps",
            found=f"{config.optimizer.warmup_steps} with training.steps={config.training.steps}",
            remedy=f"give at most {config.training.steps}",
        )


def _pipeline_faults(config: RunConfig) -> Iterator[Fault]:
    """Stages that do not fit the model, the mesh or the schedule. An open axis (-1) may still fit."""
    model, pipe, training = config.model, config.mesh.pipe, config.training
    chunks, stages = model.pipeline_chunks, model.pipeline_stages
    if (training.pipeline_schedule == "interleaved") != (chunks > 1):
        yield Fault(
            path="model.pipeline_chunks",
            found=f"{chunks} with training.pipeline_schedule={training.pipeline_schedule!r}",
            remedy="give 2 or more with 'interleaved', 1 with any other schedule",
        )
    if pipe == -1:
        return
    if pipe == 1:
        if stages or chunks > 1:
            path, value = ("model.pipeline_stages", list(stages)) if stages else ("model.pipeline_chunks", chunks)
            remedy = "leave it out, or put devices on pipe; a run cannot change its number of stages"
            yield Fault(path=path, found=f"{value} with mesh.pipe=1", remedy=remedy)
        return
    if pipe * chunks > model.num_layers:
        found = f"{pipe} with model.num_layers={model.num_layers}" + (f" and {chunks} chunks" if chunks > 1 else "")
        yield Fault(path="mesh.pipe", found=found, remedy=f"give at most {max(1, model.num_layers // chunks)}")
    if stages and (len(stages) != pipe * chunks or sum(stages) != model.num_layers or min(stages) < 1):
        yield Fault(
            path="model.pipeline_stages",
            found=f"{list(stages)} with mesh.pipe={pipe}, pipeline_chunks={chunks}, num_layers={model.num_layers}",
            remedy=f"give {pipe * chunks} numbers of at least 1 with the sum {model.num_layers}, or leave it out",
        )
    elif stages and stages[0] < len(model.vision.deep_layers):
        remedy = f"give the first stage at least {len(model.vision.deep_layers)}: deep features are added to its layers"
        yield Fault(path="model.pipeline_stages", found=f"{list(stages)}", remedy=remedy)
    expert_devices = math.prod(config.mesh.sizes[axis] for axis in axes.MESH_AXES_OF_EXPERTS[model.moe.expert_axes])
    if model.moe.transport == "ring" and expert_devices > 1:
        remedy = "give all_to_all: a ring's permutations wait for the devices of all stages, which do other work"
        yield Fault(path="model.moe.transport", found=f"'ring' with mesh.pipe={pipe}", remedy=remedy)
    if training.pipeline_edges == "data_parallel" and training.accumulation % pipe:
        yield Fault(
            path="training.accumulation",
            found=f"{training.accumulation} with pipeline_edges='data_parallel', pipe={pipe}",
            remedy=f"give a multiple of {pipe}: each stage embeds as many micro-batches as any other",
        )
    ring = pipe * (2 if training.pipeline_transfer == "hidden" else 1)
    if chunks > 1 and training.accumulation % ring:
        yield Fault(
            path="training.accumulation",
            found=f"{training.accumulation} with pipeline_schedule='interleaved', pipe={pipe}, pipeline_transfer="
            f"{training.pipeline_transfer!r}",
            remedy=f"give a multiple of {ring}: so many micro-batches fill the ring",
        )


def _adapter_faults(config: RunConfig) -> Iterator[Fault]:
    moe, mesh, model = config.model.moe, config.mesh, config.model
    if not config.lora.targets:
        yield Fault(path="lora.targets", found="nothing", remedy="give all-linear, names or regular expressions")
    if config.audio_weights and config.lora.rank:
        found = f"{config.audio_weights!r} with lora.rank={config.lora.rank}: a projector of random numbers, frozen"
        yield Fault(path="audio_weights", found=found, remedy="train the whole model first, or leave the tower out")
    if config.audio_weights and not model.audio.is_present:
        yield Fault(path="audio_weights", found="weights for model.audio.num_layers=0", remedy="give the tower's sizes")
    if moe.expert_storage == "dense" or moe.num_dense_layers == model.num_layers:
        return
    if not config.lora.rank:
        yield Fault(
            path="model.moe.expert_storage",
            found="mxfp4, which cannot be trained, with lora.rank=0",
            remedy="train adapters with lora.rank, or give dense",
        )
    input_path, input_width = "model.moe.latent_width" if moe.latent_width else "model.width", moe.latent_width
    for path, size, parts in (
        (input_path, input_width or model.width, 1),
        ("model.moe.expert_width", moe.expert_width, max(mesh.tensor, 1)),
    ):
        if size % (MXFP4_GROUP * parts):
            over = f" and is split over tensor={parts}" if parts > 1 else ""
            yield Fault(
                path=path,
                found=f"{size}, which expert_storage=mxfp4 packs by {MXFP4_GROUP}{over}",
                remedy=f"give a multiple of {MXFP4_GROUP * parts}, or expert_storage=dense",
            )


def split_sizes(model: ModelConfig) -> Iterator[tuple[str, int, str]]:
    """(setting, size, array axis) of every array axis that a mesh must divide and whose size is a setting."""
    linear, full, moe = model.linear_attention, model.full_attention, model.moe
    yield "model.vocabulary_size", model.vocabulary_size, "vocabulary"
    if len(model.full_attention_layers) < model.num_layers:
        if model.linear_attention_kind == "kimi_delta":
            yield "model.linear_attention.num_heads", linear.num_heads, "heads"
        else:
            yield "model.gated_delta_net.num_key_heads", model.gated_delta_net.num_key_heads, "heads"
            yield "model.gated_delta_net.num_value_heads", model.gated_delta_net.num_value_heads, "heads"
    if model.full_attention_layers and model.full_attention_kind == "grouped":
        yield "model.grouped_attention.num_heads", model.grouped_attention.num_heads, "heads"
        yield "model.grouped_attention.num_key_heads", model.grouped_attention.num_key_heads, "heads"
    elif model.full_attention_layers:
        yield "model.full_attention.num_heads", full.num_heads, "heads"
    if moe.num_dense_layers:
        yield "model.moe.dense_width", moe.dense_width, "hidden"
    if moe.num_dense_layers < model.num_layers:
        yield "model.moe.num_experts", moe.num_experts, axes.ARRAY_AXIS_OF_EXPERTS[moe.expert_axes]
        yield "model.moe.expert_width", moe.expert_width, "expert_hidden"
        if moe.shared_hidden_width and moe.shared_width:
            yield "model.moe.shared_width", moe.shared_width, "hidden"


def mesh_split_faults(config: RunConfig) -> Iterator[Fault]:
    """Sizes that must be divided and that the mesh does not divide. An open axis (-1) is taken for 1."""
    for path, size, array_axis in split_sizes(config.model):
        # What is gathered at use rests whole instead.
        needed = set(SPLIT_OVER[array_axis]) - set(axes.GATHERED_AT_USE.get(array_axis, ()))
        mesh_axes = [axis for axis in SPLIT_OVER[array_axis] if axis in needed and config.mesh.sizes[axis] > 1]
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
