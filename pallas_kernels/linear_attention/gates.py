"""The gate that makes log decays of what a projection gives: as XLA computes it, and inside kernels."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear_attention.documents import wide_dtype

Kind = Literal["bounded", "softplus"]

LOG2_E = math.log2(math.e)
MOST_LOG_RATE = 60.0
LARGEST_POWER = 126.0
"""Of 2: neither it nor its reciprocal leaves the normal numbers of float32, and a gate is saturated."""
SMALL = 2.0**-7
"""Up to here a series of three terms is nearer to log(1 + x) than the logarithm of a rounded 1 + x."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("log_rate", "bias"), meta_fields=("kind", "lower_bound")
)
@dataclasses.dataclass(frozen=True)
class DecayGate:
    """Log decay of each token and channel, or of each token and head, at most 0, from a raw one.

        bounded:  lower_bound * sigmoid(exp(log_rate) (raw + bias))
        softplus: -exp(log_rate) softplus(raw + bias)

    Value and gradients are finite for finite arguments, of softplus while its input times the rate is: a rate beyond
    e^60 counts as e^60, one below e^-60 as that.

    Source: Kimi K3 technical report, arXiv:2607.24653, equation 2 (bounded); Kimi Linear, arXiv:2510.26692 (softplus).
    """

    log_rate: Float[Array, " H"]
    """`A_log` of checkpoints."""
    bias: Float[Array, "H ..."]
    """`dt_bias` of checkpoints."""
    kind: Kind
    lower_bound: float = -5.0
    """Of a bounded one."""

    def __call__(self, raw: Float[Array, "B S H ..."]) -> Float[Array, "B S H ..."]:
        """In at least float32."""
        wide = wide_dtype(raw, self.log_rate, self.bias)
        shifted = raw.astype(wide) + self.bias.astype(wide)[None, None]
        rate = jnp.exp(self.limited_log_rate().astype(wide))
        rate = rate.reshape(1, 1, -1, *(1,) * (raw.ndim - 3))
        match self.kind:
            case "bounded":
                return self.lower_bound * jax.nn.sigmoid(rate * shifted)
            case "softplus":
                return -rate * jax.nn.softplus(shifted)

    def limited_log_rate(self) -> Float[Array, " H"]:
        return jnp.clip(self.log_rate, -MOST_LOG_RATE, MOST_LOG_RATE)

    @property
    def form(self) -> "Form":
        return Form(self.kind, self.lower_bound)


class Functions(NamedTuple):
    """What a kernel computes a gate by."""

    exp2: Callable = jnp.exp2
    log2: Callable = jnp.log2
    reciprocal: Callable = jnp.reciprocal


class Form(NamedTuple):
    """What a gate's kernels are made for: they compute it in float32, in the forward and again in the backward pass.

    `raw`, `shift` and `rate` are of shapes that fit each other; the latter two come from `rows`. To base 2, a gate's
    curve is of `raw * factor + shift`.
    """

    kind: Kind
    lower_bound: float

    def rows(self, log_rate: Float[Array, " H"], bias: Float[Array, "H K"]) -> Float[Array, "H 2 K"]:
        """`shift` and `rate` of each channel, of a limited `log_rate`."""
        rate = jnp.broadcast_to(jnp.exp(log_rate)[:, None], bias.shape)
        return jnp.stack([bias * self._factor(rate), rate], axis=1)

    def _factor(self, rate: jax.Array) -> jax.Array:
        return -LOG2_E * rate if self.kind == "bounded" else jnp.full_like(rate, LOG2_E)

    def log2_decay(self, raw: jax.Array, shift: jax.Array, rate: jax.Array, functions: Functions) -> jax.Array:
        """The decay's logarithm to base 2."""
        power = raw * self._factor(rate) + shift
        if self.kind == "bounded":
            return (self.lower_bound * LOG2_E) * functions.reciprocal(1 + functions.exp2(power))
        return -rate * _softplus(power, functions.exp2(-jnp.abs(power)), functions)

    def gradients(
        self, gradient: jax.Array, raw: jax.Array, shift: jax.Array, rate: jax.Array, functions: Functions
    ) -> tuple[jax.Array, jax.Array]:
        """Of `raw`, as of the bias; and of `log_rate` what `finish_rate` makes its gradient of, added up.

        `gradient` is that of the natural log decay.
        """
        power = raw * self._factor(rate) + shift
        if self.kind == "bounded":
            power = jnp.clip(power, -LARGEST_POWER, LARGEST_POWER)
            other = functions.exp2(power)
            share = functions.reciprocal(1 + other)
            # As 1 - share the other share would lose its digits where the gate saturates.
            gradient *= other * share * share
            return gradient * (self.lower_bound * rate), gradient * power
        smaller = functions.exp2(-jnp.abs(power))
        share = functions.reciprocal(1 + smaller)
        share = jnp.where(power >= 0, share, smaller * share)
        return gradient * (-rate * share), gradient * _softplus(power, smaller, functions)

    def finish_rate(self, total: Float[Array, " H"], log_rate: Float[Array, " H"]) -> Float[Array, " H"]:
        """Gradient of `log_rate`."""
        if self.kind == "bounded":
            return total * (-self.lower_bound / LOG2_E)
        return total * (jnp.exp(log_rate) * (-1 / LOG2_E))


def _softplus(power: jax.Array, smaller: jax.Array, functions: Functions) -> jax.Array:
    """log2(1 + 2^power), where `smaller` is 2^-|power|."""
    series = (LOG2_E * smaller) * (1 - smaller * (1 / 2 - smaller * (1 / 3)))
    return jnp.maximum(power, 0) + jnp.where(smaller < SMALL, series, functions.log2(1 + smaller))
