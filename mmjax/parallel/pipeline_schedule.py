"""Pipeline schedules as tables: which operation each stage's device does in each tick. No JAX.

Tick, device and chunk count from 0. With several chunks a device holds stages `device`, `devices + device`, ...: a
micro-batch passes the ring of devices once for each chunk. A result of tick t can be used in tick t + latency:

    latency 1   sent when it is ready, while nothing is computed
    latency 2   sent during tick t + 1, while that tick's operations are computed

Of all schedules here with m micro-batches, p devices, v chunks and latency L, an operation taking one tick:

    gpipe, 1f1b         2 (m + L (p - 1)) ticks        idle share  L (p - 1) / (m + L (p - 1))
    interleaved         2 (m v + L (p - 1))                        L (p - 1) / (m v + L (p - 1))      (L p divides m)
    split_backward      3 m + L (p - 1)                            L (p - 1) / (3 m + L (p - 1))      (m >= 2 L (p - 1))

Source: GPipe, arXiv:1811.06965; 1F1B, PipeDream-Flush, arXiv:2006.09503; interleaved, arXiv:2104.04473; split backward
as in ZB-H1, arXiv:2401.10241.
"""

import dataclasses
import enum
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "split_backward"]


class Kind(enum.IntEnum):
    """What a device does in a tick."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    """Gradients of the stage's input and, unless the schedule splits them off, of its weights."""
    WEIGHT = 3
    """Gradients of the stage's weights alone."""


class Operation(NamedTuple):
    """One tick of one device."""

    kind: Kind
    micro_batch: int = 0
    chunk: int = 0


IDLE = Operation(Kind.IDLE)
_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}


class Buffer(NamedTuple):
    """Places for arrays of messages: int32 [ticks, devices, arrays] each, -1 for nowhere."""

    stored: np.ndarray
    """Takes what is there from the end of the tick on."""
    used: np.ndarray
    """Is read by the tick's operation."""
    num_places: tuple[int, ...]
    """For each array, on the device that needs most."""


class _Stay(NamedTuple):
    """An array of a message that lies on a device."""

    since: int
    """The tick at whose end it is there."""
    number: int
    micro_batch: int
    stages: Sequence[int]
    """Those that use it, all on one device."""


@dataclass(frozen=True)
class Slots:
    """Where a device keeps what its operations need of earlier ones."""

    inputs: Buffer
    """Sent by the stage before."""
    own_inputs: Buffer
    """Sums that an earlier stage of the same device has finished."""
    cotangents: Buffer
    """Sent by the stage behind."""
    own_cotangents: Buffer
    """Of sums that a later stage of the same device has used, too."""
    kept: np.ndarray
    """int32 [ticks, devices]: slot of what a forward pass keeps inside its stage, from then until its last use."""
    kept_of_device: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        return self.inputs.num_places[0]

    @property
    def num_cotangents(self) -> int:
        return self.cotangents.num_places[0]


class _Places:
    """Numbered places of each device, as few as are taken at one time."""

    def __init__(self, num_devices: int):
        self.free_from: list[list[int]] = [[] for _ in range(num_devices)]
        """Of each place: the tick of its last use."""

    def take(self, device: int, since: int, last_use: int) -> int:
        """A place that nothing uses behind tick `since`, taken until `last_use`."""
        free = self.free_from[device]
        place = next((number for number, tick in enumerate(free) if tick <= since), len(free))
        free[place : place + 1] = [last_use]
        return place


