"""Of each row's range of scores the exact best are found, interpreted on a CPU and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention import top_k as module
from pallas_kernels.sparse_attention.top_k import top_k_of_rows


def best(scores, first, end, top_k):
    """By a stable sort of each row."""
    expected = np.full((len(first), top_k), -1)
    for row, (start, stop) in enumerate(zip(first, end, strict=True)):
        places = np.arange(start, stop)
        order = np.argsort(-(scores[row, places] + 0.0), kind="stable")[:top_k]
        expected[row, : len(order)] = np.sort(places[order])
    return expected


def draw_rows(rows, length, seed=0):
    """Random scores; then equal ones of many kinds, rising, falling, and rows whose sample misleads."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(rows, length)).astype(np.float32)
    scores[1] = np.round(scores[1])
    scores[2] = 0
    scores[3, ::2] = -0.0
    scores[3, 1::2] = 0
    scores[4] = np.arange(length)
    scores[5] = -np.arange(length)
    scores[6] = np.where(np.arange(length) < length // 9, 5 + scores[6] * 1e-3, scores[6])
    # Seven of eight scores are high, but none that a sample of every eighth sees.
    scores[7] = np.where(np.arange(length) % 8 == 0, -9, 9) + scores[7]
    scores[8, : length // 2] = np.float32(1e-42)
    return scores


@pytest.mark.parametrize(("top_k", "held"), [(16, 4096), (64, 32)])
def test_the_best_of_every_range_are_found_and_of_equal_ones_the_first(monkeypatch, top_k, held):
    monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(module, "LIST_PIECE", 32)
    monkeypatch.setattr(module, "SAMPLE", 32)
    monkeypatch.setattr(module, "KEPT", 64)
    monkeypatch.setattr(module, "HELD", held)
    # Of no multiple of a piece.
    scores = np.concatenate([draw_rows(9, 701, seed) for seed in range(3)])
    random = np.random.default_rng(3)
    first = np.concatenate([np.zeros(9), random.integers(0, 300, 18)]).astype(np.int32)
    lengths = np.concatenate([np.full(9, 701), [0, 1, 15, 16, 17, 31, 32, 33, 64], random.integers(60, 400, 9)])
    end = (first + lengths).astype(np.int32)
    found = top_k_of_rows(*map(jnp.asarray, (scores, first, end)), top_k, interpret=True)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, best(scores, first, end, top_k))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize(
    ("length", "top_k"),
    [(2048, 2048), (32768, 2048), (131072, 2048), (9001, 64), (20011, 4096), (70003, 4096), (130, 64), (2**20, 2048)],
)
def test_the_best_of_long_rows_are_found_on_a_gpu(length, top_k):
    scores, random = draw_rows(64, length), np.random.default_rng(4)
    first = np.where(np.arange(64) < 20, 0, random.integers(0, length, 64)).astype(np.int32)
    lengths = np.resize([length, length, 63, 64, 65, 2047, 2048, 2049, 4096, 4097, 8192, 8193, 9999, 20000], 64)
    lengths[:9] = length
    end = np.minimum(first + lengths, length).astype(np.int32)
    found = jax.jit(lambda *arrays: top_k_of_rows(*arrays, top_k))(*map(jnp.asarray, (scores, first, end)))
    np.testing.assert_array_equal(found, best(scores, first, end, top_k))
