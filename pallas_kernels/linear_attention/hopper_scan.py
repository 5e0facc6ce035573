"""The state of the gated delta rule carried over chunks, in Pallas Mosaic GPU for Hopper.

The same as `scan` of `scan_kernels`. The warpgroup beside the state makes the output of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK
from pallas_kernels.linear_attention.hopper_carry import (
    AHEAD,
    BESIDE,
    CARRYING,
    COPYING,
    HALVES,
    REGISTERS,
    WIDTH,
    Ring,
    half_of,
    kept_by,
    kept_of_channels,
    launch,
    place_of,
    read_state,
    turned,
    wait_unless_first,
    write_state,
)
from pallas_kernels.linear_attention.hopper_tiles import HALF

BEHIND = 3
"""Chunks for which what waits for the state is held."""


def scan(from_state, from_value, reading, writing, kept, products, state, *, keep_states: bool):
    """Output [B, S, H, V] and last state; or the states that enter chunks [B, N, H, K, V] and what tokens write."""
    batch, length, heads, _ = from_value.shape
    chunks, ahead = length // CHUNK, AHEAD + keep_states  # as many as memory holds
    narrow, wide = jnp.bfloat16, jnp.float32

    def body(
        from_state, from_value, writing, kept, state, *refs,
        from_state_smem, from_value_smem, writing_smem, kept_smem, narrow_smem, written_smem, negative_smem,
        carry_in, carry_out, narrow_in, narrow_out, written_in, written_out, output_in, output_out,
        reading_smem: Any = None, products_smem: Any = None,
    ):  # fmt: skip
        warpgroup, (row, head, columns) = lax.axis_index("warpgroup"), place_of(heads)
        carrying, giving = Ring(ahead, carry_in, carry_out), Ring(BEHIND, output_in, output_out)
        *of_output_refs, first_out, second_out = refs

        def tokens(chunk):
            return pl.ds(chunk * CHUNK, CHUNK)

        def load(step, _):
            def of_carry(slot, barrier):
                sources = (from_state, writing), (from_state_smem, writing_smem)
                for source, target in zip(*sources, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[row, tokens(step), head], target.at[slot], barrier)
                source = from_value.at[row, tokens(step), head, columns]
                plgpu.copy_gmem_to_smem(source, from_value_smem.at[slot], barrier)
                for half in HALVES:
                    source = kept.at[row, step, head, half_of(half)]
                    plgpu.copy_gmem_to_smem(source, kept_smem.at[slot, half], barrier)

            def of_output(slot, barrier):
                reading, products = of_output_refs
                source = reading.at[row, tokens(step - 1), head]
                plgpu.copy_gmem_to_smem(source, reading_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(products.at[row, step - 1, head], products_smem.at[slot], barrier)

            carrying.fill(step, chunks, of_carry)
            if not keep_states:
                giving.fill(step - 1, chunks, of_output)
            return ()

        def carry(chunk, halves):
            slot = carrying.slot(chunk)
            state = [half.astype(narrow) for half in halves]

            def give_state():
                if keep_states:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                else:
                    wait_unless_first(chunk, narrow_out)
                for half in HALVES:
                    tiles.store_turned(state[half], narrow_smem.at[half])
                plgpu.commit_smem()
                if not keep_states:
                    plgpu.barrier_arrive(narrow_in)
                    return
                for half in HALVES:
                    target = first_out.at[row, chunk, head, half_of(half), columns]
                    plgpu.copy_smem_to_gmem(narrow_smem.at[half], target)

            def give_written():
                if not keep_states:
                    wait_unless_first(chunk, written_out)
                tiles.store_turned(written, written_smem)
                plgpu.commit_smem()
                if keep_states:
                    plgpu.copy_smem_to_gmem(written_smem, second_out.at[row, tokens(chunk), head, columns])
                else:
                    plgpu.barrier_arrive(written_in)

            carrying.wait(chunk)
            factors = [(tiles.turned(from_value_smem.at[slot]), negative_smem)]
            factors += [(state[half], tiles.turned(from_state_smem.at[slot, :, half_of(half)])) for half in HALVES]
            (written,) = tiles.products([factors], (CHUNK,), meanwhile=give_state)
            written = (-written).astype(narrow)
            factors = [[(written, writing_smem.at[slot, :, half_of(half)])] for half in HALVES]
            added = tiles.products(factors, (HALF,) * 2, meanwhile=give_written)
            halves = tuple(halves[half] * kept_by(kept_smem.at[slot], half) + added[half] for half in HALVES)
            carrying.release(chunk)
            return halves

        def give(chunk, _):
            slot = giving.slot(chunk)
            giving.wait(chunk)
            plgpu.barrier_wait(narrow_in)
            factors = [(reading_smem.at[slot, :, half_of(half)], narrow_smem.at[half]) for half in HALVES]
            output = tiles.product(*factors)
            plgpu.barrier_arrive(narrow_out)
            plgpu.barrier_wait(written_in)
            (output,) = tiles.accumulate([output], [[(products_smem.at[slot], written_smem)]])
            plgpu.barrier_arrive(written_out)
            plgpu.commit_smem()  # every warp has read all
            products_smem[slot] = output.astype(narrow)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(products_smem.at[slot], first_out.at[row, tokens(chunk), head, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            giving.release(chunk)
            return ()

        @pl.when(warpgroup == CARRYING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            negative = jnp.where(tiles.iota(0) == tiles.iota(1), jnp.float32(-1), jnp.float32(0))
            negative_smem[...] = negative.astype(narrow)
            plgpu.commit_smem()
            halves = lax.fori_loop(0, chunks, carry, read_state(state.at[row, head, columns]))
            if keep_states:
                plgpu.wait_smem_to_gmem(0)
            else:
                write_state(halves, second_out.at[row, head, columns])
                plgpu.barrier_wait(narrow_out)
                plgpu.barrier_wait(written_out)

        if not keep_states:

            @pl.when(warpgroup == BESIDE)
            def _():
                plgpu.set_max_registers(REGISTERS[1], action="decrease")
                lax.fori_loop(0, chunks, give, ())
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COPYING)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            lax.fori_loop(0, chunks + 1, load, ())
            carrying.drain(chunks)
            if not keep_states:
                giving.drain(chunks)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    states_shape = jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow)
    last_shape = jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), wide)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    of_output_smem = {
        "reading_smem": buffer((BEHIND, CHUNK, WIDTH)),
        "products_smem": buffer((BEHIND, CHUNK, CHUNK)),
    }
    arguments = from_state, from_value, writing, kept_of_channels(kept), turned(state)
    first, second = launch(
        body,
        (*arguments, *([] if keep_states else [reading, products])),
        [states_shape, tokens_shape] if keep_states else [tokens_shape, last_shape],
        heads,
        scratch={
            "from_state_smem": buffer((ahead, CHUNK, WIDTH)),
            "from_value_smem": buffer((ahead, CHUNK, HALF)),
            "writing_smem": buffer((ahead, CHUNK, WIDTH)),
            "kept_smem": plgpu.SMEM((ahead, 2, HALF), wide),
            "narrow_smem": buffer((2, HALF, HALF)),
            "written_smem": buffer((CHUNK, HALF)),
            "negative_smem": buffer((CHUNK, CHUNK)),
            **({} if keep_states else of_output_smem),
        },
        barriers={
            "carry_in": (5, ahead),
            "carry_out": (1, ahead),
            "output_in": (2, BEHIND),
            "output_out": (1, BEHIND),
            **dict.fromkeys(("narrow_in", "narrow_out", "written_in", "written_out"), (1, 1)),
        },
        name="scan_states" if keep_states else "scan_chunks",
        in_place={1: 1} if keep_states else None,  # what tokens write, of `from_value`
    )
    return (first, second) if keep_states else (first, turned(second))
