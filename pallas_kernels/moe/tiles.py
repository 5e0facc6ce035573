"""How persistent kernels of routed experts share out their tiles, and how warpgroups hand operands to each other.

Of a block's warpgroups the last one copies operands into a ring of buffers in shared memory, over the ends of tiles,
and the others multiply. Rows lie in blocks of 64 that belong to one expert each; a warpgroup multiplies one such block,
so no more than 63 rows of an expert are padding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher

BLOCK = 64
"""Rows of a block; also the length of one step of a contraction."""


class Tiles(NamedTuple):
    """Where each expert's blocks lie, and the tiles of at most `warpgroups` blocks they are cut into."""

    num_tiles: jax.Array
    """[1] int32."""
    expert: jax.Array
    """[tiles] int32."""
    first_block: jax.Array
    """[tiles] int32."""
    num_blocks: jax.Array
    """[tiles] int32: 1 to `warpgroups`."""
    first_tile: jax.Array
    """[tiles] int32: the first tile of this tile's expert."""
    expert_tiles: jax.Array
    """[tiles] int32: how many its expert has."""


class Tile(NamedTuple):
    """One warpgroup's share of a tile inside a kernel."""

    row: jax.Array
    """The first of its 64 rows."""
    column: jax.Array
    """Number of the tile along the columns."""


class Shape(NamedTuple):
    """How a kernel is cut."""

    warpgroups: int = 2
    """Warpgroups that multiply: blocks of rows in a tile."""
    stages: int = 4
    """Depth of the ring of operand buffers."""
    width: int = 256
    """Columns of a tile; 256 are the most that a warpgroup can hold beside its 64 rows."""


def running_total(counts: jax.Array) -> jax.Array:
    """Sums of the counts up to and with each: one pass, where a scan would take many small ones."""
    place = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None, :] <= place[:, None], counts[None, :], 0), axis=1, dtype=jnp.int32)


def cut_tiles(num_blocks: jax.Array, total_blocks: int, warpgroups: int) -> Tiles:
    """Cut experts of `num_blocks` [E] int32 blocks, one after the other, into tiles of nearly equal height."""
    num_experts = num_blocks.shape[0]
    num_tiles = -(-num_blocks // warpgroups)
    last_tile = running_total(num_tiles)
    tile = jnp.arange(-(-total_blocks // warpgroups) + num_experts, dtype=jnp.int32)
    expert = jnp.sum(last_tile[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    expert_tiles = jnp.maximum(num_tiles[expert], 1)
    first_tile = last_tile[expert] - num_tiles[expert]
    start = (tile - first_tile) * num_blocks[expert] // expert_tiles
    end = (tile - first_tile + 1) * num_blocks[expert] // expert_tiles
    first_block = running_total(num_blocks)[expert] - num_blocks[expert]
    return Tiles(last_tile[-1:], expert, first_block + start, end - start, first_tile, expert_tiles)


class Counter(NamedTuple):
    """A place that no other kernel counts in."""

    counters: jax.Array
    """[n] int32 zeros, computed anew for every use."""
    place: int


class Tickets(NamedTuple):
    """How the blocks of a grid share out tiles: in order, each taken when one is free.

    Tiles that read the same weights are neighbours. Shared out beforehand they would drift apart, and every one would
    fetch the weights from device memory again: measured, 1.5 times the time. The warpgroup that copies draws the next
    tile, works out what it is and tells the others through shared memory.
    """

    counter: Any
    last: Any
    num_words: int
    """Length of a tile's description."""
    words: Any
    """[3, 8]: twice the number drawn, whether there is a tile, its description; then place for 4 barriers."""
    is_drawn: Any
    is_described: Any
    is_read: Any

    @staticmethod
    def scratch(warpgroups: int) -> dict[str, Any]:
        return {
            "words": plgpu.SMEM((3, 8), jnp.int32),
            "is_drawn": plgpu.Barrier(),
            "is_described": plgpu.Barrier(num_barriers=2),
            "is_read": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2),
        }

    def for_each_tile(self, workers: int, total, describe: Callable, run: Callable, *, is_copying: bool):
        """Call `steps = run(*describe(index), steps)` for the tiles this block takes; returns the last steps."""

        def copy(carry):
            number, index, steps = carry
            slot = lax.rem(number, 2)
            launcher.draw(self.counter, self.last, self.words.at[slot, 0], number)
            plgpu.barrier_arrive(self.is_drawn)
            description = describe(index)

            @pl.when(number >= 2)
            def _():
                plgpu.barrier_wait(self.is_read.at[slot])

            for word, value in enumerate((jnp.int32(1), *description), start=1):
                self.words[slot, word] = value
            plgpu.barrier_arrive(self.is_described.at[slot])
            steps = run(*description, steps)
            plgpu.barrier_wait(self.is_drawn)
            return number + 1, self.words[slot, 0] + workers, steps

        def compute(carry):
            number, _, steps = carry
            slot = lax.rem(number, 2)
            plgpu.barrier_wait(self.is_described.at[slot])
            has_tile, *description = [self.words[slot, word] for word in range(1, 2 + self.num_words)]
            plgpu.barrier_arrive(self.is_read.at[slot])
            steps = lax.cond(has_tile == 1, lambda: run(*description, steps), lambda: steps)
            return number + 1, has_tile, steps

        zero, first = jnp.int32(0), lax.axis_index("worker")
        if not is_copying:
            return lax.while_loop(lambda carry: carry[1] == 1, compute, (zero, jnp.int32(1), zero))[2]
        number, _beyond, steps = lax.while_loop(lambda carry: carry[1] < total, copy, (zero, first, zero))
        slot = lax.rem(number, 2)

        @pl.when(number >= 2)
        def _():
            plgpu.barrier_wait(self.is_read.at[slot])

        self.words[slot, 1] = jnp.int32(0)
        plgpu.barrier_arrive(self.is_described.at[slot])
        drain(number + 1, self.is_read, 2)
        return steps


def drain(steps: jax.Array, emptied: Any, stages: int) -> None:
    """Wait until the last buffers are read."""
    for ago in range(stages, 0, -1):

        @pl.when(steps >= ago)
        def _(ago=ago):
            plgpu.barrier_wait(emptied.at[lax.rem(steps - ago, stages)])


def registers(*, computes: bool) -> tuple[int, int]:
    """Registers of a thread that copies, by bulk copies alone or not, and of one that multiplies.

    One thread of the first kind and two of the other have 504 at launch. More are never granted: the kernel would wait.
    """
    return (72, 216) if computes else (40, 232)
