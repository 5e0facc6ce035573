"""Qwen3-Next: gated delta nets, gated grouped-query attention that turns in part, softmax routers, a shared expert."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import (
    ActivationConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    ModelConfig,
    MoeConfig,
    RouterConfig,
    VisionConfig,
    layer_kinds,
)
from mmjax.errors import ConfigurationError
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor, grouped_rows, heads_of_two, stacked_rows
from mmjax.models.families.rotary_fields import read_rotary

MODEL_TYPES = ("qwen3_next",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3-Next -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields = Fields(config)
    num_layers, head_width = fields.take("num_hidden_layers"), fields.take("head_dim")
    for name, value in (
        *(("hidden_act", "silu"), ("attention_bias", False), ("attention_dropout", 0.0)),
        *(("decoder_sparse_step", 1), ("output_router_logits", False), ("use_sliding_window", False)),
    ):
        fields.expect(name, value)
    # Of a training run that adds a balancing loss.
    fields.ignore("router_aux_loss_coef")
    model = ModelConfig(
        width=fields.take("hidden_size"),
        num_layers=num_layers,
        vocabulary_size=fields.take("vocab_size"),
        full_attention_layers=_full_attention_layers(fields, num_layers),
        full_attention_kind="grouped",
        linear_attention_kind="gated_delta_net",
        residual="plain",
        norm_epsilon=fields.take("rms_norm_eps"),
        norm_scale="zero_centred",
        tied_head=fields.take("tie_word_embeddings", default=False),
        initializer_range=fields.take("initializer_range", default=0.02),
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=fields.take("linear_num_key_heads"),
            num_value_heads=fields.take("linear_num_value_heads"),
            key_width=fields.take("linear_key_head_dim"),
            value_width=fields.take("linear_value_head_dim"),
            convolution_width=fields.take("linear_conv_kernel_dim"),
        ),
        grouped_attention=GroupedAttentionConfig(
            num_heads=fields.take("num_attention_heads"),
            num_key_heads=fields.take("num_key_value_heads"),
            head_width=head_width,
            head_norm=True,
            output_gate="sigmoid",
            rotary=read_rotary(fields, head_width, partial_factor=0.25).rotary,
        ),
        moe=MoeConfig(
            num_experts=fields.take("num_experts"),
            experts_per_token=fields.take("num_experts_per_tok"),
            expert_width=fields.take("moe_intermediate_size"),
            latent_width=0,
            latent_norm=False,
            num_shared_experts=1,
            shared_width=fields.take("shared_expert_intermediate_size"),
            shared_gate="sigmoid",
            num_dense_layers=_num_dense_layers(fields),
            dense_width=fields.take("intermediate_size"),
            router=RouterConfig(
                scoring="softmax",
                renormalise=fields.take("norm_topk_prob", default=True),
                balancing="none",
                correction_bias=False,
            ),
        ),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
    )
    fields.finish()
    return model


def _full_attention_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    interval = fields.take("full_attention_interval", default=4)
    kinds = fields.take("layer_types", default=None)
    if kinds is None:
        return tuple(range(interval - 1, num_layers, interval))
    if len(kinds) != num_layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise ConfigurationError(
            "config.json: layer_types",
            found=str(kinds),
            expected=f"linear_attention or full_attention for each of {num_layers} layers",
            remedy="take the config.json that belongs to the weights",
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _num_dense_layers(fields: Fields) -> int:
    dense = fields.take("mlp_only_layers", default=None) or []
    # Dense layers behind one with experts are not built.
    fields.expect("mlp_only_layers", list(range(len(dense))), None)
    return len(dense)


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from table_tensors(model)
    for number, (mixer, mlp) in enumerate(layer_kinds(model)):
        layer = LayerTensors(model, number, f"model.layers.{number}")
        yield from layer.norms()
        yield from _gated_delta_net(layer) if mixer == "linear" else _grouped_attention(layer)
        if mlp == "dense":
            yield from layer.dense_mlp("mlp", "mlp", model.moe.dense_width)
        else:
            yield from _mixture(layer)


def _gated_delta_net(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    net, width, name = layer.model.gated_delta_net, layer.model.width, "linear_attn"
    groups, heads = net.num_key_heads, net.num_value_heads
    share = heads // groups
    keys, values = groups * net.key_width, heads * net.value_width
    yield layer.joined(
        f"{name}.in_proj_qkvz.weight",
        (2 * keys + 2 * values, width),
        ("mixer.query", "mixer.key", "mixer.value", "mixer.output_gate"),
        grouped_rows(groups, net.key_width, net.key_width, share * net.value_width, share * net.value_width),
    )
    pair = ("mixer.beta", "mixer.decay")
    yield layer.joined(f"{name}.in_proj_ba.weight", (2 * heads, width), pair, grouped_rows(groups, share, share))
    yield layer.joined(
        f"{name}.conv1d.weight",
        (2 * keys + values, 1, net.convolution_width),
        ("mixer.query_convolution", "mixer.key_convolution", "mixer.value_convolution"),
        stacked_rows(LINEAR, keys, keys, values),
    )
    yield layer.tensor(f"{name}.A_log", (heads,), "mixer.log_rate", SAME)
    yield layer.tensor(f"{name}.dt_bias", (heads,), "mixer.decay_bias", SAME)
    yield layer.tensor(f"{name}.norm.weight", (net.value_width,), "mixer.output_norm", SAME)
    yield layer.tensor(f"{name}.out_proj.weight", (width, values), "mixer.output")


def _grouped_attention(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    grouped, width, name = layer.model.grouped_attention, layer.model.width, "self_attn"
    head_width = grouped.head_width
    queries, keys = grouped.num_heads * head_width, grouped.num_key_heads * head_width
    pair = ("mixer.query", "mixer.output_gate")
    yield layer.joined(f"{name}.q_proj.weight", (2 * queries, width), pair, heads_of_two(head_width))
    yield layer.tensor(f"{name}.k_proj.weight", (keys, width), "mixer.key")
    yield layer.tensor(f"{name}.v_proj.weight", (keys, width), "mixer.value")
    yield layer.tensor(f"{name}.q_norm.weight", (head_width,), "mixer.query_norm", SAME)
    yield layer.tensor(f"{name}.k_norm.weight", (head_width,), "mixer.key_norm", SAME)
    yield layer.tensor(f"{name}.o_proj.weight", (width, queries), "mixer.output")


def _mixture(layer: LayerTensors) -> Iterator[ReleasedTensor]:
    moe, width = layer.model.moe, layer.model.width
    yield layer.tensor("mlp.gate.weight", (moe.num_experts, width), "mlp.router")
    yield from layer.dense_mlp("mlp.shared_expert", "mlp.shared", moe.shared_hidden_width)
    yield layer.tensor("mlp.shared_expert_gate.weight", (1, width), "mlp.shared_gate")
    yield from layer.experts("mlp.experts")


def is_left_out(model: ModelConfig, name: str) -> bool:
    """Whether a tensor of a file is no part of the model: released files hold a layer that guesses further tokens."""
    return name.startswith("mtp.")
