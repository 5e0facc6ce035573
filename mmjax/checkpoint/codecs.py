"""How released checkpoints pack weights: MXFP4, FP8 in blocks of 128 x 128, INT4 in groups of 32; read and written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mmjax.errors import CheckpointError
from pallas_kernels.moe.mxfp4 import quantize

GROUP = 32
_BLOCK = 128
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The sixteen E2M1 codes: sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Codec:
    """One way to pack the numbers of `<name>` = `<stem>.weight` into several tensors, `<stem>.<suffix>` each."""

    name: str
    suffixes: tuple[str, ...]
    """The first holds the codes."""
    logical_shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]]
    """Shapes of the tensors by suffix -> shape of the numbers. ValueError if they do not belong together."""
    decode: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    """Tensors by suffix -> numbers, bfloat16. ValueError if they stand for none."""
    dtypes: Mapping[str, tuple[np.dtype, ...]]
    """Which dtypes each tensor may have."""
    decoded_dtype: np.dtype = _BFLOAT16


def codec_of(config: Mapping[str, Any]) -> Codec | None:
    """The codec that a config.json speaks of in `quantization_config`, at the top or in the text part.

    Raises:
      CheckpointError: it speaks of one that is not known.
    """
    settings = config.get("quantization_config")
    if settings is None and isinstance(text := config.get("text_config"), Mapping):
        settings = text.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        _refuse("quantization_config", f"a {type(settings).__name__}", "an object")
    method = settings.get("quant_method")
    if method == "fp8":
        _expect(settings, "weight_block_size", [_BLOCK, _BLOCK])
        _expect(settings, "fmt", "e4m3", None)
        return FP8
    if method != "compressed-tensors":
        _refuse("quantization_config: quant_method", repr(method), "compressed-tensors or fp8")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        _refuse("quantization_config: config_groups", repr(groups)[:80], "groups of layers")
    formats = {settings.get("format")} | {group.get("format", settings.get("format")) for group in groups.values()}
    if len(formats) != 1:
        _refuse("quantization_config: format", ", ".join(map(repr, formats)), "one format")
    codec = {"mxfp4-pack-quantized": MXFP4, "pack-quantized": INT4}.get(str(form := formats.pop()))
    if codec is None:
        _refuse("quantization_config: format", repr(form), "mxfp4-pack-quantized or pack-quantized")
    for group in groups.values():
        weights = group.get("weights") or {}
        _expect(weights, "num_bits", 4)
        _expect(weights, "type", "float" if codec is MXFP4 else "int")
        _expect(weights, "group_size", GROUP)
        _expect(weights, "symmetric", True)
        _expect(weights, "actorder", None, False)
        _expect(group, "input_activations", None)
    return codec


def _expect(settings: Mapping[str, Any], name: str, *values: Any) -> None:
    if (found := settings.get(name)) not in values:
        _refuse(f"quantization_config: {name}", repr(found), " or ".join(map(repr, values)))


def _refuse(where: str, found: str, expected: str) -> Any:
    raise CheckpointError(
        f"config.json: {where}",
        found=found,
        expected=expected,
        remedy="this packing is not known: take the weights in bfloat16, or in a packing that is",
    )


def decode_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E2M1 codes uint8 [..., in / 2] and E8M0 scales uint8 [..., in / 32] -> bfloat16 [..., in], exact.

        value = e2m1(code) * 2^(scale - 127)        low nibble: even column

    Raises:
      ValueError: a scale is NaN (255), or a value exceeds bfloat16.
    """
    if (scales == 255).any():
        raise ValueError(f"{int((scales == 255).sum())} scales are NaN")
    values = np.empty((*codes.shape[:-1], codes.shape[-1], 2), np.float32)
    values[..., 0] = _E2M1[codes & 15]
    values[..., 1] = _E2M1[codes >> 4]
    grouped = values.reshape(*scales.shape, GROUP)
    # In two factors, each a normal float32, so that nothing is rounded on the way.
    exponent = scales.astype(np.int32) - 127
    half = exponent // 2
    with np.errstate(over="ignore"):
        grouped *= np.ldexp(np.float32(1), half)[..., None]
        grouped *= np.ldexp(np.float32(1), exponent - half)[..., None]
    decoded = values.reshape(*codes.shape[:-1], -1).astype(_BFLOAT16)
    if scales.size and scales.max() > 251 and not np.isfinite(decoded.astype(np.float32)).all():
        raise ValueError("values that exceed bfloat16")
    return decoded


