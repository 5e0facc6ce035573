"""States that enter chunks and what tokens write, to more digits, in Pallas Mosaic GPU for Hopper.

Like `hopper_scan.scan` with `keep_states`; but what tokens would write without a state, (I + L)^-1 beta value, is made
here of two parts and stays float32, and what they write is told by two numbers in bfloat16. The gradient of one decay a
head needs that: one number a token, a sum over channels whose terms cancel.
"""

import functools

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
)
from pallas_kernels.linear_attention.hopper_tiles import HALF, WIDTH


def states(from_state, value, beta, inverse, writing, kept, state) -> Scan:
    """Gives the states that enter chunks [B, N, H, K, V] and what tokens write [B, S, H, V], high and low part."""
    batch, length, heads, _ = value.shape
    chunks = length // CHUNK
    narrow, wide = jnp.bfloat16, jnp.float32

    def body(
        warpgroup, from_state, value, beta, inverse, writing, kept, state, states_out, high_out, low_out,
        *, from_state_smem, writing_smem, kept_smem, value_smem, low_value_smem, beta_smem, inverse_smem,
        narrow_smem, high_smem, low_smem, carry_in, carry_out, value_in, value_out, multiplied_in,
    ):  # fmt: skip
        row, head, columns = place_of(heads)
        carrying, solving = Ring(AHEAD, carry_in, carry_out), Ring(AHEAD, value_in, value_out)

        def tokens(chunk):
            return pl.ds(chunk * CHUNK, CHUNK)

        def load(step, _):
            def of_values(slot, barrier):
                plgpu.copy_gmem_to_smem(value.at[row, tokens(step), head, columns], value_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(inverse.at[row, step, head], inverse_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(beta.at[row, head, tokens(step)], beta_smem.at[slot], barrier)

            def of_carry(slot, barrier):
                for source, target in ((from_state, from_state_smem), (writing, writing_smem)):
                    plgpu.copy_gmem_to_smem(source.at[row, tokens(step), head], target.at[slot], barrier)
                for half in HALVES:
                    source = kept.at[row, step, head, half_of(half)]
                    plgpu.copy_gmem_to_smem(source, kept_smem.at[slot, half], barrier)

            solving.fill(step, chunks, of_values)
            carrying.fill(step, chunks, of_carry)
            return ()

        def multiply(chunk, _):
            slot = solving.slot(chunk)
            solving.wait(chunk)
            values = shared.matrix(value_smem.at[slot]).astype(wide) * tiles.down(shared.row(beta_smem.at[slot]))
            for ref, part in zip((value_smem, low_value_smem), tiles.parts(values, 2), strict=True):
                ref[slot] = part
            plgpu.commit_smem()
            plgpu.barrier_arrive(multiplied_in.at[slot])
            return ()

        def wait(chunk):
            carrying.wait(chunk)
            plgpu.barrier_wait(multiplied_in.at[solving.slot(chunk)])

        def of_values(chunk):
            """What a chunk's tokens would write without a state."""
            slot = solving.slot(chunk)
            inverse = cores.turned(inverse_smem.at[slot])
            factors = [(cores.turned(ref.at[slot]), inverse) for ref in (value_smem, low_value_smem)]
            return cores.start([factors], (CHUNK,))

        def carry(chunk, carried):
            halves, kept, written = carried
            slot = carrying.slot(chunk)
            state = [half.astype(narrow) for half in halves]
            halves = scaled(halves, kept)

            def give_state():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for half in HALVES:
                    shared.store_turned(state[half], narrow_smem.at[half])
                plgpu.commit_smem()
                for half in HALVES:
                    target = states_out.at[row, chunk, head, half_of(half), columns]
                    plgpu.copy_smem_to_gmem(narrow_smem.at[half], target)

            def give_written():
                for part, ref in zip(parts, (high_smem, low_smem), strict=True):
                    shared.store_turned(part, ref)
                plgpu.commit_smem()
                for ref, target in ((high_smem, high_out), (low_smem, low_out)):
                    plgpu.copy_smem_to_gmem(ref, target.at[row, tokens(chunk), head, columns])

            sources = (cores.turned(from_state_smem.at[slot, :, half_of(half)]) for half in HALVES)
            factors = [(cores.negative(one), other) for one, other in zip(state, sources, strict=True)]
            written = cores.start([factors], (CHUNK,), written)
            next_chunk = following(chunk, chunks, wait)
            ahead = of_values(next_chunk)
            give_state()
            (written,) = cores.finish(written, later=1)
            parts = tiles.parts(written, 2)
            factors = [[(parts[0], writing_smem.at[slot, :, half_of(half)])] for half in HALVES]
            halves = cores.start(factors, (HALF,) * 2, halves)
            give_written()
            kept = kept_by(kept_smem.at[carrying.slot(next_chunk)])
            *halves, ahead = cores.finish([*halves, *ahead])
            solving.release(chunk)
            carrying.release(chunk)
            return halves, kept, [ahead]

        @pl.when(warpgroup == CARRYING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            halves = read_state(state.at[row, head, columns])
            wait(0)
            lax.fori_loop(0, chunks, carry, ([*halves], kept_by(kept_smem.at[0]), cores.finish(of_values(0))))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == BESIDE)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            lax.fori_loop(0, chunks, multiply, ())

        @pl.when(warpgroup == COPYING)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
            lax.fori_loop(0, chunks, load, ())
            solving.drain(chunks)
            carrying.drain(chunks)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    return Scan(
        body,
        (from_state, value, jnp.moveaxis(beta, 1, 2), inverse, writing, kept_of_channels(kept), turned(state)),
        [jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow), tokens_shape, tokens_shape],
        scratch={
            "from_state_smem": buffer((AHEAD, CHUNK, WIDTH)),
            "writing_smem": buffer((AHEAD, CHUNK, WIDTH)),
            "kept_smem": plgpu.SMEM((AHEAD, 2, HALF), wide),
            "value_smem": buffer((AHEAD, CHUNK, HALF)),
            "low_value_smem": buffer((AHEAD, CHUNK, HALF)),
            "beta_smem": plgpu.SMEM((AHEAD, CHUNK), wide),
            "inverse_smem": buffer((AHEAD, CHUNK, CHUNK)),
            "narrow_smem": buffer((2, HALF, HALF)),
            "high_smem": buffer((CHUNK, HALF)),
            "low_smem": buffer((CHUNK, HALF)),
        },
        barriers={
            "carry_in": (4, AHEAD),
            "carry_out": (1, AHEAD),
            "value_in": (3, AHEAD),
            "value_out": (1, AHEAD),
            "multiplied_in": (1, AHEAD),
        },
    )
