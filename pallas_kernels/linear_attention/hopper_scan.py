"""The state of the gated delta rule carried over chunks, in Pallas Mosaic GPU for Hopper.

The same as `scan` and `scan_back` of `scan_kernels`. A block takes one head and 64 value channels of a row, so that a
chunk is read twice, not once for every 32 channels. One warpgroup carries the state, in registers; a second makes of it
what nothing in the chunk waits for (the output, or the gradients that are solved); a third copies, chunks ahead.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK
from pallas_kernels.linear_attention.hopper_tiles import HALF

WIDTH = 2 * HALF
HALVES = range(2)
AHEAD, BEHIND = 3, 2
"""Chunks for which what the state waits for is held, and what waits for the state."""


def half_of(half: int):
    return pl.ds(half * HALF, HALF)


def wait_unless_first(step, barrier) -> None:
    @pl.when(step > 0)
    def _():
        plgpu.barrier_wait(barrier)


class Ring:
    """Buffers of `count` chunks, filled by one warpgroup and emptied by another, in turn."""

    def __init__(self, count: int, filled, emptied):
        self.count, self.filled, self.emptied = count, filled, emptied

    def slot(self, step):
        return lax.rem(step, self.count)

    def fill(self, step, chunks: int, copies: Callable) -> None:
        """Start `copies(slot, barrier)` once the slot is empty; nothing behind the last chunk."""
        slot = self.slot(step)

        @pl.when((step >= self.count) & (step < chunks))
        def _():
            plgpu.barrier_wait(self.emptied.at[slot])

        @pl.when((step >= 0) & (step < chunks))
        def _():
            copies(slot, self.filled.at[slot])

    def wait(self, step) -> None:
        plgpu.barrier_wait(self.filled.at[self.slot(step)])

    def release(self, step) -> None:
        plgpu.barrier_arrive(self.emptied.at[self.slot(step)])

    def drain(self, chunks: int) -> None:
        for step in range(max(chunks - self.count, 0), chunks):
            plgpu.barrier_wait(self.emptied.at[step % self.count])


def read_state(source, edge, is_read) -> tuple[jax.Array, ...]:
    """Some columns of a state [128, C], in two halves of rows."""
    halves = []
    for half in HALVES:
        plgpu.copy_gmem_to_smem(source.at[half_of(half)], edge, is_read)
        plgpu.barrier_wait(is_read)
        halves.append(tiles.matrix(edge))
        plgpu.commit_smem()  # every warp has read all
    return tuple(halves)


def _write_state(halves, edge, target) -> None:
    for half, state in enumerate(halves):
        edge[...] = state
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(edge, target.at[half_of(half)])
        plgpu.wait_smem_to_gmem(0)


def kept_by(kept_ref, half: int) -> jax.Array:
    return tiles.down(tiles.row(kept_ref.at[half]))


def launch(body, arguments, outputs, heads: int, *, scratch, barriers, name: str, in_place=None):
    """One block a row, head and half of the value channels; scratch and barriers as `body` names them."""
    rows = arguments[0].shape[0]
    return launcher.launch(
        body,
        arguments,
        outputs,
        scratch=scratch
        | {
            key: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count) for key, (arrivals, count) in barriers.items()
        },
        name=name,
        in_place=in_place,
        reduction_bytes=0,
        grid=(rows * heads * 2,),
        grid_names=("task",),
        num_threads=3,
        thread_name="warpgroup",
    )


def place_of(heads: int):
    task = lax.axis_index("task")
    return task // (2 * heads), lax.rem(task // 2, heads), pl.ds(lax.rem(task, 2) * HALF, HALF)


def kept_of_channels(kept: jax.Array) -> jax.Array:
    return kept if kept.ndim == 4 else jnp.broadcast_to(kept[..., None], (*kept.shape, WIDTH))


def scan(from_state, from_value, reading, writing, kept, products, state, *, keep_states: bool):
    """Output [B, S, H, V] and last state; or the states that enter chunks [B, N, H, K, V] and what tokens write."""
    batch, length, heads, _ = from_value.shape
    chunks = length // CHUNK
    narrow, wide = jnp.bfloat16, jnp.float32

    def body(
        from_state, from_value, writing, kept, state, *refs,
        from_state_smem, from_value_smem, writing_smem, kept_smem, narrow_smem, written_smem, edge_smem, carry_in,
        carry_out, narrow_in, narrow_out, written_in, written_out, edge_in, output_in, output_out,
        reading_smem: Any = None, products_smem: Any = None,
    ):  # fmt: skip
        warpgroup, (row, head, columns) = lax.axis_index("warpgroup"), place_of(heads)
        carrying, giving = Ring(AHEAD, carry_in, carry_out), Ring(BEHIND, output_in, output_out)
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
            if keep_states:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                wait_unless_first(chunk, narrow_out)
            for half in HALVES:
                narrow_smem[half] = halves[half].astype(narrow)
            plgpu.commit_smem()
            if keep_states:
                for half in HALVES:
                    target = first_out.at[row, chunk, head, half_of(half), columns]
                    plgpu.copy_smem_to_gmem(narrow_smem.at[half], target)
            else:
                plgpu.barrier_arrive(narrow_in)
            carrying.wait(chunk)
            factors = [(from_state_smem.at[slot, :, half_of(half)], narrow_smem.at[half]) for half in HALVES]
            written = tiles.matrix(from_value_smem.at[slot]).astype(wide) - tiles.product(*factors)
            if not keep_states:
                wait_unless_first(chunk, written_out)
            written_smem[...] = written.astype(narrow)
            plgpu.commit_smem()
            if keep_states:
                plgpu.copy_smem_to_gmem(written_smem, second_out.at[row, tokens(chunk), head, columns])
            else:
                plgpu.barrier_arrive(written_in)
            halves = tiles.accumulate(
                [halves[half] * kept_by(kept_smem.at[slot], half) for half in HALVES],
                [[(tiles.turned(writing_smem.at[slot, :, half_of(half)]), written_smem)] for half in HALVES],
            )
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

        @pl.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(208, action="increase")
            halves = read_state(state.at[row, head, :, columns], edge_smem, edge_in)
            halves = lax.fori_loop(0, chunks, carry, halves)
            if keep_states:
                plgpu.wait_smem_to_gmem(0)
            else:
                _write_state(halves, edge_smem, second_out.at[row, head, :, columns])
                plgpu.barrier_wait(narrow_out)
                plgpu.barrier_wait(written_out)

        if not keep_states:

            @pl.when(warpgroup == 1)
            def _():
                plgpu.set_max_registers(168, action="decrease")
                lax.fori_loop(0, chunks, give, ())
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
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
    return launch(
        body,
        (from_state, from_value, writing, kept_of_channels(kept), state, *([] if keep_states else [reading, products])),
        [states_shape, tokens_shape] if keep_states else [tokens_shape, last_shape],
        heads,
        scratch={
            "from_state_smem": buffer((AHEAD, CHUNK, WIDTH)),
            "from_value_smem": buffer((AHEAD, CHUNK, HALF)),
            "writing_smem": buffer((AHEAD, CHUNK, WIDTH)),
            "kept_smem": plgpu.SMEM((AHEAD, 2, HALF), wide),
            "narrow_smem": buffer((2, HALF, HALF)),
            "written_smem": buffer((CHUNK, HALF)),
            "edge_smem": launcher.swizzled((HALF, HALF), wide),
            **({} if keep_states else of_output_smem),
        },
        barriers={
            "carry_in": (5, AHEAD),
            "carry_out": (1, AHEAD),
            "output_in": (2, BEHIND),
            "output_out": (1, BEHIND),
            **dict.fromkeys(("narrow_in", "narrow_out", "written_in", "written_out", "edge_in"), (1, 1)),
        },
        name="scan_states" if keep_states else "scan_chunks",
        in_place={1: 1} if keep_states else None,  # what tokens write, of `from_value`
    )


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
        narrow_smem, written_smem, edge_smem, early_in, early_out, late_in, late_out, inverse_in, inverse_out,
        written_in, written_out, edge_in, value_smem: Any = None, value_in=None, value_out=None,
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
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for half in HALVES:
                narrow_smem[half] = halves[half].astype(narrow)
            plgpu.commit_smem()
            for half in HALVES:
                target = states_out.at[row, chunks - 1 - step, head, half_of(half), columns]
                plgpu.copy_smem_to_gmem(narrow_smem.at[half], target)
            early.wait(step)
            written = tiles.product(
                (tiles.turned(products_smem.at[slot]), gradient_smem.at[slot]),
                *((writing_smem.at[slot, :, half_of(half)], narrow_smem.at[half]) for half in HALVES),
            )
            wait_unless_first(step, written_out)
            written_smem[...] = (-written).astype(narrow)
            plgpu.commit_smem()
            plgpu.barrier_arrive(written_in)
            late.wait(step)
            halves = tiles.accumulate(
                [halves[half] * kept_by(kept_smem.at[slot], half) for half in HALVES],
                [
                    [
                        (tiles.turned(reading_smem.at[late_slot, :, half_of(half)]), gradient_smem.at[slot]),
                        (tiles.turned(from_state_smem.at[late_slot, :, half_of(half)]), written_smem),
                    ]
                    for half in HALVES
                ],
            )
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

        @pl.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(208, action="increase")
            halves = read_state(last_gradient.at[row, head, :, columns], edge_smem, edge_in)
            halves = lax.fori_loop(0, chunks, carry, halves)
            _write_state(halves, edge_smem, first_out.at[row, head, :, columns])
            plgpu.barrier_wait(written_out)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.set_max_registers(168, action="decrease")
            lax.fori_loop(0, chunks, solve, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            lax.fori_loop(0, chunks + 1, load, ())
            for ring in (early, late, solving, *([values] if has_value else [])):
                ring.drain(chunks)

    tokens_shape = jax.ShapeDtypeStruct((batch, length, heads, WIDTH), narrow)
    states_shape = jax.ShapeDtypeStruct((batch, chunks, heads, WIDTH, WIDTH), narrow)
    first_shape = jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), wide)
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    arguments = from_state, reading, writing, kept_of_channels(kept), products, inverse, output_gradient, last_gradient
    outputs, scratch, barriers = [states_shape, tokens_shape, first_shape], {}, {}
    if value is not None and beta is not None:
        arguments = *arguments, value, jnp.moveaxis(beta, 1, 2)
        outputs += [tokens_shape, jax.ShapeDtypeStruct((2, batch, heads, length), wide)]
        scratch = {"value_smem": buffer((1, CHUNK, HALF))}
        barriers = {"value_in": (2, 1), "value_out": (1, 1)}
    results = launch(
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
            "edge_smem": launcher.swizzled((HALF, HALF), wide),
            **scratch,
        },
        barriers={
            "early_in": (5, AHEAD),
            "early_out": (1, AHEAD),
            "late_in": (2, BEHIND),
            "late_out": (1, BEHIND),
            "inverse_in": (1, BEHIND),
            "inverse_out": (1, BEHIND),
            **dict.fromkeys(("written_in", "written_out", "edge_in"), (1, 1)),
            **barriers,
        },
        name="scan_chunks_back",
    )
    if not has_value:
        return results
    *results, by_value = results
    return *results, jnp.moveaxis(jnp.sum(by_value, axis=0), 1, 2)
