"""Sums over each expert's rows of the products of two of their vectors: gradients of weights, on Hopper."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.moe.copying import Arrivals, await_copies, end_group, fetch_tokens, gather_rows
from pallas_kernels.moe.tiles import BLOCK, Counter, Shape, Tickets, drain, registers


def contract_rows(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    first_block: jax.Array,
    num_blocks: jax.Array,
    *,
    counter: Counter,
    token: jax.Array | None = None,
    gathers: Literal["lhs", "rhs"] | None = None,
    shape: Shape,
    name: str,
) -> Sequence[jax.Array]:
    """For each expert e and array of `rhs`: the sum over its rows n of lhs[n]^T rhs[n].

    `lhs` [N, M]; `rhs` one or two arrays [N, C] that share a tile; `first_block`, `num_blocks` [E] int32. Returns
    arrays [E, M, C], zero for an expert without rows. Rows that pad a block must be zero. With `token` [N] int32 the
    rows of `lhs` or of the only `rhs`, as `gathers` says, are those of these tokens, zero for a token beyond them.
    """
    warpgroups, stages, width = shape
    num_experts, (height, columns) = num_blocks.shape[0], (lhs.shape[1], rhs[0].shape[1])
    num_parts = len(rhs)
    part = width // num_parts
    num_tall, num_wide = pl.cdiv(height, warpgroups * BLOCK), pl.cdiv(columns, part)
    workers = launcher.num_multiprocessors()
    total = num_experts * num_tall * num_wide
    # Tokens of so many steps are on their way before their rows are. Threads wait for each other at every step, so none
    # is written while one may still read it.
    ahead = stages - 1
    num_registers = registers(computes=token is not None)

    def body(
        counters,
        last,
        first_gmem,
        count_gmem,
        *refs,
        lhs_smem,
        rhs_smem,
        out_smem,
        filled,
        emptied,
        **scratch,
    ):
        refs, token_smem = list(refs), scratch.pop("tokens", None)
        token_gmem = refs.pop(0) if token is not None else None
        lhs_gmem, rhs_gmem, outputs_gmem = refs[0], refs[1 : num_parts + 1], refs[num_parts + 1 :]
        warpgroup = lax.axis_index("warpgroup")

        def describe(index):
            expert, within = index // (num_tall * num_wide), lax.rem(index, num_tall * num_wide)
            return expert, first_gmem[expert], count_gmem[expert], within // num_wide, lax.rem(within, num_wide)

        tickets = Tickets(counters.at[counter.place], last, 5, **scratch)
        arrivals = Arrivals(tickets.words.at[2], stages) if token is not None else None
        for_each_tile = functools.partial(tickets.for_each_tile, workers, total, describe)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(num_registers[0], action="decrease")
            if arrivals is not None:
                arrivals.prepare()

            def fetch(first, count, k, token_smem: Any = token_smem):
                """Start copying the tokens of step `k`, if there is one."""

                @pl.when(k < count)
                def _():
                    fetch_tokens(token_gmem, (first + k) * BLOCK, token_smem.at[lax.rem(jnp.int32(k), stages)])

            def fetch_first(first, count):
                await_copies(ahead - 1)
                for k in range(ahead):
                    fetch(first, count, k)
                end_group()
                await_copies(0)

            def copy(array, row, column, target, slot, k, is_gathered, token_smem: Any = token_smem):
                if is_gathered:
                    own = token_smem.at[lax.rem(k, stages)]
                    gather_rows(array, own, jnp.int32(0), BLOCK, column, target, is_fetched=True)
                    plgpu.barrier_arrive(filled.at[slot])
                else:
                    source = array.at[pl.ds(row, BLOCK), pl.ds(column, target.shape[1])]
                    plgpu.copy_gmem_to_smem(source, target, filled.at[slot])

            def load(expert, first, count, tall, wide, steps):
                def step(k, _):
                    slot = lax.rem(steps + k, stages)

                    @pl.when(steps + k >= stages)
                    def _():
                        plgpu.barrier_wait(emptied.at[slot])

                    if token is not None:
                        # This step's tokens came with the copies of `ahead` steps ago.
                        await_copies(ahead - 1)
                        fetch(first, count, k + ahead)

                    row, down = (first + k) * BLOCK, tall * (warpgroups * BLOCK)
                    copy(lhs_gmem, row, down, lhs_smem.at[slot], slot, k, gathers == "lhs")
                    for number, array in enumerate(rhs_gmem):
                        copy(array, row, wide * part, rhs_smem.at[slot, number], slot, k, gathers == "rhs")
                    if arrivals is not None:
                        arrivals.arrive(slot)
                    return ()

                if token is not None:
                    fetch_first(first, count)
                lax.fori_loop(0, count, step, ())
                return steps + count

            drain(for_each_tile(load, is_copying=True), emptied, stages)

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(num_registers[1], action="increase")

            def compute(expert, first, count, tall, wide, steps):
                def scope(*accumulators):
                    def step(k, _):
                        slot = lax.rem(steps + k, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        if arrivals is not None:
                            arrivals.wait(steps + k)
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

    dtype, tokens = lhs.dtype, () if token is None else (token,)
    return launcher.launch(
        body,
        (counter.counters, jnp.full((1,), total - 1, jnp.int32), first_block, num_blocks, *tokens, lhs, *rhs),
        [jax.ShapeDtypeStruct((num_experts, height, columns), dtype)] * num_parts,
        scratch=dict(
            lhs_smem=launcher.swizzled((stages, BLOCK, warpgroups * BLOCK), dtype),
            rhs_smem=launcher.swizzled((stages, num_parts, BLOCK, part), dtype),
            out_smem=launcher.swizzled((warpgroups, 2, BLOCK, BLOCK), dtype),
            filled=plgpu.Barrier(num_arrivals=1 + num_parts, num_barriers=stages),
            emptied=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            **({} if token is None else {"tokens": plgpu.SMEM((stages, BLOCK), jnp.int32)}),
            **Tickets.scratch(warpgroups),
        ),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        name=name,
    )
