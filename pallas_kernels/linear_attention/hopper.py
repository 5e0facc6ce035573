"""Gradients of the delta rule with one decay a channel, chunk by chunk, in Pallas Mosaic GPU for Hopper.

The same sums as `chunk_kernels.gradients`, letters and masks as there. One warpgroup copies what the next chunk needs
while two others compute, each for half of the key channels; every product runs on tensor cores from shared memory or
registers. Decays within a tile are told from its first token, so no token may be deeper there than `DEEPEST`.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, DEEPEST, TILE_BITS
from pallas_kernels.linear_attention.hopper_tiles import HALF

WIDTH = 2 * HALF
ANCHORS = (0, 16, 32, 48, 63)
"""Rows of a chunk whose sums of decays are read as such: tiles' first ones, and the last."""
OUTPUT, SOLVED, WRITTEN = 0, 1, 2
STATE_GRADIENT, STATE = 0, 1


def reason_against(key_width: int, value_width: int) -> str | None:
    """Why this kernel cannot take such widths; None if it can."""
    return None if key_width == value_width == WIDTH else f"needs widths of {WIDTH}, got {key_width} and {value_width}"


class _Half:
    """One warpgroup's work on one chunk: the key channels of its half."""

    def __init__(self, warpgroup, values, states, keys, sums, anchors, vectors, bounds, pairs, itself, end):
        self.warpgroup, self.values, self.states, self.keys = warpgroup, values, states, keys
        self.sums, self.anchors, self.vectors, self.bounds = sums, anchors, vectors, bounds
        self.pairs, self.itself, self.end = pairs, itself, end

    def staging(self, number: int):
        """One of four matrices [64, 64], where this half's states were."""
        return self.states.at[number // 2, self.warpgroup, :, pl.ds(number % 2 * HALF, HALF)]

    def anchor(self, row: int) -> jax.Array:
        ref = self.anchors.at[self.warpgroup, ANCHORS.index(row)]
        return tiles.across(launcher.load(ref, tiles.column_layout()))

    def pair_matrices(self):
        """One half makes the gradient of P, the other that of L, and each its transpose."""
        row = tiles.iota(0)
        first, last = (tiles.down(tiles.row(self.bounds.at[number])) for number in range(2))
        sign = jnp.where(self.warpgroup == 0, jnp.float32(1), jnp.float32(-1))
        own, written = self.values.at[self.warpgroup], self.values.at[WRITTEN]
        matrix = tiles.product((own, tiles.turned(written))) * sign
        self.pairs[self.warpgroup] = jnp.where(tiles.within(first, row - first), matrix, 0).astype(jnp.bfloat16)

        @pl.when(self.warpgroup == 0)
        def _():
            self.itself[...] = jnp.sum(jnp.where(row == tiles.iota(1), matrix, 0), axis=1)

        matrix = tiles.product((written, tiles.turned(own))) * sign
        self.pairs[2 + self.warpgroup] = jnp.where(tiles.within(row + 1, last - row), matrix, 0).astype(jnp.bfloat16)

    def of_states(self, is_paired):
        """Gradients of key, sums ([64, 64] float32) and beta [64] by what crosses the chunk's ends.

        That of query is kept aside.
        """
        is_seen = tiles.down(tiles.row(self.bounds.at[0])) < 0
        is_writing = tiles.down(tiles.row(self.bounds.at[1])) == CHUNK - 1
        state, state_gradient = (self.states.at[kind, self.warpgroup] for kind in (STATE, STATE_GRADIENT))
        query, key = (self.keys.at[number, self.warpgroup] for number in range(2))
        sums = self.sums.at[self.warpgroup]

        def inner(start):
            columns = pl.ds(start, HALF)
            one, other = (tiles.matrix(ref.at[:, columns]).astype(jnp.float32) for ref in (state, state_gradient))
            return jnp.sum(one * other, axis=1)

        carried = inner(0) + inner(HALF)
        end = tiles.row(self.anchors.at[self.warpgroup, ANCHORS.index(63)])
        kept = jnp.where(self.bounds.at[0][CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0)) * jnp.exp2(end)
        self.end[self.warpgroup] = kept * carried
        # To the state that leaves.
        leaving = tiles.product((self.values.at[WRITTEN], tiles.turned(state_gradient)))
        key_gradient = jnp.where(is_writing, jnp.exp2(self.anchor(63) - tiles.matrix(sums)), 0) * leaving
        leaving = tiles.matrix(key).astype(jnp.float32) * key_gradient
        parts = [self.staging(number) for number in (0, 1)]
        for ref, part in zip(parts, tiles.parts(leaving, 2), strict=True):
            ref[...] = part
        plgpu.commit_smem()
        # Sums over tokens as a product with ones, all of whose rows are the same.
        end_gradient = tiles.product(*((tiles.ones(), part) for part in parts))
        end_gradient += tiles.across(launcher.load(self.end.at[self.warpgroup], tiles.column_layout()))
        sums_gradient = jnp.where(tiles.iota(0) == CHUNK - 1, end_gradient, 0) - leaving
        # From the state that enters.
        from_state = tiles.product((self.values.at[SOLVED], tiles.turned(state)))
        from_state = jnp.where(is_seen, jnp.exp2(tiles.matrix(sums)), 0) * from_state
        by_key = tiles.matrix(key).astype(jnp.float32) * from_state
        by_beta = -jnp.sum(by_key, axis=1)
        beta = tiles.down(tiles.row(self.vectors.at[0]))
        key_gradient -= beta * from_state
        sums_gradient -= beta * by_key
        query_gradient = tiles.product((self.values.at[OUTPUT], tiles.turned(state)))
        plgpu.barrier_arrive(is_paired)
        query_gradient = jnp.where(is_seen, jnp.exp2(tiles.matrix(sums)), 0) * query_gradient
        sums_gradient += tiles.matrix(query).astype(jnp.float32) * query_gradient
        plgpu.barrier_wait(is_paired)
        itself = tiles.down(tiles.row(self.itself))
        query_gradient += itself * tiles.matrix(key).astype(jnp.float32)
        key_gradient += itself * tiles.matrix(query).astype(jnp.float32)
        for ref, part in zip(self.kept_query_gradient(), tiles.parts(query_gradient, 2), strict=True):
            ref[...] = part
        return key_gradient, sums_gradient, by_beta

    def kept_query_gradient(self):
        """Two parts, in the place of values that are no longer read: registers are scarce."""
        return [self.values.at[self.warpgroup, :, pl.ds(start, HALF)] for start in (0, HALF)]

    def chosen(self, number: int, is_chosen: Callable[[int, int], bool]) -> jax.Array:
        return tiles.choose_tiles(tiles.matrix(self.pairs.at[number]), is_chosen)

    def of_tiles(self, *rows: int) -> jax.Array:
        """The sums of decays at the first tokens of the tiles `rows`, one for each tile."""
        return tiles.rows_of_tiles(self.anchors.at[self.warpgroup], rows)

    def rescaling(self, after: Sequence[int], before: Sequence[int]) -> jax.Array:
        return jnp.exp2(jnp.minimum(self.of_tiles(*after) - self.of_tiles(*before), 0))

    def over_late(self, number: int) -> jax.Array:
        """Of each late token, sum over early ones as told from the first token of its tile."""

        def apart(tile):
            return self.chosen(number, lambda row, column: row > column and column == tile), self.staging(0)

        total = tiles.product(apart(0)) * self.rescaling((1, 1, 2, 2), (1, 1, 1, 1)) + tiles.product(apart(1))
        within = self.chosen(number, lambda row, column: row == column), self.staging(1)
        return total * self.rescaling((2, 2, 2, 3), (2, 2, 2, 2)) + tiles.product(apart(2), within)

    def over_early(self) -> tuple[jax.Array, jax.Array]:
        """Of each early token, sums over late ones of later tiles, from the next tile's first token on; of its own."""

        def product(is_chosen):
            return tiles.product(*((self.chosen(number, is_chosen), self.staging(number)) for number in (2, 3)))

        def apart(tile):
            return product(lambda row, column: row < column and column == tile)

        total = apart(3) * self.rescaling((3, 3, 2, 2), (2, 2, 2, 2)) + apart(2)
        total = total * self.rescaling((2, 1, 1, 1), (1, 1, 1, 1)) + apart(1)
        return total, product(lambda row, column: row == column)

    def of_pairs(self, gradients, finish_query):
        """What pairs of tokens add.

        A late token decays from the first of its tile (or document in it) on. An early one decays up to the first
        token of the next tile, from where sums over tiles are carried on; within its tile it grows back to the first.
        """
        key_gradient, sums_gradient, by_beta = gradients
        query, key = (self.keys.at[number, self.warpgroup] for number in range(2))
        depth = self.sums.at[self.warpgroup]
        sums = tiles.matrix(depth)
        # The sum before a document's first token is zero.
        is_first = tiles.down(tiles.row(self.bounds.at[0])) >= (tiles.iota(0) >> TILE_BITS << TILE_BITS)
        depth[...] = jnp.where(is_first, 0, self.of_tiles(0, 1, 2, 3)) - sums

        def early():
            start = jnp.where(is_first, 0, self.of_tiles(0, 1, 2, 3))
            return jnp.exp2(jnp.minimum(self.of_tiles(1, 2, 3, 3) - start + tiles.matrix(depth), 0))

        def late():
            return jnp.exp2(-tiles.matrix(depth))

        def growing():
            return jnp.exp2(jnp.minimum(tiles.matrix(depth), DEEPEST))

        def staged(number):
            return tiles.matrix(self.staging(number)).astype(jnp.float32)

        self.staging(0)[...] = (tiles.matrix(key).astype(jnp.float32) * early()).astype(jnp.bfloat16)
        self.staging(1)[...] = (tiles.matrix(key).astype(jnp.float32) * growing()).astype(jnp.bfloat16)
        factor = late()
        self.staging(2)[...] = (tiles.matrix(query).astype(jnp.float32) * factor).astype(jnp.bfloat16)
        beta = tiles.down(tiles.row(self.vectors.at[0]))
        self.staging(3)[...] = (tiles.matrix(key).astype(jnp.float32) * factor * beta).astype(jnp.bfloat16)
        plgpu.commit_smem()
        # A pair adds the same number to the sum of its late token and takes it from that of its early one, up to
        # float32's rounding, so that decays which do not lie between them get next to nothing.
        by_query = self.over_late(0)
        finish_query(late() * by_query)
        sums_gradient += staged(2) * by_query
        by_late_key = self.over_late(1)
        sums_gradient += staged(3) * by_late_key
        by_late_key *= late()
        by_beta += jnp.sum(tiles.matrix(key).astype(jnp.float32) * by_late_key, axis=1)
        key_gradient += beta * by_late_key
        by_apart, by_near = self.over_early()
        key_gradient += early() * by_apart + growing() * by_near
        sums_gradient -= staged(0) * by_apart + staged(1) * by_near
        return key_gradient, sums_gradient, by_beta

    def decay_gradient(self, sums_gradient):
        """Sums over the tokens that a token's decay reaches."""
        for number, part in enumerate(tiles.parts(sums_gradient, 3)):
            self.staging(number)[...] = part
        plgpu.commit_smem()
        row = tiles.iota(0)
        first, last = (tiles.down(tiles.row(self.bounds.at[number])) for number in range(2))
        # The first token of a document decays nothing.
        mask = tiles.within(row, jnp.where(row > first, last - row + 1, 0))
        mask = jnp.where(mask, jnp.float32(1), jnp.float32(0)).astype(jnp.bfloat16)
        return tiles.product(*((mask, self.staging(number)) for number in range(3)))


def gradients(query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep):
    """Gradients of query and key [B, S, H, K] bfloat16, of the decay [B, S, H, K] and, by keys, of beta [B, S, H].

    The gradient of the decay takes the place of the sums; not in chunks that are deep (`is_deep` [B, N, H, 4] int32,
    four times the same): their sums stay, and their other gradients are worthless.
    """
    batch, length, heads, _ = written.shape
    chunks, group = length // CHUNK, heads // query.shape[2]
    total = batch * chunks * heads
    workers = min(launcher.num_multiprocessors(), total)
    beta = jnp.moveaxis(beta, 1, 2)

    def body(
        query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep,
        query_out, key_out, decay_out, beta_out,
        *, values_smem, states_smem, keys_smem, sums_smem, anchors_smem, vectors_smem, bounds_smem, is_deep_smem,
        pairs_smem, itself_smem, end_smem, values_in, states_in, keys_in, values_out, states_out, keys_out, is_paired,
        is_unpaired,
    ):  # fmt: skip
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        steps = pl.cdiv(total - worker, workers)

        def place(step):
            task = worker + step * workers
            head, rest = lax.rem(task, heads), task // heads
            return rest // chunks, lax.rem(rest, chunks), head

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(24, action="decrease")

            def load(step, _):
                row, chunk, head = place(step)
                tokens = pl.ds(chunk * CHUNK, CHUNK)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(values_out)

                for number, source in enumerate((output_gradient, solved, written)):
                    plgpu.copy_gmem_to_smem(source.at[row, tokens, head], values_smem.at[number], values_in)
                for number, source in enumerate((first, last)):
                    target = bounds_smem.at[lax.rem(step, 2), number]
                    plgpu.copy_gmem_to_smem(source.at[row, tokens], target, values_in)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(states_out)

                for half in range(2):
                    channels = pl.ds(half * HALF, HALF)
                    for kind, source in enumerate((state_gradient, state)):
                        target = states_smem.at[kind, half]
                        plgpu.copy_gmem_to_smem(source.at[row, chunk, head, channels], target, states_in)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(keys_out)

                for half in range(2):
                    channels = pl.ds(half * HALF, HALF)
                    for number, source in enumerate((query, key)):
                        plgpu.copy_gmem_to_smem(
                            source.at[row, tokens, head // group, channels], keys_smem.at[number, half], keys_in
                        )
                    plgpu.copy_gmem_to_smem(sums.at[row, tokens, head, channels], sums_smem.at[half], keys_in)
                    for number, anchor in enumerate(ANCHORS):
                        source = sums.at[row, chunk * CHUNK + anchor, head, channels]
                        plgpu.copy_gmem_to_smem(source, anchors_smem.at[half, number], keys_in)
                plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], vectors_smem.at[0], keys_in)
                plgpu.copy_gmem_to_smem(is_deep.at[row, chunk, head], is_deep_smem, keys_in)
                return ()

            lax.fori_loop(0, steps, load, ())
            for emptied in (values_out, states_out, keys_out):
                plgpu.barrier_wait(emptied)

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(240, action="increase")

            def compute(step, _):
                row, chunk, head = place(step)
                tokens, channels = pl.ds(chunk * CHUNK, CHUNK), pl.ds(warpgroup * HALF, HALF)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(is_unpaired)

                plgpu.barrier_wait(values_in)
                own = tiles.unknown(warpgroup, step)
                half = _Half(
                    own, values_smem, states_smem, keys_smem, sums_smem, anchors_smem, vectors_smem,
                    bounds_smem.at[lax.rem(step, 2)], pairs_smem, itself_smem, end_smem,
                )  # fmt: skip
                half.pair_matrices()
                plgpu.commit_smem()
                plgpu.barrier_wait(states_in)
                plgpu.barrier_wait(keys_in)
                results = half.of_states(is_paired)

                def finish_query(gradient):
                    for part in half.kept_query_gradient():
                        gradient += tiles.matrix(part).astype(jnp.float32)
                    plgpu.barrier_arrive(values_out)
                    keys_smem[0, own] = gradient.astype(jnp.bfloat16)

                key_gradient, sums_gradient, beta_gradient = half.of_pairs(results, finish_query)
                plgpu.barrier_arrive(is_unpaired)
                decay_gradient = half.decay_gradient(sums_gradient)
                plgpu.barrier_arrive(states_out)
                beta_out[own, row, head, tokens] = beta_gradient
                sums_smem[own] = decay_gradient
                keys_smem[1, own] = key_gradient.astype(jnp.bfloat16)
                plgpu.commit_smem()
                is_near, result = is_deep_smem[0] == 0, sums_smem.at[own]
                target = decay_out.at[row, tokens, head, channels]
                if launcher.is_simulated():  # which never ends with a predicate
                    pl.when(is_near)(lambda: plgpu.copy_smem_to_gmem(result, target))
                else:  # A branch makes the loop too long for the instruction cache.
                    plgpu.copy_smem_to_gmem(result, target, is_near)
                plgpu.copy_smem_to_gmem(keys_smem.at[0, own], query_out.at[row, tokens, head, channels])
                plgpu.copy_smem_to_gmem(keys_smem.at[1, own], key_out.at[row, tokens, head, channels])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(keys_out)
                return ()

            lax.fori_loop(0, steps, compute, ())
            plgpu.barrier_wait(is_unpaired)
            plgpu.wait_smem_to_gmem(0)

    wide = (batch, length, heads, WIDTH)
    outputs = [jax.ShapeDtypeStruct(wide, jnp.bfloat16)] * 2
    outputs += [jax.ShapeDtypeStruct(wide, jnp.float32), jax.ShapeDtypeStruct((2, batch, heads, length), jnp.float32)]
    buffer = functools.partial(launcher.swizzled, dtype=jnp.bfloat16)
    query_gradient, key_gradient, decay_gradient, beta_gradient = launcher.launch(
        body,
        (query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep),
        outputs,
        scratch={
            "values_smem": buffer((3, CHUNK, WIDTH)),
            "states_smem": buffer((2, 2, HALF, WIDTH)),
            "keys_smem": buffer((2, 2, CHUNK, HALF)),
            "sums_smem": launcher.swizzled((2, CHUNK, HALF), jnp.float32),
            "anchors_smem": plgpu.SMEM((2, len(ANCHORS), HALF), jnp.float32),
            "vectors_smem": plgpu.SMEM((1, CHUNK), jnp.float32),
            "bounds_smem": plgpu.SMEM((2, 2, CHUNK), jnp.int32),
            "is_deep_smem": plgpu.SMEM((4,), jnp.int32),
            "pairs_smem": buffer((4, CHUNK, CHUNK)),
            "itself_smem": plgpu.SMEM((CHUNK,), jnp.float32),
            "end_smem": plgpu.SMEM((2, HALF), jnp.float32),
            "values_in": plgpu.Barrier(num_arrivals=5),
            "states_in": plgpu.Barrier(num_arrivals=4),
            "keys_in": plgpu.Barrier(num_arrivals=2 * (3 + len(ANCHORS)) + 2),
            "values_out": plgpu.Barrier(num_arrivals=2),
            "states_out": plgpu.Barrier(num_arrivals=2),
            "keys_out": plgpu.Barrier(num_arrivals=2),
            "is_paired": plgpu.Barrier(num_arrivals=2),
            "is_unpaired": plgpu.Barrier(num_arrivals=2),
        },
        name="key_gradients",
        in_place={2: 2},  # of the sums, whose buffer is one of the largest
        grid=(workers,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="warpgroup",
    )
    return query_gradient, key_gradient, decay_gradient, jnp.moveaxis(jnp.sum(beta_gradient, axis=0), 1, 2)
