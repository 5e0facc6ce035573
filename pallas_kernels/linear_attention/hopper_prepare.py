"""What a chunk's tokens read, write and share, in Pallas Mosaic GPU for Hopper.

The same as `chunk_kernels.prepare`. Two warpgroups each take half of the key channels, sum decays and stage what pairs
of tokens are made of; one of them then makes the matrix of query and key, the other that of key and key. A third
inverts the latter and multiplies by beta and the inverse, while the two are at the next chunk; a fourth copies.

A late token decays from the first one of its tile on. An early one grows back to it, for pairs in one tile; or decays
up to the first token of the next tile and on to that of the second and third next, for pairs in tiles apart: a product
with all four, one behind the other, gives every pair of tiles. Where the two are of different documents factors may
overflow; their products are never used. Results of a chunk are worthless if a token is deeper in its tile than
`chunk_kernels.DEEPEST`.

One decay a head scales rows and columns of a single product, however deep.
"""

import functools
from collections.abc import Sequence
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
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE, TILE_BITS
from pallas_kernels.linear_attention.gates import LOG2_E, Form
from pallas_kernels.linear_attention.hopper_inverse import invert
from pallas_kernels.linear_attention.hopper_tiles import ANCHORS, HALF, WIDTH

QUERY, KEY = 0, 1
APART = (CHUNK, 3 * TILE, 2 * TILE, TILE)
"""How many early tokens have a partner no, one, two and three tiles later."""
STARTS = (0, 64, 112, 144)
"""Where those begin, one behind the other."""
REGISTERS = launcher.registers(176, 176, 136, 24)
"""Of a thread that pairs tokens, and of one that inverts (120 would be too few); 24 remain for copying."""


class _Half:
    """One warpgroup's work on one chunk."""

    def __init__(self, own, bounds, table):
        self.own, self.bounds, self.table = own, bounds, table

    def bound(self, number: int) -> jax.Array:
        return tiles.down(shared.row(self.bounds.at[number]))

    def sum_decays(self, slots, stored):
        """Sums of the decays that a token's state passes: not that of the first of its document.

        Of decays as told by two numbers in bfloat16: all sums round one alike, so that it leaves their differences.
        `stored` gets as many of the first columns as it has.
        """
        mask = tiles.keep_between(self.bound(0) + 1, tiles.iota(0) + 1, tiles.filled(1))
        sums = cores.product(*((mask, slot) for slot in slots))
        stored[...] = tiles.columns(sums, 0, stored.shape[1])
        shared.keep_rows(sums, self.table)
        plgpu.commit_smem()
        return sums

    def of_tiles(self, *rows: int) -> jax.Array:
        """The sums of decays at the rows `ANCHORS[row]`, one for each tile."""
        return shared.rows_of_tiles(self.table, rows)

    def between(self, after: Sequence[int], before: Sequence[int]) -> jax.Array:
        return jnp.exp2(self.of_tiles(*after) - self.of_tiles(*before))


