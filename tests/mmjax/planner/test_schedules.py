"""Ticks and kept inputs in closed form are those of the tables that a pipeline carries out."""

import dataclasses

import pytest

from mmjax.config import MeshConfig, ModelConfig, RunConfig, TrainingConfig, VisionConfig
from mmjax.parallel.pipeline_schedule import Kind, make_schedule
from mmjax.planner.pipeline_cut import Block, cut_pipeline, slowest_stage
from mmjax.planner.schedules import Scheduling, cost_of, schedules

FORWARD, BACKWARD = 1.0, 3.0


@pytest.mark.parametrize("transfer", ["hidden", "direct"])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_ticks_and_kept_inputs_are_those_of_the_table(name, chunks, transfer):
    latency = 2 if transfer == "hidden" else 1
    for pipe, number in ((2, 4), (2, 8), (4, 8), (4, 16)):
        table = make_schedule(name, num_devices=pipe, num_micro_batches=number, num_chunks=chunks, latency=latency)
        cost = cost_of(Scheduling(name, transfer, chunks, "first_stage"), pipe, number)
        seconds = table.seconds({Kind.FORWARD: FORWARD / chunks, Kind.BACKWARD: BACKWARD / chunks})
        # Of interleaved stages that travel hidden, which ticks are the longer ones depends on the round.
        assert cost.seconds(FORWARD, BACKWARD) == pytest.approx(seconds, rel=0.03 if chunks > 1 else 1e-12)
        assert abs(cost.num_inputs - table.slots().num_inputs) <= (4 if chunks > 1 else 1)
        assert cost.num_kept == max(table.slots(runs_again=False).kept_of_device)


def test_a_split_backward_pass_never_takes_less_time_than_1f1b():
    half = (BACKWARD + 1) / 2
    for pipe, number in ((2, 8), (4, 8), (4, 16), (8, 16)):
        split = make_schedule("split_backward", num_devices=pipe, num_micro_batches=number, latency=2)
        seconds = split.seconds({Kind.FORWARD: FORWARD, Kind.BACKWARD: half, Kind.WEIGHT: half})
        assert seconds >= cost_of(Scheduling("1f1b", "hidden", 1, "first_stage"), pipe, number).seconds(1.0, 3.0)


def test_only_schedules_that_fit_are_offered():
    config = RunConfig(
        model=ModelConfig(num_layers=8, vision=VisionConfig(num_layers=0)),
        mesh=MeshConfig(pipe=4),
        training=TrainingConfig(accumulation=4),
    )
    # Four micro-batches fill a ring of four once where they travel directly, and not where each waits a tick.
    assert {(one.name, one.transfer, one.chunks) for one in schedules(config)} == {
        *(("1f1b", "hidden", 1), ("gpipe", "hidden", 1), ("1f1b", "direct", 1), ("gpipe", "direct", 1)),
        ("interleaved", "direct", 2),
    }
    assert {one.edges for one in schedules(config)} == {"first_stage"}
    seeing = dataclasses.replace(config, model=ModelConfig(num_layers=8))
    assert {one.edges for one in schedules(seeing)} == {"first_stage", "data_parallel"}


def test_the_slowest_stage_is_that_of_the_exact_cut():
    work = [9.0, 3, 3, 2, 4, 4, 1, 7]
    for num_stages in (1, 2, 3, 5, 8):
        cut = cut_pipeline([Block(name=str(number), seconds=number) for number in work], num_stages)
        assert slowest_stage(work, num_stages) == pytest.approx(cut.slowest_seconds, rel=1e-9)
