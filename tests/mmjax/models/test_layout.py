"""The layout of a decoder's layers: each layer in one place, with and without a pipeline, and the way between them."""

import dataclasses

import numpy as np
import pytest

from mmjax.config import ModelConfig, MoeConfig, layer_kinds
from mmjax.models.layout import (
    Relayout,
    block_starts,
    layer_address,
    num_devices,
    parameter_stacks,
    plan_segments,
    slots_of_kinds,
    stage_layers,
    without_pipeline,
)
from mmjax.presets.kimi_k3 import kimi_k3

K3 = kimi_k3()
WHOLE = dataclasses.replace(K3, layer_loops="whole")
STAGED = dataclasses.replace(K3, pipeline_stages=(23, 23, 24, 23))
INTERLEAVED = dataclasses.replace(K3, pipeline_stages=(11, 12, 11, 12, 12, 12, 12, 11), pipeline_chunks=2)


@pytest.mark.parametrize("model", [K3, WHOLE, STAGED, INTERLEAVED], ids=["blocks", "whole", "stages", "interleaved"])
def test_each_layer_has_a_place_of_its_own_among_layers_of_its_kind(model):
    kinds, stacks = layer_kinds(model), parameter_stacks(model)
    places = [layer_address(model, layer) for layer in range(model.num_layers)]
    assert len(set(places)) == model.num_layers
    for layer, (segment, position, repeat) in enumerate(places):
        assert stacks[segment].kinds[position] == kinds[layer]
        assert repeat < stacks[segment].num_repeats
    with pytest.raises(ValueError, match="outside"):
        layer_address(model, model.num_layers)


@pytest.mark.parametrize("model", [STAGED, INTERLEAVED], ids=["stages", "interleaved"])
def test_a_layer_lies_on_the_device_of_its_stage_in_order(model):
    slots = list(slots_of_kinds(model).values())
    last: dict[tuple[int, int], int] = {}
    for stage, layers in enumerate(stage_layers(model)):
        for layer in layers:
            segment, _, repeat = layer_address(model, layer)
            assert repeat // slots[segment] == stage % num_devices(model)
            assert repeat > last.get((segment, stage % num_devices(model)), -1)
            last[segment, stage % num_devices(model)] = repeat


def test_segments_of_stages_end_at_blocks_and_stages():
    whole = [segment.first_layer for segment in plan_segments(K3) if segment.starts_block]
    assert whole == list(range(0, 93, 12))
    for layers in stage_layers(STAGED):
        segments = plan_segments(STAGED, layers.start, layers.stop)
        assert [layer for s in segments for layer in range(s.first_layer, s.first_layer + s.num_layers)] == list(layers)
        assert [s.first_layer for s in segments if s.starts_block] == [layer for layer in layers if layer % 12 == 0]


def test_loops_across_blocks_leave_seven_layers_to_compile_and_know_where_blocks_begin():
    assert sum(len(stack.kinds) for stack in parameter_stacks(K3)) == 36
    assert [(len(stack.kinds), stack.num_repeats) for stack in parameter_stacks(WHOLE)] == [
        (1, 1),
        (4, 22),
        (1, 2),
        (1, 2),
    ]
    begun = [
        segment.first_layer + place
        for segment in plan_segments(WHOLE)
        for place in np.flatnonzero(block_starts(WHOLE, segment))
    ]
    assert begun == list(range(0, 93, 12))
    assert without_pipeline(WHOLE) == K3


def test_arrays_go_to_a_pipelines_layout_and_back_and_empty_slots_are_zero():
    model = ModelConfig(num_layers=5, full_attention_layers=(2,), moe=MoeConfig(num_dense_layers=1))
    staged = dataclasses.replace(model, pipeline_stages=(1, 4))
    assert without_pipeline(staged) == model
    paths = {f"decoder.segments.{n}.layers.0.mixer.x": s.num_repeats for n, s in enumerate(parameter_stacks(model))}
    numbers = iter(range(1, 100))
    arrays = {path: np.array([[next(numbers)] for _ in range(size)]) for path, size in paths.items()}
    arrays["decoder.norm"] = np.array([7])
    there, back = Relayout(model, staged), Relayout(staged, model)
    wanted = sorted({target for path in arrays for target in there.targets(path)})
    moved = there.apply(arrays, wanted, np)
    for path in wanted:
        if path != "decoder.norm":
            rows = there.rows(path) or []
            assert len(rows) == len(moved[path])
            assert all((row is None) == (value == 0) for row, value in zip(rows, moved[path][:, 0], strict=True))
            assert back.empty_slots(path) == [slot for slot, row in enumerate(rows) if row is None]
    again = back.apply(moved, arrays, np)
    assert {path: array.tolist() for path, array in again.items()} == {p: a.tolist() for p, a in arrays.items()}