@dataclass(frozen=True)
class Schedule:
    """A whole step of a pipeline."""

    num_devices: int
    num_chunks: int
    num_micro_batches: int
    latency: int
    ticks: tuple[tuple[Operation, ...], ...]
    """[tick][device]."""

    @property
    def num_stages(self) -> int:
        return self.num_devices * self.num_chunks

    def stage_of(self, device: int, chunk: int) -> int:
        return chunk * self.num_devices + device

    @functools.cached_property
    def done(self) -> Mapping[tuple[Kind, int, int], int]:
        """(kind, micro-batch, stage) -> its tick."""
        return {
            (operation.kind, operation.micro_batch, self.stage_of(device, operation.chunk)): tick
            for tick, operations in enumerate(self.ticks)
            for device, operation in enumerate(operations)
            if operation is not IDLE
        }

    @property
    def idle_share(self) -> float:
        """Of all ticks of all devices, with every operation taking one tick."""
        return 1 - len(self.done) / (len(self.ticks) * self.num_devices)

    def seconds(self, of_kind: Mapping[Kind, float]) -> float:
        """Time of the step where every tick takes as long as its longest operation: devices wait for each other."""
        return sum(max(of_kind.get(operation.kind, 0.0) for operation in operations) for operations in self.ticks)

    def under_way(self) -> list[int]:
        """Of each device: the most inputs of stages that it must keep at one time, from a forward to its last use."""
        peaks = []
        for device in range(self.num_devices):
            changes: Counter[int] = Counter()
            for (kind, micro_batch, stage), tick in self.done.items():
                if kind is Kind.FORWARD and stage % self.num_devices == device:
                    changes[tick] += 1
                    changes[self._last_use(micro_batch, stage) + 1] -= 1
            total = peak = 0
            for tick in sorted(changes):
                total += changes[tick]
                peak = max(peak, total)
            peaks.append(peak)
        return peaks

    def _last_use(self, micro_batch: int, stage: int) -> int:
        return max(tick for kind in Kind if (tick := self.done.get((kind, micro_batch, stage))) is not None)

    def check(self, kinds: Sequence[Kind]) -> None:
        """Raise ValueError unless each stage does each of `kinds` once for each micro-batch, after what it needs."""
        expected = {(k, m, s) for k in kinds for m in range(self.num_micro_batches) for s in range(self.num_stages)}
        num_operations = sum(operation is not IDLE for operations in self.ticks for operation in operations)
        if self.done.keys() != expected or num_operations != len(expected):
            raise ValueError(f"{num_operations} operations, {len(expected)} expected, each once")
        for (kind, micro_batch, stage), tick in self.done.items():
            for needed, neighbour, latency in self._needs(kind, stage):
                if tick < self.done[needed, micro_batch, neighbour] + latency:
                    raise ValueError(f"{kind.name} of micro-batch {micro_batch}, stage {stage} comes before its input")

    def _needs(self, kind: Kind, stage: int) -> list[tuple[Kind, int, int]]:
        """(kind, stage, latency) of what an operation waits for."""
        if kind is Kind.FORWARD:
            return [(Kind.FORWARD, stage - 1, self.latency)] if stage else []
        if kind is Kind.WEIGHT:
            return [(Kind.BACKWARD, stage, 1)]
        is_last = stage == self.num_stages - 1
        return [(Kind.FORWARD, stage, 1)] + ([] if is_last else [(Kind.BACKWARD, stage + 1, self.latency)])

    def sent(self, stage: int, num_arrays: Sequence[int]) -> list[int]:
        """Which arrays of a message travel to a stage, and as gradients back.

        A message is the running sum, 0, then the sums of finished residual blocks in order, of which a stage gets as
        many as `num_arrays` says. Its device has those that were there when its stage before had run.
        """
        before = stage - self.num_devices
        return [0, *range(num_arrays[before + 1] if before >= 0 else 1, num_arrays[stage])]

    def slots(self, num_arrays: Sequence[int] = (), *, runs_again: bool = True) -> Slots:
        """A place for every array from when it is there until its last use; as few places as that needs.

        Stages are given `num_arrays` arrays, one if it is empty. Where a backward pass does not run its stage again, an
        input's last use is a forward pass.
        """
        num_arrays = num_arrays or (1,) * self.num_stages
        inputs, own_inputs, cotangents, own_cotangents = stays = [], [], [], []
        for (kind, m, stage), tick in self.done.items():
            arrival = tick + self.latency - 1
            if kind is Kind.FORWARD and stage < self.num_stages - 1:
                later = range(stage + 1, self.num_stages, self.num_devices)
                inputs += [
                    _Stay(arrival, number, m, later if number else later[:1])
                    for number in self.sent(stage + 1, num_arrays)
                ]
                if later := range(stage + self.num_devices, self.num_stages, self.num_devices):
                    finished = range(num_arrays[stage], num_arrays[stage + 1])
                    own_inputs += [_Stay(tick, number, m, later) for number in finished]
            if kind is Kind.BACKWARD and stage > 0:
                cotangents += [_Stay(arrival, number, m, [stage - 1]) for number in self.sent(stage, num_arrays)]
                if (before := stage - self.num_devices) >= 0:
                    own_cotangents += [_Stay(tick, number, m, [before]) for number in range(1, num_arrays[before + 1])]
        of_inputs, of_cotangents = tuple(Kind) if runs_again else (Kind.FORWARD,), (Kind.BACKWARD, Kind.WEIGHT)
        buffers = [
            self._buffer(of_buffer, users, max(num_arrays))
            for of_buffer, users in zip(stays, (of_inputs, of_inputs, of_cotangents, of_cotangents), strict=True)
        ]
        kept, placing = np.full((len(self.ticks), self.num_devices), -1, np.int32), _Places(self.num_devices)
        for (kind, micro_batch, stage), tick in sorted(self.done.items(), key=lambda item: item[1]):
            if kind is Kind.FORWARD:
                slot = placing.take(stage % self.num_devices, tick - 1, self._last_use(micro_batch, stage))
                for user in Kind:
                    if (tick := self.done.get((user, micro_batch, stage))) is not None:
                        kept[tick, stage % self.num_devices] = slot
        return Slots(*buffers, kept=kept, kept_of_device=tuple(map(len, placing.free_from)))

    def _buffer(self, stays: Iterable[_Stay], users: Iterable[Kind], num_arrays: int) -> Buffer:
        """Places for `stays`, which end with the last of their stages' passes of the kinds `users`."""
        shape = (len(self.ticks), self.num_devices, num_arrays)
        stored, used = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        placing = [_Places(self.num_devices) for _ in range(num_arrays)]
        for since, number, micro_batch, stages in sorted(stays, key=lambda stay: stay.since):
            device, operations = stages[0] % self.num_devices, itertools.product(users, [micro_batch], stages)
            uses = [self.done[operation] for operation in operations if operation in self.done]
            place = placing[number].take(device, since, max(uses))
            stored[since, device, number] = used[uses, device, number] = place
        return Buffer(stored, used, tuple(max(map(len, of_array.free_from)) for of_array in placing))

    def lines(self) -> list[str]:
        """The table for a person: a row for each device, a column for each tick, e.g. `F3` or `B0.1` (chunk 1)."""

        def name(operation: Operation) -> str:
            if operation.kind is Kind.IDLE:
                return "."
            chunk = f".{operation.chunk}" if self.num_chunks > 1 else ""
            return f"{_LETTERS[operation.kind]}{operation.micro_batch}{chunk}"

        names = [[name(operations[device]) for operations in self.ticks] for device in range(self.num_devices)]
        width = max(len(text) for row in names for text in row)
        return [f"{device:>3} | " + " ".join(text.ljust(width) for text in row) for device, row in enumerate(names)]


