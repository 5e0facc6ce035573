"""Small pieces shared by all modules: parameters with named axes, their use, norms, the dense MLP."""

import functools
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.config import ActivationConfig
from mmjax.parallel.fsdp import gather_for_use
from mmjax.parallel.tensor import column, row
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

    Holds no numbers: `initial_arrays` draws them by path, and a step puts arrays or tracers in their place.
    """
    assert len(shape) == len(array_axes)
    return kind(jax.ShapeDtypeStruct(shape, np.dtype(dtype)), array_axes=array_axes, initializer=initializer)


@functools.cache
def normal(standard_deviation: float) -> Initializer:
    """The same function for the same deviation, so that programs which draw arrays of one shape are shared."""
    return jax.nn.initializers.normal(standard_deviation)


def ones(width: int, dtype: jax.typing.DTypeLike) -> nnx.Variable:
    """Scale of a norm, held whole on every device."""
    return parameter(jax.nn.initializers.ones, (width,), (None,), dtype)


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
    return gather_for_use(weight.get_value(), weight.get_metadata()["array_axes"], dtype)


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
    ):
        self.activation = activation
        self.gate = parameter(initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.up = parameter(initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.down = parameter(initializer, (hidden_width, width), ("hidden", "model_weight"), dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` [..., D] -> [..., D] of the same dtype."""
        gate = column("...d,df->...f", inputs, use(self.gate, inputs.dtype))
        up = column("...d,df->...f", inputs, use(self.up, inputs.dtype))
        hidden = gated_activation(
            gate, up, kind=self.activation.kind, beta=self.activation.beta, linear_beta=self.activation.linear_beta
        )
        return row("...f,fd->...d", hidden, use(self.down, inputs.dtype))
