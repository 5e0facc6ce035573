"""The gradient of the delta rule's state carried from the last chunk to the first, in Pallas Mosaic GPU for Hopper.

The same as `scan_back` of `scan_kernels`. The warpgroup beside it solves for the gradients of what tokens would write.
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

BEHIND = 2
"""Chunks for which what waits for the gradient is held."""


def scan_back(
    from_state, reading, writing, kept, products, inverse, output_gradient, last_gradient, value=None, beta=None
) -> Scan:  # fmt: skip
    """Gives gradients of states that leave chunks, (I + L)^-T of those of what tokens write, that of the first state.

    With `value` and `beta` [B, S, H] also the gradient of the value, and that of beta by the value.
    """
    batch, length, heads, _ = output_gradient.shape
    chunks, has_value = length // CHUNK, value is not None
    narrow, wide = jnp.bfloat16, jnp.float32
    given = 1 if has_value else GIVEN  # as many as memory holds

    def body(
        warpgroup, from_state, reading, writing, kept, products, inverse, output_gradient, last_gradient, *refs,
        writing_smem, gradient_smem, products_smem, kept_smem, reading_smem, from_state_smem, inverse_smem,
        narrow_smem, written_smem, early_in, early_out, late_in, late_out, inverse_in, inverse_out,
        narrow_in, narrow_out, written_in, written_out, value_smem: Any = None, beta_smem: Any = None,
    ):  # fmt: skip
        row, head, columns = place_of(heads)
        of_value = refs[: 2 * has_value]
        states_out, solved_out, first_out, *value_outs = refs[2 * has_value :]
        early, late, solving = (
            Ring(AHEAD, early_in, early_out), Ring(BEHIND, late_in, late_out), Ring(BEHIND, inverse_in, inverse_out)
        )  # fmt: skip

        states, writes = Ring(given, narrow_in, narrow_out), Ring(given, written_in, written_out)

        def tokens(step):
            return pl.ds((chunks - 1 - step) * CHUNK, CHUNK)

        def load(step, _):
            def of_early(slot, barrier):
                plgpu.copy_gmem_to_smem(writing.at[row, tokens(step), head], writing_smem.at[slot], barrier)
                source = output_gradient.at[row, tokens(step), head, columns]
                plgpu.copy_gmem_to_smem(source, gradient_smem.at[slot], barrier)
                chunk = chunks - 1 - step
                plgpu.copy_gmem_to_smem(products.at[row, chunk, head], products_smem.at[slot], barrier)
                for half in HALVES:
                    source = kept.at[row, chunk, head, half_of(half)]
                    plgpu.copy_gmem_to_smem(source, kept_smem.at[slot, half], barrier)

            def of_late(slot, barrier):
                for source, target in ((reading, reading_smem), (from_state, from_state_smem)):
                    plgpu.copy_gmem_to_smem(source.at[row, tokens(step - 1), head], target.at[slot], barrier)

            def of_solving(slot, barrier):
                plgpu.copy_gmem_to_smem(inverse.at[row, chunks - step, head], inverse_smem.at[slot], barrier)
                if has_value:
                    value, beta = of_value
                    source = value.at[row, tokens(step - 1), head, columns]
                    plgpu.copy_gmem_to_smem(source, value_smem.at[slot], barrier)
                    plgpu.copy_gmem_to_smem(beta.at[row, head, tokens(step - 1)], beta_smem.at[slot], barrier)

            early.fill(step, chunks, of_early)
            late.fill(step - 1, chunks, of_late)
            solving.fill(step - 1, chunks, of_solving, leave)
            return ()

        def leave(step, slot):
            plgpu.copy_smem_to_gmem(inverse_smem.at[slot], solved_out.at[row, tokens(step), head, columns])
            if has_value:
                target, _ = value_outs
                plgpu.copy_smem_to_gmem(value_smem.at[slot], target.at[row, tokens(step), head, columns])

        def ahead_of(step):
            slot = early.slot(step)
            return shared.turned_matrix(gradient_smem.at[slot]), kept_by(kept_smem.at[slot])

        def carry(step, carried):
            halves, (gradient, kept) = carried
            slot, late_slot = early.slot(step), late.slot(step)
            state = [half.astype(narrow) for half in halves]
            halves = scaled(halves, kept)

            def give_state(slot):
                for half in HALVES:
                    shared.store_turned(state[half], narrow_smem.at[slot, half])

            def give_written(slot):
                shared.store_turned(written, written_smem.at[slot])

            factors = [(cores.negative(gradient), products_smem.at[slot])]
            for half in HALVES:
                writing = cores.turned(writing_smem.at[slot, :, half_of(half)])
                factors.append((cores.negative(state[half]), writing))
            under_way = cores.start([factors], (CHUNK,))
            states.give(step, give_state)
            late.wait(step)
            # While what is written is on its way from one product to the next.
            sources = [reading_smem.at[late_slot, :, half_of(half)] for half in HALVES]
            halves = cores.start([[(gradient, source)] for source in sources], (HALF,) * 2, halves)
            (written,) = cores.finish(under_way, later=1)
            written = written.astype(narrow)
            sources = [from_state_smem.at[late_slot, :, half_of(half)] for half in HALVES]
            halves = cores.start([[(written, source)] for source in sources], (HALF,) * 2, halves)
            writes.give(step, give_written)
            ahead = ahead_of(following(step, chunks, early.wait))
            halves = cores.finish(halves)
            early.release(step)
            late.release(step)
            return halves, ahead

        def solve(step, _):
            slot = solving.slot(step)
            own = states.slot(step)
            states.take(step)
            for half in HALVES:
                target = states_out.at[row, chunks - 1 - step, head, half_of(half), columns]
                plgpu.copy_smem_to_gmem(narrow_smem.at[own, half], target)
            # Soon: the gradient of the next states may be waiting for this place.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            states.release(step)
            solving.wait(step)
            writes.take(step)
            solved = -cores.product((cores.turned(inverse_smem.at[slot]), written_smem.at[own]))
            writes.release(step)
            cores.wait_for_warps()  # which have read the inverse
            inverse_smem[slot] = solved.astype(narrow)
            if has_value:
                _, beta_gradient_out = value_outs
                by_value = jnp.sum(solved * shared.matrix(value_smem.at[slot]).astype(wide), axis=1)
                beta_gradient_out[lax.rem(lax.axis_index("task"), 2), row, head, tokens(step)] = by_value
                value_smem[slot] = (solved * tiles.down(shared.row(beta_smem.at[slot]))).astype(narrow)
            solving.release(step)
            return ()

        @pl.when(warpgroup == CARRYING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            halves = read_state(last_gradient.at[row, head, columns])
            early.wait(0)
            halves, _ = lax.fori_loop(0, chunks, carry, ([*halves], ahead_of(0)))
            write_state(halves, first_out.at[row, head, columns])
            states.drain(chunks)
            writes.drain(chunks)

        @pl.when(warpgroup == BESIDE)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            lax.fori_loop(0, chunks, solve, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COPYING)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
            lax.fori_loop(0, chunks + 1, load, ())
            early.drain(chunks)
            late.drain(chunks)
            solving.drain(chunks, leave)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    states_shape = jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow)
    first_shape = jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), wide)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    arguments = from_state, reading, writing, kept_of_channels(kept), products, inverse, output_gradient
    arguments = *arguments, turned(last_gradient)
    outputs, scratch = [states_shape, tokens_shape, first_shape], {}
    if value is not None and beta is not None:
        arguments = *arguments, value, jnp.moveaxis(beta, 1, 2)
        outputs += [tokens_shape, jax.ShapeDtypeStruct((2, batch, heads, length), wide)]
        scratch = {"value_smem": buffer((BEHIND, CHUNK, HALF)), "beta_smem": plgpu.SMEM((BEHIND, CHUNK), wide)}

    def finish(states, solved, first, *of_value):
        if of_value:
            of_value = of_value[0], jnp.moveaxis(jnp.sum(of_value[1], axis=0), 1, 2)
        return states, solved, turned(first), *of_value

    return Scan(
        body,
        arguments,
        outputs,
        scratch={
            "writing_smem": buffer((AHEAD, CHUNK, WIDTH)),
            "gradient_smem": buffer((AHEAD, CHUNK, HALF)),
            "products_smem": buffer((AHEAD, CHUNK, CHUNK)),
            "kept_smem": plgpu.SMEM((AHEAD, 2, HALF), wide),
            "reading_smem": buffer((BEHIND, CHUNK, WIDTH)),
            "from_state_smem": buffer((BEHIND, CHUNK, WIDTH)),
            "inverse_smem": buffer((BEHIND, CHUNK, CHUNK)),
            "narrow_smem": buffer((given, 2, HALF, HALF)),
            "written_smem": buffer((given, CHUNK, HALF)),
            **scratch,
        },
        barriers={
            "early_in": (5, AHEAD),
            "early_out": (1, AHEAD),
            "late_in": (2, BEHIND),
            "late_out": (1, BEHIND),
            "inverse_in": (1 + 2 * has_value, BEHIND),
            "inverse_out": (1, BEHIND),
            **dict.fromkeys(("narrow_in", "narrow_out", "written_in", "written_out"), (1, given)),
        },
        finish=finish,
    )
