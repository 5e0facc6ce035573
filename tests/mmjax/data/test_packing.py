"""Rows are full, cost alike, lose and repeat nothing, and are found by number without packing what lies before."""

import functools
import os
import time
from pathlib import Path

import numpy as np
import pytest

from mmjax.config import DataConfig, ModelConfig, QuotaConfig, VisionConfig
from mmjax.data.cost import predicted_costs, quota_report, row_room
from mmjax.data.microbatch import balanced_order, cost_balance
from mmjax.data.order import SampleOrder
from mmjax.data.packing import Room, RowPlan, arrange, pack

MODEL = ModelConfig(width=256, num_layers=8, full_attention_layers=(3, 7))


@functools.cache
def real_lengths() -> np.ndarray:
    """Bytes of the parts, between blank lines, of Python's own sources: many short texts, few very long ones."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:120]
    texts = {part for file in files for part in file.read_bytes().split(b"\n\n") if part.strip()}
    return np.array(sorted(len(text) + 8 for text in texts))


def mixture(count: int, row_tokens: int, seed: int = 0) -> np.ndarray:
    """Sizes [count, 5]: texts of real lengths, half of them with one to three pictures of all shapes."""
    random = np.random.default_rng(seed)
    tokens = np.minimum(random.choice(real_lengths(), count), row_tokens // 2)
    images = np.where(random.random((count, 1)) < 0.5, random.integers(4, 65, (count, 3)) * 4, 0)
    images *= np.arange(3)[None, :] < random.integers(1, 4, count)[:, None]
    patches = images.sum(axis=1)
    squared, clips = (images**2).sum(axis=1), np.zeros_like(tokens)
    return np.stack([tokens + patches // 4, patches, tokens // 2, squared, clips], axis=1)


def packed(sizes: np.ndarray, row_tokens: int, row_patches: int, window: int = 256, **room) -> list[list[int]]:
    room = {"image_patches": row_patches} | room
    costs = predicted_costs(sizes, MODEL)
    return pack(
        sizes[:, 0], sizes[:, 1], costs, room=Room(tokens=row_tokens, patches=row_patches, **room), window=window
    )


def sums(rows: list[list[int]], values: np.ndarray) -> np.ndarray:
    return np.array([values[row].sum() for row in rows])


def test_real_lengths_fill_ninety_seven_percent_of_the_rows():
    lengths = real_lengths()
    assert len(lengths) > 3000 and lengths.max() > 4000 and np.median(lengths) < 200
    sizes = np.zeros((len(lengths), 5), np.int64)
    sizes[:, 0] = np.random.default_rng(0).permutation(np.minimum(lengths, 4096))
    rows = packed(sizes, 4096, 0)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert sums(rows, sizes[:, 0]).max() <= 4096
    assert sizes[:, 0].sum() / (4096 * len(rows)) >= 0.97


def test_rows_of_text_and_pictures_are_full_and_devices_get_equal_costs():
    row_tokens, row_patches = 4096, 8192
    sizes = mixture(4096, row_tokens)
    rows = packed(sizes, row_tokens, row_patches)
    assert sorted(number for row in rows for number in row) == list(range(4096))
    assert sums(rows, sizes[:, 0]).max() <= row_tokens and sums(rows, sizes[:, 1]).max() <= row_patches
    assert sizes[:, 0].sum() / (row_tokens * len(rows)) >= 0.97
    costs = sums(rows, predicted_costs(sizes, MODEL))
    random = np.random.default_rng(0)
    arranged = arrange(costs, 0, 8, random.permutation)
    assert sorted(arranged) == list(range(len(rows)))
    for batch_rows in (8, 16, 32):
        ours, at_random = [], []
        for start in range(0, len(rows) - batch_rows + 1, batch_rows):
            step = [int(costs[row]) for row in arranged[start : start + batch_rows]]
            ours.append(cost_balance([step[row] for row in balanced_order(step)], 8))
            samples = random.permutation(4096)[: 128 * batch_rows].reshape(batch_rows, -1)
            at_random.append(cost_balance(predicted_costs(sizes, MODEL)[samples].sum(axis=1).tolist(), 8))
        assert np.mean(ours) <= 1.01 and np.quantile(ours, 0.9) <= 1.05, (batch_rows, ours)
        assert np.mean(at_random) > 1.03


def test_a_row_takes_only_from_its_window():
    sizes = mixture(600, 1024)
    rows = packed(sizes, 1024, 1024, window=16)
    taken: set[int] = set()
    for row in rows:
        oldest = min(set(range(600)) - taken)
        assert oldest in row and max(row) < len(taken) + 16
        taken |= set(row)
    assert packed(sizes, 1024, 1024, window=1) == [[number] for number in range(600)]


def test_groups_of_equal_cost_begin_at_multiples_of_their_size_over_chapters():
    random = np.random.default_rng(0)
    start, order = 3, []
    costs = []
    for count in (50, 3, 0, 41, 64):
        here = random.integers(1, 10**6, count)
        order += here[np.array(arrange(here, start, 8, random.permutation), int)].tolist()
        costs += here.tolist()
        start += count
    assert sorted(order) == sorted(costs)
    whole = np.array(order[5 : 5 + (len(order) - 5) // 8 * 8]).reshape(-1, 8)
    assert np.median(whole.max(axis=1) / whole.mean(axis=1)) < 1.3 < np.max(costs) / np.mean(costs)


def plan(seed: int = 0, balance_rows: int = 8) -> RowPlan:
    sizes = mixture(300, 1024)
    order = SampleOrder([np.arange(300)], None, seed, chapter_samples=100)
    room = Room(tokens=1024, patches=1024, image_patches=1024)
    costs = predicted_costs(sizes, MODEL)
    return RowPlan(order, sizes, costs, room=room, window=32, balance_rows=balance_rows, seed=seed)


def test_a_row_is_the_same_however_it_is_come_by():
    whole = plan()
    expected = [whole.row(number) for number in range(400)]
    backwards = plan()
    assert [backwards.row(number) for number in reversed(range(400))] == expected[::-1]
    for number in (37, 399):
        resumed = plan()
        resumed.begin_at(*whole.place(number))
        assert resumed.row(number) == expected[number] and resumed.num_packed == 1
        assert resumed.row(0) == expected[0]


def test_a_late_row_is_found_as_fast_as_an_early_one():
    first = plan()
    chapter, row = first.place(3000)
    assert first.num_packed > 50
    seconds = []
    for place, number in (((0, 0), 5), ((chapter, row), 3000)):
        begun = time.perf_counter()
        resumed = plan()
        resumed.begin_at(*place)
        resumed.row(number)
        seconds.append(time.perf_counter() - begun)
        assert resumed.num_packed == 1
    assert seconds[1] < 5 * seconds[0]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_pictures_stay_in_their_share_of_the_rows_and_of_memory(share):
    data = DataConfig(row_tokens=2048, row_patches=4096, quotas=QuotaConfig(image_rows=share, image_memory=0.3))
    vision = VisionConfig(width=128)
    room = row_room(data, vision, MODEL)
    sizes = mixture(3000, 2048)
    # Few enough pictures for the quota.
    sizes[np.random.default_rng(1).random(3000) < 0.8, 1:] = 0
    rows = pack(sizes[:, 0], sizes[:, 1], predicted_costs(sizes, MODEL), room=room, window=256)
    assert sorted(number for row in rows for number in row) == list(range(3000))
    patches, tokens = sums(rows, sizes[:, 1]), sums(rows, sizes[:, 0])
    # The last rows of a chapter take what is left.
    assert np.mean(patches[:-20] > 0) <= share + 0.05
    report = quota_report(tokens[:-20], patches[:-20], data, vision, MODEL)
    assert report.image_memory <= 0.3 and report.num_breaches == 0
    free = quota_report(np.array([2048]), np.array([4096]), data, vision, MODEL)
    assert free.image_memory == pytest.approx(4096 * 128 / (2048 * 256 + 4096 * 128)) and free.num_breaches == 2


def test_a_picture_larger_than_the_quota_gets_a_row_and_is_reported():
    rows = packed(np.array([[300, 800, 1, 800**2, 0], [20, 8, 1, 64, 0]]), 512, 1024, image_patches=100)
    assert sorted(number for row in rows for number in row) == [0, 1] and all(
        len(row) == 1 or sum([800, 8][n] for n in row) <= 808 for row in rows
    )


def test_predicted_costs_follow_the_planner_s_flops():
    sizes = np.array([[1, 0, 1, 0, 0], [1000, 0, 1, 0, 0], [100, 64, 1, 64**2, 0], [100, 64, 1, 2 * 32**2, 0]])
    from mmjax.planner.cost import batch_flops

    one = batch_flops(MODEL, [1], []).total
    expected = [
        batch_flops(MODEL, tokens, images).total / one * 1024
        for tokens, images in (([1], []), ([1000], []), ([100], [64]), ([100], [32, 32]))
    ]
    np.testing.assert_allclose(predicted_costs(sizes, MODEL), expected, rtol=2e-3)
    assert predicted_costs(sizes, MODEL)[2] > predicted_costs(sizes, MODEL)[3]
    assert predicted_costs(sizes, None).tolist() == [1024, 1024_000, 1024 * 116, 1024 * 116]
