"""Random numbers that depend on a purpose and some integers alone, and stay the same over NumPy versions."""

import hashlib

import numpy as np


def draw(count: int, purpose: str, *numbers: int) -> np.ndarray:
    """`count` uint64 values for this purpose and these integers."""
    key = hashlib.sha256(repr((purpose, *numbers)).encode()).digest()
    # Raw bit streams are guaranteed not to change between NumPy versions; Generator's methods are not.
    return np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(count)


def permutation(count: int, purpose: str, *numbers: int) -> np.ndarray:
    """A shuffled range(count), int64."""
    return np.argsort(draw(count, purpose, *numbers), kind="stable")
