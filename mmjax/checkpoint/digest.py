"""Digests of arrays that are the same on every mesh, and cost a training step nothing."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Odd 32-bit constants: one seed a lane, and one multiplier for each array dimension of a lane.
_SEEDS = (np.uint32(0x9E3779B1), np.uint32(0x7FEB352D))
_MULTIPLIERS = (
    (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0x2545F491, 0x94D049BB, 0xBF58476D, 0xD6E8FEB9),
    (0xCC9E2D51, 0x1B873593, 0xE6546B65, 0xA136AAAD, 0x9F6D62D7, 0xB5026F5B, 0x68E31DA5, 0x3C6EF373),
)
_WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint32}
# Words summed at a time in `SliceDigest`: what the processor's caches hold.
_BLOCK_WORDS = 1 << 15
# Arrays up to this size are summed on the host: compiling for each of their shapes would take longer.
_HOST_BYTES = 1 << 20


class Digest:
    """Two 32-bit sums over an array, of numbers that mix each element's bits with its position.

        sum over elements of mix(odd * bits + mix(position))  modulo 2^32, once for each of two position numberings

    One changed element always changes both sums; anything else escapes with a probability of about 2^-64. The sums are
    exact, so neither sharding nor order of summation matters. They guard against damage, not against forgery.

    Made at once, on the devices or from a copy of a small array; the array may then be donated. `text` waits for it.
    """

    def __init__(self, array: jax.Array):
        is_here = array.is_fully_addressable or array.is_fully_replicated
        self._array: Any = None
        if array.nbytes <= _HOST_BYTES and is_here:
            self._array = np.array(array, order="C", ndmin=1)
        else:
            self._sums = _device_sums(array)
            if jax.process_count() > 1:
                # Exchanges of several processes' CPU devices that are under way side by side can wait for each other.
                self._sums.block_until_ready()

    def text(self) -> str:
        """16 hexadecimal digits."""
        sums = np.asarray(self._sums) if self._array is None else _sums(_host_words(self._array), np)
        return "".join(f"{int(word):08x}" for word in sums)


class SliceDigest:
    """The digest of an array that is never held whole: its slices may come in any order, each element once."""

    def __init__(self) -> None:
        self.sums = np.zeros(2, np.uint32)
        """[2] uint32; those of other slices of the same array may be added."""

    def add(self, slice_: np.ndarray, start: tuple[int, ...]) -> None:
        """Count a slice whose first element is at `start` of the array."""
        self.sums += slice_sums(slice_, start)

    def text(self) -> str:
        """As `Digest.text` of the whole array."""
        return "".join(f"{int(word):08x}" for word in self.sums)


def slice_sums(slice_: np.ndarray, start: tuple[int, ...]) -> np.ndarray:
    """What a slice whose first element is at `start` adds to the sums of its array: [2] uint32."""
    values = np.array(slice_, order="C", copy=None, ndmin=1)
    if values.itemsize == 8:
        values = values.view(np.uint32).reshape(*values.shape, 2)
    starts = [*(start or (0,)), *[0] * (values.ndim - max(len(start), 1))]
    num_columns = values.shape[-1]
    rows = values.reshape(-1, num_columns)
    width = min(num_columns, _BLOCK_WORDS) or 1
    height = max(1, _BLOCK_WORDS // width)
    row_positions, columns = [], []
    for seed, multipliers in zip(_SEEDS, _MULTIPLIERS, strict=True):
        *outer, last = (
            (np.arange(size, dtype=np.uint32) + np.uint32(first & 0xFFFFFFFF)) * np.uint32(multiplier)
            for size, first, multiplier in zip(values.shape, starts, multipliers, strict=False)
        )
        position = np.full(values.shape[:-1], seed, np.uint32)
        for dimension, along in enumerate(outer):
            position += along.reshape([-1 if other == dimension else 1 for other in range(len(outer))])
        row_positions.append(position.reshape(-1, 1))
        columns.append(last[None, :])
    sums = np.zeros(2, np.uint32)
    for row in range(0, len(rows), height):
        for column in range(0, num_columns, width):
            words = _host_words(np.ascontiguousarray(rows[row : row + height, column : column + width]))
            for lane, seed in enumerate(_SEEDS):
                position = row_positions[lane][row : row + height] + columns[lane][:, column : column + width]
                mixed = words * seed
                mixed += _mix_in_place(position)
                sums[lane : lane + 1] += np.sum(_mix_in_place(mixed), dtype=np.uint32)
    return sums


@jax.jit
def _device_sums(array: jax.Array) -> jax.Array:
    """[2] uint32."""
    return jnp.stack(_sums(_device_words(array), jnp))


def _device_words(array: jax.Array) -> jax.Array:
    """The bits of each element as uint32; an element of 64 bits becomes two along a new last axis."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = (jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo)(array.dtype).bits
    return lax.bitcast_convert_type(array, jnp.uint4 if bits == 4 else _WORDS[bits]).astype(jnp.uint32)


def _host_words(array: np.ndarray) -> np.ndarray:
    """As `_device_words`."""
    if array.dtype in (jnp.int4, jnp.uint4):
        return array.astype(np.int8).view(np.uint8).astype(np.uint32) & np.uint32(15)
    if array.itemsize == 8:
        array = array[..., None]
    return array.view(_WORDS[8 * array.itemsize]).astype(np.uint32)


def _sums(words: Any, numpy: ModuleType) -> list[Any]:
    """Both sums over uint32 words, with NumPy or jax.numpy."""
    sums = []
    for seed, multipliers in zip(_SEEDS, _MULTIPLIERS, strict=True):
        position = numpy.full(words.shape, seed)
        for dimension, size in enumerate(words.shape):
            shape = [size if other == dimension else 1 for other in range(words.ndim)]
            position += numpy.arange(size, dtype=np.uint32).reshape(shape) * np.uint32(multipliers[dimension])
        sums.append(numpy.sum(_mix(words * seed + _mix(position)), dtype=np.uint32))
    return sums


def _mix(word: Any) -> Any:
    """A bijection of 32-bit words that spreads each bit over all of them (the finaliser of MurmurHash3)."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def _mix_in_place(word: np.ndarray) -> np.ndarray:
    """`_mix` without new arrays but one."""
    shifted = word >> np.uint32(16)
    word ^= shifted
    word *= np.uint32(0x85EBCA6B)
    np.right_shift(word, np.uint32(13), out=shifted)
    word ^= shifted
    word *= np.uint32(0xC2B2AE35)
    np.right_shift(word, np.uint32(16), out=shifted)
    word ^= shifted
    return word
