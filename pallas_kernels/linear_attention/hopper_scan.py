"""The state of the gated delta rule carried over chunks, in Pallas Mosaic GPU for Hopper.

The same as `scan` of `scan_kernels`. The state, and what tokens write, are left factors of the output's products, too:
these follow those that the chain from chunk to chunk waits for, and take their place while their results are converted.
Another warpgroup stores what the first one gives.
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
    following,
    half_of,
    kept_by,
    kept_of_channels,
    place_of,
    read_state,
    scaled,
    turned,
    write_state,
)
from pallas_kernels.linear_attention.hopper_tiles import HALF, WIDTH


def scan(from_state, from_value, reading, writing, kept, products, state, *, keep_states: bool = False) -> Scan:
    """Gives output [B, S, H, V] and last state; or states that enter chunks [B, N, H, K, V] and what tokens write."""
    batch, length, heads, _ = from_value.shape
    chunks, ahead = length // CHUNK, AHEAD + keep_states  # as many as memory holds
    narrow, wide = jnp.bfloat16, jnp.float32

    def body(
        warpgroup, from_state, from_value, writing, kept, state, *refs,
        from_state_smem, from_value_smem, writing_smem, kept_smem, carry_in, carry_out,
        narrow_smem: Any = None, written_smem: Any = None, narrow_in: Any = None, narrow_out: Any = None,
        written_in: Any = None, written_out: Any = None, reading_smem: Any = None, products_smem: Any = None,
        output_smem: Any = None, output_in: Any = None, output_out: Any = None,
    ):  # fmt: skip
        row, head, columns = place_of(heads)
        carrying, outputs = Ring(ahead, carry_in, carry_out), Ring(GIVEN, output_in, output_out)
        states, writes = Ring(GIVEN, narrow_in, narrow_out), Ring(GIVEN, written_in, written_out)
        *of_output, first_out, second_out = refs

        def tokens(chunk):
            return pl.ds(chunk * CHUNK, CHUNK)

        def load(step, _):
            def copies(slot, barrier):
                sources, targets = [from_state, writing], [from_state_smem, writing_smem]
                if not keep_states:
                    reading, products = of_output
                    sources, targets = [*sources, reading], [*targets, reading_smem]
                    plgpu.copy_gmem_to_smem(products.at[row, step, head], products_smem.at[slot], barrier)
                for source, target in zip(sources, targets, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[row, tokens(step), head], target.at[slot], barrier)
                source = from_value.at[row, tokens(step), head, columns]
                plgpu.copy_gmem_to_smem(source, from_value_smem.at[slot], barrier)
                for half in HALVES:
                    source = kept.at[row, step, head, half_of(half)]
                    plgpu.copy_gmem_to_smem(source, kept_smem.at[slot, half], barrier)

            carrying.fill(step, chunks, copies)
            return ()

        def ahead_of(chunk):
            slot = carrying.slot(chunk)
            from_value = shared.widened(shared.turned_matrix(from_value_smem.at[slot]))
            return from_value, kept_by(kept_smem.at[slot])

        def give(ring, chunk, matrices, target):
            def write(slot):
                for number, matrix in enumerate(matrices):
                    shared.store_turned(matrix, target.at[slot, number])

            ring.give(chunk, write)

        def carry(chunk, carried):
            halves, (from_value, kept), output = carried
            slot = carrying.slot(chunk)
            state = [half.astype(narrow) for half in halves]
            halves = scaled(halves, kept)

            def by_state(source):
                return [(state[half], cores.turned(source.at[slot, :, half_of(half)])) for half in HALVES]

            factors = [(cores.negative(one), other) for one, other in by_state(from_state_smem)]
            written = cores.start([factors], (CHUNK,), [from_value])
            if keep_states:
                output = []
                give(states, chunk, state, narrow_smem)
            else:
                last_output, output = output, cores.start([by_state(reading_smem)], (CHUNK,))
                pl.when(chunk > 0)(lambda: give(outputs, chunk - 1, last_output, output_smem))
            (written,) = cores.finish(written, later=len(output))
            written = written.astype(narrow)
            factors = [[(written, writing_smem.at[slot, :, half_of(half)])] for half in HALVES]
            halves = cores.start(factors, (HALF,) * 2, halves)
            if keep_states:
                give(writes, chunk, [written], written_smem)
            else:
                output = cores.start([[(written, cores.turned(products_smem.at[slot]))]], (CHUNK,), output)
            ahead = ahead_of(following(chunk, chunks, carrying.wait))
            results = cores.finish([*halves, *output])
            carrying.release(chunk)
            return results[:2], ahead, [matrix.astype(narrow) for matrix in results[2:]]

        def store_output(chunk, _):
            outputs.take(chunk)
            target = first_out.at[row, tokens(chunk), head, columns]
            plgpu.copy_smem_to_gmem(output_smem.at[outputs.slot(chunk), 0], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            outputs.release(chunk)
            return ()

        def store_states(chunk, _):
            own = states.slot(chunk)
            states.take(chunk)
            for half in HALVES:
                target = first_out.at[row, chunk, head, half_of(half), columns]
                plgpu.copy_smem_to_gmem(narrow_smem.at[own, half], target)
            writes.take(chunk)
            plgpu.copy_smem_to_gmem(written_smem.at[own, 0], second_out.at[row, tokens(chunk), head, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            states.release(chunk)
            writes.release(chunk)
            return ()

        @pl.when(warpgroup == CARRYING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            halves = read_state(state.at[row, head, columns])
            carrying.wait(0)
            nothing = [] if keep_states else [tiles.filled(0)]
            halves, _, output = lax.fori_loop(0, chunks, carry, ([*halves], ahead_of(0), nothing))
            if keep_states:
                states.drain(chunks)
                writes.drain(chunks)
            else:
                give(outputs, chunks - 1, output, output_smem)
                write_state(halves, second_out.at[row, head, columns])
                outputs.drain(chunks)

        @pl.when(warpgroup == BESIDE)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            lax.fori_loop(0, chunks, store_states if keep_states else store_output, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COPYING)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
            lax.fori_loop(0, chunks, load, ())
            carrying.drain(chunks)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    states_shape = jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow)
    last_shape = jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), wide)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    arguments = from_state, from_value, writing, kept_of_channels(kept), turned(state)
    scratch = {
        "from_state_smem": buffer((ahead, CHUNK, WIDTH)),
        "from_value_smem": buffer((ahead, CHUNK, HALF)),
        "writing_smem": buffer((ahead, CHUNK, WIDTH)),
        "kept_smem": plgpu.SMEM((ahead, 2, HALF), wide),
    }
    barriers = {"carry_in": (5 if keep_states else 7, ahead), "carry_out": (1, ahead)}
    if keep_states:
        return Scan(
            body,
            arguments,
            [states_shape, tokens_shape],
            scratch | {"narrow_smem": buffer((GIVEN, 2, HALF, HALF)), "written_smem": buffer((GIVEN, 1, CHUNK, HALF))},
            barriers | dict.fromkeys(("narrow_in", "narrow_out", "written_in", "written_out"), (1, GIVEN)),
            in_place={1: 1},  # what tokens write, of `from_value`
        )
    return Scan(
        body,
        (*arguments, reading, products),
        [tokens_shape, last_shape],
        scratch
        | {
            "reading_smem": buffer((ahead, CHUNK, WIDTH)),
            "products_smem": buffer((ahead, CHUNK, CHUNK)),
            "output_smem": buffer((GIVEN, 1, CHUNK, HALF)),
        },
        barriers | dict.fromkeys(("output_in", "output_out"), (1, GIVEN)),
        finish=lambda output, last: (output, turned(last)),
    )
