"""Matrix products of rows sorted by expert with each expert's weights, on Hopper's tensor cores.

Persistent kernels of Pallas Mosaic GPU. Of a block's warpgroups the last one copies operands into a ring of buffers in
shared memory, over the ends of tiles, and the others multiply. Rows lie in blocks of 64 that belong to one expert each;
a warpgroup multiplies one such block, so no more than 63 rows of an expert are padding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher

BLOCK = 64
"""Rows of a block; also the length of one step of a contraction."""

Epilogue = Callable[["Tile", jax.Array, Sequence, Callable, Callable], None]


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
    words: Any
    """[2, 2 + words]: the number drawn, whether there is a tile, its description."""
    is_drawn: Any
    is_described: Any
    is_read: Any

    @staticmethod
    def scratch(warpgroups: int, num_words: int) -> dict[str, Any]:
        return {
            "words": plgpu.SMEM((2, 2 + num_words), jnp.int32),
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
            has_tile, *description = [self.words[slot, word] for word in range(1, self.words.shape[1])]
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


def multiply(
    terms: Sequence[tuple[jax.Array, Sequence[jax.Array]]],
    tiles: Tiles,
    outputs: Sequence[jax.ShapeDtypeStruct],
    epilogue: Epilogue,
    *,
    columns: int,
    transposed: bool,
    counter: Counter,
    beside: Sequence[jax.Array] = (),
    row_values: Sequence[jax.Array] = (),
    shape: Shape,
    name: str,
) -> Sequence[jax.Array]:
    """For each block of rows of expert e: epilogue(sum over terms (lhs, rhs) of lhs @ rhs[0][e], lhs @ rhs[1][e]).

    Of each term `lhs` [N, K] and `rhs` one or two arrays [E, K, columns], or one [E, columns, K] if `transposed`.
    `beside`: two arrays [N, columns] read tile by tile in the epilogue; `row_values` [N] float32.
    """
    lhs, rhs = zip(*terms, strict=True)
    num_parts = len(rhs[0])
    warpgroups, stages, width = shape
    part = width // num_parts
    num_columns = pl.cdiv(columns, part)
    num_steps = [-(-term.shape[1] // BLOCK) for term in lhs]
    num_beside = width // BLOCK if beside else 0
    workers = launcher.num_multiprocessors()

    def body(*refs, lhs_smem, rhs_smem, out_smem, filled, emptied, **scratch):
        refs = list(refs)

        def take(count):
            taken = refs[:count]
            del refs[:count]
            return taken

        counters, last = take(2)
        tickets = Tickets(counters.at[counter.place], last, **scratch)
        tiles_gmem = Tiles(*take(len(tiles)))
        lhs_gmem, rhs_gmem = take(len(lhs)), [take(num_parts) for _ in rhs]
        beside_gmem, values_gmem = take(len(beside)), take(len(row_values))
        outputs_gmem = take(len(outputs))
        warpgroup = lax.axis_index("warpgroup")
        total = tiles_gmem.num_tiles[0] * num_columns

        def describe(index):
            """An expert's tiles that read the same columns of its weights follow each other."""
            any_tile = index // num_columns
            first, height = tiles_gmem.first_tile[any_tile], tiles_gmem.expert_tiles[any_tile]
            within = index - first * num_columns
            column = within // height
            tile = first + within - column * height
            return tiles_gmem.expert[tile], tiles_gmem.first_block[tile], tiles_gmem.num_blocks[tile], column

        for_each_tile = functools.partial(tickets.for_each_tile, workers, total, describe)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def copy_rows(source, block, height, column, slot):
                for blocks in range(1, warpgroups + 1):

                    @pl.when(height == blocks)
                    def _(blocks=blocks):
                        plgpu.copy_gmem_to_smem(
                            source.at[pl.ds(block * BLOCK, blocks * BLOCK), pl.ds(column, BLOCK)],
                            lhs_smem.at[slot, pl.ds(0, blocks * BLOCK)],
                            filled.at[slot],
                        )

            def load(expert, block, height, column, steps):
                def acquire(steps):
                    slot = lax.rem(steps, stages)

                    @pl.when(steps >= stages)
                    def _():
                        plgpu.barrier_wait(emptied.at[slot])

                    return slot

                for term, count in enumerate(num_steps):

                    def step(k, steps, term=term):
                        slot = acquire(steps)
                        copy_rows(lhs_gmem[term], block, height, k * BLOCK, slot)
                        along, across = pl.ds(k * BLOCK, BLOCK), pl.ds(column * part, part)
                        for number, weight in enumerate(rhs_gmem[term]):
                            source = (
                                weight.at[expert, across, along] if transposed else weight.at[expert, along, across]
                            )
                            plgpu.copy_gmem_to_smem(source, rhs_smem.at[slot, number], filled.at[slot])
                        return steps + 1

                    steps = lax.fori_loop(0, count, step, steps)

                def beside_step(number, steps):
                    slot = acquire(steps)
                    start = column * width + number * BLOCK
                    copy_rows(beside_gmem[0], block, height, start, slot)
                    rows = pl.ds(block * BLOCK, warpgroups * BLOCK)
                    target = rhs_smem.at[slot, 0, pl.ds(0, warpgroups * BLOCK)]
                    plgpu.copy_gmem_to_smem(beside_gmem[1].at[rows, pl.ds(start, BLOCK)], target, filled.at[slot])
                    return steps + 1

                return lax.fori_loop(0, num_beside, beside_step, steps) if beside else steps

            drain(for_each_tile(load, is_copying=True), emptied, stages)

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(232, action="increase")
            own = pl.ds(warpgroup * BLOCK, BLOCK)

            def store(value, target, slot):
                """Write a [64, 64] piece of the result through one of two buffers."""
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out_smem[warpgroup, slot] = value.astype(out_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, slot], target)

            def compute(expert, block, height, column, steps):
                total_steps = sum(num_steps)

                @pl.when(warpgroup < height)
                def _():
                    def scope(*accumulators):
                        def step(k, _):
                            slot = lax.rem(steps + k, stages)
                            plgpu.barrier_wait(filled.at[slot])
                            for number, accumulator in enumerate(accumulators):
                                weights = rhs_smem.at[slot, number]
                                weights = weights.transpose((1, 0)) if transposed else weights
                                plgpu.wgmma(accumulator, lhs_smem.at[slot, own], weights)
                            plgpu.wgmma_wait(num_parts)

                            @pl.when(k > 0)
                            def _():
                                plgpu.barrier_arrive(emptied.at[lax.rem(steps + k - 1, stages)])

                            return ()

                        lax.fori_loop(0, total_steps, step, ())
                        results = [accumulator[...] for accumulator in accumulators]
                        plgpu.barrier_arrive(emptied.at[lax.rem(steps + total_steps - 1, stages)])
                        return results

                    results = pl.run_scoped(scope, *[plgpu.WGMMAAccumulatorRef((BLOCK, part))] * num_parts)

                    def read_beside(number):
                        slot = lax.rem(steps + total_steps + number, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        refs = lhs_smem.at[slot, own], rhs_smem.at[slot, 0, own]
                        values = [launcher.load(ref, plgpu.Layout.WGMMA).astype(jnp.float32) for ref in refs]
                        plgpu.barrier_arrive(emptied.at[slot])
                        return values

                    tile = Tile((block + warpgroup) * BLOCK, column)
                    epilogue(tile, results, (*outputs_gmem, *values_gmem), store, read_beside)

                @pl.when(warpgroup >= height)
                def _():
                    def step(k, _):
                        slot = lax.rem(steps + k, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        plgpu.barrier_arrive(emptied.at[slot])
                        return ()

                    lax.fori_loop(0, total_steps + num_beside, step, ())

                return steps + total_steps + num_beside

            for_each_tile(compute, is_copying=False)
            plgpu.wait_smem_to_gmem(0)

    dtype = lhs[0].dtype
    return launcher.launch(
        body,
        (
            counter.counters,
            tiles.num_tiles * num_columns - 1,
            *tiles,
            *lhs,
            *sum(map(tuple, rhs), ()),
            *beside,
            *row_values,
        ),
        outputs,
        scratch=dict(
            lhs_smem=launcher.swizzled((stages, warpgroups * BLOCK, BLOCK), dtype),
            rhs_smem=launcher.swizzled((stages, num_parts, *((part, BLOCK) if transposed else (BLOCK, part))), dtype),
            out_smem=launcher.swizzled((warpgroups, 2, BLOCK, BLOCK), dtype),
            filled=plgpu.Barrier(num_arrivals=1 + num_parts, num_barriers=stages),
            emptied=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            **Tickets.scratch(warpgroups, 4),
        ),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        name=name,
    )


def contract_rows(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    first_block: jax.Array,
    num_blocks: jax.Array,
    *,
    counter: Counter,
    shape: Shape,
    name: str,
) -> Sequence[jax.Array]:
    """For each expert e and array of `rhs`: the sum over its rows n of lhs[n]^T rhs[n].

    `lhs` [N, M]; `rhs` one or two arrays [N, C] that share a tile; `first_block`, `num_blocks` [E] int32. Returns
    arrays [E, M, C], zero for an expert without rows. Rows that pad a block must be zero.
    """
    warpgroups, stages, width = shape
    num_experts, (height, columns) = num_blocks.shape[0], (lhs.shape[1], rhs[0].shape[1])
    num_parts = len(rhs)
    part = width // num_parts
    num_tall, num_wide = pl.cdiv(height, warpgroups * BLOCK), pl.cdiv(columns, part)
    workers = launcher.num_multiprocessors()
    total = num_experts * num_tall * num_wide

    def body(
        counters,
        last,
        first_gmem,
        count_gmem,
        lhs_gmem,
        *refs,
        lhs_smem,
        rhs_smem,
        out_smem,
        filled,
        emptied,
        **scratch,
    ):
        rhs_gmem, outputs_gmem = refs[:num_parts], refs[num_parts:]
        warpgroup = lax.axis_index("warpgroup")

        def describe(index):
            expert, within = index // (num_tall * num_wide), lax.rem(index, num_tall * num_wide)
            return expert, first_gmem[expert], count_gmem[expert], within // num_wide, lax.rem(within, num_wide)

        tickets = Tickets(counters.at[counter.place], last, **scratch)
        for_each_tile = functools.partial(tickets.for_each_tile, workers, total, describe)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def load(expert, first, count, tall, wide, steps):
                def step(k, _):
                    slot = lax.rem(steps + k, stages)

                    @pl.when(steps + k >= stages)
                    def _():
                        plgpu.barrier_wait(emptied.at[slot])

                    rows = pl.ds((first + k) * BLOCK, BLOCK)
                    down = pl.ds(tall * (warpgroups * BLOCK), warpgroups * BLOCK)
                    plgpu.copy_gmem_to_smem(lhs_gmem.at[rows, down], lhs_smem.at[slot], filled.at[slot])
                    for number, array in enumerate(rhs_gmem):
                        source = array.at[rows, pl.ds(wide * part, part)]
                        plgpu.copy_gmem_to_smem(source, rhs_smem.at[slot, number], filled.at[slot])
                    return ()

                lax.fori_loop(0, count, step, ())
                return steps + count

            drain(for_each_tile(load, is_copying=True), emptied, stages)

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def compute(expert, first, count, tall, wide, steps):
                def scope(*accumulators):
                    def step(k, _):
                        slot = lax.rem(steps + k, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        own = lhs_smem.at[slot, :, pl.ds(warpgroup * BLOCK, BLOCK)].transpose((1, 0))
                        for number, accumulator in enumerate(accumulators):
                            plgpu.wgmma(accumulator, own, rhs_smem.at[slot, number])
                        plgpu.wgmma_wait(num_parts)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(emptied.at[lax.rem(steps + k - 1, stages)])

                        return ()

                    lax.fori_loop(0, count, step, ())
                    results = [accumulator[...] for accumulator in accumulators]

                    @pl.when(count > 0)
                    def _():
                        plgpu.barrier_arrive(emptied.at[lax.rem(steps + count - 1, stages)])

                    return results

                results = pl.run_scoped(scope, *[plgpu.WGMMAAccumulatorRef((BLOCK, part))] * num_parts)
                down = pl.ds((tall * warpgroups + warpgroup) * BLOCK, BLOCK)
                for number, (result, output) in enumerate(zip(results, outputs_gmem, strict=True)):
                    for start in range(0, part, BLOCK):
                        buffer = (number * part + start) // BLOCK % 2
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        out_smem[warpgroup, buffer] = result[:, start : start + BLOCK].astype(out_smem.dtype)
                        plgpu.commit_smem()
                        target = output.at[expert, down, pl.ds(wide * part + start, BLOCK)]
                        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, buffer], target)
                return steps + count

            for_each_tile(compute, is_copying=False)
            plgpu.wait_smem_to_gmem(0)

    dtype = lhs.dtype
    return launcher.launch(
        body,
        (counter.counters, jnp.full((1,), total - 1, jnp.int32), first_block, num_blocks, lhs, *rhs),
        [jax.ShapeDtypeStruct((num_experts, height, columns), dtype)] * num_parts,
        scratch=dict(
            lhs_smem=launcher.swizzled((stages, BLOCK, warpgroups * BLOCK), dtype),
            rhs_smem=launcher.swizzled((stages, num_parts, BLOCK, part), dtype),
            out_smem=launcher.swizzled((warpgroups, 2, BLOCK, BLOCK), dtype),
            filled=plgpu.Barrier(num_arrivals=1 + num_parts, num_barriers=stages),
            emptied=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            **Tickets.scratch(warpgroups, 5),
        ),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        name=name,
    )
