"""GLM-5.3-Flash: KDA, latent attention without rotation but with an indexer, hyper-connections; its text part only."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import (
    ActivationConfig,
    HyperConnectionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    RotaryConfig,
    layer_kinds,
)
from mmjax.errors import ConfigurationError
from mmjax.models.families import deepseek_v3
from mmjax.models.families.deepseek_v3 import mixture
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor

MODEL_TYPES = ("glm5_next", "glm5_next_text")
ROOT = "model.language_model"


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a GLM-5.3-Flash -> our settings of its text part; the tower is left out.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built (an indexer that pools its keys), or
        is not understood.
    """
    if "text_config" not in config:
        return _read_text(Fields(config))
    fields = Fields(config)
    fields.expect("tie_word_embeddings", bool(fields.take("text_config").get("tie_word_embeddings", False)))
    fields.ignore("vision_config", *(f"{kind}{end}_token_id" for kind in ("image", "video") for end in _TOKEN_ENDS))
    model = _read_text(fields.part("text_config"))
    fields.finish()
    return model


_TOKEN_ENDS = ("", "_start", "_end")


def _read_text(fields: Fields) -> ModelConfig:
    fields.expect("qk_rope_head_dim", 0)
    # Keys pooled over several tokens are another indexer.
    fields.take("index_kpool")
    fields.expect("index_kpool", 1)
    fields.ignore("index_kpool_always_select_tail")
    model = deepseek_v3.read_text(fields)
    num_layers, full = model.num_layers, model.full_attention
    layers, num_dense = _full_attention_layers(fields, num_layers), _num_dense_layers(fields, num_layers)
    fields.expect("indexer_types", ["full"] * num_layers, None)
    head_width = fields.take("linear_head_dim")
    lower_bound = fields.take("linear_lower_bound", default=-5.0)
    limit = fields.take("swiglu_limit")
    indexer = IndexerConfig(
        stage="sparse",
        num_heads=fields.take("index_n_heads"),
        head_width=fields.take("index_head_dim"),
        top_k=fields.take("index_topk"),
        # Whatever the epsilon of the other norms.
        key_norm_epsilon=1e-6,
    )
    model = dataclasses.replace(
        model,
        full_attention_layers=layers,
        residual="hyper",
        hyper_connections=HyperConnectionConfig(
            num_streams=fields.take("hc_mult"),
            sinkhorn_steps=fields.take("hc_sinkhorn_iters"),
            epsilon=fields.take("hc_eps"),
        ),
        linear_attention=LinearAttentionConfig(
            num_heads=fields.take("linear_num_heads"),
            key_width=head_width,
            value_width=head_width,
            convolution_width=fields.take("linear_conv_kernel_dim"),
            decay="softplus" if lower_bound is None else "bounded",
            decay_lower_bound=-5.0 if lower_bound is None else lower_bound,
            decay_rank=head_width,
            output_gate="low_rank",
            output_gate_rank=head_width,
        ),
        full_attention=dataclasses.replace(
            full, latent_norm_epsilon=model.norm_epsilon, rotary=RotaryConfig(), indexer=indexer
        ),
        moe=dataclasses.replace(model.moe, num_dense_layers=num_dense),
        activation=ActivationConfig(kind="clipped_silu", linear_beta=limit) if limit else model.activation,
    )
    fields.finish()
    return model


def _full_attention_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    kinds = fields.take("layer_types", default=None)
    if kinds is None:
        return tuple(range(3, num_layers, 4))
    if len(kinds) != num_layers or not set(kinds) <= {"linear_attention", "indexed_attention", "full_attention"}:
        raise ConfigurationError(
            "config.json: layer_types",
            found=str(kinds),
            expected=f"linear_attention or indexed_attention for each of {num_layers} layers",
            remedy="take the config.json that belongs to the weights",
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind != "linear_attention")


def _num_dense_layers(fields: Fields, num_layers: int) -> int:
    kinds = fields.take("mlp_layer_types", default=None)
    if kinds is None:
        return min(3, num_layers)
    num_dense = kinds.count("dense")
    # Dense layers behind one with experts are not built.
    fields.expect("mlp_layer_types", ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense))
    return num_dense


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of the text part of a released checkpoint of `model`."""
    yield from table_tensors(model, ROOT)
    for number, (mixer, mlp) in enumerate(layer_kinds(model)):
        layer = LayerTensors(model, number, f"{ROOT}.layers.{number}")
        yield from layer.norms()
        for theirs, ours in (("attn", "mixer_streams"), ("ffn", "mlp_streams")):
            yield from _streams(layer, f"hc_{theirs}", ours)
        if mixer == "linear":
            yield from layer.kimi_delta_attention()
            num_heads = (model.linear_attention.num_heads,)
            yield layer.tensor("self_attn.A_log", num_heads, "mixer.log_rate", SAME)
        else:
            yield from layer.latent_attention()
        if mlp == "dense":
            yield from layer.dense_mlp("mlp", "mlp", model.moe.dense_width)
        else:
            yield from mixture(layer)


def _streams(layer: LayerTensors, released: str, ours: str) -> Iterator[ReleasedTensor]:
    streams = layer.model.hyper_connections.num_streams
    weights = (2 + streams) * streams
    yield layer.tensor(f"{released}_fn", (weights, streams * layer.model.width), f"{ours}.projection", LINEAR)
    yield layer.tensor(f"{released}_base", (weights,), f"{ours}.base", SAME)
    yield layer.tensor(f"{released}_scale", (3,), f"{ours}.scale", SAME)


def is_left_out(model: ModelConfig, name: str) -> bool:
    """Whether a tensor of a file is no part of our model.

    The tower, layers that guess further tokens, and how keys of the indexer are pooled, which says nothing of one key.
    """
    parts = name.removeprefix(f"{ROOT}.layers.").split(".")
    is_further = parts[0].isdigit() and int(parts[0]) >= model.num_layers
    return is_further or name.startswith("model.visual.") or ".indexer.index_kpool_compress_" in name
