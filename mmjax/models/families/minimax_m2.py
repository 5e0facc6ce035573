"""MiniMax-M2: grouped-query attention whose queries and keys are normalised over all heads, experts in every layer."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ActivationConfig, GroupedAttentionConfig, ModelConfig, MoeConfig, RouterConfig, VisionConfig
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("minimax_m2",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a MiniMax-M2 -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields = Fields(config)
    width, num_heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    num_layers, head_width = fields.take("num_hidden_layers"), fields.take("head_dim")
    share = fields.take("rotary_dim", default=head_width) / head_width
    for name, value in (
        *(("hidden_act", "silu"), ("attention_dropout", 0.0), ("router_jitter_noise", 0.0), ("use_qk_norm", True)),
        *(("qk_norm_type", "per_layer"), ("scoring_func", "sigmoid"), ("use_routing_bias", True)),
        *(("tie_word_embeddings", False), ("output_router_logits", False), ("num_mtp_modules", 0)),
        *(("use_mtp", False), ("shared_intermediate_size", 0), ("layernorm_full_attention_beta", 1.0)),
    ):
        fields.expect(name, value)
    # The loss is ours; and without another kind of attention, their list says nothing.
    fields.ignore("router_aux_loss_coef", "max_position_embeddings", "attn_type_list", "quantization_config")
    model = ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=fields.take("vocab_size"),
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=fields.take("rms_norm_eps"),
        initializer_range=fields.take("initializer_range", default=0.02),
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads,
            num_key_heads=fields.take("num_key_value_heads"),
            head_width=head_width,
            joint_norm=True,
            rotary=read_rotary(fields, head_width, partial_factor=share, default_base=5_000_000.0).rotary,
        ),
        moe=MoeConfig(
            num_experts=fields.take("num_local_experts", "num_experts"),
            experts_per_token=fields.take("num_experts_per_tok"),
            expert_width=fields.take("intermediate_size"),
            latent_width=0,
            latent_norm=False,
            num_shared_experts=0,
            num_dense_layers=0,
            router=RouterConfig(balancing="sign"),
        ),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
    )
    fields.finish()
    return model


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from table_tensors(model)
    for layer in range(model.num_layers):
        yield from _layer(LayerTensors(model, layer, f"model.layers.{layer}"))


def _layer(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    grouped, moe, width = layer.model.grouped_attention, layer.model.moe, layer.model.width
    queries, keys = (number * grouped.head_width for number in (grouped.num_heads, grouped.num_key_heads))
    yield from layer.norms()
    for short, long, rows in (("q", "query", queries), ("k", "key", keys), ("v", "value", keys)):
        yield layer.tensor(f"self_attn.{short}_proj.weight", (rows, width), f"mixer.{long}")
    for short, long, rows in (("q", "query", queries), ("k", "key", keys)):
        yield layer.tensor(f"self_attn.{short}_norm.weight", (rows,), f"mixer.{long}_norm", SAME)
    yield layer.tensor("self_attn.o_proj.weight", (width, queries), "mixer.output")
    name, hidden = "block_sparse_moe", moe.expert_width
    yield layer.tensor(f"{name}.gate.weight", (moe.num_experts, width), "mlp.router")
    yield layer.tensor(f"{name}.e_score_correction_bias", (moe.num_experts,), "mlp.bias", SAME)
    for expert in range(moe.num_experts):
        for theirs, ours, shape in (("w1", "gate", (hidden, width)), ("w3", "up", (hidden, width))):
            yield layer.tensor(f"{name}.experts.{expert}.{theirs}.weight", shape, f"mlp.{ours}", LINEAR, expert)
        yield layer.tensor(f"{name}.experts.{expert}.w2.weight", (width, hidden), "mlp.down", LINEAR, expert)
