"""Fuyu: patches projected straight to the width of a Persimmon, whose norms and projections have biases."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import GroupedAttentionConfig, ModelConfig, MoeConfig, VisionConfig
from mmjax.models.families import llava
from mmjax.models.families.encoder_tensors import linear, norm, plain
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors
from mmjax.models.families.released import ReleasedTensor, Slot, grouped_rows
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("fuyu",)

# Older configs write the text model's fields among those of the whole.
_OWN_FIELDS = ("image_size", "image_token_id", "model_type", "num_channels", "patch_size", "text_config")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Fuyu -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    flat = {name: value for name, value in config.items() if name not in _OWN_FIELDS}
    part = dict(config.get("text_config") or {"model_type": "persimmon", **flat})
    fields = Fields(config)
    # Pictures have any size; the id of the placeholder is a matter of the processor.
    fields.ignore("image_size", "image_token_id", "text_config", *("tie_word_embeddings", "initializer_range"))
    for name in flat.keys() & part.keys() - {"initializer_range", "tie_word_embeddings"}:
        fields.expect(name, part[name])
    vision = VisionConfig(
        kind="fuyu", patch_pixels=fields.take("patch_size"), channels=fields.take("num_channels", default=3)
    )
    fields.finish()
    part["tie_word_embeddings"] = bool(config.get("tie_word_embeddings")) or part.get("tie_word_embeddings", False)
    return read_persimmon(Fields(part, "config.json: text_config"), vision)


def read_persimmon(text: Fields, vision: VisionConfig) -> ModelConfig:
    for name, value in (
        *(("model_type", "persimmon"), ("hidden_act", "relu2"), ("hidden_dropout", 0.0), ("attention_dropout", 0.0)),
        ("qk_layernorm", True),
    ):
        text.expect(name, value)
    text.ignore("max_position_embeddings")
    width, num_heads, num_layers = (
        text.take(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    text.expect("num_key_value_heads", num_heads)
    head_width = width // num_heads
    model = ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=text.take("vocab_size"),
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm="layer",
        norm_epsilon=text.take("layer_norm_eps"),
        dense_mlp="relu_squared",
        mlp_bias=True,
        tied_head=text.take("tie_word_embeddings"),
        initializer_range=text.take("initializer_range", default=0.02),
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads,
            num_key_heads=num_heads,
            head_width=head_width,
            projection_bias=True,
            output_bias=True,
            head_norm=True,
            rotary=read_rotary(text, head_width, partial_factor=0.5).rotary,
        ),
        moe=MoeConfig(num_dense_layers=num_layers, dense_width=text.take("intermediate_size")),
        vision=vision,
    )
    text.finish()
    return model


canonical_name = llava.canonical_name


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    width, table = model.width, (model.vocabulary_size, model.width)
    root = "language_model.model"
    yield plain(f"{root}.embed_tokens.weight", table, "decoder.embedding")
    yield from norm(f"{root}.final_layernorm", width, "decoder.norm")
    if not model.tied_head:
        yield from linear("language_model.lm_head", table, "decoder.head")
    for number in range(model.num_layers):
        yield from _layer(LayerTensors(model, number, f"{root}.layers.{number}"))
    patch = (width, model.vision.patch_values)
    yield from linear("vision_embed_tokens", patch, "vision.patch_embedding", bias="vision.patch_bias")


def _layer(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    model, ours = layer.model, layer.ours
    width, hidden, grouped = model.width, model.moe.dense_width, model.grouped_attention
    rows = grouped.num_heads * grouped.head_width
    for name, path, size in (
        ("input_layernorm", "input_norm", width),
        ("post_attention_layernorm", "mlp_norm", width),
        ("self_attn.q_layernorm", "mixer.query_norm", grouped.head_width),
        ("self_attn.k_layernorm", "mixer.key_norm", grouped.head_width),
    ):
        yield from norm(f"{layer.released}.{name}", size, f"{ours}.{path}", layer.repeat)
    # Query, key and value of one head after those of another.
    layout = grouped_rows(grouped.num_heads, *(3 * (grouped.head_width,)))
    for suffix, ending, shape in (("weight", "", (width,)), ("bias", "_bias", ())):
        slots = tuple(Slot(f"{ours}.mixer.{part}{ending}", (layer.repeat,)) for part in ("query", "key", "value"))
        yield ReleasedTensor(f"{layer.released}.self_attn.query_key_value.{suffix}", (3 * rows, *shape), slots, layout)
    for name, path, shape in (
        ("self_attn.dense", "mixer.output", (width, rows)),
        ("mlp.dense_h_to_4h", "mlp.up", (hidden, width)),
        ("mlp.dense_4h_to_h", "mlp.down", (width, hidden)),
    ):
        bias = f"{ours}.{path}_bias"
        yield from linear(f"{layer.released}.{name}", shape, f"{ours}.{path}", layer.repeat, bias=bias)
