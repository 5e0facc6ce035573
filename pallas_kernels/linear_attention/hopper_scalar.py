"""Gradients of the delta rule with one decay a head, chunk by chunk, in Pallas Mosaic GPU for Hopper.

The same sums as `chunk_kernels.gradients`, letters and masks as there. As in `hopper`, one warpgroup copies and two
compute, each for half of the key channels; but decays scale rows and columns of products, however deep, and what is
summed over channels stays one number a token, whose halves are added outside.
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
from pallas_kernels.linear_attention.hopper import (
    KEY,
    OUTPUT,
    QUERY,
    REGISTERS,
    SOLVED,
    STATE,
    STATE_GRADIENT,
    WRITTEN,
)
from pallas_kernels.linear_attention.hopper_tiles import HALF, WIDTH

SUMS, BETA = 0, 1
LOW = WRITTEN + 1
"""Behind the high part of what tokens write, whose products' sums cancel."""


def _sum(matrix: jax.Array) -> jax.Array:
    """Over columns: one number a row."""
    return jnp.sum(matrix, axis=1)


class _Half:
    """One warpgroup's work on one chunk: the key channels of its half."""

    def __init__(self, own, values, states, keys, vectors, bounds, pairs, itself, scaled, summed):
        self.own, self.values, self.pairs, self.itself = own, values, pairs, itself
        self.scaled, self.summed = scaled.at[own], summed.at[own]
        self.state, self.state_gradient = (states.at[kind, own] for kind in (STATE, STATE_GRADIENT))
        self.query, self.key = (keys.at[number, own] for number in (QUERY, KEY))
        self.vectors, self.bounds = vectors, bounds

    def vector(self, number: int) -> jax.Array:
        return shared.row(self.vectors.at[number])

    def bound(self, number: int) -> jax.Array:
        return shared.row(self.bounds.at[number])

    def pair_matrices(self) -> None:
        """The gradient of P, by one half, or of L, by the other, times the decay of each pair."""
        first = tiles.down(self.bound(0))
        sign = jnp.where(self.own == 0, jnp.float32(1), jnp.float32(-1))
        parts = (cores.turned(self.values.at[number]) for number in (WRITTEN, LOW))
        matrix = cores.product(*((self.values.at[self.own], part) for part in parts)) * sign

        @pl.when(self.own == 0)
        def _():
            # A token reads itself, without decay.
            self.itself[...] = tiles.diagonal(matrix)

        matrix *= jnp.exp2(tiles.down(self.vector(SUMS)) - shared.row_across(self.vectors, SUMS))
        self.pairs[self.own] = tiles.keep_between(first, tiles.iota(0), matrix.astype(jnp.bfloat16))

    def of_states(self) -> tuple[jax.Array, ...]:
        """Gradients of query and key [64, 64], sums and beta [64] by what crosses the chunk's ends."""
        sums, beta = self.vector(SUMS), self.vector(BETA)
        end = self.vectors[SUMS, CHUNK - 1]

        def products(sums_of, right):
            factors = [[(left, cores.turned(right)) for left in lefts] for lefts in sums_of]
            return cores.products(factors, (HALF,) * len(factors))

        # To the state that leaves.
        written = [self.values.at[number] for number in (WRITTEN, LOW)]
        key_gradient, carried = products((written, [self.state]), self.state_gradient)
        key = shared.wide(self.key)
        key_gradient *= jnp.where(tiles.down(self.bound(1)) == CHUNK - 1, jnp.exp2(end - tiles.down(sums)), 0)
        leaving = _sum(key * key_gradient)
        kept = jnp.where(self.bounds[0, CHUNK - 1] < 0, jnp.float32(1), jnp.float32(0)) * jnp.exp2(end)
        self.summed[1] = leaving + kept * tiles.diagonal(carried)
        # From the state that enters.
        lefts = [[self.values.at[number]] for number in (SOLVED, OUTPUT)]
        from_state, query_gradient = products(lefts, self.state)
        from_start = jnp.where(tiles.down(self.bound(0)) < 0, jnp.exp2(tiles.down(sums)), 0)
        from_state *= from_start
        query_gradient *= from_start
        by_key = _sum(key * from_state)
        key_gradient -= tiles.down(beta) * from_state
        sums_gradient = _sum(shared.wide(self.query) * query_gradient) - leaving - beta * by_key
        self.scaled[...] = (key * tiles.down(beta)).astype(jnp.bfloat16)
        return query_gradient, key_gradient, sums_gradient, -by_key

    def of_pairs(self, query_gradient, key_gradient, sums_gradient, beta_gradient) -> tuple[jax.Array, ...]:
        """Pairs added: the same number to the sum of the late token as is taken from that of the early one."""
        products, lower = self.pairs.at[0], self.pairs.at[1]
        factors = (
            [(products, self.key)],
            [(lower, self.key)],
            [(cores.turned(products), self.query), (cores.turned(lower), self.scaled)],
        )
        by_query, by_late_key, by_early_key = cores.products(factors, (HALF,) * len(factors))
        query, key = shared.wide(self.query), shared.wide(self.key)
        query_gradient += by_query
        sums_gradient += _sum(query * by_query + shared.wide(self.scaled) * by_late_key - key * by_early_key)
        beta_gradient += _sum(key * by_late_key)
        key_gradient += tiles.down(self.vector(BETA)) * by_late_key + by_early_key
        itself = tiles.down(shared.row(self.itself))
        query_gradient += itself * key
        key_gradient += itself * query
        return query_gradient, key_gradient, sums_gradient, beta_gradient

    def decay_gradient(self, sums_gradient) -> jax.Array:
        """Sums over the tokens that a token's decay reaches, [64]."""
        self.summed[0] = sums_gradient
        plgpu.commit_smem()
        row, first, last = tiles.iota(0), tiles.down(self.bound(0)), tiles.down(self.bound(1))
        total = tiles.down(_sum(shared.row_across(self.summed, 1)))
        sums_gradient = shared.row_across(self.summed, 0) + jnp.where(tiles.iota(1) == CHUNK - 1, total, 0)
        # The first token of a document decays nothing.
        is_reached = tiles.within(row, jnp.where(row > first, last - row + 1, 0))
        return _sum(jnp.where(is_reached, sums_gradient, 0))


