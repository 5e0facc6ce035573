"""The table of a pipeline's stages names every layer once, with its place and its residual block."""

import dataclasses

import numpy as np
import pytest

from mmjax.config import layer_kinds
from mmjax.models.layout import layer_address, num_devices, slots_of_kinds
from mmjax.models.stage_loop import num_sums, stage_table
from mmjax.presets.kimi_k3 import kimi_k31


@pytest.mark.parametrize(
    ("stages", "chunks"), [((23, 23, 24, 23), 1), ((6,) * 13 + (5,) * 3, 1), ((20, 27, 1, 45), 2)], ids=str
)
def test_each_layer_runs_once_in_its_stage_and_its_slot(stages, chunks):
    model = dataclasses.replace(kimi_k31(), pipeline_stages=stages, pipeline_chunks=chunks)
    table, kinds, slots = stage_table(model), list(slots_of_kinds(model)), list(slots_of_kinds(model).values())
    first = 0
    for stage, number in enumerate(stages):
        kind, slot, place, num_before, begins = (column[stage] for column in table.turns)
        assert (kind[:number] >= 0).all() and (kind[number:] == -1).all()
        for turn, layer in enumerate(range(first, first + number)):
            assert kinds[kind[turn]] == layer_kinds(model)[layer]
            device = stage % num_devices(model)
            assert layer_address(model, layer) == (kind[turn], 0, device * slots[kind[turn]] + slot[turn])
            assert table.layer_of_slot[kind[turn]][stage, slot[turn]] == layer
            # Blocks of 12 layers: the embedding's sum is finished where the first one begins.
            assert begins[turn] == (layer % 12 == 0) and num_before[turn] == (layer + 11) // 12
        for of_kind, most in enumerate(table.num_places):
            mine = place[kind == of_kind]
            np.testing.assert_array_equal(mine, np.arange(len(mine)))
            assert len(mine) <= most
        first += number
    assert num_sums(model) == 8
    # Kimi Delta Attention alone begins blocks, with a dense MLP in layer 0.
    assert table.can_begin == (True, True, False)
