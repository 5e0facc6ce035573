"""Gradients of the delta rule with one decay a channel, chunk by chunk, in Pallas Mosaic GPU for Hopper.

The same sums as `chunk_kernels.gradients`, letters and masks as there. One warpgroup copies results and what the next
chunk needs while two others compute, each for half of the key channels; every product runs on tensor cores from shared
memory or registers. Decays within a tile are told from its first token, so no token may be deeper there than `DEEPEST`.
"""

import functools
from collections.abc import Callable, Sequence
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
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, DEEPEST, TILE_BITS
from pallas_kernels.linear_attention.gates import Form
from pallas_kernels.linear_attention.hopper_tiles import ANCHORS, HALF, WIDTH

REGISTERS = launcher.registers(240, 240, 24)
"""Of a thread in either half, and of one that copies."""
REGISTERS_WITH_GATE = launcher.registers(232, 232, 40)
OUTPUT, SOLVED, WRITTEN = 0, 1, 2
STATE_GRADIENT, STATE = 0, 1
QUERY, KEY = 0, 1


def reason_against(key_width: int, value_width: int) -> str | None:
    """Why this kernel cannot take such widths; None if it can."""
    return None if key_width == value_width == WIDTH else f"needs widths of {WIDTH}, got {key_width} and {value_width}"


