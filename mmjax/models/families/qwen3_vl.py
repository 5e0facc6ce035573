"""Qwen3-VL: a tower with 2-D rotation and deep features, mergers, and a Llama whose positions have three numbers."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ActivationConfig, GroupedAttentionConfig, ModelConfig, MoeConfig, VisionConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import llama
from mmjax.models.families.encoder_tensors import QWEN_NAMES, encoder_layers, linear, norm, plain
from mmjax.models.families.fields import Fields
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor, Slot, stacked_rows
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("qwen3_vl",)

TEXT_BASE = 500_000.0


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3-VL -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields, text = split_config(config)
    text.expect("model_type", "qwen3_vl_text")
    num_layers = text.take("num_hidden_layers")
    return read_parts(fields, text, MoeConfig(num_dense_layers=num_layers, dense_width=text.take("intermediate_size")))


def split_config(config: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """The fields of a config.json, and those of its text part."""
    fields = Fields(config)
    # Ids of placeholders are a matter of the processor.
    fields.ignore(
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "image_token_index"
    )
    return fields, fields.part("text_config")


def read_parts(fields: Fields, text: Fields, moe: MoeConfig) -> ModelConfig:
    """All but what `moe` holds; no field may be left over."""
    width, num_heads = text.take("hidden_size"), text.take("num_attention_heads")
    head_width = text.take("head_dim", default=None) or width // num_heads
    num_layers, has_bias = text.take("num_hidden_layers"), text.take("attention_bias", default=False)
    for name, value in (("hidden_act", "silu"), ("attention_dropout", 0.0), ("use_sliding_window", False)):
        text.expect(name, value)
    text.ignore("max_position_embeddings", "sliding_window", "max_window_layers", "rope_deltas")
    # The head is tied if the whole says so; what the text part says is about a text model alone.
    text.ignore("tie_word_embeddings")
    model = ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=text.take("vocab_size"),
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=text.take("rms_norm_eps"),
        tied_head=fields.take("tie_word_embeddings", default=False),
        initializer_range=text.take("initializer_range", default=0.02),
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads,
            num_key_heads=text.take("num_key_value_heads", default=None) or num_heads,
            head_width=head_width,
            projection_bias=has_bias,
            output_bias=has_bias,
            head_norm=True,
            rotary=read_rotary(text, head_width, default_base=TEXT_BASE).rotary,
        ),
        moe=moe,
        activation=ActivationConfig(kind="silu"),
        vision=read_tower(fields.part("vision_config"), width),
    )
    for part in (text, fields):
        part.finish()
    sections = model.grouped_attention.rotary.sections
    if sum(sections) != head_width // 2 or model.grouped_attention.rotary.section_order != "interleaved":
        raise ConfigurationError(
            "config.json: text_config.rope_parameters",
            found=f"mrope_section {list(sections)}, {model.grouped_attention.rotary.section_order}",
            expected=f"interleaved sections of {head_width // 2} pairs",
            remedy="take the config.json that belongs to the weights",
        )
    return model


def read_tower(fields: Fields, text_width: int) -> VisionConfig:
    fields.expect("model_type", "qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_vl", "qwen3_vl_moe")
    fields.expect("hidden_act", "gelu_pytorch_tanh")
    fields.expect("out_hidden_size", text_width)
    fields.expect("spatial_merge_size", 2)
    rotary = fields.part("rope_parameters")
    rotary.expect("rope_type", "axial")
    base = rotary.take("rope_theta", default=10_000.0)
    rotary.finish()
    width, num_heads, num_positions = (
        fields.take(name) for name in ("hidden_size", "num_heads", "num_position_embeddings")
    )
    num_layers, deep = fields.take("depth"), tuple(fields.take("deepstack_visual_indexes"))
    side = math.isqrt(num_positions)
    if side**2 != num_positions or list(deep) != sorted(set(deep)) or (deep and deep[-1] >= num_layers):
        raise ConfigurationError(
            "config.json: vision_config",
            found=f"num_position_embeddings {num_positions}, deepstack_visual_indexes {deep}, depth {num_layers}",
            expected="a square number of positions, and rising indexes of layers",
            remedy="take the config.json that belongs to the weights",
        )
    vision = VisionConfig(
        kind="qwen3_vl",
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        head_width=width // num_heads,
        hidden_width=fields.take("intermediate_size"),
        patch_pixels=fields.take("patch_size"),
        channels=fields.take("in_channels", default=3),
        frames_per_patch=fields.take("temporal_patch_size", default=2),
        table_rows=side,
        table_columns=side,
        norm_epsilon=1e-6,
        projector_norm_epsilon=1e-6,
        rope_base=float(base),
        deep_layers=deep,
    )
    fields.finish()
    return vision


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from llama.text_tensors(model, "model.language_model", "lm_head")
    yield from tower_tensors(model, "model.visual")


def tower_tensors(model: ModelConfig, released: str) -> Iterator[ReleasedTensor]:
    """The tower and its mergers."""
    vision = model.vision
    width, merged, heads = vision.width, vision.merged_width, vision.num_heads * vision.head_width
    patch = (width, vision.channels, vision.frames_per_patch, vision.patch_pixels, vision.patch_pixels)
    yield from linear(f"{released}.patch_embed.proj", patch, "vision.patch_embedding", bias="vision.patch_bias")
    table = (vision.table_rows * vision.table_columns, width)
    yield plain(f"{released}.pos_embed.weight", table, "vision.position_table")
    yield from encoder_layers(vision, "vision.layers", f"{released}.blocks", QWEN_NAMES)
    for layer in range(vision.num_layers):
        name, rows = f"{released}.blocks.{layer}.attn.qkv", (heads, heads, heads)
        for suffix, ending, shape, layout in (("weight", "", (width,), LINEAR), ("bias", "_bias", (), SAME)):
            slots = tuple(Slot(f"vision.layers.{part}{ending}", (layer,)) for part in ("query", "key", "value"))
            yield ReleasedTensor(f"{name}.{suffix}", (3 * heads, *shape), slots, stacked_rows(layout, *rows))
    mergers = [(f"{released}.merger", "projector.merger", ())]
    mergers += [
        (f"{released}.deepstack_merger_list.{n}", "projector.deep", (n,)) for n in range(len(vision.deep_layers))
    ]
    for name, path, index in mergers:
        yield from norm(f"{name}.norm", merged if index else width, f"{path}.norm", *index)
        yield from linear(f"{name}.linear_fc1", (merged, merged), f"{path}.up", *index, bias=f"{path}.up_bias")
        yield from linear(f"{name}.linear_fc2", (model.width, merged), f"{path}.down", *index, bias=f"{path}.down_bias")