def make_schedule(
    name: ScheduleName, *, num_devices: int, num_micro_batches: int, num_chunks: int = 1, latency: int = 2
) -> Schedule:
    """The table of a step with forward and backward passes.

    Raises:
      ValueError: an unknown name, several chunks in a schedule other than `interleaved`, or micro-batches of such a one
        that are no multiple of latency x devices: so many fill the ring.
    """
    if name not in get_args(ScheduleName):
        raise ValueError(f"no schedule {name!r}")
    if num_chunks > 1 and name != "interleaved":
        raise ValueError(f"{num_chunks} chunks need the schedule 'interleaved', not {name!r}")
    if num_chunks > 1 and num_micro_batches % (latency * num_devices):
        raise ValueError(f"{num_micro_batches} micro-batches in {num_chunks} chunks: not {latency * num_devices} n")
    empty = Schedule(num_devices, num_chunks, num_micro_batches, latency, ())
    if name == "split_backward":
        schedule = _fill_with_weight_gradients(empty)
        schedule.check((Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))
        return schedule
    orders = []
    for device in range(num_devices):
        forward = [Operation(Kind.FORWARD, *visit) for visit in _visits(empty)]
        backward = [Operation(Kind.BACKWARD, m, num_chunks - 1 - chunk) for m, chunk in _visits(empty)]
        behind = latency * (num_devices - 1 - device)
        if name == "gpipe":
            lead = len(forward)
        elif num_chunks == 1:
            lead = behind + 1
        else:
            lead = 2 * behind + (num_chunks - 1) * latency * num_devices + 1
        lead = min(lead, len(forward))
        order = forward[:lead]
        for number, operation in enumerate(backward):
            order += [operation, *forward[lead + number : lead + number + 1]]
        orders.append(order)
    # All forward passes in even ticks, all backward ones in odd ticks: no device waits for its neighbour's longer one.
    schedule = _place(empty, orders, forward_every=2 if name == "1f1b" and latency == 2 else 1)
    schedule.check((Kind.FORWARD, Kind.BACKWARD))
    return schedule


