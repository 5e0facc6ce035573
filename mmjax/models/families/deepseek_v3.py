"""DeepSeek-V3: latent attention whose shared key part turns, routers with groups of experts, no output gate."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    ModelConfig,
    MoeConfig,
    RouterConfig,
    VisionConfig,
    layer_kinds,
)
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import SAME, ReleasedTensor
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("deepseek_v3", "kimi_k2")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a DeepSeek-V3 -> our settings."""
    fields = Fields(config)
    model = read_text(fields)
    fields.finish()
    return model


def read_text(fields: Fields) -> ModelConfig:
    """What DeepSeek-V3 and its successors have in common; the caller reads its own fields, then finishes.

    Raises:
      ConfigurationError: a field is missing, or asks for something that is not built.
    """
    num_layers, num_heads = fields.take("num_hidden_layers"), fields.take("num_attention_heads")
    shared_key_width = fields.take("qk_rope_head_dim")
    fields.expect("num_key_value_heads", num_heads, None)
    for name, value in (
        *(("hidden_act", "silu"), ("attention_bias", False), ("attention_dropout", 0.0), ("mlp_bias", False)),
        *(("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
    ):
        fields.expect(name, value)
    # Derived from other fields, or of a training run; how weights are packed shows in the tensors themselves.
    fields.ignore("head_dim", "qk_head_dim", "pretraining_tp", "ep_size", "quantization_config")
    fields.ignore("output_router_logits", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef")
    # Layers behind the last, which guess further tokens: see `is_left_out`.
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    pairs = "interleaved" if fields.take("rope_interleave", default=True) else "half"
    rotary, score_factor = read_rotary(fields, shared_key_width, pairs=pairs)
    return ModelConfig(
        width=fields.take("hidden_size"),
        num_layers=num_layers,
        vocabulary_size=fields.take("vocab_size"),
        full_attention_layers=tuple(range(num_layers)),
        residual="plain",
        norm_epsilon=fields.take("rms_norm_eps"),
        tied_head=fields.take("tie_word_embeddings", default=False),
        initializer_range=fields.take("initializer_range", default=0.02),
        full_attention=FullAttentionConfig(
            num_heads=num_heads,
            query_rank=fields.take("q_lora_rank") or 0,
            latent_width=fields.take("kv_lora_rank"),
            nope_width=fields.take("qk_nope_head_dim"),
            shared_key_width=shared_key_width,
            value_width=fields.take("v_head_dim"),
            latent_norm_epsilon=1e-6,
            output_gate="none",
            rotary=rotary,
            score_factor=score_factor,
        ),
        moe=MoeConfig(
            num_experts=fields.take("n_routed_experts", "num_local_experts", "num_experts"),
            experts_per_token=fields.take("num_experts_per_tok"),
            expert_width=fields.take("moe_intermediate_size"),
            latent_width=0,
            latent_norm=False,
            num_shared_experts=fields.take("n_shared_experts") or 0,
            num_dense_layers=min(fields.take("first_k_dense_replace", default=3), num_layers),
            dense_width=fields.take("intermediate_size"),
            router=RouterConfig(
                num_groups=fields.take("n_group") or 1,
                top_groups=fields.take("topk_group") or 1,
                renormalise=fields.take("norm_topk_prob", default=True),
                scale=fields.take("routed_scaling_factor"),
                balancing="sign",
            ),
        ),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
    )


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from table_tensors(model)
    for number, (_, mlp) in enumerate(layer_kinds(model)):
        layer = LayerTensors(model, number, f"model.layers.{number}")
        yield from layer.norms()
        yield from layer.latent_attention()
        if mlp == "dense":
            yield from layer.dense_mlp("mlp", "mlp", model.moe.dense_width)
        else:
            yield from mixture(layer)


def mixture(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    """Router with its correction bias, shared experts as one MLP, routed experts."""
    moe = layer.model.moe
    yield layer.tensor("mlp.gate.weight", (moe.num_experts, layer.model.width), "mlp.router")
    yield layer.tensor("mlp.gate.e_score_correction_bias", (moe.num_experts,), "mlp.bias", SAME)
    if moe.num_shared_experts:
        hidden = moe.num_shared_experts * moe.expert_width
        yield from layer.dense_mlp("mlp.shared_experts", "mlp.shared", hidden)
    yield from layer.experts("mlp.experts")


def is_left_out(model: ModelConfig, name: str) -> bool:
    """Whether a tensor of a file is no part of the model: released files hold layers that guess further tokens."""
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= model.num_layers
