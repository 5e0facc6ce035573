"""Llama and all that share its architecture (SmolLM2, ...): grouped-query attention with rotation, dense MLPs."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ActivationConfig, GroupedAttentionConfig, ModelConfig, MoeConfig, VisionConfig
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import SAME, ReleasedTensor
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("llama",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Llama -> our settings."""
    return read_text(Fields(config))


def read_text(fields: Fields) -> ModelConfig:
    """A Llama, alone or as the text part of a larger config.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    width, num_heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    head_width = fields.take("head_dim", default=None) or width // num_heads
    num_layers, has_bias = fields.take("num_hidden_layers"), fields.take("attention_bias", default=False)
    for name, value in (("hidden_act", "silu"), ("attention_dropout", 0.0), ("rope_interleaved", False)):
        fields.expect(name, value)
    fields.ignore("pretraining_tp", "is_llama_config", "transformers.js_config", "max_position_embeddings")
    model = ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=fields.take("vocab_size"),
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=fields.take("rms_norm_eps"),
        mlp_bias=fields.take("mlp_bias", default=False),
        tied_head=fields.take("tie_word_embeddings", default=False),
        initializer_range=fields.take("initializer_range", default=0.02),
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads,
            num_key_heads=fields.take("num_key_value_heads", default=None) or num_heads,
            head_width=head_width,
            projection_bias=has_bias,
            output_bias=has_bias,
            rotary=read_rotary(fields, head_width).rotary,
        ),
        moe=MoeConfig(num_dense_layers=num_layers, dense_width=fields.take("intermediate_size")),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
    )
    fields.finish()
    return model


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from text_tensors(model)


def text_tensors(model: ModelConfig, root: str = "model", head: str = "lm_head") -> Iterator[ReleasedTensor]:
    """Every tensor of the decoder, whose names begin with `root`, and its output head."""
    yield from table_tensors(model, root, head)
    for layer in range(model.num_layers):
        yield from _layer(LayerTensors(model, layer, f"{root}.layers.{layer}"))


def _layer(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    model, width, hidden = layer.model, layer.model.width, layer.model.moe.dense_width
    yield from layer.norms()
    yield from grouped_attention(layer)
    yield from layer.dense_mlp("mlp", "mlp", hidden)
    if model.mlp_bias:
        for name, rows in (("gate", hidden), ("up", hidden), ("down", width)):
            yield layer.tensor(f"mlp.{name}_proj.bias", (rows,), f"mlp.{name}_bias", SAME)


def grouped_attention(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    """Projections of a layer's grouped-query attention, their biases, and the norms of queries and keys."""
    grouped, width = layer.model.grouped_attention, layer.model.width
    queries, keys = (number * grouped.head_width for number in (grouped.num_heads, grouped.num_key_heads))
    for short, long, rows in (("q", "query", queries), ("k", "key", keys), ("v", "value", keys)):
        yield layer.tensor(f"self_attn.{short}_proj.weight", (rows, width), f"mixer.{long}")
        if grouped.projection_bias:
            yield layer.tensor(f"self_attn.{short}_proj.bias", (rows,), f"mixer.{long}_bias", SAME)
    if grouped.head_norm:
        for short, long in (("q", "query"), ("k", "key")):
            yield layer.tensor(f"self_attn.{short}_norm.weight", (grouped.head_width,), f"mixer.{long}_norm", SAME)
    yield layer.tensor("self_attn.o_proj.weight", (width, queries), "mixer.output")
    if grouped.output_bias:
        yield layer.tensor("self_attn.o_proj.bias", (width,), "mixer.output_bias", SAME)
