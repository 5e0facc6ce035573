"""What stages of a pipeline send each other: what is needed and new, and every gradient of it once."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from mmjax.parallel.pipeline_parcels import parcels_of
from mmjax.parallel.pipeline_schedule import Kind, forward_schedule, make_schedule

# What each stage is given on 4 devices, with one stage or two on each: a running sum, and the sums finished before it.
ONE, TWO = (1, 2, 2, 4), (1, 2, 4, 4, 5, 7, 8, 8)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("latency", [1, 2])
@pytest.mark.parametrize(
    ("name", "num_arrays"),
    [
        *(("gpipe", ONE), ("1f1b", ONE), ("split_backward", ONE), ("interleaved", TWO), ("interleaved", (1,) * 12)),
        ("forward", TWO),
    ],
)
def test_an_operation_gets_every_array_it_needs_and_every_gradient_of_it_once(name, num_arrays, latency, most):
    """Follows all arrays tick by tick; a gradient is the count of the stages whose shares of it have come."""
    sizes = {"num_devices": 4, "num_micro_batches": 8, "num_chunks": len(num_arrays) // 4, "latency": latency}
    schedule = forward_schedule(**sizes) if name == "forward" else make_schedule(name, **sizes)
    slots, parcels = schedule.slots(num_arrays), parcels_of(schedule, num_arrays, most)
    last, places = schedule.num_stages - 1, defaultdict(dict)

    def read(buffer: str, tick: int, device: int) -> list:
        used = getattr(slots, buffer).used[tick, device]
        return [None if place < 0 else places[buffer, device, number][place] for number, place in enumerate(used)]

    def store(buffer: str, tick: int, device: int, arrays: list) -> None:
        for number, place in enumerate(getattr(slots, buffer).stored[tick, device]):
            if place >= 0:
                assert place < getattr(slots, buffer).num_places[number]
                places[buffer, device, number][place] = arrays[number]

    def crossing(sender: int, way: int, target: int, arrays: list) -> list:
        """What arrives of what goes to stage `target`, or as gradients comes from there."""
        pair = (sender, (sender + 1) % 4) if way > 0 else ((sender - 1) % 4, sender)
        is_carried = np.repeat([pair in pairs for pairs in parcels.pairs], parcels.sizes)
        carried = zip(parcels.array_of_row[target], is_carried, strict=True)
        rows = [arrays[number] if is_one else None for number, is_one in carried]
        return [rows[row] for row in parcels.row_of_array[target]]

    leaving = []
    for tick, operations in enumerate(schedule.ticks):
        given = []
        for device, (kind, m, chunk) in enumerate(operations):
            stage = schedule.stage_of(device, chunk)
            inputs = [
                a or b for a, b in zip(read("inputs", tick, device), read("own_inputs", tick, device), strict=True)
            ]
            if kind is Kind.IDLE:
                continue
            if stage > 0:
                nothing = [None] * (max(num_arrays) - num_arrays[stage])
                assert inputs == [(m, "running", stage - 1), *((m, n) for n in range(1, num_arrays[stage])), *nothing]
            arrays = [(m, "running", stage), *((m, n) for n in range(1, max(num_arrays)))]
            if kind is not Kind.FORWARD:
                gradients = zip(read("cotangents", tick, device), read("own_cotangents", tick, device), strict=True)
                arrays = [(a or Counter()) + (b or Counter()) for a, b in gradients]
                if stage < last:
                    # Where a sum was finished all of its gradient has come; other devices have kept parts of it.
                    later = Counter((m, s) for s in range(stage + 1, last + 1))
                    finished = range(num_arrays[stage], num_arrays[stage + 1])
                    assert arrays[0] == {(m, stage + 1): 1} and all(arrays[number] == later for number in finished)
                arrays = [gradient + Counter([(m, stage)]) for gradient in (Counter(), *arrays[1:])]
            given.append((kind, device, stage, arrays))
            if kind is Kind.FORWARD:
                store("own_inputs", tick, device, arrays)
            if kind is Kind.BACKWARD:
                store("own_cotangents", tick, device, arrays)
        for kind, device, stage, arrays in given if latency == 1 else leaving:
            if kind is Kind.FORWARD and stage < last:
                store("inputs", tick, (device + 1) % 4, crossing(device, 1, stage + 1, arrays))
            if kind is Kind.BACKWARD and stage > 0:
                store("cotangents", tick, (device - 1) % 4, crossing(device, -1, stage, arrays))
        leaving = given


def crossed(parcels) -> Counter:
    """Of each border: arrays that cross it."""
    return Counter(
        pair for size, pairs in zip(parcels.sizes, parcels.pairs, strict=True) for pair in pairs for _ in range(size)
    )


def test_a_border_is_crossed_by_those_sums_alone_that_are_finished_before_it():
    # 16 stages of 93 layers in blocks of 12: the running sum, and a sum for each block begun.
    ends = np.cumsum([6] * 13 + [5] * 3)
    num_arrays = [1, *(1 - -int(end) // 12 for end in ends[:-1])]
    schedule = make_schedule("1f1b", num_devices=16, num_micro_batches=16)
    parcels = parcels_of(schedule, num_arrays, 4)
    assert crossed(parcels) == {(stage - 1, stage): num_arrays[stage] for stage in range(1, 16)}
    # No row is in vain, and nothing but the last border has all nine.
    assert parcels.sizes == (1, 1, 2, 5) and sum(crossed(parcels).values()) == 79
    # With two, fewer arrays than with one, which all borders take.
    assert 79 < sum(crossed(parcels_of(schedule, num_arrays, 2)).values()) < 15 * 9


def test_interleaved_stages_are_sent_what_was_finished_since_their_device_ran_last():
    schedule = make_schedule("interleaved", num_devices=4, num_micro_batches=8, num_chunks=2)
    assert [schedule.sent(stage, TWO) for stage in range(1, 8)] == [
        [0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3, 4], [0, 4, 5, 6], [0, 4, 5, 6, 7], [0, 5, 6, 7]
    ]  # fmt: skip
    # Every tick holds the same exchanges: of two stages on a device the one counts that needs more.
    assert crossed(parcels_of(schedule, TWO, 4)) == {(3, 0): 4, (0, 1): 4, (1, 2): 5, (2, 3): 4}
    # Each sum reaches each device once: it is sent there or finished there.
    for number in range(1, 8):
        devices = Counter(stage % 4 for stage in range(1, 8) if number in schedule.sent(stage, TWO))
        assert set(devices.values()) == {1}
    slots = schedule.slots()
    assert slots.own_inputs.num_places == slots.own_cotangents.num_places == (0,)
