"""`check`: all faults of a configuration at once, each with what was given and what to do."""

import math
from collections.abc import Iterator

from mmjax import axes
from mmjax.config.fault import Fault, divisors_of
from mmjax.config.model_faults import model_faults
from mmjax.config.model_settings import ModelConfig, VisionConfig
from mmjax.config.settings import MeshConfig, RunConfig
from mmjax.config.value_faults import value_faults

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


def check(config: RunConfig) -> list[Fault]:
    """All faults of a configuration that can be seen without a device or a file.

    While a value has a wrong type or size, faults of combinations are not looked for: they would be noise.
    """
    faults = list(value_faults(config, ""))
    if not faults:
        faults = [*_mesh_faults(config.mesh), *model_faults(config.model), *_data_faults(config)]
        faults += [*_training_faults(config), *_adapter_faults(config), *mesh_split_faults(config)]
        faults += _pipeline_faults(config)
    return faults


def check_model(model: ModelConfig) -> list[Fault]:
    """All faults of a model, whatever a run does with it."""
    return list(value_faults(model, "model.")) or list(model_faults(model))


def _mesh_faults(mesh: MeshConfig) -> Iterator[Fault]:
    open_axes = [name for name, size in mesh.sizes.items() if size == -1]
    if len(open_axes) > 1:
        found = f"-1 for {', '.join(open_axes)}"
        yield Fault(path="mesh", found=found, remedy="only one axis may be -1; give the others a size")
    order, number = mesh.device_order, mesh.num_devices
    if not order:
        return
    if open_axes:
        found = f"{len(order)} devices with {open_axes[0]}=-1"
        yield Fault(path="mesh.device_order", found=found, remedy="give every axis a size, or leave the order out")
    elif sorted(order) != list(range(number)):
        missing = sorted(set(range(number)) - set(order))
        found = f"{len(order)} numbers for {number} devices" + (f", none of them {missing[0]}" if missing else "")
        remedy = f"give each of 0 to {number - 1} once, or leave it out for the devices' own order"
        yield Fault(path="mesh.device_order", found=found, remedy=remedy)


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
    if model.moe.transport in ("ring", "by_node") and expert_devices > 1:
        remedy = "give all_to_all: its permutations would wait for the devices of all stages, which do other work"
        found = f"{model.moe.transport!r} with mesh.pipe={pipe}"
        yield Fault(path="model.moe.transport", found=found, remedy=remedy)
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
    if config.trained and config.lora.rank:
        found = f"{list(config.trained)} with lora.rank={config.lora.rank}, which trains adapters alone"
        yield Fault(path="trained", found=found, remedy="train the parts first, then adapters on what that run gives")
    if config.audio_weights and config.lora.rank:
        found = f"{config.audio_weights!r} with lora.rank={config.lora.rank}: a projector of random numbers, frozen"
        yield Fault(path="audio_weights", found=found, remedy="train the whole model first, or leave the tower out")
    if config.audio_weights and not model.audio.is_present:
        yield Fault(path="audio_weights", found="weights for model.audio.num_layers=0", remedy="give the tower's sizes")
    num_expert_devices = math.prod(mesh.sizes[axis] for axis in axes.MESH_AXES_OF_EXPERTS[moe.expert_axes])
    if moe.resident_experts and num_expert_devices > 1:
        found = f"{moe.resident_experts} with experts on {num_expert_devices} devices"
        remedy = "give 0: it stands for a device without the others"
        yield Fault(path="model.moe.resident_experts", found=found, remedy=remedy)
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
        yield "model.moe.num_experts", moe.num_resident_experts, axes.ARRAY_AXIS_OF_EXPERTS[moe.expert_axes]
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
                f" {divisors_of(size)}",
            )
