"""Kimi-Linear: KDA with softplus decay, latent attention without rotation, experts at the model width, text only.

Its decoder layers, in names and layouts, are those of Kimi-K3 too: what K3 adds appears when the model has it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    RouterConfig,
    VisionConfig,
    layer_kinds,
)
from mmjax.errors import ConfigurationError
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor, Slot, padded

MODEL_TYPES = ("kimi_linear",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Kimi-Linear -> our settings."""
    return read_text(Fields(config))


def read_text(fields: Fields) -> ModelConfig:
    """The text part of a Kimi-Linear or Kimi-K3 config.json; the vision tower is left out.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    num_layers, num_heads = fields.take("num_hidden_layers"), fields.take("num_attention_heads")
    fields.expect("num_key_value_heads", num_heads)
    for name, value in (
        *(("moe_router_activation_func", "sigmoid"), ("topk_method", "noaux_tc"), ("mla_use_nope", True)),
        *(("moe_layer_freq", 1), ("num_nextn_predict_layers", 0), ("tie_word_embeddings", False)),
        *(("attention_bias", False), ("attention_dropout", 0.0), ("output_router_logits", False)),
        *(("rope_scaling", None), ("hidden_dropout", 0.0)),
    ):
        fields.expect(name, value)
    fields.ignore("max_position_embeddings", "model_max_length", "use_grouped_topk", "head_dim", "qk_head_dim")
    # Derived from linear_attn_config by transformers when it saves; without rotation its base says nothing.
    fields.ignore("linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "rope_theta", "rope_parameters")
    fields.ignore("layer_types", "mlp_layer_types", "pretraining_tp", "quantization_config")
    full_layers, linear = _linear_attention(fields.part("linear_attn_config"), num_layers)
    width, residual_block = fields.take("hidden_size"), fields.take("attn_res_block_size", default=None)
    groups, top_groups = fields.take("num_expert_group", default=1), fields.take("topk_group", default=1)
    latent = fields.take("routed_expert_hidden_size", default=None)
    model = ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=fields.take("vocab_size"),
        full_attention_layers=full_layers,
        residual="attention" if residual_block else "plain",
        residual_block_layers=residual_block or ModelConfig.residual_block_layers,
        norm_epsilon=fields.take("rms_norm_eps"),
        initializer_range=fields.take("initializer_range", default=0.02),
        linear_attention=linear,
        full_attention=FullAttentionConfig(
            num_heads=num_heads,
            query_rank=fields.take("q_lora_rank", default=None) or 0,
            latent_width=fields.take("kv_lora_rank"),
            nope_width=fields.take("qk_nope_head_dim"),
            shared_key_width=fields.take("qk_rope_head_dim"),
            value_width=fields.take("v_head_dim"),
            output_gate="sigmoid" if fields.take("mla_use_output_gate", default=False) else "none",
        ),
        moe=MoeConfig(
            num_experts=fields.take("num_experts"),
            experts_per_token=fields.take("num_experts_per_token"),
            expert_width=fields.take("moe_intermediate_size"),
            latent_width=latent or 0,
            latent_norm=bool(latent and fields.take("latent_moe_use_norm", default=False)),
            num_shared_experts=fields.take("num_shared_experts"),
            num_dense_layers=fields.take("first_k_dense_replace", default=0),
            dense_width=fields.take("intermediate_size"),
            router=RouterConfig(
                num_groups=groups,
                top_groups=top_groups,
                renormalise=fields.take("moe_renormalize", default=True),
                scale=fields.take("routed_scaling_factor"),
                balancing="quantile" if latent else "sign",
            ),
        ),
        activation=_activation(fields),
        vision=VisionConfig(num_layers=0),
    )
    fields.ignore("latent_moe_use_norm")
    fields.finish()
    return model


def _activation(fields: Fields) -> ActivationConfig:
    kind: Literal["situ", "silu"] = fields.take("hidden_act")
    if kind not in ("situ", "silu"):
        fields.expect("hidden_act", "situ", "silu")
    beta = fields.take("activation_situ_beta", default=4.0)
    linear_beta = fields.take("activation_situ_linear_beta", default=25.0)
    return ActivationConfig(kind=kind, beta=beta, linear_beta=linear_beta)


def _linear_attention(fields: Fields, num_layers: int) -> tuple[tuple[int, ...], LinearAttentionConfig]:
    """(0-based full attention layers, settings of the others) from `linear_attn_config`, whose layers count from 1."""
    full, linear = fields.take("full_attn_layers"), fields.take("kda_layers")
    if sorted([*full, *linear]) != list(range(1, num_layers + 1)):
        raise ConfigurationError(
            "config.json: linear_attn_config",
            found=f"full_attn_layers {full} and kda_layers {linear}",
            expected=f"each layer from 1 to {num_layers} in one of the two lists",
            remedy="layers count from 1 here",
        )
    head_width = fields.take("head_dim")
    lower_bound = fields.take("gate_lower_bound", default=None)
    is_full_rank = fields.take("use_full_rank_gate", default=False)
    config = LinearAttentionConfig(
        num_heads=fields.take("num_heads"),
        key_width=head_width,
        value_width=head_width,
        convolution_width=fields.take("short_conv_kernel_size"),
        decay="softplus" if lower_bound is None else "bounded",
        decay_lower_bound=-5.0 if lower_bound is None else lower_bound,
        decay_rank=head_width,
        output_gate="full" if is_full_rank else "low_rank",
        output_gate_rank=LinearAttentionConfig.output_gate_rank if is_full_rank else head_width,
    )
    fields.finish()
    return tuple(layer - 1 for layer in full), config


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from text_tensors(model, "")


def canonical_name(name: str) -> str:
    """transformers saves a dense layer's MLP under the name of the mixture of experts."""
    parts = name.split(".")
    if len(parts) > 4 and parts[3] == "block_sparse_moe" and parts[4] in ("gate_proj", "up_proj", "down_proj"):
        parts[3] = "mlp"
    return ".".join(parts)