def forward_schedule(*, num_devices: int, num_micro_batches: int, num_chunks: int = 1, latency: int = 2) -> Schedule:
    """The table of forward passes alone; with several chunks, latency x devices must divide the micro-batches."""
    empty = Schedule(num_devices, num_chunks, num_micro_batches, latency, ())
    schedule = _place(empty, [[Operation(Kind.FORWARD, *visit) for visit in _visits(empty)]] * num_devices)
    schedule.check((Kind.FORWARD,))
    return schedule


def _visits(schedule: Schedule) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of a device's forward passes: groups that fill the ring go round together."""
    group = schedule.latency * schedule.num_devices if schedule.num_chunks > 1 else schedule.num_micro_batches
    return [
        (micro_batch, chunk)
        for first in range(0, schedule.num_micro_batches, group)
        for chunk in range(schedule.num_chunks)
        for micro_batch in range(first, first + group)
    ]


class _Placing:
    """A table that grows tick by tick."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.done: dict[tuple[Kind, int, int], int] = {}
        self.ticks: list[tuple[Operation, ...]] = []
        self.num_idle = 0

    def is_ready(self, operation: Operation, device: int) -> bool:
        stage = self.schedule.stage_of(device, operation.chunk)
        needs = self.schedule._needs(operation.kind, stage)
        never = len(self.ticks) + 1
        return all(
            self.done.get((kind, operation.micro_batch, neighbour), never) + latency <= len(self.ticks)
            for kind, neighbour, latency in needs
        )

    def add(self, operations: Sequence[Operation]) -> None:
        is_stuck = all(operation is IDLE for operation in operations)
        self.num_idle = self.num_idle + 1 if is_stuck else 0
        assert self.num_idle <= self.schedule.latency, "operations wait for each other"
        for device, operation in enumerate(operations):
            if operation is not IDLE:
                key = (operation.kind, operation.micro_batch, self.schedule.stage_of(device, operation.chunk))
                self.done[key] = len(self.ticks)
        self.ticks.append(tuple(operations))

    def finish(self) -> Schedule:
        return dataclasses.replace(self.schedule, ticks=tuple(self.ticks))


def _place(schedule: Schedule, orders: Sequence[Sequence[Operation]], forward_every: int = 1) -> Schedule:
    """Each device's operations in its order, each as early as what it needs allows."""
    placing, left = _Placing(schedule), [list(order) for order in orders]

    def is_next(operation: Operation, device: int) -> bool:
        is_turn = operation.kind is not Kind.FORWARD or len(placing.ticks) % forward_every == 0
        return is_turn and placing.is_ready(operation, device)

    while any(left):
        ready = [bool(order) and is_next(order[0], device) for device, order in enumerate(left)]
        placing.add([order.pop(0) if is_ready else IDLE for order, is_ready in zip(left, ready, strict=True)])
    return placing.finish()


def _fill_with_weight_gradients(schedule: Schedule) -> Schedule:
    """Backward passes first, then forward passes while not too many inputs are kept, then weights."""
    placing, num_devices = _Placing(schedule), schedule.num_devices
    next_of = [dict.fromkeys((Kind.BACKWARD, Kind.FORWARD, Kind.WEIGHT), 0) for _ in range(num_devices)]
    # With half the devices' number more than a ring needs, no device waits for a forward pass in the steady state.
    most = schedule.latency * (num_devices - 1) + 1 + num_devices // 2
    while any(numbers[Kind.WEIGHT] < schedule.num_micro_batches for numbers in next_of):
        operations = []
        for device, numbers in enumerate(next_of):
            chosen = IDLE
            for kind, number in numbers.items():
                is_full = kind is Kind.FORWARD and number - numbers[Kind.WEIGHT] >= most
                operation = Operation(kind, number)
                is_left = number < schedule.num_micro_batches and not is_full
                if is_left and placing.is_ready(operation, device):
                    chosen = operation
                    numbers[kind] += 1
                    break
            operations.append(chosen)
        placing.add(operations)
    return placing.finish()
