"""Kimi-K3: released tensor names and layouts, and how they map to our parameters, both ways."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmjax.config import ModelConfig, layer_kinds
from mmjax.models.decoder import layer_address
from mmjax.models.multimodal import define

# Released `A_log` holds this many values: one a head, then zeros.
PADDED_HEADS = 128

Layout = Literal["same", "linear", "linear_of_heads", "convolution", "padded", "key_and_value"]


@dataclass(frozen=True)
class ReleasedTensor:
    """One tensor of a released checkpoint and the parameters that hold its numbers.

    Layouts, released -> ours:
      same             reshaped only
      linear           [out, in...] -> [in, out...]
      linear_of_heads  [out, heads * width] -> [heads, width, out]
      convolution      [channels, 1, taps] -> [taps, heads, width]
      padded           [128] -> [heads]; what is cut off must be zero
      key_and_value    [heads * (key + value), in] -> [in, heads, key] and [in, heads, value]
    """

    name: str
    paths: tuple[str, ...]
    layout: Layout = "same"
    index: tuple[int, ...] = ()
    """Position along the leading stacked axes of the parameter: repeat, expert."""


def released_tensors(model: ModelConfig) -> Iterator[ReleasedTensor]:
    """Every tensor of a released checkpoint of `model`."""
    text = "language_model.model"
    yield ReleasedTensor("language_model.lm_head.weight", ("decoder.head",), "linear")
    yield ReleasedTensor(f"{text}.embed_tokens.weight", ("decoder.embedding",))
    yield ReleasedTensor(f"{text}.norm.weight", ("decoder.norm",))
    yield ReleasedTensor(f"{text}.output_attn_res_norm.weight", ("decoder.output_residual.norm",))
    yield ReleasedTensor(f"{text}.output_attn_res_proj.weight", ("decoder.output_residual.query",))
    for layer, (mixer, mlp) in enumerate(layer_kinds(model)):
        yield from _layer(model, layer, mixer, mlp)
    if model.vision.is_present:
        yield from _vision(model)


def _layer(model: ModelConfig, layer: int, mixer: str, mlp: str) -> Iterator[ReleasedTensor]:
    address = layer_address(model, layer)
    ours = f"decoder.segments.{address.segment}.layers.{address.position}"
    released = f"language_model.model.layers.{layer}"

    def tensor(name: str, path: str, layout: Layout = "same", *expert: int) -> ReleasedTensor:
        return ReleasedTensor(f"{released}.{name}", (f"{ours}.{path}",), layout, (address.repeat, *expert))

    yield tensor("input_layernorm.weight", "input_norm")
    yield tensor("post_attention_layernorm.weight", "mlp_norm")
    yield tensor("self_attention_res_norm.weight", "mixer_residual.norm")
    yield tensor("self_attention_res_proj.weight", "mixer_residual.query")
    yield tensor("mlp_res_norm.weight", "mlp_residual.norm")
    yield tensor("mlp_res_proj.weight", "mlp_residual.query")
    if mixer == "linear":
        for short, long in (("q", "query"), ("k", "key"), ("v", "value")):
            yield tensor(f"self_attn.{short}_proj.weight", f"mixer.{long}", "linear")
            yield tensor(f"self_attn.{short}_conv1d.weight", f"mixer.{long}_convolution", "convolution")
        yield tensor("self_attn.f_a_proj.weight", "mixer.decay_down", "linear")
        yield tensor("self_attn.f_b_proj.weight", "mixer.decay_up", "linear")
        yield tensor("self_attn.b_proj.weight", "mixer.beta", "linear")
        yield tensor("self_attn.g_proj.weight", "mixer.output_gate", "linear")
        yield tensor("self_attn.A_log", "mixer.log_rate", "padded")
        yield tensor("self_attn.dt_bias", "mixer.decay_bias")
        yield tensor("self_attn.o_norm.weight", "mixer.output_norm")
    else:
        yield tensor("self_attn.q_a_proj.weight", "mixer.query_down", "linear")
        yield tensor("self_attn.q_a_layernorm.weight", "mixer.query_norm")
        yield tensor("self_attn.q_b_proj.weight", "mixer.query_up", "linear")
        yield tensor("self_attn.kv_a_proj_with_mqa.weight", "mixer.latent_down", "linear")
        yield tensor("self_attn.kv_a_layernorm.weight", "mixer.latent_norm")
        yield ReleasedTensor(
            f"{released}.self_attn.kv_b_proj.weight",
            (f"{ours}.mixer.key_up", f"{ours}.mixer.value_up"),
            "key_and_value",
            (address.repeat,),
        )
        yield tensor("self_attn.g_proj.weight", "mixer.output_gate", "linear")
    yield tensor("self_attn.o_proj.weight", "mixer.output", "linear_of_heads")
    if mlp == "dense":
        for name in ("gate", "up", "down"):
            yield tensor(f"mlp.{name}_proj.weight", f"mlp.{name}", "linear")
        return
    moe = "block_sparse_moe"
    yield tensor(f"{moe}.gate.weight", "mlp.router", "linear")
    yield tensor(f"{moe}.gate.e_score_correction_bias", "mlp.bias")
    yield tensor(f"{moe}.routed_expert_down_proj.weight", "mlp.latent_down", "linear")
    yield tensor(f"{moe}.routed_expert_norm.weight", "mlp.latent_norm")
    yield tensor(f"{moe}.routed_expert_up_proj.weight", "mlp.latent_up", "linear")
    for name in ("gate", "up", "down"):
        yield tensor(f"{moe}.shared_experts.{name}_proj.weight", f"mlp.shared.{name}", "linear")
    for expert in range(model.moe.num_experts):
        for short, long in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            yield tensor(f"{moe}.experts.{expert}.{short}.weight", f"mlp.{long}", "linear", expert)


def _vision(model: ModelConfig) -> Iterator[ReleasedTensor]:
    yield ReleasedTensor("vision_tower.patch_embed.proj.weight", ("vision.patch_embedding",), "linear")
    yield ReleasedTensor("vision_tower.patch_embed.pos_emb.weight", ("vision.position_table",))
    yield ReleasedTensor("vision_tower.encoder.final_layernorm.weight", ("vision.final_norm",))
    names: tuple[tuple[str, str, Layout], ...] = (
        ("norm0", "attention_norm", "same"),
        ("wqkv", "query_key_value", "linear"),
        ("wo", "output", "linear_of_heads"),
        ("norm1", "mlp_norm", "same"),
        ("mlp.fc0", "up", "linear"),
        ("mlp.fc1", "down", "linear"),
    )
    for block in range(model.vision.num_layers):
        for name, path, layout in names:
            released = f"vision_tower.encoder.blocks.{block}.{name}.weight"
            yield ReleasedTensor(released, (f"vision.layers.{path}",), layout, (block,))
    yield ReleasedTensor("mm_projector.proj.0.weight", ("projector.up",), "linear")
    yield ReleasedTensor("mm_projector.proj.2.weight", ("projector.down",), "linear")
    yield ReleasedTensor("mm_projector.post_norm.weight", ("projector.norm",))


def from_released(
    model: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Released tensors -> (parameters, router biases) by path.

    Raises:
      ValueError: a tensor is missing, left over or padded with something else than zeros; all are named.
    """
    definition = define(model)
    shapes = {
        path: (v.get_value().shape, v.get_value().dtype)
        for path, v in (definition.parameters | definition.router_biases).items()
    }
    expected = list(released_tensors(model))
    names = {tensor.name for tensor in expected}
    if names != tensors.keys():
        raise ValueError(
            f"missing tensors: {sorted(names - tensors.keys())}; not understood: {sorted(tensors.keys() - names)}"
        )
    arrays = {path: np.empty(shape, dtype) for path, (shape, dtype) in shapes.items()}
    filled = dict.fromkeys(shapes, 0)
    for tensor in expected:
        parts = [arrays[path][tensor.index] for path in tensor.paths]
        for path, part, value in zip(tensor.paths, parts, _to_ours(tensor, tensors[tensor.name], parts), strict=True):
            part[...] = value
            filled[path] += part.size
    if gaps := [path for path, array in arrays.items() if filled[path] != array.size]:
        raise ValueError(f"parameters that no released tensor fills: {gaps}")
    return {p: arrays[p] for p in definition.parameters}, {p: arrays[p] for p in definition.router_biases}


