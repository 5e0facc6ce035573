"""What kernels share that carry the state of the gated delta rule over chunks, in Pallas Mosaic GPU for Hopper.

A block takes one head and 64 value channels of a row, so that a chunk is read twice, not once for every 32 channels.
One warpgroup carries the state, in registers; a second does what the state does not wait for; a third copies, chunks
ahead. The state is held transposed, [64, 128]: value channels are rows. What a product leaves in registers is then the
left factor of the next one, and the chain from chunk to chunk never passes through shared memory.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_cores as cores
from pallas_kernels.linear_attention import hopper_shared as shared
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.hopper_tiles import HALF, WIDTH

HALVES = range(2)
CARRYING, BESIDE, COPYING = range(3)
"""The warpgroups."""
REGISTERS = launcher.registers(240, 168, 24)
"""Of a thread that carries the state, of one beside it, and of one that copies."""
AHEAD = 3
"""Chunks for which what the state waits for is held; with two, loads are waited for."""

GIVEN = 2
"""Chunks of which what the state gives is held for another warpgroup."""


def half_of(half: int):
    return pl.ds(half * HALF, HALF)


class Ring:
    """Buffers of `count` chunks, filled by one warpgroup and emptied by another, in turn."""

    def __init__(self, count: int, filled, emptied):
        self.count, self.filled, self.emptied = count, filled, emptied

    def slot(self, step):
        return lax.rem(step, self.count)

    def fill(self, step, chunks: int, copies: Callable, leave: Callable | None = None) -> None:
        """Start `copies(slot, barrier)` once the slot is empty; nothing behind the last chunk.

        `leave(chunk, slot)` stores what has been written to a slot before it is filled anew.
        """
        slot = self.slot(step)

        @pl.when((step >= self.count) & (step < chunks))
        def _():
            self._wait_emptied(slot)
            if leave is not None:
                cores.acquire()
                leave(step - self.count, slot)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when((step >= 0) & (step < chunks))
        def _():
            copies(slot, self.filled.at[slot])

    def give(self, step, write: Callable) -> None:
        """Once the slot is empty, `write(slot)` from registers for another warpgroup, which takes it."""
        slot = self.slot(step)
        pl.when(step >= self.count)(lambda: self._wait_emptied(slot))
        write(slot)
        plgpu.barrier_arrive(self.filled.at[slot])

    def wait(self, step) -> None:
        plgpu.barrier_wait(self.filled.at[self.slot(step)])

    def _wait_emptied(self, slot) -> None:
        plgpu.barrier_wait(self.emptied.at[slot])

    def take(self, step) -> None:
        """Wait for what another warpgroup gave, and let tensor cores and bulk copies of this one read it."""
        self.wait(step)
        cores.acquire()

    def release(self, step) -> None:
        plgpu.barrier_arrive(self.emptied.at[self.slot(step)])

    def drain(self, chunks: int, leave: Callable | None = None) -> None:
        for step in range(max(chunks - self.count, 0), chunks):
            self._wait_emptied(step % self.count)
            if leave is not None:
                cores.acquire()
                leave(step, step % self.count)
        if leave is not None:
            plgpu.wait_smem_to_gmem(0)


def place_of(heads: int):
    """Row and head of this block, and its value channels."""
    task = lax.axis_index("task")
    return task // (2 * heads), lax.rem(task // 2, heads), pl.ds(lax.rem(task, 2) * HALF, HALF)


def turned(state: jax.Array) -> jax.Array:
    """[B, H, K, V] as the kernels read and write it, [B, H, V, K], and back."""
    return jnp.swapaxes(state, 2, 3)


def read_state(source) -> tuple[jax.Array, ...]:
    """Of a state [64, 128] in device memory, the two halves of its columns."""
    halves = [launcher.load(source.at[:, half_of(half)], plgpu.Layout.WGMMA, is_strided=True) for half in HALVES]
    return tuple(map(tiles.unmarked, halves))


def write_state(halves, target) -> None:
    for half, state in enumerate(halves):
        target[:, half_of(half)] = state


def kept_by(kept_ref) -> list[jax.Array]:
    """How much of each key channel a chunk keeps, for all value channels: both halves."""
    return [shared.row_across(kept_ref, half) for half in HALVES]


def scaled(halves: Sequence[jax.Array], kept: Sequence[jax.Array]) -> list[jax.Array]:
    """What is kept of a state: to be told before products start that do not wait for it."""
    return cores.computed([half * factor for half, factor in zip(halves, kept, strict=True)])


def following(step, chunks: int, wait: Callable[[Any], None]):
    """The next step, once `wait` has seen that what it needs is there; behind the last one that once more."""
    next_step = jnp.minimum(step + 1, chunks - 1)
    pl.when(next_step > step)(lambda: wait(next_step))
    return next_step


def kept_of_channels(kept: jax.Array) -> jax.Array:
    return kept if kept.ndim == 4 else jnp.broadcast_to(kept[..., None], (*kept.shape, WIDTH))


class Scan(NamedTuple):
    """What one scan reads and writes, and what a warpgroup does: `body(warpgroup, *arguments, *outputs, **scratch)`."""

    body: Callable[..., None]
    arguments: Sequence[jax.Array]
    outputs: Sequence[jax.ShapeDtypeStruct]
    scratch: Mapping[str, Any]
    barriers: Mapping[str, tuple[int, int]]
    """How often each is arrived at, and how many there are."""
    in_place: Mapping[int, int] = {}
    """Places of arguments whose memory outputs take, and of these."""
    finish: Callable[..., tuple[jax.Array, ...]] = lambda *outputs: outputs
    """Makes results of the outputs."""

    def run(self, warpgroup: jax.Array, *refs: Any) -> None:
        barriers = {
            name: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
            for name, (arrivals, count) in self.barriers.items()
        }
        # Allocated here, scans of one launch take the same memory.
        body = functools.partial(self.body, warpgroup, *refs)
        pl.run_scoped(body, collective_axes="warpgroup", **self.scratch, **barriers)


def launch(name: str, *scans: Scan) -> list[tuple[jax.Array, ...]]:
    """Results of scans side by side, the longest first: one block a scan, row, head and half of the value channels."""
    rows, _, heads, _ = scans[0].arguments[0].shape
    num_read, num_written = [len(scan.arguments) for scan in scans], [len(scan.outputs) for scan in scans]

    def body(*refs):
        warpgroup, own = lax.axis_index("warpgroup"), lax.axis_index("scan")
        read, written = _split(refs, num_read), _split(refs[sum(num_read) :], num_written)
        for number, scan in enumerate(scans):
            pl.when(own == number)(functools.partial(scan.run, warpgroup, *read[number], *written[number]))

    outputs = launcher.launch(
        body,
        [argument for scan in scans for argument in scan.arguments],
        [output for scan in scans for output in scan.outputs],
        scratch={},
        name=name,
        in_place={
            sum(num_read[:number]) + argument: sum(num_written[:number]) + output
            for number, scan in enumerate(scans)
            for argument, output in scan.in_place.items()
        },
        reduction_bytes=0,
        grid=(len(scans), rows * heads * 2),
        grid_names=("scan", "task"),
        num_threads=3,
        thread_name="warpgroup",
    )
    return [scan.finish(*results) for scan, results in zip(scans, _split(outputs, num_written), strict=True)]


def _split(sequence: Sequence, lengths: Sequence[int]) -> list[Sequence]:
    ends = itertools.accumulate(lengths)
    return [sequence[end - length : end] for end, length in zip(ends, lengths, strict=True)]
