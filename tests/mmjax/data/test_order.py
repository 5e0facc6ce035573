from collections import Counter

import numpy as np
import pytest

from mmjax.data.order import SampleOrder
from mmjax.errors import DataError

SOURCES = [np.arange(0, 7), np.arange(7, 60), np.arange(60, 63)]


def order(weights=None, sources=SOURCES, chapter_samples=10, seed=0) -> SampleOrder:
    return SampleOrder(sources, weights, seed, chapter_samples=chapter_samples)


def drawn(plan: SampleOrder, first: int, last: int) -> list[int]:
    return [number for chapter in range(first, last) for number in plan.chapter(chapter).tolist()]


def shares(numbers: list[int]) -> list[float]:
    counts = Counter(int(np.searchsorted([7, 60], number, side="right")) for number in numbers)
    return [counts[source] / len(numbers) for source in range(3)]


@pytest.mark.parametrize("chapter_samples", [1, 10, 63, 1000])
def test_without_weights_every_epoch_holds_every_sample_once_in_another_order(chapter_samples):
    plan = order(chapter_samples=chapter_samples)
    epochs = [drawn(plan, epoch * plan.chapters_per_epoch, (epoch + 1) * plan.chapters_per_epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(63)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Sources take turns: none waits for another to end.
    assert all(abs(share - size / 63) < 0.05 for share, size in zip(shares(epochs[0][:40]), (7, 53, 3), strict=True))


def test_chapters_do_not_depend_on_what_was_asked_before_and_end_with_the_epoch():
    plan, other = order(), order()
    expected = [plan.chapter(chapter).tolist() for chapter in range(30)]
    assert [other.chapter(chapter).tolist() for chapter in reversed(range(30))] == expected[::-1]
    assert order().chapter(10**6).tolist() != order(seed=1).chapter(10**6).tolist()
    assert len(order().chapter(10**6)) > 0
    assert [len(chapter) for chapter in expected[:7]] == [9] * 7


def test_weights_hold_at_every_moment_and_every_source_goes_round_by_itself():
    plan = order(weights=[3, 1, 2])
    numbers = drawn(plan, 0, 70)
    for length in (60, 200, 600):
        assert shares(numbers[:length]) == pytest.approx([3 / 6, 1 / 6, 2 / 6], abs=2 / length)
    for source in SOURCES:
        own = [number for number in numbers if number in source]
        rounds = [sorted(own[start : start + len(source)]) for start in range(0, len(own) - len(source), len(source))]
        assert rounds and all(round == source.tolist() for round in rounds)


def test_a_source_left_out_gives_its_turns_to_the_others_and_none_of_theirs_is_lost_or_read_twice():
    plan, whole = order(weights=[3, 1, 2]), order(weights=[3, 1, 2])
    plan.exclude(0, 20)
    assert drawn(plan, 0, 20) == drawn(whole, 0, 20)
    after = drawn(plan, 20, 80)
    assert shares(after) == pytest.approx([0, 1 / 3, 2 / 3], abs=0.01)
    for source in (1, 2):
        own = [number for number in drawn(plan, 0, 80) if number in SOURCES[source]]
        expected = [number for number in drawn(whole, 0, 200) if number in SOURCES[source]]
        assert own == expected[: len(own)]
    plan.exclude(2, 40)
    assert shares(drawn(plan, 40, 60)) == [0, 1, 0] and shares(drawn(plan, 20, 40))[2] > 0.6
    with pytest.raises(DataError, match="no source left"):
        plan.exclude(1, 50)


def test_a_source_without_usable_samples_gets_no_turn():
    plan = order(weights=[1, 1, 5], sources=[np.arange(3), np.zeros(0, np.int64), np.arange(3, 8)])
    assert set(drawn(plan, 0, 9)) == set(range(8))
