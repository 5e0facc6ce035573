"""Small pieces shared by all modules: parameters with named axes, their use, norms, the dense MLP."""

import functools
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import TENSOR
from mmjax.config import ActivationConfig, ModelConfig
from mmjax.parallel.fsdp import gather_for_use
from mmjax.parallel.tensor import column, product, row
from pallas_kernels.gated_activation.api import gated_activation

Initializer = Callable[[jax.Array, tuple[int, ...], jax.typing.DTypeLike], jax.Array]


def parameter(
    initializer: Initializer,
    shape: tuple[int, ...],
    array_axes: tuple[str | None, ...],
    dtype: jax.typing.DTypeLike,
    *,
    kind: type[nnx.Variable] = nnx.Param,
) -> nnx.Variable:
    """A described array of a model: shape, dtype, how it starts, and a name for each axis (None: never split).

    Holds no numbers: `initial_arrays` draws them by path, and a step puts arrays or tracers in their place. What it
    holds then may be a device's shard, or of a stack of layers; `whole_shape` goes on telling one layer's whole sizes.
    """
    assert len(shape) == len(array_axes)
    described = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    return kind(described, array_axes=array_axes, whole_shape=shape, initializer=initializer)


@functools.cache
def normal(standard_deviation: float) -> Initializer:
    """The same function for the same deviation, so that programs which draw arrays of one shape are shared."""
    return jax.nn.initializers.normal(standard_deviation)


def ones(width: int, dtype: jax.typing.DTypeLike) -> nnx.Variable:
    """Scale of a norm, held whole on every device."""
    return parameter(jax.nn.initializers.ones, (width,), (None,), dtype)


def zeros(shape: tuple[int, ...], array_axes: tuple[str | None, ...], dtype: jax.typing.DTypeLike) -> nnx.Variable:
    """A bias."""
    return parameter(jax.nn.initializers.zeros, shape, array_axes, dtype)


def initial_arrays(
    variables: Mapping[str, nnx.Variable], key: jax.Array, shardings: Mapping[str, jax.sharding.Sharding] | None = None
) -> dict[str, jax.Array]:
    """Arrays for described variables, by path; each depends on `key`, its path and its shape alone."""
    return {
        path: _draw(
            variable.get_metadata()["initializer"],
            variable.get_value().shape,
            variable.get_value().dtype,
            shardings[path] if shardings else None,
        )(jax.random.fold_in(key, zlib.crc32(path.encode())))
        for path, variable in variables.items()
    }


@functools.cache
def _draw(initializer: Initializer, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None):
    # Each of these programs runs a few times only: compile fast.
    options: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    return jax.jit(lambda key: initializer(key, shape, dtype), out_shardings=sharding, compiler_options=options)


