"""LLaVA 1.5: CLIP's tower, a two-layer projector, and a Llama."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ModelConfig, VisionConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import llama
from mmjax.models.families.encoder_tensors import CLIP_NAMES, encoder_layers, linear, norm, plain
from mmjax.models.families.fields import Fields
from mmjax.models.families.released import ReleasedTensor

MODEL_TYPES = ("llava",)

# What transformers takes where a released config is silent, as older ones are.
LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
# Mistral without a sliding window, which it has unless its config says otherwise, is a Llama.
TEXT_DEFAULTS = {
    "llama": LLAMA_DEFAULTS,
    "mistral": LLAMA_DEFAULTS | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
}
CLIP_DEFAULTS = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a LLaVA 1.5 -> our settings."""
    fields = Fields(config)
    model = read_parts(fields)
    fields.finish()
    return model


def read_parts(fields: Fields) -> ModelConfig:
    """Everything that LLaVA and LLaVA-NeXT write alike."""
    fields.expect("projector_hidden_act", "gelu")
    # Ids of placeholders and how many a picture has are a matter of the processor.
    fields.ignore("ignore_index", "image_token_index", "image_token_id", "image_seq_length", "vocab_size")
    text = fields.take("text_config", default=None) or {}
    if (kind := text.get("model_type", "llama")) not in TEXT_DEFAULTS:
        raise ConfigurationError(
            "config.json: text_config.model_type",
            found=repr(kind),
            expected=" or ".join(TEXT_DEFAULTS),
            remedy="convert a LLaVA whose text model is one of these",
        )
    is_tied = fields.take("tie_word_embeddings", default=False) or text.get("tie_word_embeddings", False)
    text = {**TEXT_DEFAULTS[kind], **text, "tie_word_embeddings": is_tied}
    text_fields = Fields(text, "config.json: text_config")
    text_fields.expect("sliding_window", None)
    model = llama.read_text(text_fields)
    vision = {**CLIP_DEFAULTS, **(fields.take("vision_config", default=None) or {})}
    vision = read_clip(Fields(vision, "config.json: vision_config"))
    layers = fields.take("vision_feature_layer", default=-2)
    layers = (layers,) if isinstance(layers, int) else tuple(layers)
    depths = tuple(layer if layer >= 0 else vision.num_layers + 1 + layer for layer in layers)
    if not depths or min(depths) < 0 or max(depths) > vision.num_layers:
        raise ConfigurationError(
            "config.json: vision_feature_layer",
            found=repr(layers),
            expected=f"numbers from {-vision.num_layers - 1} to {vision.num_layers}",
            remedy="take the config.json that belongs to the weights",
        )
    strategy = fields.take("vision_feature_select_strategy", default="default")
    fields.expect("vision_feature_select_strategy", "default", "full")
    return dataclasses.replace(
        model,
        vision=dataclasses.replace(
            vision,
            feature_depths=depths,
            class_feature="keep" if strategy == "full" else "drop",
            projector_bias=fields.take("multimodal_projector_bias", default=True),
        ),
    )


def read_clip(fields: Fields) -> VisionConfig:
    """A CLIP vision config."""
    fields.expect("model_type", "clip_vision_model")
    fields.expect("attention_dropout", 0.0)
    fields.ignore("projection_dim", "vocab_size", "initializer_factor", "dropout")
    width, num_heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    image_pixels, patch_pixels = fields.take("image_size"), fields.take("patch_size")
    activation = fields.take("hidden_act", default="quick_gelu")
    fields.expect("hidden_act", "quick_gelu", "gelu")
    vision = VisionConfig(
        kind="clip",
        num_layers=fields.take("num_hidden_layers"),
        width=width,
        num_heads=num_heads,
        head_width=width // num_heads,
        hidden_width=fields.take("intermediate_size"),
        patch_pixels=patch_pixels,
        channels=fields.take("num_channels", default=3),
        table_rows=image_pixels // patch_pixels,
        table_columns=image_pixels // patch_pixels,
        norm_epsilon=fields.take("layer_norm_eps", default=1e-5),
        activation="quick_gelu" if activation == "quick_gelu" else "gelu",
    )
    fields.finish()
    return vision


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from llama.text_tensors(model, "language_model.model", "language_model.lm_head")
    yield from tower_tensors(model.vision, "vision_tower")
    yield from projector_tensors(model)


def canonical_name(name: str) -> str:
    """Older files have the tower below `vision_model`; some are named as models of transformers are in memory."""
    if name.startswith("model.language_model."):
        name = name.replace("model.language_model.", "language_model.model.", 1)
    elif name.startswith("lm_head."):
        name = f"language_model.{name}"
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)


def tower_tensors(vision: VisionConfig, released: str) -> Iterator[ReleasedTensor]:
    width, positions = vision.width, 1 + vision.table_rows * vision.table_columns
    patch = (width, vision.channels, vision.patch_pixels, vision.patch_pixels)
    yield plain(f"{released}.embeddings.class_embedding", (width,), "vision.class_embedding")
    yield from linear(f"{released}.embeddings.patch_embedding", patch, "vision.patch_embedding")
    table = f"{released}.embeddings.position_embedding.weight"
    yield plain(table, (positions, width), "vision.position_table")
    yield from norm(f"{released}.pre_layrnorm", width, "vision.input_norm")
    yield from encoder_layers(vision, "vision.layers", f"{released}.encoder.layers", CLIP_NAMES)
    yield from norm(f"{released}.post_layernorm", width, "vision.final_norm")


def projector_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    vision, width = model.vision, model.width
    joined = len(vision.feature_depths) * vision.width
    for name, path, num_inputs in (("linear_1", "projector.up", joined), ("linear_2", "projector.down", width)):
        bias = f"{path}_bias" if vision.projector_bias else ""
        yield from linear(f"multi_modal_projector.{name}", (width, num_inputs), path, bias=bias)
