"""Released tensors of the towers' encoder layers, whose parts the families name differently."""

from collections.abc import Iterator, Mapping

from mmjax.config import AudioConfig, VisionConfig
from mmjax.models.families.released import LINEAR, SAME, ReleasedTensor, Shape, Slot

CLIP_NAMES = {
    "attention_norm": "layer_norm1",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
WHISPER_NAMES = CLIP_NAMES | {
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}
QWEN_NAMES = {
    "attention_norm": "norm1",
    "output": "attn.proj",
    "mlp_norm": "norm2",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}
"""Without queries, keys and values, which this family joins in one tensor."""


def plain(name: str, shape: Shape, path: str, *index: int) -> ReleasedTensor:
    """A tensor that is only reshaped."""
    return ReleasedTensor(name, shape, (Slot(path, index),), SAME)


def linear(released: str, shape: Shape, path: str, *index: int, bias: str = "") -> Iterator[ReleasedTensor]:
    """`released.weight` [out, in...] in `path`; `released.bias` [out] in the path `bias`, if there is one."""
    yield ReleasedTensor(f"{released}.weight", shape, (Slot(path, index),), LINEAR)
    if bias:
        yield plain(f"{released}.bias", shape[:1], bias, *index)


def norm(released: str, width: int, path: str, *index: int) -> Iterator[ReleasedTensor]:
    """`weight` and `bias` of a LayerNorm."""
    yield plain(f"{released}.weight", (width,), f"{path}.scale", *index)
    yield plain(f"{released}.bias", (width,), f"{path}.bias", *index)


def encoder_layers(
    config: VisionConfig | AudioConfig, ours: str, released: str, names: Mapping[str, str], *, has_key_bias: bool = True
) -> Iterator[ReleasedTensor]:
    """All tensors that `names` names, of all layers: `released.<layer>.<name>` in the stack `ours`."""
    width, hidden, heads = config.width, config.hidden_width, config.num_heads * config.head_width
    shapes = {"output": (width, heads), "up": (hidden, width), "down": (width, hidden)}
    for layer in range(config.num_layers):
        for part, name in names.items():
            full, path = f"{released}.{layer}.{name}", f"{ours}.{part}"
            if part.endswith("_norm"):
                yield from norm(full, width, path, layer)
                continue
            bias = f"{path}_bias" if has_key_bias or part != "key" else ""
            yield from linear(full, shapes.get(part, (heads, width)), path, layer, bias=bias)
