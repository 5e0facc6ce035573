"""What a chunk's tokens read, write and share, in Pallas Mosaic GPU for Hopper.

The same as `chunk_kernels.prepare`. Two warpgroups each take half of the key channels, sum decays and stage what pairs
of tokens are made of; one of them then makes the matrix of query and key, the other that of key and key. A third
inverts the latter and multiplies by the inverse, while the two are at the next chunk; a fourth copies.

A late token decays from the first one of its tile on. An early one grows back to it, for pairs in one tile; or decays
up to the first token of the next tile and on to that of the second and third next, for pairs in tiles apart: a product
with each of the four gives every pair of tiles. Where the two are of different documents factors may overflow; their
products are never used. Results of a chunk are worthless if a token is deeper in its tile than `chunk_kernels.DEEPEST`.

One decay a head scales rows and columns of a single product, however deep.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, CHUNK_BITS, LOG2_E, TILE, TILE_BITS
from pallas_kernels.linear_attention.hopper_tiles import HALF

WIDTH = 2 * HALF
QUERY, KEY = 0, 1
ANCHORS = (0, 16, 32, 48, 63)
"""Rows of a chunk whose sums of decays are read as such: tiles' first ones, and the last."""
APART = (CHUNK, CHUNK, 2 * TILE, TILE)
"""How many early tokens have a partner no, one, two and three tiles later."""
REGISTERS = 184, 120
"""Of a thread that pairs tokens, and of one that inverts; 24 remain for copying."""


class _Half:
    """One warpgroup's work on one chunk."""

    def __init__(self, own, bounds, table):
        self.own, self.bounds, self.table = own, bounds, table

    def bound(self, number: int) -> jax.Array:
        return tiles.down(tiles.row(self.bounds.at[number]))

    def sum_decays(self, decay, slots):
        """Sums of the decays that a token's state passes: not that of the first of its document.

        Of decays as told by two numbers in bfloat16: all sums round one alike, so that it leaves their differences.
        """
        parts = tiles.parts(tiles.matrix(decay) * LOG2_E, 2)
        for slot, part in zip(slots, parts, strict=True):
            slot[...] = part
        plgpu.commit_smem()
        mask = tiles.within(self.bound(0) + 1, tiles.iota(0) - self.bound(0))
        mask = jnp.where(mask, jnp.float32(1), jnp.float32(0)).astype(jnp.bfloat16)
        sums = tiles.product(*((mask, slot) for slot in slots))
        decay[...] = sums
        tiles.keep_rows(sums, self.table, ANCHORS)
        plgpu.commit_smem()
        return sums

    def of_tiles(self, *rows: int) -> jax.Array:
        """The sums of decays at the rows `ANCHORS[row]`, one for each tile."""
        return tiles.rows_of_tiles(self.table, rows)

    def between(self, after: Sequence[int], before: Sequence[int]) -> jax.Array:
        return jnp.exp2(self.of_tiles(*after) - self.of_tiles(*before))


def _inverse(lower, parts) -> jax.Array:
    """`(I + lower)^-1` by blocks of doubled size in bfloat16, see `xla`, and a Newton step with twice its digits.

    `lower` and `parts` are pairs of refs, high and low.
    """
    differing = tiles.iota(0) ^ tiles.iota(1)
    high, low = (tiles.matrix(lower.at[number]).astype(jnp.float32) for number in range(2))
    start = jnp.where(differing == 0, 1.0, jnp.where(differing == 1, -(high + low), 0.0))

    def double(bit, inverse):
        narrow, kept = inverse.astype(jnp.bfloat16), parts.at[bit & 1]  # the other may still be read

        def keep():
            kept[...] = narrow
            plgpu.commit_smem()

        # The inverse so far is zero outside its blocks: their product with all of `lower` holds that with the corners.
        (corner,) = tiles.products([[(narrow, lower.at[0])]], (CHUNK,), meanwhile=keep)
        return inverse - tiles.product((tiles.corners(corner.astype(jnp.bfloat16), bit), kept))

    inverse = lax.fori_loop(1, CHUNK_BITS, double, start)
    plgpu.commit_smem()
    for number, part in enumerate(tiles.parts(inverse, 2)):
        parts[number] = part
    plgpu.commit_smem()
    product = tiles.product((lower.at[0], parts.at[0]), (lower.at[0], parts.at[1]), (lower.at[1], parts.at[0]))
    residual = jnp.where(tiles.iota(0) == tiles.iota(1), 1.0, 0.0) - inverse - product
    plgpu.commit_smem()
    parts[1] = residual.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return inverse + tiles.product((inverse.astype(jnp.bfloat16), parts.at[1]))