def to_released(model: ModelConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters and router biases by path (or their gradients) -> released tensors."""
    return {
        tensor.name: _to_released(tensor, [np.asarray(arrays[path])[tensor.index] for path in tensor.paths])
        for tensor in released_tensors(model)
    }


def _to_ours(tensor: ReleasedTensor, value: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    (first, *_) = parts
    match tensor.layout:
        case "same":
            return [value.reshape(first.shape)]
        case "linear" | "linear_of_heads":
            return [value.reshape(value.shape[0], -1).T.reshape(first.shape)]
        case "convolution":
            return [value.reshape(-1, first.shape[0]).T.reshape(first.shape)]
        case "padded":
            if value[first.size :].any():
                raise ValueError(f"{tensor.name}: the padding after {first.size} heads is not zero")
            return [value[: first.size]]
        case "key_and_value":
            num_inputs, num_heads, key_width = first.shape
            by_head = value.reshape(num_heads, -1, num_inputs).transpose(2, 0, 1)
            return [by_head[..., :key_width], by_head[..., key_width:]]


def _to_released(tensor: ReleasedTensor, parts: list[np.ndarray]) -> np.ndarray:
    (first, *_) = parts
    match tensor.layout:
        case "same" if tensor.name.endswith("_res_proj.weight"):
            return first[None]
        case "same" if tensor.name.endswith("dt_bias"):
            return first.reshape(-1)
        case "same":
            return first
        case "linear" if tensor.name.endswith("patch_embed.proj.weight"):
            side = round((first.shape[0] // 3) ** 0.5)
            return first.T.reshape(-1, 3, side, side)
        case "linear":
            return first.reshape(first.shape[0], -1).T
        case "linear_of_heads":
            return first.reshape(-1, first.shape[-1]).T
        case "convolution":
            return first.reshape(first.shape[0], -1).T[:, None, :]
        case "padded":
            return np.pad(first, (0, PADDED_HEADS - first.size))
        case "key_and_value":
            return np.concatenate(parts, axis=-1).transpose(1, 2, 0).reshape(-1, first.shape[0])
