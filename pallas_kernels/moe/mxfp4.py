"""MXFP4 weights: two 4-bit codes a byte with one power-of-two scale for 32 inputs. Unpacking is exact.

    value = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6}[code] * 2^(scale - 127)

A packed weight is a dict of two uint8 arrays in the layout of released checkpoints, whose last axis is that of the
inputs: `codes` [..., out, in/2], the low half byte being the even input, and `scales` [..., out, in/32].

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3 and 6.
"""

from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

GROUP = 32
"""Inputs that share a scale."""

_SCALE_BIAS, _NAN_SCALE = 127, 255
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_LARGEST_EXPONENT = 2  # of 6 = 1.5 * 2^2


class PackedWeight(TypedDict):
    """`out x in` matrices, any number of them."""

    codes: UInt8[Array, "*B out half_in"]
    scales: UInt8[Array, "*B out groups"]


def dequantize(packed: PackedWeight, dtype: jax.typing.DTypeLike) -> Float[Array, "*B out in"]:
    """The weights in `dtype`: bfloat16, float32 or float64.

    Built from bits, so that every value is exact where `dtype` has it, subnormal numbers included, which arithmetic on
    some devices flushes to zero. Beyond the range of bfloat16 and float32 (4 * 2^126 and above) it is infinite; a scale
    byte of 255 makes its 32 values NaN.

    Raises:
      ValueError: the shapes do not fit together, or another dtype.
    """
    codes, scales = packed["codes"], packed["scales"]
    if codes.shape[:-1] != scales.shape[:-1] or 2 * codes.shape[-1] != GROUP * scales.shape[-1]:
        raise ValueError(f"codes {codes.shape} and scales {scales.shape} are not of one packed weight")
    if np.dtype(dtype) not in (jnp.bfloat16, np.float32, np.float64):
        raise ValueError(f"cannot unpack to {np.dtype(dtype)}; expected bfloat16, float32 or float64")
    info = jnp.finfo(dtype)
    bits = np.dtype(f"uint{info.bits}")
    pairs = jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*scales.shape, GROUP).astype(np.int32)
    scale = scales[..., None].astype(np.int32)
    magnitude, sign = pairs & 7, pairs >> 3
    # As +-1.0 or +-1.5 times a power of two: codes 1 to 7 have exponents -1 0 0 1 1 2 2.
    exponent = (magnitude >> 1) - 1 + scale - _SCALE_BIAS - (int(info.minexp) - 1)
    is_half = ((magnitude & 1) == 1) & (magnitude > 1)
    significand = jnp.where(is_half, 3, 2).astype(bits) << np.array(info.nmant - 1, bits)
    fraction = significand & np.array((1 << info.nmant) - 1, bits)
    normal = (jnp.maximum(exponent, 0).astype(bits) << np.array(info.nmant, bits)) | fraction
    subnormal = significand >> jnp.clip(1 - exponent, 0, 2).astype(bits)
    infinity = np.array((1 << (info.bits - 1 - info.nmant)) - 1 << info.nmant, bits)
    largest = (1 << (info.bits - 1 - info.nmant)) - 2
    pattern = jnp.where(exponent >= 1, normal, subnormal)
    pattern = jnp.where(exponent > largest, infinity, pattern)
    pattern = jnp.where(magnitude == 0, np.array(0, bits), pattern)
    pattern = jnp.where(scale == _NAN_SCALE, infinity | np.array(1 << (info.nmant - 1), bits), pattern)
    pattern |= sign.astype(bits) << np.array(info.bits - 1, bits)
    return lax.bitcast_convert_type(pattern, dtype).reshape(*codes.shape[:-1], -1)


def quantize(weight: np.ndarray) -> dict[str, np.ndarray]:
    """The nearest packed weight of `weight` [..., out, in], on the host.

        scale exponent = floor(log2(largest of the 32)) - 2,  within -127 to 127

    Codes are rounded to nearest, ties to the even code, and limited to 6. What `dequantize` gives comes back unchanged.

    Raises:
      ValueError: the inputs are no multiple of 32, or a value is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"{weight.shape[-1]} inputs; expected a multiple of {GROUP}")
    groups = np.asarray(weight, np.float64).reshape(*weight.shape[:-1], -1, GROUP)
    if not np.isfinite(groups).all():
        raise ValueError("a value is not finite")
    largest = np.abs(groups).max(axis=-1)
    # frexp gives 0.5 <= m < 1: floor(log2) is its exponent less one. A group of zeros keeps scale 1.
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - _LARGEST_EXPONENT, 0)
    exponent = np.clip(exponent, -_SCALE_BIAS, _SCALE_BIAS)
    scaled = np.ldexp(np.abs(groups), -exponent[..., None])
    middles = (_VALUES[1:] + _VALUES[:-1]) / 2
    below, above = np.searchsorted(middles, scaled, side="left"), np.searchsorted(middles, scaled, side="right")
    code = np.where(below % 2 == 0, below, above) | (np.signbit(groups) << 3)
    code = code.astype(np.uint8).reshape(*weight.shape[:-1], -1, 2)
    return {"codes": code[..., 0] | (code[..., 1] << 4), "scales": (exponent + _SCALE_BIAS).astype(np.uint8)}
