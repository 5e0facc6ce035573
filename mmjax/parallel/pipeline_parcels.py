"""How messages of different numbers of arrays cross the borders of a pipeline in few exchanges. No JAX."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmjax.parallel.pipeline_schedule import Schedule


class Parcels(NamedTuple):
    """An exchange for each parcel, over those borders that it crosses; a stage's message is some of them."""

    sizes: tuple[int, ...]
    """Arrays of each."""
    pairs: tuple[tuple[tuple[int, int], ...], ...]
    """Of each: (sender, receiver) of its devices on the way forward."""
    array_of_row: np.ndarray
    """int32 [stages, rows], parcels one after the other: which array of a message lies there on the way to a stage."""
    row_of_array: np.ndarray
    """int32 [stages, arrays]: where it lies; anything for an array that is not sent."""


def parcels_of(schedule: Schedule, num_arrays: Sequence[int], most: int) -> Parcels:
    """At most so many parcels, by which the fewest arrays travel that nobody waits for.

    Every tick holds the same exchanges, so a border is crossed by as many arrays as that stage behind it is sent which
    needs most. With four parcels none is in vain up to 15 arrays: 1, 2, 4 and 8 make any number.
    """
    devices = schedule.num_devices
    sent = {stage: schedule.sent(stage, num_arrays) for stage in range(1, schedule.num_stages)}
    widths: dict[int, int] = defaultdict(int)
    for stage, arrays in sent.items():
        widths[stage % devices] = max(widths[stage % devices], len(arrays))
    largest = max(widths.values())

    def num_sent(sizes: tuple[int, ...]) -> int:
        return sum(sizes[parcel] for width in widths.values() for parcel in _least(sizes, width))

    numbers, any_size = range(1, most + 1), range(1, largest + 1)
    choices = (sizes for number in numbers for sizes in itertools.combinations_with_replacement(any_size, number))
    sizes = min((sizes for sizes in choices if sum(sizes) == largest), key=num_sent)
    taken = {receiver: _least(sizes, width) for receiver, width in widths.items()}
    pairs = (
        tuple(((receiver - 1) % devices, receiver) for receiver in sorted(taken) if parcel in taken[receiver])
        for parcel in range(len(sizes))
    )
    array_of_row = np.zeros((schedule.num_stages, largest), np.int32)
    row_of_array = np.zeros((schedule.num_stages, max(num_arrays)), np.int32)
    rows = np.split(np.arange(largest), np.cumsum(sizes)[:-1])
    for stage, arrays in sent.items():
        places = np.concatenate([rows[parcel] for parcel in taken[stage % devices]])[: len(arrays)]
        array_of_row[stage, places] = arrays
        row_of_array[stage, arrays] = places
    return Parcels(sizes, tuple(pairs), array_of_row, row_of_array)


def _least(sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The parcels that hold so many arrays with the least room left."""
    every = range(len(sizes))
    subsets = itertools.chain.from_iterable(itertools.combinations(every, 1 + number) for number in every)
    held = {parcels: sum(sizes[parcel] for parcel in parcels) for parcels in subsets}
    return min((parcels for parcels in held if held[parcels] >= width), key=lambda parcels: held[parcels])
