"""Faults of combinations of a model's settings."""

import typing
from collections.abc import Iterator

from mmjax.config.fault import Fault, divisors_of
from mmjax.config.model_settings import (
    AudioConfig,
    FullAttentionConfig,
    GroupedAttentionConfig,
    ModelConfig,
    RematResult,
    RotaryConfig,
)


def model_faults(model: ModelConfig) -> Iterator[Fault]:
    """Settings of a model that do not fit together."""
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
            remedy=f"give a divisor of {net.num_value_heads}: {divisors_of(net.num_value_heads)}",
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
    if vision.transparency == "chessboard" and (vision.kind != "moonvit" or vision.channels != 3):
        found = f"chessboard with kind={vision.kind}, channels={vision.channels}"
        yield Fault(path="model.vision.transparency", found=found, remedy="give white, or a moonvit tower of colours")
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
            remedy=f"give a divisor of {grouped.num_heads}: {divisors_of(grouped.num_heads)}",
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
    if moe.transport in ("ring", "by_node") and moe.exchange_chunks > 1:
        found = f"{moe.exchange_chunks} with transport={moe.transport!r}"
        parts = "the steps of a ring" if moe.transport == "ring" else "what comes from each node"
        yield Fault(path="model.moe.exchange_chunks", found=found, remedy=f"give 1: {parts} are its chunks")
    if moe.resident_experts and moe.num_experts % moe.resident_experts:
        found = f"{moe.resident_experts} with num_experts={moe.num_experts}"
        remedy = f"give a divisor of {moe.num_experts}: {divisors_of(moe.num_experts)}, or 0"
        yield Fault(path="model.moe.resident_experts", found=found, remedy=remedy)
    if router.balancing != "none" and not router.correction_bias:
        found = f"{router.balancing!r} with correction_bias=False"
        remedy = "balancing moves that bias: give correction_bias=True, or balancing='none'"
        yield Fault(path="model.moe.router.balancing", found=found, remedy=remedy)
    if moe.num_experts % router.num_groups:
        yield Fault(
            path="model.moe.router.num_groups",
            found=f"{router.num_groups} with num_experts={moe.num_experts}",
            remedy=f"give a divisor of {moe.num_experts}: {divisors_of(moe.num_experts)}",
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