def encode_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [..., in] -> (codes uint8 [..., in / 2], scales uint8 [..., in / 32]), as in the OCP MX specification.

    See `mxfp4.quantize`: values that came from MXFP4 come back exactly, and a group of zeros gets scale 1.
    """
    packed = quantize(values)
    return packed["codes"], packed["scales"]


def decode_fp8(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float8_e4m3fn [out, in] and float32 [out / 128, in / 128], rounded up -> bfloat16 [out, in]."""
    rows, columns = values.shape
    spread = np.repeat(np.repeat(scales.astype(np.float32), _BLOCK, axis=0)[:rows], _BLOCK, axis=1)[:, :columns]
    return (values.astype(np.float32) * spread).astype(_BFLOAT16)


def decode_int4(packed: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """int32 [out, in / 8], lowest nibble first, each value + 8, and scales [out, in / 32] -> bfloat16 [out, in]."""
    nibbles = (packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    whole = nibbles.reshape(len(packed), -1)[:, :columns].astype(np.float32) - 8
    return (whole * np.repeat(scales.astype(np.float32), GROUP, axis=1)[:, :columns]).astype(_BFLOAT16)


def _mxfp4_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    codes, scales = shapes["weight_packed"], shapes["weight_scale"]
    _agree(scales, (*codes[:-1], codes[-1] * 2 / GROUP) if codes else ())
    return (*codes[:-1], codes[-1] * 2)


def _fp8_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    values, scales = shapes["weight"], shapes["weight_scale_inv"]
    _agree(scales, tuple(math.ceil(size / _BLOCK) for size in values))
    return values


def _int4_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    packed, scales = shapes["weight_packed"], shapes["weight_scale"]
    _agree(shapes["weight_shape"], (2,))
    if len(packed) != 2 or len(scales) != 2:
        raise ValueError(f"shapes {packed} and {scales}, not two axes each")
    # Padded to whole words; weight_shape, which is a value, says how many columns count.
    return packed[0], packed[1] * 8


def _agree(found: tuple[int, ...], expected: tuple[float, ...]) -> None:
    if found != expected:
        raise ValueError(f"scales of shape {found}, expected {expected}")


def _decode_int4_tensors(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    rows, columns = map(int, tensors["weight_shape"])
    if rows != packed.shape[0] or not 0 <= packed.shape[1] * 8 - columns < 8 or scales.shape[1] * GROUP < columns:
        raise ValueError(f"weight_shape {rows} x {columns}, weight_packed {packed.shape}, weight_scale {scales.shape}")
    return decode_int4(packed, scales, columns)


_UINT8 = (np.dtype(np.uint8),)
MXFP4 = Codec(
    "mxfp4",
    ("weight_packed", "weight_scale"),
    _mxfp4_shape,
    lambda tensors: decode_mxfp4(tensors["weight_packed"], tensors["weight_scale"]),
    {"weight_packed": _UINT8, "weight_scale": _UINT8},
)
FP8 = Codec(
    "fp8",
    ("weight", "weight_scale_inv"),
    _fp8_shape,
    lambda tensors: decode_fp8(tensors["weight"], tensors["weight_scale_inv"]),
    {"weight": (np.dtype(ml_dtypes.float8_e4m3fn),), "weight_scale_inv": (np.dtype(np.float32), _BFLOAT16)},
)
INT4 = Codec(
    "int4",
    ("weight_packed", "weight_scale", "weight_shape"),
    _int4_shape,
    _decode_int4_tensors,
    {
        "weight_packed": (np.dtype(np.int32),),
        "weight_scale": (_BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)),
        "weight_shape": (np.dtype(np.int64), np.dtype(np.int32)),
    },
)
CODECS = {codec.name: codec for codec in (MXFP4, FP8, INT4)}
