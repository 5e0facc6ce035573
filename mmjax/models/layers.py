"""Small pieces shared by all modules: parameters with named axes, their use, norms, the dense MLP."""

from collections.abc import Callable

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
    rngs: nnx.Rngs,
    initializer: Initializer,
    shape: tuple[int, ...],
    array_axes: tuple[str | None, ...],
    dtype: jax.typing.DTypeLike,
) -> nnx.Param:
    """A trained array. `array_axes` names each of its axes for the sharding table (None: never split)."""
    assert len(shape) == len(array_axes)
    return nnx.Param(initializer(rngs.params(), shape, dtype), array_axes=array_axes)


def normal(standard_deviation: float) -> Initializer:
    return jax.nn.initializers.normal(standard_deviation)


def ones(rngs: nnx.Rngs, width: int, dtype: jax.typing.DTypeLike) -> nnx.Param:
    """Scale of a norm, held whole on every device."""
    return parameter(rngs, jax.nn.initializers.ones, (width,), (None,), dtype)


def use(weight: nnx.Param, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The weight as this device computes with it: cast to `dtype`, gathered where it rests split."""
    return gather_for_use(weight.get_value(), weight.get_metadata()["array_axes"], dtype)


def at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float32 for bfloat16 and float32, float64 for float64."""
    # NumPy's rule: JAX's own refuses to name a common type when promotion is strict.
    return np.promote_types(dtype, np.float32)


def rms_norm(inputs: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """`inputs / sqrt(mean(inputs^2) + epsilon) * scale` over the last axis.

    Statistics in at least float32; the normalised value is cast back before the scale, as the released Kimi models do.
    """
    wide = inputs.astype(at_least_float32(inputs.dtype))
    normalised = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return normalised.astype(inputs.dtype) * jnp.broadcast_to(jnp.asarray(scale, inputs.dtype), inputs.shape)


class DenseMlp(nnx.Module):
    """`down(activation(gate(x), up(x)))`, hidden width split over the tensor axis."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        width: int,
        hidden_width: int,
        activation: ActivationConfig,
        initializer: Initializer,
        dtype: jax.typing.DTypeLike,
    ):
        self.activation = activation
        self.gate = parameter(rngs, initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.up = parameter(rngs, initializer, (width, hidden_width), ("model_weight", "hidden"), dtype)
        self.down = parameter(rngs, initializer, (hidden_width, width), ("hidden", "model_weight"), dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs` [..., D] -> [..., D] of the same dtype."""
        gate = column("...d,df->...f", inputs, use(self.gate, inputs.dtype))
        up = column("...d,df->...f", inputs, use(self.up, inputs.dtype))
        hidden = gated_activation(
            gate, up, kind=self.activation.kind, beta=self.activation.beta, linear_beta=self.activation.linear_beta
        )
        return row("...f,fd->...d", hidden, use(self.down, inputs.dtype))