def prepare(query, key, value, log_decay, beta, first, last):
    """(products, inverse, sums, depth, parts) as `prepare` of `pallas_triton` has them."""
    batch, length, heads, _ = value.shape
    chunks, group = length // CHUNK, heads // query.shape[2]
    total = batch * chunks * heads
    workers = min(launcher.num_multiprocessors(), total)
    is_scalar = log_decay.ndim == 3
    beta = jnp.moveaxis(beta, 1, 2)
    log_decay = jnp.moveaxis(log_decay, 1, 2) if is_scalar else log_decay

    def body(
        query, key, value, decay, beta, first, last,
        products_out, inverse_out, sums_out, depth_out, from_state_out, from_value_out, writing_out, reading_out,
        kept_out, *, decay_smem, keys_smem, values_smem, early_smem, leaving_smem, solving_smem, inverse_smem,
        lower_smem, parts_smem, anchors_smem, itself_smem, bounds_smem, beta_smem, value_beta_smem,
        decay_in, decay_out, keys_in, keys_out, values_in, values_out, is_staged, is_multiplied,
        lower_in, lower_out, solving_in, solving_out,
    ):  # fmt: skip
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        steps = pl.cdiv(total - worker, workers)

        def place(step):
            task = worker + step * workers
            head, rest = lax.rem(task, heads), task // heads
            chunk = lax.rem(rest, chunks)
            return rest // chunks, chunk, head, pl.ds(chunk * CHUNK, CHUNK)

        def wait_unless_first(step, barrier):
            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(barrier)

        def load(step, _):
            row, _, head, tokens = place(step)
            halves = [pl.ds(half * HALF, HALF) for half in range(2)]
            wait_unless_first(step, decay_out)
            if is_scalar:
                plgpu.copy_gmem_to_smem(decay.at[row, head, tokens], decay_smem.at[0], decay_in)
            else:
                for half, channels in enumerate(halves):
                    plgpu.copy_gmem_to_smem(decay.at[row, tokens, head, channels], decay_smem.at[half], decay_in)
            for number, source in enumerate((first, last)):
                plgpu.copy_gmem_to_smem(source.at[row, tokens], bounds_smem.at[lax.rem(step, 2), number], decay_in)
            wait_unless_first(step, keys_out)
            for half, channels in enumerate(halves):
                for number, source in enumerate((query, key)):
                    target = keys_smem.at[number, half]
                    plgpu.copy_gmem_to_smem(source.at[row, tokens, head // group, channels], target, keys_in)
            plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], beta_smem.at[lax.rem(step, 2)], keys_in)
            wait_unless_first(step, values_out)
            for half, channels in enumerate(halves):
                plgpu.copy_gmem_to_smem(value.at[row, tokens, head, channels], values_smem.at[half], values_in)
            plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], value_beta_smem, values_in)
            return ()

        def give_products(step, matrix):
            row, chunk, head, _ = place(step)
            target = early_smem.at[0, 0] if is_scalar else early_smem.at[3, 0]
            if is_scalar:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            target[...] = matrix.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, products_out.at[row, chunk, head])

        def give_lower(step, lower):
            wait_unless_first(step, lower_out)
            for number, part in enumerate(tiles.parts(lower, 2)):
                lower_smem[number] = part
            plgpu.commit_smem()
            plgpu.barrier_arrive(lower_in)

        def give_solving(step, own, solving):
            wait_unless_first(step, solving_out)
            solving_smem[own] = solving
            plgpu.commit_smem()
            plgpu.barrier_arrive(solving_in)

        def pair(step, _):
            row, chunk, head, tokens = place(step)
            plgpu.barrier_wait(decay_in)
            bounds, beta = bounds_smem.at[lax.rem(step, 2)], beta_smem.at[lax.rem(step, 2)]
            own = tiles.unknown(warpgroup, step)
            channels = pl.ds(own * HALF, HALF)
            half = _Half(own, bounds, anchors_smem.at[own])
            sums = half.sum_decays(decay_smem.at[own], [early_smem.at[number, own] for number in range(2)])
            plgpu.copy_smem_to_gmem(decay_smem.at[own], sums_out.at[row, tokens, head, channels])
            is_first = half.bound(0) >= (tiles.iota(0) >> TILE_BITS << TILE_BITS)
            # The sum before a document's first token is zero.
            depth = jnp.where(is_first, 0, half.of_tiles(0, 1, 2, 3)) - sums
            depth_out[own, row, head, tokens] = jnp.max(depth, axis=1)
            late = jnp.exp2(-depth)

            plgpu.barrier_wait(keys_in)
            query, key = (tiles.matrix(keys_smem.at[number, own]) for number in (QUERY, KEY))
            itself_smem[lax.rem(step, 2), own] = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), axis=1)
            late_query = query.astype(jnp.float32) * late
            keys_smem[QUERY, own] = late_query.astype(jnp.bfloat16)
            is_seen = half.bound(0) < 0
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(decay_out)
            reading = jnp.where(is_seen, late_query * jnp.exp2(half.of_tiles(0, 1, 2, 3)), 0)
            leaving_smem[own] = reading.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(leaving_smem.at[own], reading_out.at[row, tokens, head, channels])

            late_key = key.astype(jnp.float32) * late
            keys_smem[KEY, own] = late_key.astype(jnp.bfloat16)
            by_row = jnp.where(is_seen, tiles.down(tiles.row(beta)), 0)
            solving = (late_key * by_row * jnp.exp2(half.of_tiles(0, 1, 2, 3))).astype(jnp.bfloat16)
            growing = jnp.exp2(depth)
            early_smem[0, own] = (key.astype(jnp.float32) * growing).astype(jnp.bfloat16)
            early = jnp.exp2(half.of_tiles(1, 2, 3, 4) - sums) * key.astype(jnp.float32)
            early_smem[1, own] = early.astype(jnp.bfloat16)
            early_smem[2, own] = (early * half.between((2, 3, 3, 3), (1, 2, 3, 3))).astype(jnp.bfloat16)
            early_smem[3, own] = (early * half.between((3, 3, 3, 3), (1, 2, 3, 3))).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(is_staged)
            writing = early * half.between((4, 4, 4, 4), (1, 2, 3, 4))
            writing = jnp.where(half.bound(1) == CHUNK - 1, writing, 0).astype(jnp.bfloat16)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            leaving_smem[own] = writing
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(leaving_smem.at[own], writing_out.at[row, tokens, head, channels])

            plgpu.barrier_wait(is_staged)
            factors = [
                [
                    (keys_smem.at[own, side], tiles.turned(early_smem.at[number, side, pl.ds(0, size)]))
                    for side in range(2)
                ]
                for number, size in enumerate(APART)
            ]
            matrix = tiles.by_tiles_apart(tiles.products(factors, APART))
            plgpu.barrier_arrive(is_multiplied)
            plgpu.barrier_wait(is_multiplied)
            plgpu.barrier_arrive(keys_out)

            is_earlier = tiles.within(half.bound(0), tiles.iota(0) - half.bound(0))

            @pl.when(own == 0)
            def _():
                itself = (tiles.down(tiles.row(itself_smem.at[lax.rem(step, 2), side])) for side in range(2))
                itself = jnp.where(tiles.iota(0) == tiles.iota(1), sum(itself), 0)
                give_products(step, jnp.where(is_earlier, matrix, itself))

            @pl.when(own == 1)
            def _():
                give_lower(step, jnp.where(is_earlier, matrix * tiles.down(tiles.row(beta)), 0))

            is_kept = jnp.where(bounds_smem[lax.rem(step, 2), 0, CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0))
            end = tiles.row(anchors_smem.at[own, ANCHORS.index(63)])
            kept_out[row, chunk, head, channels] = is_kept * jnp.exp2(end)
            give_solving(step, own, solving)
            return ()

        def pair_scalar(step, _):
            row, chunk, head, tokens = place(step)
            plgpu.barrier_wait(decay_in)
            beta = beta_smem.at[lax.rem(step, 2)]
            own = tiles.unknown(warpgroup, step)
            channels = pl.ds(own * HALF, HALF)
            half = _Half(own, bounds_smem.at[lax.rem(step, 2)], None)
            decays = tiles.row_across(decay_smem) * LOG2_E
            is_passed = tiles.within(half.bound(0) + 1, tiles.iota(0) - half.bound(0))
            anchors_smem[own, 0] = jnp.sum(jnp.where(is_passed, decays, 0), axis=1)
            plgpu.commit_smem()
            plgpu.barrier_arrive(decay_out)

            def late():
                return tiles.down(tiles.row(anchors_smem.at[own, 0]))

            def early():
                return tiles.row_across(anchors_smem.at[own])

            end = jnp.sum(jnp.where(tiles.iota(1) == CHUNK - 1, early(), 0), axis=1)

            @pl.when(own == 0)
            def _():
                sums_out[row, head, tokens] = tiles.row(anchors_smem.at[own, 0])
                is_kept = jnp.where(bounds_smem[lax.rem(step, 2), 0, CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0))
                kept_out[row, chunk, head] = is_kept * jnp.exp2(end)

            plgpu.barrier_wait(keys_in)

            def leave(matrix, target):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                leaving_smem[own] = matrix.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(leaving_smem.at[own], target.at[row, tokens, head, channels])

            from_start = jnp.where(half.bound(0) < 0, jnp.exp2(late()), 0)
            leave(tiles.matrix(keys_smem.at[QUERY, own]).astype(jnp.float32) * from_start, reading_out)
            key = tiles.matrix(keys_smem.at[KEY, own]).astype(jnp.float32)
            solving = (key * (from_start * tiles.down(tiles.row(beta)))).astype(jnp.bfloat16)
            matrix = tiles.product(
                *((keys_smem.at[own, side], tiles.turned(keys_smem.at[KEY, side])) for side in range(2))
            )
            plgpu.barrier_arrive(keys_out)
            matrix *= jnp.exp2(late() - early())

            @pl.when(own == 0)
            def _():
                # A token with itself does not decay.
                is_counted = tiles.within(half.bound(0), tiles.iota(0) - half.bound(0) + 1)
                give_products(step, jnp.where(is_counted, matrix, 0))

            @pl.when(own == 1)
            def _():
                is_earlier = tiles.within(half.bound(0), tiles.iota(0) - half.bound(0))
                give_lower(step, jnp.where(is_earlier, matrix * tiles.down(tiles.row(beta)), 0))

            to_end = jnp.where(half.bound(1) == CHUNK - 1, jnp.exp2(tiles.down(end) - late()), 0)
            leave(key * to_end, writing_out)
            give_solving(step, own, solving)
            return ()

        def solve(step, _):
            row, chunk, head, tokens = place(step)
            plgpu.barrier_wait(values_in)
            for side in range(2):
                beta = tiles.down(tiles.row(value_beta_smem))
                values = tiles.matrix(values_smem.at[side]).astype(jnp.float32)
                values_smem[side] = (values * beta).astype(jnp.bfloat16)
            plgpu.barrier_wait(lower_in)
            inverse = _inverse(lower_smem, parts_smem).astype(jnp.bfloat16)
            plgpu.barrier_arrive(lower_out)
            inverse_smem[...] = inverse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(inverse_smem, inverse_out.at[row, chunk, head])

            def multiply(ref, target):
                """Each half of a matrix [64, 128] by the inverse, in its place."""
                results = [tiles.product((inverse_smem, ref.at[side])).astype(jnp.bfloat16) for side in range(2)]
                plgpu.commit_smem()  # every warp has read all
                for side, result in enumerate(results):
                    ref[side] = result
                plgpu.commit_smem()
                for side in range(2):
                    plgpu.copy_smem_to_gmem(ref.at[side], target.at[row, tokens, head, pl.ds(side * HALF, HALF)])

            multiply(values_smem, from_value_out)
            plgpu.barrier_wait(solving_in)
            multiply(solving_smem, from_state_out)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(values_out)
            plgpu.barrier_arrive(solving_out)
            return ()

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            lax.fori_loop(0, steps, pair_scalar if is_scalar else pair, ())
            plgpu.barrier_wait(solving_out)
            plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 1)
            def _():
                plgpu.barrier_wait(lower_out)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="increase" if REGISTERS[1] > 128 else "decrease")
            lax.fori_loop(0, steps, solve, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 3)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            lax.fori_loop(0, steps, load, ())
            for emptied in (decay_out, keys_out, values_out):
                plgpu.barrier_wait(emptied)

    narrow, wide = jnp.bfloat16, jnp.float32
    tokens, square = (batch, length, heads, WIDTH), (batch, chunks, heads, CHUNK, CHUNK)
    of_heads, width = ((batch, heads, length), CHUNK) if is_scalar else (tokens, WIDTH)
    shapes = [(square, narrow), (square, narrow), (of_heads, wide), ((2, batch, heads, length), wide)]
    shapes += [(tokens, narrow)] * 4 + [((batch, chunks, heads, width), wide)]
    buffer = functools.partial(launcher.swizzled, dtype=narrow)
    products, inverse, sums, depth, *parts = launcher.launch(
        body,
        (query, key, value, log_decay, beta, first, last),
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        scratch={
            "decay_smem": plgpu.SMEM((1, CHUNK), wide) if is_scalar else launcher.swizzled((2, CHUNK, HALF), wide),
            "keys_smem": buffer((2, 2, CHUNK, HALF)),
            "values_smem": buffer((2, CHUNK, HALF)),
            "early_smem": buffer((1, 1, CHUNK, HALF) if is_scalar else (4, 2, CHUNK, HALF)),
            "leaving_smem": buffer((2, CHUNK, HALF)),
            "solving_smem": buffer((2, CHUNK, HALF)),
            "inverse_smem": buffer((CHUNK, CHUNK)),
            "lower_smem": buffer((2, CHUNK, CHUNK)),
            "parts_smem": buffer((2, CHUNK, CHUNK)),
            "anchors_smem": plgpu.SMEM((2, 1, CHUNK) if is_scalar else (2, len(ANCHORS), HALF), wide),
            "itself_smem": plgpu.SMEM((2, 2, CHUNK), wide),
            "bounds_smem": plgpu.SMEM((2, 2, CHUNK), jnp.int32),
            "beta_smem": plgpu.SMEM((2, CHUNK), wide),
            "value_beta_smem": plgpu.SMEM((CHUNK,), wide),
            "decay_in": plgpu.Barrier(num_arrivals=3 if is_scalar else 4),
            "keys_in": plgpu.Barrier(num_arrivals=5),
            "values_in": plgpu.Barrier(num_arrivals=3),
            **{name: plgpu.Barrier(num_arrivals=2) for name in ("decay_out", "keys_out", "is_staged", "is_multiplied")},
            "solving_in": plgpu.Barrier(num_arrivals=2),
            **{name: plgpu.Barrier(num_arrivals=1) for name in ("values_out", "lower_in", "lower_out", "solving_out")},
        },
        name="prepare_chunks",
        grid=(workers,),
        grid_names=("worker",),
        num_threads=4,
        thread_name="warpgroup",
    )
    if is_scalar:
        sums, kept = jnp.moveaxis(sums, 1, 2), parts[-1][..., 0]
        return products, inverse, sums, jnp.zeros_like(sums), [*parts[:-1], kept]
    depth = jnp.moveaxis(jnp.max(depth, axis=0), 1, 2)
    return products, inverse, sums, depth, parts