def use(weight: nnx.Variable, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The weight as this device computes with it: cast to `dtype`, gathered where it rests split."""
    metadata = weight.get_metadata()
    return gather_for_use(weight.get_value(), metadata["array_axes"], metadata["whole_shape"], dtype)


class LoraFactor(nnx.Param):
    """One of the two trained factors of an adapter."""


class LoraWeight(nnx.Module):
    """What stands in place of an adapted weight W [in..., out...]:   W + scale * down [in..., r] up [r, out...]."""

    def __init__(
        self, base: nnx.Variable | None, down: nnx.Variable, up: nnx.Variable, *, scale: float, num_input_axes: int
    ):
        self.lora_base = base
        """W; None where it is held in another form (packed experts)."""
        self.down, self.up = down, up
        self.scale, self.num_input_axes = scale, num_input_axes


def project(equation: str, inputs: jax.Array, weight: nnx.Variable | LoraWeight, *, is_row: bool = False) -> jax.Array:
    """`einsum(equation, inputs, weight)` in the dtype of `inputs`: every projection of a model goes through here.

    `is_row`: both hold this device's share of a summed axis (heads, hidden width); summed over the tensor axis.
    """
    if not isinstance(weight, LoraWeight):
        outputs = (row if is_row else column)(equation, inputs, use(weight, inputs.dtype))
        return checkpoint_name(outputs, "projections")
    assert weight.lora_base is not None
    # Added before the sum over the tensor axis: one exchange for both.
    outputs = column(equation, inputs, use(weight.lora_base, inputs.dtype)) + _through_factors(equation, inputs, weight)
    return checkpoint_name(lax.psum(outputs, TENSOR) if is_row else outputs, "projections")


def _through_factors(equation: str, inputs: jax.Array, weight: LoraWeight) -> jax.Array:
    """`einsum(equation, inputs, scale * down up)`, without the product of the factors.

    The factor that holds the summed axes comes first: `down`, or `up` where a weight is used from its outputs' side.
    """
    left, result = equation.split("->")
    taken, letters = left.split(",")
    letters_in, letters_out = letters[: weight.num_input_axes], letters[weight.num_input_axes :]
    first, second = (weight.down, f"{letters_in}Z"), (weight.up, f"Z{letters_out}")
    summed = {letter for letter in letters if letter in taken and letter not in result}
    if not summed <= set(letters_in):
        first, second = second, first
    between = "".join(letter for letter in taken if letter not in summed) + "Z"
    narrow = product(f"{taken},{first[1]}->{between}", inputs, use(first[0], inputs.dtype)) * weight.scale
    return product(f"{between},{second[1]}->{result}", narrow, use(second[0], inputs.dtype))


def add_bias(values: jax.Array, bias: nnx.Variable) -> jax.Array:
    """`values` [..., heads and widths of `bias`] plus `bias`, whose gradient adds up over tokens in its own dtype."""
    return values + jnp.broadcast_to(bias.get_value(), values.shape).astype(values.dtype)


def spread(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`jnp.broadcast_to`, but gradients add up in at least float32: GPUs add bfloat16 numbers up in bfloat16."""
    return jnp.broadcast_to(array.astype(at_least_float32(array.dtype)), shape).astype(array.dtype)


def at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float32 for bfloat16 and float32, float64 for float64."""
    # NumPy's rule: JAX's own refuses to name a common type when promotion is strict.
    return np.promote_types(dtype, np.float32)


def rms_norm(inputs: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """`inputs / sqrt(mean(inputs^2) + epsilon) * scale` over the last axis.

    Statistics in at least float32; the normalised value is cast back before the scale, as the released Kimi models do.
    The scale is cast where it is broadcast, so that its gradient adds up over tokens in its own dtype.
    """
    wide = inputs.astype(at_least_float32(inputs.dtype))
    normalised = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return normalised.astype(inputs.dtype) * jnp.broadcast_to(scale, inputs.shape).astype(inputs.dtype)


def norm_weight(model: ModelConfig, width: int) -> "nnx.Variable | LayerNorm":
    """Weight of one of the decoder's norms, held whole on every device: a scale of 1 at the start."""
    if model.norm == "layer":
        return LayerNorm(width, model.norm_epsilon, model.parameter_dtype)
    start = jax.nn.initializers.zeros if model.norm_scale == "zero_centred" else jax.nn.initializers.ones
    return parameter(start, (width,), (None,), model.parameter_dtype)


def scaled_norm(inputs: jax.Array, weight: "nnx.Variable | LayerNorm", model: ModelConfig) -> jax.Array:
    """The model's kind of norm with a weight of `norm_weight`, as its scale and epsilon are."""
    if isinstance(weight, LayerNorm):
        return weight(inputs)
    wide = at_least_float32(inputs.dtype)
    scale = use(weight, wide)
    if model.norm_scale == "plain":
        return rms_norm(inputs, scale, model.norm_epsilon)
    # Rounded once, as the releases do: 1 + weight has fewer digits of the weight.
    return rms_norm(inputs.astype(wide), scale + 1, model.norm_epsilon).astype(inputs.dtype)


def layer_norm(inputs: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float) -> jax.Array:
    """`(inputs - mean) / sqrt(variance + epsilon) * scale + bias` over the last axis, in at least float32."""
    wide = inputs.astype(at_least_float32(inputs.dtype))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    result = normalised * jnp.broadcast_to(scale, inputs.shape).astype(wide.dtype)
    if bias is not None:
        result += jnp.broadcast_to(bias, inputs.shape).astype(wide.dtype)
    return result.astype(inputs.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm with scale and bias over the last axis, in at least float32; held whole on every device."""

    def __init__(self, width: int, epsilon: float, dtype: jax.typing.DTypeLike):
        self.epsilon = epsilon
        self.scale = ones(width, dtype)
        self.bias = zeros((width,), (None,), dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        wide = at_least_float32(inputs.dtype)
        return layer_norm(inputs, use(self.scale, wide), use(self.bias, wide), self.epsilon)


class DenseMlp(nnx.Module):
    """`down(activation(gate(x), up(x)))`, hidden width split over the tensor axis."""

    def __init__(
        self,
        *,
        width: int,
        hidden_width: int,
        activation: ActivationConfig,
        initializer: Initializer,
        dtype: jax.typing.DTypeLike,
        has_bias: bool = False,
    ):
        self.activation, self.has_bias = activation, has_bias
        self.gate = parameter(initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.up = parameter(initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.down = parameter(initializer, (hidden_width, width), ("hidden", "model_weight"), dtype)
        if has_bias:
            self.gate_bias = zeros((hidden_width,), ("hidden",), dtype)
            self.up_bias = zeros((hidden_width,), ("hidden",), dtype)
            self.down_bias = zeros((width,), (None,), dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` [..., D] -> [..., D] of the same dtype."""
        return self.output(self.hidden(inputs))

    def hidden(self, inputs: jax.Array) -> jax.Array:
        """The first half: `inputs` [..., D] -> this device's hidden values [..., f]."""
        gate = project("...d,df->...f", inputs, self.gate)
        up = project("...d,df->...f", inputs, self.up)
        if self.has_bias:
            gate, up = add_bias(gate, self.gate_bias), add_bias(up, self.up_bias)
        return gated_activation(
            gate, up, kind=self.activation.kind, beta=self.activation.beta, linear_beta=self.activation.linear_beta
        )

    def output(self, hidden: jax.Array) -> jax.Array:
        """The second half."""
        output = project("...f,fd->...d", hidden, self.down, is_row=True)
        return add_bias(output, self.down_bias) if self.has_bias else output


class PlainMlp(nnx.Module):
    """`down(relu(up(x))^2)`, hidden width split over the tensor axis."""

    def __init__(
        self,
        *,
        width: int,
        hidden_width: int,
        initializer: Initializer,
        dtype: jax.typing.DTypeLike,
        has_bias: bool,
    ):
        self.has_bias = has_bias
        self.up = parameter(initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.down = parameter(initializer, (hidden_width, width), ("hidden", "model_weight"), dtype)
        if has_bias:
            self.up_bias = zeros((hidden_width,), ("hidden",), dtype)
            self.down_bias = zeros((width,), (None,), dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` [..., D] -> [..., D] of the same dtype."""
        up = project("...d,df->...f", inputs, self.up)
        hidden = jnp.square(jax.nn.relu(add_bias(up, self.up_bias) if self.has_bias else up))
        output = project("...f,fd->...d", hidden, self.down, is_row=True)
        return add_bias(output, self.down_bias) if self.has_bias else output