def text_tensors(model: ModelConfig, root: str) -> Iterator[ReleasedTensor]:
    """Every tensor of the decoder, names beginning with `root`."""
    yield from table_tensors(model, f"{root}model", f"{root}lm_head")
    if model.residual == "attention":
        for name, path, shape in (("norm", "norm", (model.width,)), ("proj", "query", (1, model.width))):
            slot = Slot(f"decoder.output_residual.{path}")
            yield ReleasedTensor(f"{root}model.output_attn_res_{name}.weight", shape, (slot,), SAME)
    for layer, (mixer, mlp) in enumerate(layer_kinds(model)):
        yield from _Layer(model, layer, f"{root}model.layers.{layer}").tensors(mixer, mlp)


class _Layer(LayerTensors):
    """Names of one decoder layer."""

    def tensors(self, mixer: str, mlp: str) -> Iterator[ReleasedTensor]:
        vector = (self.model.width,)
        yield from self.norms()
        if self.model.residual == "attention":
            for theirs, ours in (("self_attention_res", "mixer_residual"), ("mlp_res", "mlp_residual")):
                yield self.tensor(f"{theirs}_norm.weight", vector, f"{ours}.norm", SAME)
                yield self.tensor(f"{theirs}_proj.weight", (1, *vector), f"{ours}.query", SAME)
        yield from self._linear_attention() if mixer == "linear" else self.latent_attention()
        yield from self.dense_mlp("mlp", "mlp", self.model.moe.dense_width) if mlp == "dense" else self._mixture()

    def _linear_attention(self) -> Iterator[ReleasedTensor]:
        yield from self.kimi_delta_attention()
        num_heads = self.model.linear_attention.num_heads
        # Kimi-K3 pads one number a head to 128 of them; Kimi-Linear shapes it for broadcasting.
        shape = (128,) if self.model.moe.latent_width else (1, 1, num_heads, 1)
        rate = self.tensor("self_attn.A_log", shape, "mixer.log_rate", padded(num_heads))
        yield ReleasedTensor(rate.name, rate.shape, rate.slots, rate.layout, may_be_padded=True)

    def _mixture(self) -> Iterator[ReleasedTensor]:
        moe, width, name = self.model.moe, self.model.width, "block_sparse_moe"
        yield self.tensor(f"{name}.gate.weight", (moe.num_experts, width), "mlp.router")
        yield self.tensor(f"{name}.gate.e_score_correction_bias", (moe.num_experts,), "mlp.bias", SAME)
        latent = moe.latent_width or width
        if moe.latent_width:
            yield self.tensor(f"{name}.routed_expert_down_proj.weight", (latent, width), "mlp.latent_down")
            if moe.latent_norm:
                yield self.tensor(f"{name}.routed_expert_norm.weight", (latent,), "mlp.latent_norm", SAME)
            yield self.tensor(f"{name}.routed_expert_up_proj.weight", (width, latent), "mlp.latent_up")
        if moe.num_shared_experts:
            yield from self.dense_mlp(f"{name}.shared_experts", "mlp.shared", moe.shared_hidden_width)
        hidden = moe.expert_width
        for expert in range(moe.num_experts):
            released = f"{name}.experts.{expert}"
            yield self.tensor(f"{released}.w1.weight", (hidden, latent), "mlp.gate", LINEAR, expert)
            yield self.tensor(f"{released}.w3.weight", (hidden, latent), "mlp.up", LINEAR, expert)
            yield self.tensor(f"{released}.w2.weight", (latent, hidden), "mlp.down", LINEAR, expert)
