"""A pre-normed transformer layer with biases: the towers of CLIP, Qwen3-VL and Whisper are stacks of it."""

from functools import partial

import jax
from flax import nnx

from mmjax.config import AudioConfig, RotaryConfig, VisionConfig
from mmjax.models.layers import Initializer, LayerNorm, add_bias, parameter, project, zeros
from mmjax.models.rotary import Rotation, rotate
from pallas_kernels.sparse_attention.api import attention


class EncoderLayer(nnx.Module):
    """Attention inside each document, then an MLP; whole on every device of the tensor axis.

    x <- x + Attention(LayerNorm(x)) W_o + b_o
    x <- x + activation(LayerNorm(x) W_up + b_up) W_down + b_down
    """

    def __init__(
        self,
        config: VisionConfig | AudioConfig,
        initializer: Initializer,
        dtype: jax.typing.DTypeLike,
        *,
        has_key_bias: bool = True,
    ):
        make = partial(parameter, initializer, dtype=dtype)
        width, heads = config.width, (config.num_heads, config.head_width)
        self.activation = config.activation
        self.attention_norm = LayerNorm(width, config.norm_epsilon, dtype)
        self.query = make((width, *heads), ("model_weight", None, None))
        self.key = make((width, *heads), ("model_weight", None, None))
        self.value = make((width, *heads), ("model_weight", None, None))
        self.query_bias = zeros(heads, (None, None), dtype)
        self.key_bias = zeros(heads, (None, None), dtype) if has_key_bias else None
        self.value_bias = zeros(heads, (None, None), dtype)
        self.output = make((*heads, width), (None, None, "model_weight"))
        self.output_bias = zeros((width,), (None,), dtype)
        self.mlp_norm = LayerNorm(width, config.norm_epsilon, dtype)
        self.up = make((width, config.hidden_width), ("model_weight", None))
        self.up_bias = zeros((config.hidden_width,), (None,), dtype)
        self.down = make((config.hidden_width, width), (None, "model_weight"))
        self.down_bias = zeros((width,), (None,), dtype)

    def __call__(self, hidden: jax.Array, segment_ids: jax.Array, rotation: Rotation | None = None) -> jax.Array:
        """`hidden` [b, P, D], segments [b, P] -> the same shape and dtype; all of a head turns by `rotation`."""
        dtype = hidden.dtype
        normed = self.attention_norm(hidden)
        query = add_bias(project("bpd,dhk->bphk", normed, self.query), self.query_bias)
        key = project("bpd,dhk->bphk", normed, self.key)
        if self.key_bias is not None:
            key = add_bias(key, self.key_bias)
        value = add_bias(project("bpd,dhk->bphk", normed, self.value), self.value_bias)
        if rotation is not None:
            config = RotaryConfig(width=query.shape[-1])
            query, key = rotate(query, rotation, config), rotate(key, rotation, config)
        mixed = attention(query, key, value, segment_ids, scale=query.shape[-1] ** -0.5, is_causal=False)
        hidden += add_bias(project("bphk,hkd->bpd", mixed.astype(dtype), self.output), self.output_bias)
        up = add_bias(project("bpd,df->bpf", self.mlp_norm(hidden), self.up), self.up_bias)
        return hidden + add_bias(project("bpf,fd->bpd", activate(up, self.activation), self.down), self.down_bias)


def activate(inputs: jax.Array, kind: str) -> jax.Array:
    """`gelu` (erf), `gelu_tanh`, or `quick_gelu`: x sigmoid(1.702 x)."""
    if kind == "quick_gelu":
        return inputs * jax.nn.sigmoid(1.702 * inputs)
    return jax.nn.gelu(inputs, approximate=kind == "gelu_tanh")
