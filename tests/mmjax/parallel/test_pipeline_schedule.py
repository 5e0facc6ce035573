"""Schedules of a pipeline: every table is valid, idles as its formula says and keeps as little as it promises."""

import dataclasses

import pytest

from mmjax.parallel.pipeline_schedule import IDLE, Kind, Operation, forward_schedule, make_schedule

SIZES = [(devices, batches) for devices in (2, 3, 4, 8) for batches in (1, 2, 8, 16, 48)]


@pytest.mark.parametrize("latency", [1, 2])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_ticks_and_idle_share_are_those_of_the_formula(name, latency):
    for devices, batches in SIZES:
        schedule = make_schedule(name, num_devices=devices, num_micro_batches=batches, latency=latency)
        wait = latency * (devices - 1)
        assert len(schedule.ticks) == 2 * (batches + wait)
        assert schedule.idle_share == pytest.approx(wait / (batches + wait))


@pytest.mark.parametrize("latency", [1, 2])
def test_interleaving_divides_the_idle_share(latency):
    for devices, chunks, rounds in ((2, 2, 2), (2, 3, 1), (4, 2, 3), (3, 4, 2)):
        batches = rounds * latency * devices
        schedule = make_schedule(
            "interleaved", num_devices=devices, num_micro_batches=batches, num_chunks=chunks, latency=latency
        )
        wait = latency * (devices - 1)
        assert len(schedule.ticks) == 2 * (batches * chunks + wait)
        assert schedule.idle_share == pytest.approx(wait / (batches * chunks + wait))


@pytest.mark.parametrize("latency", [1, 2])
def test_weight_gradients_fill_the_bubbles(latency):
    for devices, batches in ((2, 4), (3, 8), (4, 12), (4, 32), (8, 48)):
        schedule = make_schedule("split_backward", num_devices=devices, num_micro_batches=batches, latency=latency)
        wait = latency * (devices - 1)
        assert len(schedule.ticks) == 3 * batches + wait
        assert schedule.idle_share == pytest.approx(wait / (3 * batches + wait))
        assert max(schedule.under_way()) <= wait + 1 + devices // 2


def test_1f1b_keeps_no_more_inputs_than_there_are_devices_and_gpipe_keeps_all():
    for devices, batches in SIZES:
        kept = make_schedule("1f1b", num_devices=devices, num_micro_batches=batches, latency=1)
        assert kept.under_way() == [min(batches, devices - device) for device in range(devices)]
        assert kept.slots().num_inputs <= devices
        hidden = make_schedule("1f1b", num_devices=devices, num_micro_batches=batches, latency=2)
        assert hidden.under_way() == [min(batches, 2 * (devices - device) - 1) for device in range(devices)]
        assert make_schedule("gpipe", num_devices=devices, num_micro_batches=batches).slots().num_inputs == batches


def test_hidden_transfers_cost_no_time_where_devices_wait_for_each_other():
    """All devices do the same kind of operation in a tick, so none waits for a longer one of its neighbour."""
    schedule = make_schedule("1f1b", num_devices=4, num_micro_batches=8, latency=2)
    assert schedule.seconds({Kind.FORWARD: 1.0, Kind.BACKWARD: 3.0}) == (8 + 4 - 1) * 4.0
    waiting = make_schedule("1f1b", num_devices=4, num_micro_batches=8, latency=1)
    assert waiting.seconds({Kind.FORWARD: 1.0, Kind.BACKWARD: 3.0}) > (8 + 4 - 1) * 4.0


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("split_backward", 1)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("latency", [1, 2])
def test_a_slot_holds_what_arrived_until_its_last_use(name, chunks, latency):
    """Follows every slot tick by tick: what an operation reads is what its neighbour sent for it."""
    schedule = make_schedule(name, num_devices=4, num_micro_batches=8, num_chunks=chunks, latency=latency)
    slots = schedule.slots()
    inputs, cotangents = {}, {}
    for tick, operations in enumerate(schedule.ticks):
        for device, (kind, micro_batch, chunk) in enumerate(operations):
            stage = schedule.stage_of(device, chunk)
            if kind is not Kind.IDLE and stage > 0:
                assert inputs[device, int(slots.inputs.used[tick, device, 0])] == (micro_batch, stage)
            if kind in (Kind.BACKWARD, Kind.WEIGHT) and stage < schedule.num_stages - 1:
                assert cotangents[device, int(slots.cotangents.used[tick, device, 0])] == (micro_batch, stage)
        sent = tick - latency + 1
        if sent < 0:
            continue
        for device, (kind, micro_batch, chunk) in enumerate(schedule.ticks[sent]):
            stage = schedule.stage_of(device, chunk)
            if kind is Kind.FORWARD and stage < schedule.num_stages - 1:
                receiver = (device + 1) % 4
                inputs[receiver, int(slots.inputs.stored[tick, receiver, 0])] = (micro_batch, stage + 1)
            if kind is Kind.BACKWARD and stage > 0:
                receiver = (device - 1) % 4
                cotangents[receiver, int(slots.cotangents.stored[tick, receiver, 0])] = (micro_batch, stage - 1)
    assert slots.inputs.stored.max() == slots.num_inputs - 1
    assert slots.cotangents.stored.max() == slots.num_cotangents - 1


