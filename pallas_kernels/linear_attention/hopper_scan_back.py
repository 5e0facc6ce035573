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

BEHIND = 2
"""Chunks for which what waits for the gradient is held."""


def scan_back(
    from_state, reading, writing, kept, products, inverse, output_gradient, last_gradient, value=None, beta=None
):  # fmt: skip
    """Gradients of the states that leave chunks, (I + L)^-T of those of what tokens write, that of the first state.

    With `value` and `beta` [B, S, H] also the gradient of the value, and that of beta by the value.
    """
    batch, length, heads, _ = output_gradient.shape
    chunks, has_value = length // CHUNK, value is not None
    narrow, wide = jnp.bfloat16, jnp.float32

    def body(
        from_state, reading, writing, kept, products, inverse, output_gradient, last_gradient, *refs,
        writing_smem, gradient_smem, products_smem, kept_smem, reading_smem, from_state_smem, inverse_smem,
        narrow_smem, written_smem, early_in, early_out, late_in, late_out, inverse_in, inverse_out,
        written_in, written_out, value_smem: Any = None, value_in=None, value_out=None,
    ):  # fmt: skip
        warpgroup, (row, head, columns) = lax.axis_index("warpgroup"), place_of(heads)
        of_value = refs[: 2 * has_value]
        states_out, solved_out, first_out, *value_outs = refs[2 * has_value :]
        values = Ring(1, value_in, value_out)
        early, late, solving = (
            Ring(AHEAD, early_in, early_out), Ring(BEHIND, late_in, late_out), Ring(BEHIND, inverse_in, inverse_out)
        )  # fmt: skip

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

            def of_values(slot, barrier):
                value, beta = of_value
                source = value.at[row, tokens(step - 1), head, columns]
                plgpu.copy_gmem_to_smem(source, value_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(beta.at[row, head, tokens(step - 1)], kept_smem.at[AHEAD, 0], barrier)

            early.fill(step, chunks, of_early)
            late.fill(step - 1, chunks, of_late)
            solving.fill(step - 1, chunks, of_solving)
            if has_value:
                values.fill(step - 1, chunks, of_values)
            return ()

        def carry(step, halves):
            slot, late_slot = early.slot(step), late.slot(step)
            state = [half.astype(narrow) for half in halves]

            def give_state():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for half in HALVES:
                    tiles.store_turned(state[half], narrow_smem.at[half])
                plgpu.commit_smem()
                for half in HALVES:
                    target = states_out.at[row, chunks - 1 - step, head, half_of(half), columns]
                    plgpu.copy_smem_to_gmem(narrow_smem.at[half], target)

            def give_written():
                wait_unless_first(step, written_out)
                tiles.store_turned(written, written_smem)
                plgpu.commit_smem()
                plgpu.barrier_arrive(written_in)

            early.wait(step)
            gradient = tiles.turned(gradient_smem.at[slot])
            factors = [(gradient, products_smem.at[slot])]
            factors += [(state[half], tiles.turned(writing_smem.at[slot, :, half_of(half)])) for half in HALVES]
            (written,) = tiles.products([factors], (CHUNK,), meanwhile=give_state)
            written = (-written).astype(narrow)
            late.wait(step)
            factors = [
                [
                    (gradient, reading_smem.at[late_slot, :, half_of(half)]),
                    (written, from_state_smem.at[late_slot, :, half_of(half)]),
                ]
                for half in HALVES
            ]
            added = tiles.products(factors, (HALF,) * 2, meanwhile=give_written)
            halves = tuple(halves[half] * kept_by(kept_smem.at[slot], half) + added[half] for half in HALVES)
            early.release(step)
            late.release(step)
            return halves

        def solve(step, _):
            slot = solving.slot(step)
            solving.wait(step)
            plgpu.barrier_wait(written_in)
            solved = -tiles.product((tiles.turned(inverse_smem.at[slot]), written_smem))
            plgpu.barrier_arrive(written_out)
            plgpu.commit_smem()  # every warp has read all
            inverse_smem[slot] = solved.astype(narrow)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(inverse_smem.at[slot], solved_out.at[row, tokens(step), head, columns])
            if has_value:
                value_gradient_out, beta_gradient_out = value_outs
                values.wait(step)
                by_value = jnp.sum(solved * tiles.matrix(value_smem.at[0]).astype(wide), axis=1)
                beta_gradient_out[lax.rem(lax.axis_index("task"), 2), row, head, tokens(step)] = by_value
                value_smem[0] = (solved * tiles.down(tiles.row(kept_smem.at[AHEAD, 0]))).astype(narrow)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(value_smem.at[0], value_gradient_out.at[row, tokens(step), head, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            solving.release(step)
            if has_value:
                values.release(step)
            return ()

        @pl.when(warpgroup == CARRYING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            halves = lax.fori_loop(0, chunks, carry, read_state(last_gradient.at[row, head, columns]))
            write_state(halves, first_out.at[row, head, columns])
            plgpu.barrier_wait(written_out)

        @pl.when(warpgroup == BESIDE)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            lax.fori_loop(0, chunks, solve, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COPYING)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            lax.fori_loop(0, chunks + 1, load, ())
            for ring in (early, late, solving, *([values] if has_value else [])):
                ring.drain(chunks)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    states_shape = jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow)
    first_shape = jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), wide)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    arguments = from_state, reading, writing, kept_of_channels(kept), products, inverse, output_gradient
    arguments = *arguments, turned(last_gradient)
    outputs, scratch, barriers = [states_shape, tokens_shape, first_shape], {}, {}
    if value is not None and beta is not None:
        arguments = *arguments, value, jnp.moveaxis(beta, 1, 2)
        outputs += [tokens_shape, jax.ShapeDtypeStruct((2, batch, heads, length), wide)]
        scratch = {"value_smem": buffer((1, CHUNK, HALF))}
        barriers = {"value_in": (2, 1), "value_out": (1, 1)}
    states, solved, first, *of_value = launch(
        body,
        arguments,
        outputs,
        heads,
        scratch={
            "writing_smem": buffer((AHEAD, CHUNK, WIDTH)),
            "gradient_smem": buffer((AHEAD, CHUNK, HALF)),
            "products_smem": buffer((AHEAD, CHUNK, CHUNK)),
            # Beta lies behind what is kept: buffers are aligned, and memory is all used.
            "kept_smem": plgpu.SMEM((AHEAD + has_value, 2, HALF), wide),
            "reading_smem": buffer((BEHIND, CHUNK, WIDTH)),
            "from_state_smem": buffer((BEHIND, CHUNK, WIDTH)),
            "inverse_smem": buffer((BEHIND, CHUNK, CHUNK)),
            "narrow_smem": buffer((2, HALF, HALF)),
            "written_smem": buffer((CHUNK, HALF)),
            **scratch,
        },
        barriers={
            "early_in": (5, AHEAD),
            "early_out": (1, AHEAD),
            "late_in": (2, BEHIND),
            "late_out": (1, BEHIND),
            "inverse_in": (1, BEHIND),
            "inverse_out": (1, BEHIND),
            **dict.fromkeys(("written_in", "written_out"), (1, 1)),
            **barriers,
        },
        name="scan_chunks_back",
    )
    if has_value:
        of_value[1] = jnp.moveaxis(jnp.sum(of_value[1], axis=0), 1, 2)
    return states, solved, turned(first), *of_value
