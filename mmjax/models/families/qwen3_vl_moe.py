"""Qwen3-VL with a mixture of experts, whose weights a release holds as two tensors a layer."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmjax.config import ModelConfig, MoeConfig, RouterConfig, layer_kinds
from mmjax.models.families import llama, qwen3_vl
from mmjax.models.families.fields import Fields
from mmjax.models.families.layer_tensors import LayerTensors, table_tensors
from mmjax.models.families.released import SAME, Layout, ReleasedTensor, Shape

MODEL_TYPES = ("qwen3_vl_moe",)


def _split_last(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
    return np.split(value, len(shapes), axis=-1)


def _join_last(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
    return np.concatenate(parts, axis=-1)


GATE_AND_UP = Layout(_split_last, _join_last)
"""[E, in, 2 * out] -> [E, in, out] twice."""


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3-VL-MoE -> our settings.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields, text = qwen3_vl.split_config(config)
    text.expect("model_type", "qwen3_vl_moe_text")
    for name, value in (("decoder_sparse_step", 1), ("norm_topk_prob", True), ("output_router_logits", False)):
        text.expect(name, value)
    # Of a training run that adds a balancing loss.
    text.ignore("router_aux_loss_coef")
    moe = MoeConfig(
        num_experts=text.take("num_experts", "num_local_experts"),
        experts_per_token=text.take("num_experts_per_tok"),
        expert_width=text.take("moe_intermediate_size"),
        latent_width=0,
        latent_norm=False,
        num_shared_experts=0,
        num_dense_layers=_num_dense_layers(text),
        dense_width=text.take("intermediate_size"),
        router=RouterConfig(scoring="softmax", balancing="none", correction_bias=False),
    )
    return qwen3_vl.read_parts(fields, text, moe)


def _num_dense_layers(text: Fields) -> int:
    dense = text.take("mlp_only_layers", default=None) or []
    # Dense layers behind one with experts are not built.
    text.expect("mlp_only_layers", list(range(len(dense))), None)
    return len(dense)


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    root, moe, width = "model.language_model", model.moe, model.width
    yield from table_tensors(model, root, "lm_head")
    for number, (_, mlp) in enumerate(layer_kinds(model)):
        layer = LayerTensors(model, number, f"{root}.layers.{number}")
        yield from layer.norms()
        yield from llama.grouped_attention(layer)
        if mlp == "dense":
            yield from layer.dense_mlp("mlp", "mlp", moe.dense_width)
            continue
        yield layer.tensor("mlp.gate.weight", (moe.num_experts, width), "mlp.router")
        joined = (moe.num_experts, width, 2 * moe.expert_width)
        down = (moe.num_experts, moe.expert_width, width)
        # [E, in, out] in a vendor's file, [E, out, in] in one that transformers wrote.
        for tensor in (
            layer.joined("mlp.experts.gate_up_proj", joined, ("mlp.gate", "mlp.up"), GATE_AND_UP),
            layer.tensor("mlp.experts.down_proj", down, "mlp.down", SAME),
        ):
            yield dataclasses.replace(tensor, may_be_swapped=True)
    yield from qwen3_vl.tower_tensors(model, "model.visual")
