"""What kernels share that carry the state of the gated delta rule over chunks, in Pallas Mosaic GPU for Hopper.

A block takes one head and 64 value channels of a row, so that a chunk is read twice, not once for every 32 channels.
One warpgroup carries the state, in registers; a second does what the state does not wait for; a third copies, chunks
ahead. The state is held transposed, [64, 128]: value channels are rows. What a product leaves in registers is then the
left factor of the next one, and the chain from chunk to chunk never passes through shared memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.hopper_tiles import HALF

WIDTH = 2 * HALF
HALVES = range(2)
CARRYING, BESIDE, COPYING = range(3)
"""The warpgroups."""
REGISTERS = 208, 168
"""Of a thread that carries the state, and of one beside it; 24 remain for copying."""
AHEAD = 3
"""Chunks for which what the state waits for is held; with two, loads are waited for."""


def half_of(half: int):
    return pl.ds(half * HALF, HALF)


def wait_unless_first(step, barrier) -> None:
    @pl.when(step > 0)
    def _():
        plgpu.barrier_wait(barrier)


class Ring:
    """Buffers of `count` chunks, filled by one warpgroup and emptied by another, in turn."""

    def __init__(self, count: int, filled, emptied):
        self.count, self.filled, self.emptied = count, filled, emptied

    def slot(self, step):
        return lax.rem(step, self.count)

    def fill(self, step, chunks: int, copies: Callable) -> None:
        """Start `copies(slot, barrier)` once the slot is empty; nothing behind the last chunk."""
        slot = self.slot(step)

        @pl.when((step >= self.count) & (step < chunks))
        def _():
            plgpu.barrier_wait(self.emptied.at[slot])

        @pl.when((step >= 0) & (step < chunks))
        def _():
            copies(slot, self.filled.at[slot])

    def wait(self, step) -> None:
        plgpu.barrier_wait(self.filled.at[self.slot(step)])

    def release(self, step) -> None:
        plgpu.barrier_arrive(self.emptied.at[self.slot(step)])

    def drain(self, chunks: int) -> None:
        for step in range(max(chunks - self.count, 0), chunks):
            plgpu.barrier_wait(self.emptied.at[step % self.count])


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


def kept_by(kept_ref, half: int) -> jax.Array:
    """How much of each key channel a chunk keeps, for all value channels."""
    return tiles.row_across(kept_ref, half)


def kept_of_channels(kept: jax.Array) -> jax.Array:
    return kept if kept.ndim == 4 else jnp.broadcast_to(kept[..., None], (*kept.shape, WIDTH))


def launch(body, arguments, outputs, heads: int, *, scratch, barriers, name: str, in_place=None):
    """One block a row, head and half of the value channels; scratch and barriers as `body` names them."""
    rows = arguments[0].shape[0]
    barriers = {
        key: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count) for key, (arrivals, count) in barriers.items()
    }
    return launcher.launch(
        body,
        arguments,
        outputs,
        scratch=scratch | barriers,
        name=name,
        in_place=in_place,
        reduction_bytes=0,
        grid=(rows * heads * 2,),
        grid_names=("task",),
        num_threads=3,
        thread_name="warpgroup",
    )
