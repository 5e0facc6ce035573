"""Matrix products of rows sorted by expert with each expert's weights, on Hopper's tensor cores."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.moe.copying import UNIT, Arrivals, Packed, gather_rows, unpack
from pallas_kernels.moe.tiles import BLOCK, Counter, Shape, Tickets, Tile, Tiles, drain, registers

PACKED_STAGES = 4
"""Depth of the ring of packed weights."""

Epilogue = Callable[[Tile, Sequence[jax.Array], Sequence[Any], Callable, Callable], None]


def multiply(
    terms: Sequence[tuple[jax.Array, Sequence[jax.Array | Packed]]],
    tiles: Tiles,
    outputs: Sequence[jax.ShapeDtypeStruct],
    epilogue: Epilogue,
    *,
    columns: int,
    transposed: bool,
    counter: Counter,
    token: jax.Array | None = None,
    beside: Sequence[jax.Array] = (),
    row_values: Sequence[jax.Array] = (),
    shape: Shape,
    name: str,
) -> Sequence[jax.Array]:
    """For each block of rows of expert e: epilogue(sum over terms (lhs, rhs) of lhs @ rhs[0][e], lhs @ rhs[1][e]).

    Of each term `lhs` [N, K] and `rhs` one or two weights [E, K, columns], or [E, columns, K] if `transposed`. With
    `token` [N] int32 rows of the first term are `lhs[token]`, zero for a token beyond them.
    `beside`: two arrays [N, columns] read tile by tile in the epilogue; `row_values` [N] float32.
    """
    lhs, rhs = zip(*terms, strict=True)
    num_parts = len(rhs[0])
    is_packed = [isinstance(weights[0], Packed) for weights in rhs]
    warpgroups, stages, width = shape
    part = width // num_parts
    num_columns = pl.cdiv(columns, part)
    num_steps = [-(-term.shape[1] // BLOCK) for term in lhs]
    # Steps that read beside: a piece of both arrays in one, if the second operand's buffer has room for rows.
    num_beside = width // BLOCK * (1 if transposed else 2) if beside else 0
    workers = launcher.num_multiprocessors()
    # Packed weights come in pieces: of each part, or of each 64 columns.
    num_pieces, piece = (num_parts, part) if transposed else (part // UNIT, UNIT)
    num_registers = registers(computes=token is not None or any(is_packed))

    def body(*refs, lhs_smem, rhs_smem, out_smem, filled, emptied, **scratch):
        refs = list(refs)

        def take(count):
            taken = refs[:count]
            del refs[:count]
            return taken

        codes_smem, scales_smem, is_copied = (scratch.pop(name, None) for name in ("codes", "scales", "is_copied"))
        counters, last = take(2)
        tickets = Tickets(counters.at[counter.place], last, 4, **scratch)
        arrivals = Arrivals(tickets.words.at[2], stages) if token is not None else None
        tiles_gmem = Tiles(*take(len(tiles)))
        token_gmem, lhs_gmem = take(token is not None), take(len(lhs))
        rhs_gmem = [[Packed(*take(2)) if packed else take(1)[0] for _ in range(num_parts)] for packed in is_packed]
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
            plgpu.set_max_registers(num_registers[0], action="decrease")
            if arrivals is not None:
                arrivals.prepare()

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

                def copy_packed(weights, k, slot):
                    """Codes and scales of one step's weights, in pieces of as many inputs as a thread unpacks."""
                    for number in range(num_pieces):
                        weight = weights[number if transposed else 0]
                        unit = k if transposed else column * num_pieces + number
                        start = column * part if transposed else k * BLOCK
                        across = pl.ds(start, piece), pl.ds(unit * (UNIT // 2), UNIT // 2)
                        plgpu.copy_gmem_to_smem(
                            weight.codes.at[expert, *across], codes_smem.at[slot, number], is_copied.at[slot]
                        )
                        source = weight.scales.at[expert, unit, pl.ds(start // 2, piece // 2)]
                        plgpu.copy_gmem_to_smem(source, scales_smem.at[slot, number], is_copied.at[slot])

                for term, count in enumerate(num_steps):
                    weights, begin = rhs_gmem[term], steps
                    if is_packed[term]:
                        for ahead in range(min(PACKED_STAGES, count)):
                            copy_packed(weights, jnp.int32(ahead), lax.rem(begin + ahead, PACKED_STAGES))

                    def step(k, steps, term=term, count=count, weights=weights, begin=begin):
                        slot = acquire(steps)
                        if term == 0 and token is not None:
                            first, num_rows = block * BLOCK, height * BLOCK
                            gather_rows(lhs_gmem[0], token_gmem[0], first, num_rows, k * BLOCK, lhs_smem.at[slot])
                            plgpu.barrier_arrive(filled.at[slot])
                        else:
                            copy_rows(lhs_gmem[term], block, height, k * BLOCK, slot)
                        if arrivals is not None:
                            arrivals.arrive(slot)
                        if is_packed[term]:
                            own = lax.rem(steps, PACKED_STAGES)
                            plgpu.barrier_wait(is_copied.at[own])
                            unpack(codes_smem.at[own], scales_smem.at[own], rhs_smem.at[slot], transposed=transposed)
                            plgpu.commit_smem()
                            for _arrival in range(num_parts):
                                plgpu.barrier_arrive(filled.at[slot])

                            @pl.when(k + PACKED_STAGES < count)
                            def _():
                                copy_packed(weights, k + PACKED_STAGES, own)

                        else:
                            along, across = pl.ds(k * BLOCK, BLOCK), pl.ds(column * part, part)
                            for number, weight in enumerate(weights):
                                source = (
                                    weight.at[expert, across, along] if transposed else weight.at[expert, along, across]
                                )
                                plgpu.copy_gmem_to_smem(source, rhs_smem.at[slot, number], filled.at[slot])
                        return steps + 1

                    steps = lax.fori_loop(0, count, step, steps)

                def beside_step(number, steps):
                    slot = acquire(steps)
                    if transposed:
                        start = column * width + number * BLOCK
                        copy_rows(beside_gmem[0], block, height, start, slot)
                        rows = pl.ds(block * BLOCK, warpgroups * BLOCK)
                        target = rhs_smem.at[slot, 0, pl.ds(0, warpgroups * BLOCK)]
                        plgpu.copy_gmem_to_smem(beside_gmem[1].at[rows, pl.ds(start, BLOCK)], target, filled.at[slot])
                    else:
                        start = column * width + number // 2 * BLOCK
                        for parity, array in enumerate(beside_gmem):

                            @pl.when(lax.rem(number, 2) == parity)
                            def _(array=array):
                                copy_rows(array, block, height, start, slot)

                        plgpu.barrier_arrive(filled.at[slot])
                    if arrivals is not None:
                        arrivals.arrive(slot)
                    return steps + 1

                return lax.fori_loop(0, num_beside, beside_step, steps) if beside else steps

            drain(for_each_tile(load, is_copying=True), emptied, stages)

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(num_registers[1], action="increase")
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
                            if arrivals is not None:
                                arrivals.wait(steps + k)
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

                    def read_step(number, *buffers):
                        slot = lax.rem(steps + total_steps + number, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        if arrivals is not None:
                            arrivals.wait(steps + total_steps + number)
                        refs = [buffer.at[slot, own] for buffer in buffers]
                        values = [launcher.load(ref, plgpu.Layout.WGMMA).astype(jnp.float32) for ref in refs]
                        plgpu.barrier_arrive(emptied.at[slot])
                        return values

                    def read_beside(number):
                        if transposed:
                            return read_step(number, lhs_smem, rhs_smem.at[:, 0])
                        return read_step(2 * number, lhs_smem) + read_step(2 * number + 1, lhs_smem)

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
    packed_scratch = {
        "codes": plgpu.SMEM((PACKED_STAGES, num_pieces, piece, UNIT // 2), jnp.uint8),
        "scales": plgpu.SMEM((PACKED_STAGES, num_pieces, piece // 2), jnp.int32),
        "is_copied": plgpu.Barrier(num_arrivals=2 * num_pieces, num_barriers=PACKED_STAGES),
    }
    return launcher.launch(
        body,
        (
            counter.counters,
            tiles.num_tiles * num_columns - 1,
            *tiles,
            *(() if token is None else (token,)),
            *lhs,
            *jax.tree.leaves(rhs),
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
            **(packed_scratch if any(is_packed) else {}),
            **Tickets.scratch(warpgroups),
        ),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        name=name,
    )