def prepare(query, key, value, decay, beta, first, last, *gated, form: Form | None = None):
    """(products, inverse, sums, parts) as `prepare` of `pallas_triton` has them, and depths in the tile [2, B, H, S].

    The latter of each token, the largest of each half of the channels; None with one decay a head.

    With a `form` of gate `decay` is its input [B, S, H, K] in bfloat16, and `gated` its `rows` [H, 2, K].
    """
    batch, length, heads, _ = value.shape
    chunks, group = length // CHUNK, heads // query.shape[2]
    total = batch * chunks * heads
    workers = min(launcher.num_multiprocessors(), total)
    is_scalar = decay.ndim == 3
    # One decay a channel leaves no memory for keys and values of two chunks.
    slots = 2 if is_scalar else 1
    beta = jnp.moveaxis(beta, 1, 2)
    decay = jnp.moveaxis(decay, 1, 2) if is_scalar else decay

    def body(
        query, key, value, decay, beta, first, last, *refs,
        keys_smem, values_smem, products_smem, leaving_smem, solving_smem, inverse_smem,
        lower_smem, parts_smem, anchors_smem, itself_smem, bounds_smem, beta_smem, solving_beta_smem,
        decay_in, decay_out, keys_in, keys_out, values_in, values_out, is_staged, is_multiplied,
        lower_in, lower_out, solving_in, solving_out,
        decay_smem: Any = None, raw_smem: Any = None, gate_smem: Any = None, sums_smem: Any = None,
        early_smem: Any = None,
    ):  # fmt: skip
        gate: Any = None
        if form:
            gate, *refs = refs
        (
            products_out, inverse_out, sums_out, from_state_out, writing_out, reading_out, from_value_out, kept_out,
            *depth_out,
        ) = refs  # fmt: skip
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        steps = pl.cdiv(total - worker, workers)

        def place(step):
            task = worker + step * workers
            head, rest = lax.rem(task, heads), task // heads
            chunk = lax.rem(rest, chunks)
            return rest // chunks, chunk, head, pl.ds(chunk * CHUNK, CHUNK)

        def slot_of(step):
            return lax.rem(step, slots) if slots > 1 else 0

        def wait_unless_first(step, barrier):
            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(barrier)

        def wait_emptied(step, barriers):
            @pl.when(step >= slots)
            def _():
                plgpu.barrier_wait(barriers.at[slot_of(step)])

        def wait_last(barriers):
            def wait(step, _):
                plgpu.barrier_wait(barriers.at[slot_of(step)])
                return ()

            lax.fori_loop(jnp.maximum(steps - slots, 0), steps, wait, ())

        halves = [pl.ds(half * HALF, HALF) for half in range(2)]

        def load_decays(step):
            # With a gate there is one more step, whose decays are told behind the last chunk for nothing.
            row, _, head, tokens = place(jnp.minimum(step, steps - 1) if form else step)
            slot = slot_of(step)
            filled = decay_in.at[slot]
            wait_emptied(step, decay_out)
            if is_scalar:
                plgpu.copy_gmem_to_smem(decay.at[row, head, tokens], decay_smem.at[slot, 0], filled)
            else:
                for half, channels in enumerate(halves):
                    target = raw_smem.at[half] if form else decay_smem.at[slot, half]
                    plgpu.copy_gmem_to_smem(decay.at[row, tokens, head, channels], target, filled)
                    if form:
                        plgpu.copy_gmem_to_smem(gate.at[head, :, channels], gate_smem.at[half], filled)
            for number, source in enumerate((first, last)):
                plgpu.copy_gmem_to_smem(source.at[row, tokens], bounds_smem.at[lax.rem(step, 2), number], filled)
            plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], beta_smem.at[lax.rem(step, 2)], filled)

        def load(step, _):
            row, _, head, tokens = place(step)
            slot = slot_of(step)
            if not form:
                load_decays(step)
            wait_emptied(step, keys_out)
            for half, channels in enumerate(halves):
                for number, source in enumerate((query, key)):
                    target = keys_smem.at[slot, number, half]
                    plgpu.copy_gmem_to_smem(source.at[row, tokens, head // group, channels], target, keys_in.at[slot])

            # Behind the next chunk's keys: the chunk before the last may still be solved.
            pl.when(step > 0)(lambda: load_values(step - 1))
            if form:
                load_decays(step + 1)
            return ()

        def load_values(step):
            row, _, head, tokens = place(step)
            slot = slot_of(step)
            filled = values_in.at[slot]
            wait_emptied(step, values_out)
            for half in range(2):
                source = value.at[row, tokens, head, pl.ds(half * HALF, HALF)]
                plgpu.copy_gmem_to_smem(source, values_smem.at[slot, half], filled)
            plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], solving_beta_smem.at[slot, 0], filled)

        def give_products(step, matrix, first):
            row, chunk, head, _ = place(step)
            products_smem[...] = tiles.keep_between(first, tiles.iota(0) + 1, matrix.astype(jnp.bfloat16))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(products_smem, products_out.at[row, chunk, head])

        def give_lower(step, lower, first):
            wait_unless_first(step, lower_out)
            for number, part in enumerate(tiles.parts(lower, 2)):
                lower_smem[number] = tiles.keep_between(first, tiles.iota(0), part)
            plgpu.commit_smem()
            plgpu.barrier_arrive(lower_in)

        def early_of(side, number):
            """Where early tokens with a partner so many tiles later lie."""
            return early_smem.at[side, pl.ds(STARTS[number], APART[number])]

        def slots_of_decays(own):
            """Of numbers in bfloat16. A gate's input, and what tokens read from the state, lie there at other times."""
            if form:
                return raw_smem.at[own], leaving_smem.at[0, own]
            return [early_smem.at[own, pl.ds(start, CHUNK)] for start in (0, CHUNK)]

        def tell_decays(own):
            """To base 2, by two numbers; those of a gate a chunk ahead, while tensor cores are busy."""
            plgpu.barrier_wait(decay_in.at[0])
            if form:
                gate = gate_smem.at[own]
                of_gate = shared.row_across(gate, 0), gate[1, 0], tiles.GATE_FUNCTIONS
                decays = form.log2_decay(shared.wide(raw_smem.at[own]), *of_gate)
                # All that this chunk has stored so far: a slot, the place of sums and those of what the last one wrote.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                decays = shared.matrix(decay_smem.at[0, own]) * LOG2_E
            for slot, part in zip(slots_of_decays(own), tiles.parts(decays, 2), strict=True):
                slot[...] = part

        def pair(step, _):
            row, chunk, head, tokens = place(step)
            bounds, beta = bounds_smem.at[lax.rem(step, 2)], beta_smem.at[lax.rem(step, 2)]
            own = tiles.unknown(warpgroup, step)
            channels = pl.ds(own * HALF, HALF)
            half = _Half(own, bounds, anchors_smem.at[own])
            if not form:
                tell_decays(own)
                plgpu.commit_smem()
            stored = sums_smem.at[own] if form else decay_smem.at[0, own]

            def store_sums(start):
                columns = pl.ds(own * HALF + start, stored.shape[1])
                plgpu.copy_smem_to_gmem(stored, sums_out.at[row, tokens, head, columns])

            sums = half.sum_decays(slots_of_decays(own), stored)
            if form:
                plgpu.barrier_arrive(decay_out.at[0])
            store_sums(0)
            is_first = half.bound(0) >= (tiles.iota(0) >> TILE_BITS << TILE_BITS)
            # The sum before a document's first token is zero. A multiplication and an addition are one instruction.
            before = half.of_tiles(0, 1, 2, 3), jnp.where(is_first, jnp.float32(0), jnp.float32(1))
            late = jnp.exp2(sums - before[0] * before[1])
            depth = before[0] * before[1] - sums
            depth_out[0][own, row, head, tokens] = jnp.max(depth, axis=1)

            plgpu.barrier_wait(keys_in.at[0])
            query, key = (shared.wide(keys_smem.at[0, number, own]) for number in (QUERY, KEY))
            early_of(own, 0)[...] = (key * jnp.exp2(depth)).astype(jnp.bfloat16)
            itself_smem[lax.rem(step, 2), own] = jnp.sum(query * key, axis=1)
            late_query = query * late
            keys_smem[0, QUERY, own] = late_query.astype(jnp.bfloat16)
            is_seen = half.bound(0) < 0
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if form:
                stored[...] = tiles.columns(sums, HALF // 2, HALF // 2)
            else:
                plgpu.barrier_arrive(decay_out.at[0])
            reading = (late_query * jnp.exp2(half.of_tiles(0, 1, 2, 3))).astype(jnp.bfloat16)
            leaving_smem[0, own] = tiles.keep_where(is_seen, reading)

            late_key = key * late
            keys_smem[0, KEY, own] = late_key.astype(jnp.bfloat16)
            solving = (late_key * jnp.exp2(half.of_tiles(0, 1, 2, 3))).astype(jnp.bfloat16)
            early = jnp.exp2(half.of_tiles(1, 2, 3, 4) - sums) * key
            for number, after in enumerate(((1, 2, 3, 3), (2, 3, 3, 3), (3, 3, 3, 3)), 1):
                further = early if number == 1 else early * half.between(after, (1, 2, 3, 3))
                shared.store_first_rows(further.astype(jnp.bfloat16), early_of(own, number))
            plgpu.commit_smem()
            plgpu.barrier_arrive(is_staged)
            if form:
                store_sums(HALF // 2)
            plgpu.copy_smem_to_gmem(leaving_smem.at[0, own], reading_out.at[row, tokens, head, channels])

            plgpu.barrier_wait(is_staged)
            factors = [(keys_smem.at[0, own, side], cores.turned(early_smem.at[side])) for side in range(2)]
            under_way = cores.start([factors], (sum(APART),))
            wait_emptied(step, solving_out)
            solving_smem[0, own] = tiles.keep_where(is_seen, solving)
            plgpu.commit_smem()
            plgpu.barrier_arrive(solving_in.at[0])
            writing = (early * half.between((4, 4, 4, 4), (1, 2, 3, 4))).astype(jnp.bfloat16)
            writing = tiles.keep_where(half.bound(1) == CHUNK - 1, writing)
            if form:
                tell_decays(own)
            (matrix,) = cores.finish(under_way)
            matrix = tiles.by_tiles_apart(matrix, STARTS)
            if not form:
                plgpu.barrier_arrive(is_multiplied)
            plgpu.barrier_arrive(keys_out.at[0])
            leaving_smem[1, own] = writing

            @pl.when(own == 0)
            def _():
                itself = (tiles.down(shared.row(itself_smem.at[lax.rem(step, 2), side])) for side in range(2))
                give_products(step, jnp.where(tiles.iota(0) == tiles.iota(1), sum(itself), matrix), half.bound(0))

            @pl.when(own == 1)
            def _():
                give_lower(step, matrix * tiles.down(shared.row(beta)), half.bound(0))

            plgpu.copy_smem_to_gmem(leaving_smem.at[1, own], writing_out.at[row, tokens, head, channels])
            if not form:
                # The next chunk's decays are told where early tokens lie.
                plgpu.barrier_wait(is_multiplied)
            is_kept = jnp.where(bounds_smem[lax.rem(step, 2), 0, CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0))
            end = shared.row(anchors_smem.at[own, ANCHORS.index(63)])
            kept_out[row, chunk, head, channels] = is_kept * jnp.exp2(end)
            if form:  # else all warps meet before the next sums lie there
                cores.wait_for_warps()
            return ()

        def pair_scalar(step, _):
            row, chunk, head, tokens = place(step)
            slot = slot_of(step)
            plgpu.barrier_wait(decay_in.at[slot])
            beta = beta_smem.at[slot]
            own = tiles.unknown(warpgroup, step)
            channels = pl.ds(own * HALF, HALF)
            half = _Half(own, bounds_smem.at[slot], None)
            decays = shared.row_across(decay_smem.at[slot]) * LOG2_E
            is_passed = tiles.within(half.bound(0) + 1, tiles.iota(0) - half.bound(0))
            anchors_smem[own, 0] = jnp.sum(jnp.where(is_passed, decays, 0), axis=1)
            plgpu.commit_smem()

            def late():
                return tiles.down(shared.row(anchors_smem.at[own, 0]))

            def early():
                return shared.row_across(anchors_smem.at[own])

            end = anchors_smem[own, 0, CHUNK - 1]

            @pl.when(own == 0)
            def _():
                sums = shared.row(anchors_smem.at[own, 0])
                sums_out[row, head, tokens] = sums
                is_kept = jnp.where(bounds_smem[slot, 0, CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0))
                kept_out[row, chunk, head] = is_kept * jnp.exp2(sums)  # of which the last one counts

            plgpu.barrier_wait(keys_in.at[slot])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            factors = [
                (keys_smem.at[slot, own, side], cores.turned(keys_smem.at[slot, KEY, side])) for side in range(2)
            ]
            under_way = cores.start([factors], (CHUNK,))
            from_start = jnp.where(half.bound(0) < 0, jnp.exp2(late()), 0)
            to_end = jnp.where(half.bound(1) == CHUNK - 1, jnp.exp2(end - late()), 0)
            reading = shared.wide(keys_smem.at[slot, QUERY, own]) * from_start
            leaving_smem[0, own] = reading.astype(jnp.bfloat16)
            key = shared.wide(keys_smem.at[slot, KEY, own])
            leaving_smem[1, own] = (key * to_end).astype(jnp.bfloat16)
            wait_emptied(step, solving_out)
            solving_smem[slot, own] = (key * from_start).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(solving_in.at[slot])
            for number, target in enumerate((reading_out, writing_out)):
                plgpu.copy_smem_to_gmem(leaving_smem.at[number, own], target.at[row, tokens, head, channels])
            (matrix,) = cores.finish(under_way)
            plgpu.barrier_arrive(keys_out.at[slot])
            matrix *= jnp.exp2(late() - early())

            @pl.when(own == 0)
            def _():
                give_products(step, matrix, half.bound(0))  # a token with itself does not decay

            @pl.when(own == 1)
            def _():
                give_lower(step, matrix * tiles.down(shared.row(beta)), half.bound(0))

            plgpu.barrier_arrive(decay_out.at[slot])
            return ()

        def solve(step, _):
            row, chunk, head, tokens = place(step)
            slot = slot_of(step)
            plgpu.barrier_wait(lower_in)
            inverse = invert(lower_smem, parts_smem, inverse_smem).astype(jnp.bfloat16)
            plgpu.barrier_arrive(lower_out)
            inverse_smem[...] = inverse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(inverse_smem, inverse_out.at[row, chunk, head])
            plgpu.barrier_wait(values_in.at[slot])
            by_token = inverse.astype(jnp.float32) * shared.row_across(solving_beta_smem.at[slot])
            by_token = by_token.astype(jnp.bfloat16)

            def multiply(ref, target):
                """Each half of a matrix [64, 128], scaled by beta, by the inverse, in its place."""
                results = cores.products([[(by_token, ref.at[side])] for side in range(2)], (HALF, HALF))
                plgpu.commit_smem()  # every warp has read all
                for side, result in enumerate(results):
                    ref[side] = result.astype(jnp.bfloat16)
                plgpu.commit_smem()
                for side in range(2):
                    plgpu.copy_smem_to_gmem(ref.at[side], target.at[row, tokens, head, pl.ds(side * HALF, HALF)])

            # Those who pair wait for the place of keys, nobody for that of values.
            plgpu.barrier_wait(solving_in.at[slot])
            multiply(solving_smem.at[slot], from_state_out)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(solving_out.at[slot])
            multiply(values_smem.at[slot], from_value_out)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(values_out.at[slot])
            return ()

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            if form:
                tell_decays(warpgroup)
                plgpu.commit_smem()
            lax.fori_loop(0, steps, pair_scalar if is_scalar else pair, ())
            wait_last(solving_out)
            plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 1)
            def _():
                plgpu.barrier_wait(lower_out)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="increase")
            lax.fori_loop(0, steps, solve, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 3)
        def _():
            plgpu.set_max_registers(REGISTERS[3], action="decrease")
            if form:
                load_decays(0)
            lax.fori_loop(0, steps, load, ())
            load_values(steps - 1)
            if not form:
                wait_last(decay_out)
            wait_last(keys_out)
            wait_last(values_out)

    narrow, wide = jnp.bfloat16, jnp.float32
    tokens, square = (batch, length, heads, WIDTH), (batch, chunks, heads, CHUNK, CHUNK)
    of_heads, width = ((batch, heads, length), CHUNK) if is_scalar else (tokens, WIDTH)
    shapes = [(square, narrow), (square, narrow), (of_heads, wide), *[(tokens, narrow)] * 4]
    shapes += [((batch, chunks, heads, width), wide)]
    shapes += [] if is_scalar else [((2, batch, heads, length), wide)]
    if is_scalar:
        of_decays = {"decay_smem": plgpu.SMEM((slots, 1, CHUNK), wide)}
    elif form:
        of_decays = {
            "raw_smem": launcher.swizzled((2, CHUNK, HALF), narrow),
            "gate_smem": plgpu.SMEM((2, 2, HALF), wide),
            # Of half of the columns, stored one half after the other: there is no memory for more.
            "sums_smem": launcher.swizzled((2, CHUNK, HALF // 2), wide),
        }
    else:
        of_decays = {"decay_smem": launcher.swizzled((slots, 2, CHUNK, HALF), wide)}
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    products, inverse, sums, *parts = launcher.launch(
        body,
        (query, key, value, decay, beta, first, last, *gated),
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        scratch={
            **of_decays,
            "keys_smem": buffer((slots, 2, 2, CHUNK, HALF)),
            "values_smem": buffer((slots, 2, CHUNK, HALF)),
            **({} if is_scalar else {"early_smem": buffer((2, sum(APART), HALF))}),
            "products_smem": buffer((CHUNK, CHUNK)),
            "leaving_smem": buffer((2, 2, CHUNK, HALF)),
            "solving_smem": buffer((slots, 2, CHUNK, HALF)),
            "inverse_smem": buffer((CHUNK, CHUNK)),
            "lower_smem": buffer((2, CHUNK, CHUNK)),
            "parts_smem": buffer((2, CHUNK, CHUNK)),
            "anchors_smem": plgpu.SMEM((2, 1, CHUNK) if is_scalar else (2, len(ANCHORS), HALF), wide),
            "itself_smem": plgpu.SMEM((2, 2, CHUNK), wide),
            "bounds_smem": plgpu.SMEM((2, 2, CHUNK), jnp.int32),
            "beta_smem": plgpu.SMEM((2, CHUNK), wide),
            "solving_beta_smem": plgpu.SMEM((slots, 1, CHUNK), wide),
            "decay_in": plgpu.Barrier(num_arrivals=4 if is_scalar else 7 if form else 5, num_barriers=slots),
            "keys_in": plgpu.Barrier(num_arrivals=4, num_barriers=slots),
            "values_in": plgpu.Barrier(num_arrivals=3, num_barriers=slots),
            **{name: plgpu.Barrier(num_arrivals=2, num_barriers=slots) for name in ("decay_out", "keys_out")},
            **{name: plgpu.Barrier(num_arrivals=2) for name in ("is_staged", "is_multiplied")},
            "solving_in": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            **{name: plgpu.Barrier(num_arrivals=1, num_barriers=slots) for name in ("solving_out", "values_out")},
            **{name: plgpu.Barrier(num_arrivals=1) for name in ("lower_in", "lower_out")},
        },
        name="prepare_chunks",
        grid=(workers,),
        grid_names=("worker",),
        num_threads=4,
        thread_name="warpgroup",
    )
    if is_scalar:
        return products, inverse, jnp.moveaxis(sums, 1, 2), [*parts[:-1], parts[-1][..., CHUNK - 1]], None
    *parts, depths = parts
    return products, inverse, sums, parts, depths