def test_a_table_with_an_operation_before_its_input_or_twice_is_found():
    schedule = make_schedule("1f1b", num_devices=2, num_micro_batches=2, latency=1)
    both = (Kind.FORWARD, Kind.BACKWARD)
    early = dataclasses.replace(
        schedule, ticks=((Operation(Kind.FORWARD), Operation(Kind.FORWARD)), *schedule.ticks[1:])
    )
    with pytest.raises(ValueError, match="expected"):
        early.check(both)
    swapped = dataclasses.replace(schedule, ticks=(schedule.ticks[1], schedule.ticks[0], *schedule.ticks[2:]))
    with pytest.raises(ValueError, match="before its input"):
        swapped.check(both)
    with pytest.raises(ValueError, match="expected"):
        dataclasses.replace(schedule, ticks=schedule.ticks[:-1]).check(both)


def test_forward_passes_alone_follow_each_other():
    schedule = forward_schedule(num_devices=4, num_micro_batches=3, latency=2)
    assert len(schedule.ticks) == 3 + 2 * 3
    assert sum(operation is not IDLE for operations in schedule.ticks for operation in operations) == 12


def test_a_table_prints_as_a_row_for_each_device():
    lines = make_schedule("1f1b", num_devices=2, num_micro_batches=2, latency=1).lines()
    assert lines == ["  0 | F0 F1 .  B0 .  B1", "  1 | .  F0 B0 F1 B1 . "]


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ValueError, match="no schedule"):
        make_schedule("dualpipe", num_devices=2, num_micro_batches=2)
    with pytest.raises(ValueError, match="need the schedule"):
        make_schedule("1f1b", num_devices=2, num_micro_batches=4, num_chunks=2)
    with pytest.raises(ValueError, match="micro-batches"):
        make_schedule("interleaved", num_devices=2, num_micro_batches=3, num_chunks=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b", {}), ("1f1b", {"latency": 1}), ("split_backward", {}), ("gpipe", {}), ("interleaved", {"num_chunks": 2})],
    ids=str,
)
def test_what_stages_keep_has_a_place_of_its_own_from_its_forward_pass_to_its_last_use(name, options):
    schedule = make_schedule(name, num_devices=4, num_micro_batches=8, **options)
    slots = schedule.slots(runs_again=False)
    assert slots.kept_of_device == tuple(schedule.under_way())
    holder: dict[tuple[int, int], tuple[int, int]] = {}
    for tick, operations in enumerate(schedule.ticks):
        for device, operation in enumerate(operations):
            if operation.kind is Kind.IDLE:
                continue
            place = device, int(slots.kept[tick, device])
            if operation.kind is Kind.FORWARD:
                holder[place] = operation.micro_batch, operation.chunk
            assert holder[place] == (operation.micro_batch, operation.chunk)
    # An input is read in its forward pass alone.
    assert slots.num_inputs < schedule.slots().num_inputs
