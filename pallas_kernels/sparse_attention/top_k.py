"""The exact best of each row's range of scores, in Pallas for Triton: a warp takes a row, and waits for no other.

A sample of a row tells a threshold that a few more than wanted reach; they are copied out, and the best of them taken.
Where the sample misleads, too few or too many reaching it, the best are sought in the row itself.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

PIECE = 512
"""Scores read at a time."""
LIST_PIECE = 256
"""Of a list in whole vectors: of another size than `PIECE`, or Triton turns those about to be vectors too."""
SAMPLE = 2048
KEPT = 4096
"""Room for what is copied out, at least."""
WARPS = 1
LOWEST = -(2**31)
"""Below the integer of every score."""


def top_k_of_rows(
    scores: jax.Array, first: jax.Array, end: jax.Array, top_k: int, *, interpret: bool = False
) -> jax.Array:
    """int32 [T, top_k]: places of the best of `scores[t, first[t] : end[t]]`, ascending, then -1.

    `scores` [T', S'] float32 with T' >= T. Of equal scores the earlier is better. `top_k` is a power of two.
    """
    # Of a longer row a number of the sample stands for more scores.
    times = 1 if scores.shape[1] <= 2**16 else 2
    num_rows, num_kept, sample = first.shape[0], times * max(KEPT, 2 * top_k), times * SAMPLE
    whole = pl.BlockSpec(scores.shape, lambda row: (0, 0))
    bound = pl.BlockSpec((None,), lambda row: (row,))
    # A list has a piece behind it. Interpreted, a masked store writes back what it read: results have a place for that.
    widths = [top_k + interpret, num_kept + LIST_PIECE, num_kept + LIST_PIECE]
    varying = jax.typeof(scores).manual_axis_type
    return pl.pallas_call(
        functools.partial(_select, top_k=top_k, num_kept=num_kept, sample=sample, interpret=interpret),
        grid=(num_rows,),
        in_specs=[whole, bound, bound],
        out_specs=[pl.BlockSpec((None, width), lambda row: (row, 0)) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((num_rows, width), jnp.int32, manual_axis_type=varying) for width in widths],
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="top_k",
    )(scores, first, end)[0][:, :top_k]


def _slots(number: jax.Array | int, size: int) -> jax.Array:
    """The places of one piece."""
    return number * size + lax.broadcasted_iota(jnp.int32, (size,), 0)


def _count(is_counted: jax.Array) -> jax.Array:
    return jnp.sum(is_counted.astype(jnp.int32))


def _integers(score: jax.Array, *, interpret: bool) -> jax.Array:
    """Integers in the order of the scores."""
    # Minus zero equals zero: it becomes that here, but XLA adds no zeros.
    score = jnp.where(score == 0, 0.0, score) if interpret else score + 0.0
    bits = lax.bitcast_convert_type(score, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _ranks(is_counted: jax.Array, *, interpret: bool) -> jax.Array:
    """How many come before each of a piece. A thread holds every 32nd: a vote counts those of the other threads."""
    numbers = is_counted.astype(jnp.int32)
    if interpret:
        return jnp.cumsum(numbers) - numbers
    held = PIECE // 32
    lines = ["{ .reg .pred yes; .reg .b32 votes, before, total, below; mov.u32 below, %lanemask_lt; mov.b32 total, 0;"]
    for number in range(held):
        lines += [
            f"setp.ne.s32 yes, ${held + number}, 0; vote.sync.ballot.b32 votes, yes, 0xffffffff;",
            f"and.b32 before, votes, below; popc.b32 before, before; add.s32 ${number}, before, total;",
            "popc.b32 votes, votes; add.s32 total, total, votes;",
        ]
    # Results are written before all arguments are read.
    constraints = ",".join(["=&r"] * held + ["r"] * held)
    shape = jax.ShapeDtypeStruct(numbers.shape, jnp.int32)
    return plt.elementwise_inline_asm(
        " ".join([*lines, "}"]), args=[numbers], constraints=constraints, pack=held, result_shape_dtypes=[shape]
    )[0]


class _List:
    """`count` integers, read piece by piece; behind them the lowest."""

    def __init__(self, read: Callable[[jax.Array], jax.Array], count: jax.Array, piece: int):
        self.read, self.num_pieces = read, pl.cdiv(count, piece)

    def reaching(self, threshold: jax.Array) -> jax.Array:
        """How many are as high as the threshold."""

        def piece(number, count):
            return count + _count(self.read(number) >= threshold)

        return lax.fori_loop(0, self.num_pieces, piece, jnp.int32(0))

    def highest(self) -> jax.Array:
        def piece(number, highest):
            return jnp.maximum(highest, jnp.max(self.read(number)))

        return lax.fori_loop(0, self.num_pieces, piece, jnp.int32(LOWEST))

    def threshold(self, least: jax.Array | int, most: jax.Array | int, low: jax.Array) -> jax.Array:
        """A number from `low` on that from `least` to `most` reach, or else the largest that `least` or more reach."""

        def halve(carry):
            low, high, _ = carry
            # The mean, rounded up, of numbers whose sum may be none.
            middle = (low | high) - ((low ^ high) >> 1)
            reached = self.reaching(middle)
            is_enough = reached >= least
            return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle - 1), reached

        def is_open(carry):
            low, high, reached = carry
            return (low < high) & ((reached < least) | (reached > most))

        return lax.while_loop(is_open, halve, (low, self.highest(), jnp.int32(0)))[0]


def _select(scores_ref, first_ref, end_ref, places_ref, kept_keys, kept_places, *, top_k, num_kept, sample, interpret):
    row, first = pl.program_id(0), first_ref[...]
    count = jnp.maximum(end_ref[...] - first, 0)

    def wait_for_all():
        if not interpret:
            plt.debug_barrier()

    def read_row(number):
        slot = _slots(number, PIECE)
        score = plt.load(scores_ref.at[row, jnp.where(slot < count, first + slot, 0)], mask=slot < count, other=0.0)
        return jnp.where(slot < count, _integers(score, interpret=interpret), LOWEST)

    def kept_list(length):
        return _List(lambda number: kept_keys[pl.ds(number * LIST_PIECE, LIST_PIECE)], length, LIST_PIECE)

    @pl.when(count <= top_k)
    def _():
        def piece(number, _):
            slot = _slots(number, PIECE)
            target = jnp.where(slot < top_k, slot, top_k)
            plt.store(places_ref.at[target], jnp.where(slot < count, first + slot, -1), mask=slot < top_k)
            return ()

        lax.fori_loop(0, pl.cdiv(top_k, PIECE), piece, ())

    def guess():
        """About the number that the sample has at the wanted rank, some more for safety."""

        def piece(number, _):
            slot = _slots(number, LIST_PIECE)
            # Both below 2^15.
            place = slot * (count // sample) + (slot * (count % sample)) // sample
            score = plt.load(scores_ref.at[row, first + jnp.where(slot < sample, place, 0)])
            key = _integers(score, interpret=interpret)
            kept_keys[pl.ds(number * LIST_PIECE, LIST_PIECE)] = jnp.where(slot < sample, key, LOWEST)
            return ()

        lax.fori_loop(0, pl.cdiv(sample, LIST_PIECE), piece, ())
        wait_for_all()
        expected = sample * (top_k / count.astype(jnp.float32))
        rank = (expected + 4 * jnp.sqrt(expected) + 8).astype(jnp.int32)
        threshold = kept_list(jnp.int32(sample)).threshold(rank, rank + rank // 8, jnp.minimum(count, LOWEST))
        wait_for_all()
        return threshold

    def keep(threshold):
        """Copy out what reaches the threshold, as far as there is room; returns how many reach it."""

        def piece(number, kept):
            slot, key = _slots(number, PIECE), read_row(number)
            is_kept = key >= threshold
            target = kept + _ranks(is_kept, interpret=interpret)
            has_room = is_kept & (target < num_kept)
            target = jnp.where(has_room, target, num_kept) if interpret else target
            plt.store(kept_keys.at[target], key, mask=has_room)
            plt.store(kept_places.at[target], first + slot, mask=has_room)
            return kept + _count(is_kept)

        kept = lax.fori_loop(0, pl.cdiv(count, PIECE), piece, jnp.int32(0))
        # Lists are read in whole pieces.
        behind = jnp.minimum(kept, num_kept) + _slots(0, LIST_PIECE)
        plt.store(kept_keys.at[behind], jnp.full((LIST_PIECE,), LOWEST, jnp.int32))
        return kept

    def take(keys, read_places, low):
        """The best of a list, and of equal ones the first."""
        threshold = keys.threshold(top_k, top_k, low)
        num_equal = top_k - keys.reaching(threshold + 1)

        def piece(number, carry):
            above, equal = carry
            key = keys.read(number)
            is_above, is_equal = key > threshold, (key == threshold) & (key > LOWEST)
            # Two counts in one sum.
            counts = jnp.cumsum(is_above.astype(jnp.int32) + (is_equal.astype(jnp.int32) << 16))
            rank = equal + (counts >> 16)
            is_best = is_above | (is_equal & (rank <= num_equal))
            target = above + (counts & 0xFFFF) + jnp.minimum(rank, num_equal) - 1
            plt.store(places_ref.at[jnp.where(is_best, target, top_k)], read_places(number), mask=is_best)
            return above + _count(is_above), equal + _count(is_equal)

        lax.fori_loop(0, keys.num_pieces, piece, (jnp.int32(0), jnp.int32(0)))

    @pl.when(count > top_k)
    def _():
        lowest = jnp.minimum(count, LOWEST)
        is_sampled = count > num_kept
        threshold = lax.cond(is_sampled, guess, lambda: lowest)
        kept = lax.cond(is_sampled, lambda: keep(threshold), lambda: jnp.minimum(count, 0))
        wait_for_all()
        is_right = (kept >= top_k) & (kept <= num_kept)

        @pl.when(is_right)
        def _():
            def read_places(number):
                return kept_places[pl.ds(number * LIST_PIECE, LIST_PIECE)]

            take(kept_list(kept), read_places, threshold)

        @pl.when(jnp.logical_not(is_right))
        def _():
            take(_List(read_row, count, PIECE), lambda number: first + _slots(number, PIECE), lowest)
