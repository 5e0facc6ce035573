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
from pallas_kernels.linear_attention import hopper_cores as cores
from pallas_kernels.linear_attention import hopper_shared as shared
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK
from pallas_kernels.linear_attention.hopper_carry import (
    AHEAD,
    BESIDE,
    CARRYING,
    COPYING,
    GIVEN,
    HALVES,
    REGISTERS,
    Ring,
    Scan,
    half_of,
    kept_by,
    kept_of_channels,
    place_of,
    read_state,
    turned,
    write_state,
)
from pallas_kernels.linear_attention.hopper_tiles import HALF, WIDTH

BEHIND = 2
"""Chunks for which what waits for the state is held."""


def scan(from_state, from_value, reading, writing, kept, products, state, *, keep_states: bool = False) -> Scan:
    """Gives output [B, S, H, V] and last state; or states that enter chunks [B, N, H, K, V] and what tokens write."""
    batch, length, heads, _ = from_value.shape
    chunks, ahead = length // CHUNK, AHEAD + keep_states  # as many as memory holds
    narrow, wide = jnp.bfloat16, jnp.float32

    def body(
        warpgroup, from_state, from_value, writing, kept, state, *refs,
        from_state_smem, from_value_smem, writing_smem, kept_smem, narrow_smem, written_smem, negative_smem,
        carry_in, carry_out, narrow_in, narrow_out, written_in, written_out, output_in, output_out,
        reading_smem: Any = None, products_smem: Any = None,
    ):  # fmt: skip
        row, head, columns = place_of(heads)
        carrying, giving = Ring(ahead, carry_in, carry_out), Ring(BEHIND, output_in, output_out)
        states, writes = Ring(GIVEN, narrow_in, narrow_out), Ring(GIVEN, written_in, written_out)
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
                giving.fill(step - 1, chunks, of_output, leave)
            return ()

        def leave(chunk, slot):
            plgpu.copy_smem_to_gmem(products_smem.at[slot], first_out.at[row, tokens(chunk), head, columns])

        def carry(chunk, halves):
            slot = carrying.slot(chunk)
            state = [half.astype(narrow) for half in halves]

            def give_state(slot):
                for half in HALVES:
                    shared.store_turned(state[half], narrow_smem.at[slot, half])

            carrying.wait(chunk)
            factors = [(cores.turned(from_value_smem.at[slot]), negative_smem)]
            factors += [(state[half], cores.turned(from_state_smem.at[slot, :, half_of(half)])) for half in HALVES]
            (written,) = cores.products([factors], (CHUNK,), meanwhile=lambda: states.give(chunk, give_state))
            written = (-written).astype(narrow)
            factors = [[(written, writing_smem.at[slot, :, half_of(half)])] for half in HALVES]

            def give_written(slot):
                shared.store_turned(written, written_smem.at[slot])

            added = cores.products(factors, (HALF,) * 2, meanwhile=lambda: writes.give(chunk, give_written))
            halves = tuple(halves[half] * kept_by(kept_smem.at[slot], half) + added[half] for half in HALVES)
            carrying.release(chunk)
            return halves

        def give_output(chunk, _):
            slot, own = giving.slot(chunk), states.slot(chunk)
            giving.wait(chunk)
            states.take(chunk)
            factors = [(reading_smem.at[slot, :, half_of(half)], narrow_smem.at[own, half]) for half in HALVES]
            output = cores.product(*factors)
            states.release(chunk)
            writes.take(chunk)
            (output,) = cores.accumulate([output], [[(products_smem.at[slot], written_smem.at[own])]])
            writes.release(chunk)
            cores.wait_for_warps()  # which have read the left factor
            products_smem[slot] = output.astype(narrow)
            giving.release(chunk)
            return ()

        def give_states(chunk, _):
            own = states.slot(chunk)
            states.take(chunk)
            for half in HALVES:
                target = first_out.at[row, chunk, head, half_of(half), columns]
                plgpu.copy_smem_to_gmem(narrow_smem.at[own, half], target)
            writes.take(chunk)
            plgpu.copy_smem_to_gmem(written_smem.at[own], second_out.at[row, tokens(chunk), head, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            states.release(chunk)
            writes.release(chunk)
            return ()

        @pl.when(warpgroup == CARRYING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            negative = jnp.where(tiles.iota(0) == tiles.iota(1), jnp.float32(-1), jnp.float32(0))
            negative_smem[...] = negative.astype(narrow)
            plgpu.commit_smem()
            halves = lax.fori_loop(0, chunks, carry, read_state(state.at[row, head, columns]))
            if not keep_states:
                write_state(halves, second_out.at[row, head, columns])
            states.drain(chunks)
            writes.drain(chunks)

        @pl.when(warpgroup == BESIDE)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            lax.fori_loop(0, chunks, give_states if keep_states else give_output, ())
            if keep_states:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COPYING)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
            lax.fori_loop(0, chunks + 1, load, ())
            carrying.drain(chunks)
            if not keep_states:
                giving.drain(chunks, leave)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    states_shape = jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow)
    last_shape = jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), wide)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    of_output_smem = {
        "reading_smem": buffer((BEHIND, CHUNK, WIDTH)),
        "products_smem": buffer((BEHIND, CHUNK, CHUNK)),
    }
    arguments = from_state, from_value, writing, kept_of_channels(kept), turned(state)
    return Scan(
        body,
        (*arguments, *([] if keep_states else [reading, products])),
        [states_shape, tokens_shape] if keep_states else [tokens_shape, last_shape],
        scratch={
            "from_state_smem": buffer((ahead, CHUNK, WIDTH)),
            "from_value_smem": buffer((ahead, CHUNK, HALF)),
            "writing_smem": buffer((ahead, CHUNK, WIDTH)),
            "kept_smem": plgpu.SMEM((ahead, 2, HALF), wide),
            "narrow_smem": buffer((GIVEN, 2, HALF, HALF)),
            "written_smem": buffer((GIVEN, CHUNK, HALF)),
            "negative_smem": buffer((CHUNK, CHUNK)),
            **({} if keep_states else of_output_smem),
        },
        barriers={
            "carry_in": (5, ahead),
            "carry_out": (1, ahead),
            "output_in": (2, BEHIND),
            "output_out": (1, BEHIND),
            **dict.fromkeys(("narrow_in", "narrow_out", "written_in", "written_out"), (1, GIVEN)),
        },
        in_place={1: 1} if keep_states else {},  # what tokens write, of `from_value`
        finish=lambda first, second: (first, second if keep_states else turned(second)),
    )