class _Half:
    """One warpgroup's work on one chunk: the key channels of its half."""

    def __init__(self, warpgroup, values, states, keys, sums, anchors, scales, vectors, bounds, pairs, itself, end):
        self.warpgroup, self.values, self.states, self.keys = warpgroup, values, states, keys
        self.sums, self.anchors, self.scales, self.vectors, self.bounds = sums, anchors, scales, vectors, bounds
        self.pairs, self.itself, self.end = pairs, itself, end

    def staging(self, number: int):
        """One of four matrices [64, 64], where this half's states were."""
        return self.states.at[number // 2, self.warpgroup, :, pl.ds(number % 2 * HALF, HALF)]

    def anchor(self, row: int) -> jax.Array:
        ref = self.anchors.at[self.warpgroup, ANCHORS.index(row)]
        return tiles.across(launcher.load(ref, tiles.column_layout()))

    def pair_matrices(self):
        """One half makes the gradient of P, the other that of L, and each its transpose."""
        row, first = tiles.iota(0), tiles.down(shared.row(self.bounds.at[0]))
        sign = jnp.where(self.warpgroup == 0, jnp.float32(1), jnp.float32(-1))
        matrix = cores.product((self.values.at[self.warpgroup], cores.turned(self.values.at[WRITTEN]))) * sign

        @pl.when(self.warpgroup == 0)
        def _():
            self.itself[...] = tiles.diagonal(matrix)

        matrix = jnp.where(tiles.within(first, row - first), matrix, 0).astype(jnp.bfloat16)
        self.pairs[self.warpgroup] = matrix
        shared.store_turned(matrix, self.pairs.at[2 + self.warpgroup])

    def spilled_sums(self) -> jax.Array:
        """The sums of decays, which from now on lie as threads hold them; some rows of them are kept beside."""
        ref = self.sums.at[self.warpgroup]
        sums = shared.matrix(ref)
        shared.keep_rows(sums, self.anchors.at[self.warpgroup])
        cores.wait_for_warps()
        shared.spill(sums, ref)
        return sums

    def of_states(self, is_paired):
        """Gradients of key, sums ([64, 64] float32) and beta [64] by what crosses the chunk's ends.

        That of query is put aside.
        """
        is_seen = tiles.down(shared.row(self.bounds.at[0])) < 0
        is_writing = tiles.down(shared.row(self.bounds.at[1])) == CHUNK - 1
        state, state_gradient = (self.states.at[kind, self.warpgroup] for kind in (STATE, STATE_GRADIENT))
        query, key = (self.keys.at[number, self.warpgroup] for number in range(2))

        def products(lefts, right):
            return cores.products([[(left, cores.turned(right))] for left in lefts], (HALF,) * len(lefts))

        carried, leaving = products((state, self.values.at[WRITTEN]), state_gradient)
        # To the state that leaves.
        sums = self.spilled_sums()
        end = shared.row(self.anchors.at[self.warpgroup, ANCHORS.index(63)])
        # Rows 0 to 3 sum what leaves over the tokens of each tile; row 4 is the kept state times its gradient.
        end_gradients = self.end.at[self.warpgroup]
        kept = jnp.where(self.bounds.at[0][CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0)) * jnp.exp2(end)
        end_gradients[4] = kept * tiles.diagonal(carried)
        to_end = jnp.exp2(self.anchor(63) - sums)
        key_gradient = jnp.where(is_writing, to_end, 0) * leaving
        leaving = shared.wide(key) * key_gradient
        tiles.sum_tiles(leaving, end_gradients.at[pl.ds(0, 4)])
        # From the state that enters.
        from_state, query_gradient = products((self.values.at[SOLVED], self.values.at[OUTPUT]), state)
        plgpu.barrier_arrive(is_paired)
        from_start = jnp.where(is_seen, jnp.exp2(shared.spilled(self.sums.at[self.warpgroup])), 0)
        from_state *= from_start
        query_gradient *= from_start
        beta = tiles.down(shared.row(self.vectors.at[0]))
        key_gradient -= beta * from_state
        by_key = shared.wide(key) * from_state
        by_beta = -jnp.sum(by_key, axis=1)
        sums_gradient = -leaving - beta * by_key
        plgpu.barrier_wait(is_paired)
        itself = tiles.down(shared.row(self.itself))
        query, key = shared.wide(query), shared.wide(key)
        sums_gradient += query * query_gradient
        query_gradient += itself * key
        key_gradient += itself * query
        # In the place of values that are no longer read: registers are scarce.
        shared.spill(query_gradient, self.values.at[self.warpgroup])
        return key_gradient, sums_gradient, by_beta

    def chosen(self, number: int, is_chosen: Callable[[int, int], bool]) -> jax.Array:
        return tiles.choose_tiles(shared.matrix(self.pairs.at[number]), is_chosen)

    def of_tiles(self, *rows: int) -> jax.Array:
        """The sums of decays at the first tokens of the tiles `rows`, one for each tile."""
        return shared.rows_of_tiles(self.anchors.at[self.warpgroup], rows)

    def rescaled(self, totals: Sequence[jax.Array], rows: Sequence[int]) -> list[jax.Array]:
        """Times what decays from one tile to a later one, told by a row of `scales` for each tile."""
        scales = shared.rows_of_tiles(self.scales.at[self.warpgroup], rows)
        return [total * scales for total in totals]

    def over_late(self) -> list[jax.Array]:
        """Of each late token, sums over early ones as told from the first token of its tile, of P and of L."""

        def apart(tile):
            return [
                (self.chosen(number, lambda row, column: row > column), self.staging(0), (tile,)) for number in (0, 1)
            ]

        def within(number):
            return self.chosen(number, lambda row, column: row == column), self.staging(1)

        totals = cores.products([[pair] for pair in apart(0)], (HALF, HALF))
        totals = cores.accumulate(self.rescaled(totals, (0, 0, 2, 2)), [[pair] for pair in apart(1)])
        factors = [[late, within(number)] for number, late in enumerate(apart(2))]
        return cores.accumulate(self.rescaled(totals, (0, 0, 0, 3)), factors)

    def over_early(self) -> tuple[jax.Array, jax.Array]:
        """Of each early token, sums over late ones of later tiles, from the next tile's first token on; of its own."""

        def apart(tile):
            pairs = ((self.chosen(number, lambda row, column: row < column), self.staging(number)) for number in (2, 3))
            return [(*pair, (tile,)) for pair in pairs]

        def within():
            return [(self.chosen(number, lambda row, column: row == column), self.staging(number)) for number in (2, 3)]

        total, near = cores.products([apart(3), within()], (HALF, HALF))
        (total,) = cores.accumulate(self.rescaled([total], (3, 3, 0, 0)), [apart(2)])
        (total,) = cores.accumulate(self.rescaled([total], (2, 0, 0, 0)), [apart(1)])
        return total, near

    def of_pairs(self, gradients, finish_query, are_read):
        """What pairs of tokens add.

        A late token decays from the first of its tile (or document in it) on. An early one decays up to the first
        token of the next tile, from where sums over tiles are carried on; within its tile it grows back to the first.
        """
        key_gradient, sums_gradient, by_beta = gradients
        query, key = (self.keys.at[number, self.warpgroup] for number in range(2))
        is_first = tiles.down(shared.row(self.bounds.at[0])) >= (tiles.iota(0) >> TILE_BITS << TILE_BITS)

        def start():
            """The sum before a document's first token is zero."""
            return jnp.where(is_first, 0, self.of_tiles(0, 1, 2, 3))

        def early(sums):
            return jnp.exp2(jnp.minimum(self.of_tiles(1, 2, 3, 3) - sums, 0))

        def late(depth):
            return jnp.exp2(-depth)

        def growing(depth):
            return jnp.exp2(jnp.minimum(depth, DEEPEST))

        def staged(number):
            return shared.wide(self.staging(number))

        depths = self.sums.at[self.warpgroup]
        sums = shared.spilled(depths)
        self.staging(0)[...] = (shared.wide(key) * early(sums)).astype(jnp.bfloat16)
        depth = start() - sums
        shared.spill(depth, depths)
        self.staging(1)[...] = (shared.wide(key) * growing(depth)).astype(jnp.bfloat16)
        factor = late(depth)
        self.staging(2)[...] = (shared.wide(query) * factor).astype(jnp.bfloat16)
        beta = tiles.down(shared.row(self.vectors.at[0]))
        self.staging(3)[...] = (shared.wide(key) * factor * beta).astype(jnp.bfloat16)
        # What decays from the second tile to the third, and from there to the last.
        after, before = (
            launcher.load(self.anchors.at[self.warpgroup, pl.ds(row, 2)], plgpu.Layout.WG_STRIDED((2, HALF), 1))
            for row in (2, 1)
        )
        self.scales[self.warpgroup, pl.ds(2, 2)] = jnp.exp2(jnp.minimum(after - before, 0))
        plgpu.commit_smem()
        # A pair adds the same number to the sum of its late token and takes it from that of its early one, up to
        # float32's rounding, so that decays which do not lie between them get next to nothing.
        by_query, by_late_key = self.over_late()
        sums_gradient += staged(2) * by_query + staged(3) * by_late_key
        factor = late(shared.spilled(depths))
        finish_query(factor * by_query)
        by_late_key *= factor
        by_beta += jnp.sum(shared.wide(key) * by_late_key, axis=1)
        key_gradient += beta * by_late_key
        by_apart, by_near = self.over_early()
        for barrier in are_read:
            plgpu.barrier_arrive(barrier)
        depth = shared.spilled(depths)
        key_gradient += early(start() - depth) * by_apart + growing(depth) * by_near
        sums_gradient -= staged(0) * by_apart + staged(1) * by_near
        return key_gradient, sums_gradient, by_beta

    def decay_gradient(self, sums_gradient):
        """Sums over the tokens that a token's decay reaches."""
        sums_gradient = tiles.add_to_last_row(sums_gradient, self.end.at[self.warpgroup])
        # In the place of pairs that are this half's to write, and of its key: of nothing that is loaded early.
        places = self.pairs.at[self.warpgroup], self.pairs.at[2 + self.warpgroup], self.keys.at[KEY, self.warpgroup]
        for place, part in zip(places, tiles.parts(sums_gradient, len(places)), strict=True):
            place[...] = part
        plgpu.commit_smem()
        row = tiles.iota(0)
        first, last = (tiles.down(shared.row(self.bounds.at[number])) for number in range(2))
        # The first token of a document decays nothing.
        mask = tiles.within(row, jnp.where(row > first, last - row + 1, 0))
        mask = jnp.where(mask, jnp.float32(1), jnp.float32(0)).astype(jnp.bfloat16)
        return cores.product(*((mask, place) for place in places))


def gradients(
    query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep,
    *gated, form: Form | None = None,
):  # fmt: skip
    """Gradients of query and key [B, S, H, K] bfloat16, of the decay [B, S, H, K] and, by keys, of beta [B, S, H].

    The gradient of the decay takes the place of the sums; not in chunks that are deep (`is_deep` [B, N, H] int32):
    their sums stay, and their other gradients are worthless.

    With a `form` of gate `gated` are its input and `rows`, as in `hopper_prepare`. The gradient of the input takes its
    place, in bfloat16, in chunks that are not deep, instead of that of the decay. Two more are of the gate's bias, of
    each tile [B, N, H, 4, K], and, of each token [B, S, H], what `Form.finish_rate` takes.
    """
    batch, length, heads, _ = written.shape
    chunks, group = length // CHUNK, heads // query.shape[2]
    total = batch * chunks * heads
    workers = min(launcher.num_multiprocessors(), total)
    beta = jnp.moveaxis(beta, 1, 2)
    registers = REGISTERS_WITH_GATE if form else REGISTERS

    def body(
        query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep, *refs,
        values_smem, states_smem, keys_smem, sums_smem, anchors_smem, by_key_smem, scales_smem, vectors_smem,
        bounds_smem, pairs_smem, itself_smem, end_smem, values_in, states_in, keys_in, values_out, states_out,
        keys_out, is_paired, gate_smem: Any = None, by_bias_smem: Any = None, by_rate_smem: Any = None,
        staging_out: Any = None, raw_in: Any = None,
    ):  # fmt: skip
        raw: Any = None
        gate: Any = None
        if form:
            raw, gate, *refs = refs
        query_out, key_out, decay_out, beta_out, *gate_out = refs
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        steps = pl.cdiv(total - worker, workers)

        def place(step):
            task = worker + step * workers
            head, rest = lax.rem(task, heads), task // heads
            return rest // chunks, lax.rem(rest, chunks), head

        halves = [(half, pl.ds(half * HALF, HALF)) for half in range(2)]

        def load_values_and_query(step):
            row, chunk, head = place(step)
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            for number, source in enumerate((output_gradient, solved, written)):
                plgpu.copy_gmem_to_smem(source.at[row, tokens, head], values_smem.at[number], values_in)
            for number, source in enumerate((first, last)):
                target = bounds_smem.at[lax.rem(step, 2), number]
                plgpu.copy_gmem_to_smem(source.at[row, tokens], target, values_in)

            # Once the gradient that lies in its place has been read.
            @pl.when(step > 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            for half, channels in halves:
                source = query.at[row, tokens, head // group, channels]
                plgpu.copy_gmem_to_smem(source, keys_smem.at[QUERY, half], values_in)

        def load_state(step, kind):
            row, chunk, head = place(step)
            source = state if kind == STATE else state_gradient
            for half, channels in halves:
                target = states_smem.at[kind, half]
                plgpu.copy_gmem_to_smem(source.at[row, chunk, head, channels], target, states_in)

        def load_sums(step):
            row, chunk, head = place(step)
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            for half, channels in halves:
                plgpu.copy_gmem_to_smem(sums.at[row, tokens, head, channels], sums_smem.at[half], keys_in)

        def load_key(step):
            row, chunk, head = place(step)
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            for half, channels in halves:
                source = key.at[row, tokens, head // group, channels]
                plgpu.copy_gmem_to_smem(source, keys_smem.at[KEY, half], keys_in)
            plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], vectors_smem.at[0], keys_in)

        # The gate's input, and its gradient, lie where pairs of tokens were staged last.
        raw_smem = states_smem.at[STATE, 0]

        def fetch_raw(step):
            row, chunk, head = place(step)
            tokens = raw.at[row, pl.ds(chunk * CHUNK, CHUNK), head]
            shared.fetch(tokens, heads * WIDTH * raw.dtype.itemsize, WIDTH * raw.dtype.itemsize)

        def load_raw(step):
            row, chunk, head = place(step)
            plgpu.copy_gmem_to_smem(raw.at[row, pl.ds(chunk * CHUNK, CHUNK), head], raw_smem, raw_in)
            for half, channels in halves:
                plgpu.copy_gmem_to_smem(gate.at[head, :, channels], gate_smem.at[half], raw_in)

        def store(step, source, target):
            row, chunk, head = place(step)
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            for half, channels in halves:
                plgpu.copy_smem_to_gmem(source.at[half], target.at[row, tokens, head, channels])

        def store_results(step, is_near):
            row, chunk, head = place(step)
            tokens = pl.ds(chunk * CHUNK, CHUNK)

            @pl.when(is_near)
            def _():
                if form:
                    plgpu.copy_smem_to_gmem(raw_smem, decay_out.at[row, tokens, head])
                else:
                    store(step, sums_smem, decay_out)

            store(step, keys_smem.at[KEY], key_out)
            for half, channels in halves:
                plgpu.copy_smem_to_gmem(by_key_smem.at[half], beta_out.at[half, row, head, tokens])
                if form:
                    plgpu.copy_smem_to_gmem(by_bias_smem.at[half], gate_out[0].at[row, chunk, head, :, channels])
                    plgpu.copy_smem_to_gmem(by_rate_smem.at[half], gate_out[1].at[half, row, head, tokens])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def copy(step, _):
            """Results of the chunk before are stored as soon as they lie where the next chunk's numbers will."""
            has_last, has_next = step > 0, step < steps

            @pl.when(has_last)
            def _():
                plgpu.barrier_wait(values_out)
                store(step - 1, keys_smem.at[QUERY], query_out)

            pl.when(has_next)(lambda: load_values_and_query(step))
            if form:
                pl.when(has_next)(lambda: fetch_raw(step))

                @pl.when(has_last)
                def _():
                    plgpu.barrier_wait(staging_out)
                    load_raw(step - 1)

            pl.when(has_last)(lambda: plgpu.barrier_wait(states_out))

            @pl.when(has_next)
            def _():
                load_state(step, STATE_GRADIENT)
                load_sums(step) if form else load_state(step, STATE)

            @pl.when(has_last)
            def _():
                row, chunk, head = place(step - 1)
                is_near = is_deep[row, chunk, head] == 0
                plgpu.barrier_wait(keys_out)
                store_results(step - 1, is_near)

            @pl.when(has_next)
            def _():
                load_state(step, STATE) if form else load_sums(step)
                load_key(step)

            return ()

        def compute(step, _):
            plgpu.barrier_wait(values_in)
            own = tiles.unknown(warpgroup, step)
            half = _Half(
                own, values_smem, states_smem, keys_smem, sums_smem, anchors_smem, scales_smem, vectors_smem,
                bounds_smem.at[lax.rem(step, 2)], pairs_smem, itself_smem, end_smem,
            )  # fmt: skip
            half.pair_matrices()
            plgpu.commit_smem()
            plgpu.barrier_wait(states_in)
            plgpu.barrier_wait(keys_in)
            results = half.of_states(is_paired)

            def finish_query(gradient):
                keys_smem[QUERY, own] = (gradient + shared.spilled(values_smem.at[own])).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(values_out)

            are_read = (staging_out, is_paired) if form else (is_paired,)
            key_gradient, sums_gradient, beta_gradient = half.of_pairs(results, finish_query, are_read)
            plgpu.barrier_arrive(states_out)
            # The other half no longer reads the matrices of pairs.
            plgpu.barrier_wait(is_paired)
            decay_gradient = half.decay_gradient(sums_gradient)
            # Tensor cores of other warps may still read what lies there.
            cores.wait_for_warps()
            keys_smem[KEY, own] = key_gradient.astype(jnp.bfloat16)
            by_key_smem[own] = beta_gradient
            if form:
                plgpu.barrier_wait(raw_in)
                own_raw = raw_smem.at[:, pl.ds(pl.multiple_of(own * HALF, HALF), HALF)]
                shift, rate = shared.row_across(gate_smem.at[own], 0), gate_smem[own, 1, 0]
                of_gate = shared.wide(own_raw), shift, rate, tiles.GATE_FUNCTIONS
                raw_gradient, by_rate = form.gradients(decay_gradient, *of_gate)
                own_raw[...] = raw_gradient.astype(jnp.bfloat16)
                by_rate_smem[own] = jnp.sum(by_rate, axis=1)
                tiles.sum_tiles(raw_gradient, by_bias_smem.at[own])
            else:
                sums_smem[own] = decay_gradient
            plgpu.commit_smem()
            plgpu.barrier_arrive(keys_out)
            return ()

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(registers[2], action="decrease")
            lax.fori_loop(0, steps + 1, copy, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            scales_smem[warpgroup, pl.ds(0, 2)] = jnp.ones((2, HALF), jnp.float32)
            lax.fori_loop(0, steps, compute, ())

    wide, of_halves = (batch, length, heads, WIDTH), (2, batch, heads, length)
    outputs = [(wide, jnp.bfloat16)] * 2 + [(wide, jnp.bfloat16 if form else jnp.float32), (of_halves, jnp.float32)]
    of_gate = {}
    if form:
        outputs += [((batch, chunks, heads, 4, WIDTH), jnp.float32), (of_halves, jnp.float32)]
        of_gate = {
            "gate_smem": plgpu.SMEM((2, 2, HALF), jnp.float32),
            "by_bias_smem": plgpu.SMEM((2, 4, HALF), jnp.float32),
            "by_rate_smem": plgpu.SMEM((2, CHUNK), jnp.float32),
            "staging_out": plgpu.Barrier(num_arrivals=2),
            "raw_in": plgpu.Barrier(num_arrivals=3),
        }
    arguments = query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep
    buffer = functools.partial(launcher.swizzled, dtype=jnp.bfloat16)
    query_gradient, key_gradient, decay_gradient, *of_tokens = launcher.launch(
        body,
        (*arguments, *gated),
        [jax.ShapeDtypeStruct(*output) for output in outputs],
        scratch={
            "values_smem": buffer((3, CHUNK, WIDTH)),
            "states_smem": buffer((2, 2, HALF, WIDTH)),
            "keys_smem": buffer((2, 2, CHUNK, HALF)),
            "sums_smem": launcher.swizzled((2, CHUNK, HALF), jnp.float32),
            "anchors_smem": plgpu.SMEM((2, len(ANCHORS), HALF), jnp.float32),
            "by_key_smem": plgpu.SMEM((2, CHUNK), jnp.float32),
            "scales_smem": plgpu.SMEM((2, 4, HALF), jnp.float32),
            "vectors_smem": plgpu.SMEM((1, CHUNK), jnp.float32),
            "bounds_smem": plgpu.SMEM((2, 2, CHUNK), jnp.int32),
            "pairs_smem": buffer((4, CHUNK, CHUNK)),
            "itself_smem": plgpu.SMEM((CHUNK,), jnp.float32),
            "end_smem": plgpu.SMEM((2, 5, HALF), jnp.float32),
            "values_in": plgpu.Barrier(num_arrivals=7),
            "states_in": plgpu.Barrier(num_arrivals=4),
            "keys_in": plgpu.Barrier(num_arrivals=5),
            **{name: plgpu.Barrier(num_arrivals=2) for name in ("values_out", "states_out", "keys_out", "is_paired")},
            **of_gate,
        },
        name="key_gradients",
        # Of the sums, whose buffer is one of the largest, or of what went into the gate.
        in_place={len(arguments) if form else 2: 2},
        grid=(workers,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="warpgroup",
    )
    of_tokens[::2] = (jnp.moveaxis(jnp.sum(array, axis=0), 1, 2) for array in of_tokens[::2])
    return query_gradient, key_gradient, decay_gradient, *of_tokens
