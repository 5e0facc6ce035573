"""Numbers of GGUF files: what each ggml type's blocks hold, in float32, with the roundings of ggml itself."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class BlockType(NamedTuple):
    """A ggml type: blocks of a fixed number of values."""

    name: str
    num_values: int
    num_bytes: int
    dtype: np.dtype
    decode: Callable[[np.ndarray], np.ndarray]
    """uint8 [blocks, num_bytes] -> [blocks, num_values] of `dtype`."""


def _float16(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, n] bytes -> [blocks, 2 n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _high_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """The fifth bits of 32 values, at byte `start` of each block -> [blocks, 32] of 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _float16(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _float16(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _float16(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _float16(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _high_bits(blocks, 2)).astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    values = (_nibbles(blocks[:, 8:]) | _high_bits(blocks, 4)).astype(np.float32)
    return _float16(blocks, 0) * values + _float16(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _float16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight 6-bit scales and minima in bytes 4 to 15 of K blocks, times those of the block: [blocks, 8, 1]."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    wide = _float16(blocks, 0) * scales.astype(np.float32), _float16(blocks, 2) * minima.astype(np.float32)
    return wide[0][..., None], wide[1][..., None]


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = _scales_and_minima(blocks)
    values = _nibbles(blocks[:, 16:].reshape(len(blocks), 4, 32)).reshape(len(blocks), 8, 32)
    return (scales * values.astype(np.float32) - minima).reshape(len(blocks), 256)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = _scales_and_minima(blocks)
    values = _nibbles(blocks[:, 48:].reshape(len(blocks), 4, 32)).reshape(len(blocks), 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1) << 4
    return (scales * (values | high).astype(np.float32) - minima).reshape(len(blocks), 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    count = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(count, 2, 64)).reshape(count, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts & 3) << 4
    values = (low | high).astype(np.float32).reshape(count, 16, 16) - 32
    scales = _float16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[..., None] * values).reshape(count, 256)


def _plain(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype)


_FLOAT32 = np.dtype(np.float32)
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _FLOAT32, _plain(np.float32)),
    1: BlockType("F16", 1, 2, np.dtype(np.float16), _plain(np.float16)),
    2: BlockType("Q4_0", 32, 18, _FLOAT32, _q4_0),
    3: BlockType("Q4_1", 32, 20, _FLOAT32, _q4_1),
    6: BlockType("Q5_0", 32, 22, _FLOAT32, _q5_0),
    7: BlockType("Q5_1", 32, 24, _FLOAT32, _q5_1),
    8: BlockType("Q8_0", 32, 34, _FLOAT32, _q8_0),
    12: BlockType("Q4_K", 256, 144, _FLOAT32, _q4_k),
    13: BlockType("Q5_K", 256, 176, _FLOAT32, _q5_k),
    14: BlockType("Q6_K", 256, 210, _FLOAT32, _q6_k),
    30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16), _plain(ml_dtypes.bfloat16)),
}
"""By ggml's number of the type."""
