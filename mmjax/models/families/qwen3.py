"""Qwen3: grouped-query attention whose queries and keys are normalised by head before they rotate, dense MLPs."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ActivationConfig, GroupedAttentionConfig, ModelConfig, MoeConfig, VisionConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import llama
from mmjax.models.families.fields import Fields
from mmjax.models.families.released import ReleasedTensor
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("qwen3",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3 -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields = Fields(config)
    num_layers = fields.take("num_hidden_layers")
    fields.expect("layer_types", None, ["full_attention"] * num_layers)
    moe = MoeConfig(num_dense_layers=num_layers, dense_width=fields.take("intermediate_size"))
    return read_text(fields, fields.take("head_dim"), moe)


def read_text(fields: Fields, head_width: int, moe: MoeConfig) -> ModelConfig:
    """All but the width of a head and what `moe` holds; no field may be left over."""
    num_layers, num_heads = fields.take("num_hidden_layers"), fields.take("num_attention_heads")
    has_bias = fields.take("attention_bias", default=False)
    for name, value in (("hidden_act", "silu"), ("attention_dropout", 0.0), ("use_sliding_window", False)):
        fields.expect(name, value)
    # Nothing without sliding windows; how a file packs its weights is read from the file.
    fields.ignore("sliding_window", "max_window_layers", "quantization_config")
    rotary = read_rotary(fields, head_width).rotary
    if rotary.width != head_width or rotary.sections:
        raise ConfigurationError(
            "config.json: rope_parameters",
            found=f"{rotary.width} of {head_width} entries rotated, mrope_section {list(rotary.sections)}",
            expected="whole heads that rotate by one position",
            remedy="take the config.json that belongs to the weights",
        )
    model = ModelConfig(
        width=fields.take("hidden_size"),
        num_layers=num_layers,
        vocabulary_size=fields.take("vocab_size"),
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=fields.take("rms_norm_eps"),
        tied_head=fields.take("tie_word_embeddings", default=False),
        initializer_range=fields.take("initializer_range", default=0.02),
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads,
            num_key_heads=fields.take("num_key_value_heads") or num_heads,
            head_width=head_width,
            projection_bias=has_bias,
            output_bias=has_bias,
            head_norm=True,
            rotary=rotary,
        ),
        moe=moe,
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
    )
    fields.finish()
    return model


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from llama.text_tensors(model)
