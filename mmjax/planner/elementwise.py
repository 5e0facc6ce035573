"""Bytes that a forward pass moves between its products: norms, rotation, gates, sums, casts. No kernel hides them."""

from collections.abc import Sequence

from mmjax.config import LayerKind, ModelConfig, RunConfig
from mmjax.planner.memory import kind_counts
from mmjax.planner.parameters import ITEM_BYTES, Shard, wide


def token_bytes(model: ModelConfig, tensor: int, kinds: dict[LayerKind, float] | None = None) -> float:
    """Bytes read and written for one position in all decoder layers on a device, forward.

    Each operation reads its inputs and writes its results once, in the compute dtype c (w: at least 4); heads H, hidden
    values and what they are made of are divided by the tensor axis.

        twice a layer  sum with the stream, norm: 4 D; of several streams or residual blocks, which count as a part of
                       their own, the norm alone: 2 D
        grouped        queries and keys turned: 2 (H + H_keys) K, a gate 3 H K
        latent         latents' norms 2 (R + L); queries, keys and padded values laid out 2 (2 H K + H V), a gate 3 H V
        KDA, GDN       taps 2 (2 H K + H V), decay H K (c + w), as in front of the kernels, or H w, gated norm 3 H V
        gated MLP      3 hidden values (without gate 2), routed experts' inside their kernels
        router         scores, their sigmoid, choices of E experts: 3 E w; routed and shared results joined 3 D
    """
    counts = kinds or kind_counts(model)
    item, wider = ITEM_BYTES[model.compute_dtype], ITEM_BYTES[wide(model.compute_dtype)]
    width, moe = model.width, model.moe
    per_sublayer = (4 if model.residual == "plain" else 2) * width * item
    factors = 3 if model.dense_mlp == "gated" else 2
    total = 0.0
    for (mixer, mlp), number in counts.items():
        layer = 2 * per_sublayer + _mixer_bytes(model, mixer, item, wider) / tensor
        if mlp == "dense":
            layer += factors * moe.dense_width / tensor * item
        else:
            layer += 3 * moe.shared_hidden_width / tensor * item + 3 * moe.num_experts * wider + 3 * width * item
        total += number * layer
    return total


def _mixer_bytes(model: ModelConfig, mixer: str, item: int, wider: int) -> float:
    linear, net, full, grouped = (
        model.linear_attention,
        model.gated_delta_net,
        model.full_attention,
        model.grouped_attention,
    )
    if mixer == "linear" and model.linear_attention_kind == "kimi_delta":
        keys, values = linear.num_heads * linear.key_width, linear.num_heads * linear.value_width
        return 2 * (2 * keys + values) * item + keys * (item + wider) + 3 * values * item
    if mixer == "linear":
        keys, values = net.num_key_heads * net.key_width, net.num_value_heads * net.value_width
        return 2 * (2 * keys + values) * item + net.num_value_heads * wider + 3 * values * item
    if model.full_attention_kind == "grouped":
        heads = grouped.num_heads * grouped.head_width
        gate = 3 * heads if grouped.output_gate == "sigmoid" else 0
        return (2 * (heads + grouped.num_key_heads * grouped.head_width) + gate) * item
    keys, values = full.num_heads * full.key_width, full.num_heads * full.value_width
    gate = 3 * values if full.output_gate == "sigmoid" else 0
    return (2 * (full.query_rank + full.latent_width) + 2 * (2 * keys + values) + gate) * item


def patch_bytes(model: ModelConfig) -> float:
    """The same for one patch in all layers of the picture tower: two sublayers, rotation, an MLP without gate."""
    vision, item = model.vision, ITEM_BYTES[model.compute_dtype]
    heads = vision.num_heads * vision.head_width
    return vision.num_layers * (8 * vision.width + 4 * heads + 2 * vision.hidden_width) * item


def adapter_bytes(model: ModelConfig, held: Sequence[Shard]) -> float:
    """Bytes of one position in a device's adapters of decoder layers, those of routed experts left out.

        in c of the input read once more, 2 out c of the result written and read where it is added

    Their products are so narrow that these bytes, not FLOPs, set their time.
    """
    item, total = ITEM_BYTES[model.compute_dtype], 0.0
    for shard in held:
        array = shard.array
        if array.part != "adapters" or not array.in_decoder_layer or array.adapted_part == "routed experts":
            continue
        is_down = array.name == "down"
        rank = array.shape[-1 if is_down else 0]
        total += (1 if is_down else 2) * shard.used_entries / rank * item
    return total


def cast_bytes(config: RunConfig, held: Sequence[Shard]) -> float:
    """Bytes of casting a device's weights to the compute dtype once, where they rest in another one."""
    item = ITEM_BYTES[config.model.compute_dtype]
    return sum(
        shard.used_entries * (item + ITEM_BYTES[shard.array.dtype])
        for shard in held
        if not shard.array.is_packed and ITEM_BYTES[shard.array.dtype] != item and shard.array.part != "adapters"
    )