def gradients(
    query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, low_written
):  # fmt: skip
    """Gradients of query and key [B, S, H, K] bfloat16, of the decay [B, S, H] and, by keys, of beta [B, S, H].

    What tokens write is the sum of `written` and `low_written`.
    """
    batch, length, heads, _ = written.shape
    chunks, group = length // CHUNK, heads // query.shape[2]
    total = batch * chunks * heads
    workers = min(launcher.num_multiprocessors(), total)
    sums, beta = jnp.moveaxis(sums, 1, 2), jnp.moveaxis(beta, 1, 2)

    def body(
        query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, low_written,
        query_out, key_out, decay_out, beta_out,
        *, values_smem, states_smem, keys_smem, vectors_smem, bounds_smem, pairs_smem, itself_smem, scaled_smem,
        summed_smem, results_smem, values_in, states_in, values_out, states_out, keys_out, is_paired,
    ):  # fmt: skip
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        steps = pl.cdiv(total - worker, workers)

        def place(step):
            task = worker + step * workers
            head, rest = lax.rem(task, heads), task // heads
            chunk = lax.rem(rest, chunks)
            return rest // chunks, chunk, head, pl.ds(chunk * CHUNK, CHUNK)

        halves = [(half, pl.ds(half * HALF, HALF)) for half in range(2)]

        def load_values(step):
            row, _, head, tokens = place(step)
            slot = lax.rem(step, 2)
            for number, source in enumerate((output_gradient, solved, written, low_written)):
                plgpu.copy_gmem_to_smem(source.at[row, tokens, head], values_smem.at[number], values_in)
            for number, source in enumerate((sums, beta)):
                plgpu.copy_gmem_to_smem(source.at[row, head, tokens], vectors_smem.at[slot, number], values_in)
            for number, source in enumerate((first, last)):
                plgpu.copy_gmem_to_smem(source.at[row, tokens], bounds_smem.at[slot, number], values_in)

        def load_states(step):
            row, chunk, head, _ = place(step)
            for half, channels in halves:
                for kind, source in enumerate((state_gradient, state)):
                    target = states_smem.at[kind, half]
                    plgpu.copy_gmem_to_smem(source.at[row, chunk, head, channels], target, states_in)

        def load_keys(step):
            row, _, head, tokens = place(step)
            # Once the gradients that lie in their place have been read.
            pl.when(step > 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
            for half, channels in halves:
                for number, source in enumerate((query, key)):
                    target = keys_smem.at[number, half]
                    plgpu.copy_gmem_to_smem(source.at[row, tokens, head // group, channels], target, states_in)

        def store(step):
            row, _, head, tokens = place(step)
            for half, channels in halves:
                for number, target in enumerate((query_out, key_out)):
                    plgpu.copy_smem_to_gmem(keys_smem.at[number, half], target.at[row, tokens, head, channels])
                for number, target in enumerate((decay_out, beta_out)):
                    plgpu.copy_smem_to_gmem(results_smem.at[number, half], target.at[half, row, head, tokens])

        def copy(step, _):
            """What the next chunk needs replaces what the last one has read, or the results that it has left there."""

            def once_emptied(barrier, then):
                pl.when(step > 0)(lambda: plgpu.barrier_wait(barrier))
                pl.when(step < steps)(then)

            once_emptied(values_out, lambda: load_values(step))
            once_emptied(states_out, lambda: load_states(step))
            pl.when(step > 0)(lambda: plgpu.barrier_wait(keys_out))
            pl.when(step > 0)(lambda: store(step - 1))
            pl.when(step < steps)(lambda: load_keys(step))
            return ()

        def compute(step, _):
            slot = lax.rem(step, 2)
            plgpu.barrier_wait(values_in)
            own = tiles.unknown(warpgroup, step)
            half = _Half(
                own, values_smem, states_smem, keys_smem, vectors_smem.at[slot], bounds_smem.at[slot], pairs_smem,
                itself_smem, scaled_smem, summed_smem,
            )  # fmt: skip
            half.pair_matrices()
            plgpu.commit_smem()
            plgpu.barrier_arrive(is_paired)
            plgpu.barrier_wait(states_in)
            results = half.of_states()
            plgpu.commit_smem()
            plgpu.barrier_arrive(values_out)
            plgpu.barrier_arrive(states_out)
            plgpu.barrier_wait(is_paired)
            query_gradient, key_gradient, sums_gradient, beta_gradient = half.of_pairs(*results)
            plgpu.barrier_arrive(is_paired)
            results_smem[0, own] = half.decay_gradient(sums_gradient)
            results_smem[1, own] = beta_gradient
            keys_smem[QUERY, own] = query_gradient.astype(jnp.bfloat16)
            keys_smem[KEY, own] = key_gradient.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(keys_out)
            # The other half no longer reads the matrices of pairs.
            plgpu.barrier_wait(is_paired)
            return ()

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            lax.fori_loop(0, steps, compute, ())

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="decrease")
            lax.fori_loop(0, steps + 1, copy, ())
            plgpu.wait_smem_to_gmem(0)

    wide, of_halves = (batch, length, heads, WIDTH), (2, batch, heads, length)
    outputs = [jax.ShapeDtypeStruct(wide, jnp.bfloat16)] * 2 + [jax.ShapeDtypeStruct(of_halves, jnp.float32)] * 2
    buffer = functools.partial(launcher.swizzled, dtype=jnp.bfloat16)
    query_gradient, key_gradient, *of_tokens = launcher.launch(
        body,
        (query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, low_written),
        outputs,
        scratch={
            "values_smem": buffer((4, CHUNK, WIDTH)),
            "states_smem": buffer((2, 2, HALF, WIDTH)),
            "keys_smem": buffer((2, 2, CHUNK, HALF)),
            "vectors_smem": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            "bounds_smem": plgpu.SMEM((2, 2, CHUNK), jnp.int32),
            "pairs_smem": buffer((2, CHUNK, CHUNK)),
            "itself_smem": plgpu.SMEM((CHUNK,), jnp.float32),
            "scaled_smem": buffer((2, CHUNK, HALF)),
            "results_smem": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            "summed_smem": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            "values_in": plgpu.Barrier(num_arrivals=8),
            "states_in": plgpu.Barrier(num_arrivals=8),
            **{name: plgpu.Barrier(num_arrivals=2) for name in ("values_out", "states_out", "keys_out", "is_paired")},
        },
        name="key_gradients_scalar",
        grid=(workers,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="warpgroup",
    )
    decay_gradient, beta_gradient = (jnp.moveaxis(jnp.sum(array, axis=0), 1, 2) for array in of_tokens)
    return query_gradient, key_gradient, decay_gradient, beta_gradient
