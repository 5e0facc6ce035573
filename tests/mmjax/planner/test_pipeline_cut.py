"""Cuts into stages: worked by hand, against brute force, and against equal layers."""

import itertools

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.planner.hardware import Link
from mmjax.planner.pipeline_cut import Block, Score, cut_pipeline, equal_layers

LINK = Link(bandwidth=10.0, latency_seconds=0.1)


def blocks(*seconds: float, **more) -> list[Block]:
    return [Block(name=str(index), seconds=value, **more) for index, value in enumerate(seconds)]


def test_three_stages_by_hand():
    # 9 | 3 3 2 | 4 4: the tower's heavy first block stands alone.
    cut = cut_pipeline(blocks(9, 3, 3, 2, 4, 4), 3)
    assert cut.boundaries == (0, 1, 4, 6)
    assert cut.stage_seconds == (9, 8, 8)
    # One pass 25, then 9 for each of 3 more micro-batches.
    assert cut.step_seconds(4) == 52
    # Stages work 4 x 25 of 3 x 52.
    assert cut.bubble_fraction(4) == pytest.approx(1 - 100 / 156)
    assert equal_layers(blocks(9, 3, 3, 2, 4, 4), 3).stage_seconds == (12, 5, 8)


def test_equal_stages_have_the_usual_bubble():
    cut = cut_pipeline(blocks(*[1.0] * 8), 4)
    assert cut.bubble_fraction(8) == pytest.approx(3 / 11)


def test_sending_counts_there_and_back():
    # Cut after the block with the small output, though the other cut is as even: 2 x (1 / 10 + 0.1).
    row = [
        Block(name="a", seconds=2, output_bytes=50),
        Block(name="b", seconds=0.1, output_bytes=1),
        Block(name="c", seconds=2),
    ]
    cut = cut_pipeline(row, 2, link=LINK)
    assert cut.boundaries == (0, 2, 3)
    assert cut.stage_seconds == pytest.approx((2.1 + 2 * (0.1 + 0.1), 2))


def test_memory_moves_a_boundary():
    # Stage 0 keeps 2 micro-batches: 3 blocks would take 3 x (10 + 2 x 5) = 60.
    row = blocks(1, 1, 1, 3, weight_bytes=10, activation_bytes=5)
    assert cut_pipeline(row, 2, num_micro_batches=4).boundaries == (0, 3, 4)
    cut = cut_pipeline(row, 2, num_micro_batches=4, memory_bytes=45)
    assert cut.boundaries == (0, 2, 4) and cut.stage_bytes == (40, 30)
    with pytest.raises(ConfigurationError, match="at least 40 bytes"):
        cut_pipeline(row, 2, num_micro_batches=4, memory_bytes=39)


def test_the_alignment_score_keeps_reused_keys_together():
    row = blocks(1, 1, 1, 1)
    row[1] = Block(name="1", seconds=1, reused_bytes=8)
    row[0] = Block(name="0", seconds=1, reused_bytes=2)
    by_time, by_score = cut_pipeline(row, 2), cut_pipeline(row, 2, score=Score(reuse=2.0))
    assert by_time.boundaries == (0, 2, 4)
    # After block 1: 2/2 + 2 x 8/10. After block 2: 3/2 + 0.
    assert by_score.boundaries == (0, 3, 4) and by_score.score == pytest.approx(1.5)


def test_impossible_numbers_of_stages_are_refused():
    for num_stages in (0, 4):
        with pytest.raises(ConfigurationError, match="1 to 3 stages"):
            cut_pipeline(blocks(1, 1, 1), num_stages)


@pytest.mark.parametrize("score", [Score(), Score(reuse=0.7, gradient=0.4)])
def test_cuts_equal_brute_force(score):
    random = np.random.default_rng(1)
    for _ in range(40):
        num_blocks = int(random.integers(4, 9))
        num_stages = int(random.integers(2, 5))
        row = [
            Block(
                name=str(index),
                seconds=float(random.random() + 0.01),
                weight_bytes=float(random.random()),
                activation_bytes=float(random.random()),
                output_bytes=float(random.random()),
                reused_bytes=float(random.random()),
                gradient_norm=float(random.random()),
            )
            for index in range(num_blocks)
        ]
        limit = float(random.uniform(0.5, 1.2)) * num_blocks
        options = {"num_micro_batches": 3, "link": LINK, "score": score}
        stages = equal_stages(row, num_stages, **options)
        all_cuts = [
            stages.build((0, *inner, num_blocks))
            for inner in itertools.combinations(range(1, num_blocks), num_stages - 1)
        ]
        fitting = [cut for cut in all_cuts if max(cut.stage_bytes) <= limit]
        if not fitting:
            with pytest.raises(ConfigurationError):
                cut_pipeline(row, num_stages, memory_bytes=limit, **options)
            continue
        found = cut_pipeline(row, num_stages, memory_bytes=limit, **options)
        assert max(found.stage_bytes) <= limit
        assert found.score == pytest.approx(min(cut.score for cut in fitting), rel=1e-12)


def test_a_cut_is_never_worse_than_equal_layers():
    random = np.random.default_rng(2)
    for _ in range(5):
        row = blocks(*random.lognormal(0, 1, 60), output_bytes=1.0)
        for num_stages in (2, 7, 16):
            best, equal = cut_pipeline(row, num_stages, link=LINK), equal_layers(row, num_stages, link=LINK)
            assert best.slowest_seconds <= equal.slowest_seconds


def equal_stages(row, num_stages, **options):
    from mmjax.planner.pipeline_cut import Stages

    return Stages(row, num_stages, memory_bytes=float("inf"), **options)
