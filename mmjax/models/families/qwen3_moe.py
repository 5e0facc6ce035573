"""Qwen3 with a mixture of experts: softmax routers, no shared expert."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config import ModelConfig, MoeConfig, RouterConfig, layer_kinds
from mmjax.errors import ConfigurationError
from mmjax.models.families import llama, qwen3
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import ReleasedTensor

MODEL_TYPES = ("qwen3_moe",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3-MoE -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields = Fields(config)
    head_width = fields.take("head_dim", default=None) or (
        fields.take("hidden_size") // fields.take("num_attention_heads")
    )
    num_experts = fields.take("num_experts", "num_local_experts")
    for name, value in (("num_local_experts", num_experts), ("output_router_logits", False)):
        fields.expect(name, value)
    # Of a training run that adds a balancing loss.
    fields.ignore("router_aux_loss_coef")
    moe = MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.take("num_experts_per_tok"),
        expert_width=fields.take("moe_intermediate_size"),
        latent_width=0,
        latent_norm=False,
        num_shared_experts=0,
        num_dense_layers=_num_dense_layers(fields),
        dense_width=fields.take("intermediate_size"),
        router=RouterConfig(
            scoring="softmax",
            renormalise=fields.take("norm_topk_prob", default=False),
            balancing="none",
            correction_bias=False,
        ),
    )
    return qwen3.read_text(fields, head_width, moe)


def _num_dense_layers(fields: Fields) -> int:
    step, listed = fields.take("decoder_sparse_step", default=1), fields.take("mlp_only_layers", default=None) or []
    dense = [n for n in range(fields.take("num_hidden_layers")) if n in listed or (n + 1) % step]
    if dense != list(range(len(dense))):
        raise ConfigurationError(
            "config.json: decoder_sparse_step, mlp_only_layers",
            found=f"{step} and {listed}: dense MLPs in layers {dense}",
            expected="dense MLPs in the first layers alone",
            remedy="this model needs something that is not built",
        )
    return len(dense)


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    yield from table_tensors(model)
    for number, (_, mlp) in enumerate(layer_kinds(model)):
        layer = LayerTensors(model, number, f"model.layers.{number}")
        yield from layer.norms()
        yield from llama.grouped_attention(layer)
        if mlp == "dense":
            yield from layer.dense_mlp("mlp", "mlp", model.moe.dense_width)
        else:
            yield layer.tensor("mlp.gate.weight", (model.moe.num_experts, model.width), "mlp.router")
            yield from layer.experts("mlp.experts")
