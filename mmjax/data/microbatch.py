"""Rows of a step in an order of equal cost for every device, and host memory that batches use again.

The order depends on the rows alone, not on the mesh: the rows are halved (or cut in 3, 5, ...) into groups of equal
number and nearly equal cost, and each group again. Every mesh splits rows into contiguous parts, and so into such
groups, whatever its size.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.data.batch import Batch

_SMALLEST_SLAB_BYTES = 4096
_MAX_EXCHANGES = 32


def balanced_order(costs: Sequence[int]) -> list[int]:
    """A permutation of the rows whose contiguous halves, quarters, ... cost nearly the same."""
    return _balance(list(range(len(costs))), costs)


def _balance(rows: list[int], costs: Sequence[int]) -> list[int]:
    parts = next((factor for factor in range(2, len(rows)) if len(rows) % factor == 0), len(rows))
    if parts == len(rows):
        return rows
    groups = _split(rows, costs, parts)
    return [row for group in groups for row in _balance(group, costs)]


def _split(rows: list[int], costs: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` groups of equal number: dearest rows first, each into the cheapest group with room; then exchanges."""
    room = len(rows) // parts
    groups: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for row in sorted(rows, key=lambda row: (-costs[row], row)):
        group = min((number for number in range(parts) if len(groups[number]) < room), key=lambda n: (totals[n], n))
        groups[group].append(row)
        totals[group] += costs[row]
    for _ in range(_MAX_EXCHANGES):
        high, low = (choose(range(parts), key=lambda number: totals[number]) for choose in (max, min))
        gap = totals[high] - totals[low]
        # The exchange that leaves the two groups closest.
        moved = np.subtract.outer([costs[row] for row in groups[high]], [costs[row] for row in groups[low]])
        after = np.abs(gap - 2 * moved)
        one, other = np.unravel_index(int(np.argmin(after)), after.shape)
        if after[one, other] >= gap:
            break
        groups[high][one], groups[low][other] = groups[low][other], groups[high][one]
        totals[high] -= int(moved[one, other])
        totals[low] += int(moved[one, other])
    return groups


def cost_balance(costs: Sequence[int], parts: int) -> float:
    """Largest over mean cost of the `parts` contiguous parts of a step's rows."""
    totals = np.asarray(costs, np.float64).reshape(parts, -1).sum(axis=1)
    return float(totals.max() / totals.mean()) if totals.any() else 1.0


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Host memory of a pool."""

    num_slabs: int
    held_bytes: int
    """All slabs."""
    used_bytes: int
    """Slabs of live batches."""
    asked_bytes: int
    """What those batches asked for."""
    num_reused: int
    """How often a slab was given out again."""

    @property
    def inner_fragmentation(self) -> float:
        """Share of used slabs that no array covers."""
        return 1 - self.asked_bytes / self.used_bytes if self.used_bytes else 0.0

    @property
    def idle_share(self) -> float:
        """Share of held memory that no live batch uses."""
        return 1 - self.used_bytes / self.held_bytes if self.held_bytes else 0.0


class BufferPool:
    """Slabs of host memory, given out as arrays, counted, and used again when nobody holds them."""

    def __init__(self):
        self._lock = threading.Lock()
        # Free slabs by size; holders and asked bytes of slabs in use, by address.
        self._free: dict[int, list[np.ndarray]] = {}
        self._used: dict[int, tuple[np.ndarray, int, int]] = {}
        self._num_slabs = self._held_bytes = self._num_reused = 0

    def full(self, shape: tuple[int, ...], dtype: type, value: float) -> np.ndarray:
        """An array full of `value`, held once."""
        asked = int(np.prod(shape)) * np.dtype(dtype).itemsize
        size = max(_SMALLEST_SLAB_BYTES, _size_class(asked))
        with self._lock:
            free = self._free.get(size)
            if free:
                slab = free.pop()
                self._num_reused += 1
            else:
                slab = np.empty(size, np.uint8)
                self._num_slabs += 1
                self._held_bytes += size
            self._used[_address(slab)] = (slab, 1, asked)
        array = slab[:asked].view(dtype).reshape(shape)
        array[...] = value
        return array

    def hold(self, batch: Batch) -> None:
        """One more holder of each array of a batch."""
        self._count(batch, 1)

    def release(self, batch: Batch) -> None:
        """One holder fewer; arrays that nobody holds are overwritten by later ones. Others' arrays are left alone."""
        self._count(batch, -1)

    def _count(self, batch: Batch, change: int) -> None:
        with self._lock:
            for array in batch:
                address = _address(array)
                if address not in self._used:
                    continue
                slab, holders, asked = self._used[address]
                if holders + change:
                    self._used[address] = (slab, holders + change, asked)
                else:
                    del self._used[address]
                    self._free.setdefault(slab.nbytes, []).append(slab)

    def report(self) -> PoolReport:
        with self._lock:
            return PoolReport(
                num_slabs=self._num_slabs,
                held_bytes=self._held_bytes,
                used_bytes=sum(slab.nbytes for slab, _, _ in self._used.values()),
                asked_bytes=sum(asked for _, _, asked in self._used.values()),
                num_reused=self._num_reused,
            )


def _size_class(num_bytes: int) -> int:
    """The next of 4, 5, 6, 7, 8, 10, 12, ... x a power of two: at most a quarter more than asked for."""
    step = max(1, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class DeviceFeed:
    """Batches on the devices: each is placed while the devices still work on the one before."""

    def __init__(
        self, batches: Iterator[Batch], place: Callable[[Batch], Any], wait: Callable[[Any], Any], pool: BufferPool
    ):
        """`wait` returns when a placed batch has left host memory, which is then used again."""
        self._batches, self._place, self._wait, self._pool = batches, place, wait, pool

    def __next__(self) -> Any:
        host = next(self._batches)
        placed = self._place(host)
        self._wait(placed)
        self._pool.release(host)
        return placed
