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
"""Of a list."""
SAMPLE = 2048
"""Numbers of a sample, at least: of long rows it has one in 16, so that it tells a threshold well enough."""
MOST_SAMPLED = 2**15
KEPT = 4096
"""Room for what is copied out, at least."""
HELD = 4096
"""Numbers that a warp can hold in its registers."""
WARPS = 1
LOWEST = -(2**31)
"""Below the integer of every score."""
LOWEST_SCORE = -0x7F800001
"""The integer of minus infinity."""


def top_k_of_rows(
    scores: jax.Array, first: jax.Array, end: jax.Array, top_k: int, *, interpret: bool = False
) -> jax.Array:
    """int32 [T, top_k]: places of the best of `scores[t, first[t] : end[t]]`, ascending, then -1.

    `scores` [T', S'] float32 with T' >= T. Of equal scores the earlier is better. `top_k` is a power of two.
    """
    num_rows, width = first.shape[0], scores.shape[1]
    sample = min(max(SAMPLE, pl.next_power_of_2(pl.cdiv(width, 16))), MOST_SAMPLED)
    # A number of the sample stands for more scores where those are no more than one in 16.
    num_kept = max(KEPT, 2 * top_k) * max(pl.cdiv(width, 16 * MOST_SAMPLED), 1)
    whole = pl.BlockSpec(scores.shape, lambda row: (0, 0))
    bound = pl.BlockSpec((None,), lambda row: (row,))
    # A list has a piece behind it. Interpreted, a masked store writes back what it read: results have a place for that.
    length = max(num_kept, sample) + PIECE
    widths = [(top_k + interpret, jnp.int32), (length, jnp.float32), (length, jnp.int32)]
    varying = jax.typeof(scores).manual_axis_type
    return pl.pallas_call(
        functools.partial(_select, top_k=top_k, num_kept=num_kept, sample=sample, interpret=interpret),
        grid=(num_rows,),
        in_specs=[whole, bound, bound],
        out_specs=[pl.BlockSpec((None, width), lambda row: (row, 0)) for width, _ in widths],
        out_shape=[jax.ShapeDtypeStruct((num_rows, width), dtype, manual_axis_type=varying) for width, dtype in widths],
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


def _score(integer: jax.Array) -> jax.Array:
    """The score of an integer; minus infinity of those below."""
    integer = jnp.maximum(integer, LOWEST_SCORE)
    return lax.bitcast_convert_type(integer ^ ((integer >> 31) & 0x7FFFFFFF), jnp.float32)


def _ranks(numbers: jax.Array, limit: jax.Array, *, interpret: bool) -> jax.Array:
    """Of each number of a piece that reaches the limit how many do before it; -1 of others.

    A thread holds every 32nd: a vote counts those of the other threads.
    """
    if interpret:
        is_counted = numbers >= limit
        return jnp.where(is_counted, jnp.cumsum(is_counted.astype(jnp.int32)) - 1, -1)
    held, kind = numbers.shape[0] // 32, "f32" if numbers.dtype == jnp.float32 else "s32"
    lines = ["{ .reg .pred yes; .reg .b32 votes, before, total, below; mov.u32 below, %lanemask_lt; mov.b32 total, 0;"]
    for number in range(held):
        lines += [
            f"setp.ge.{kind} yes, ${held + number}, ${2 * held}; vote.sync.ballot.b32 votes, yes, 0xffffffff;",
            "and.b32 before, votes, below; popc.b32 before, before; add.s32 before, before, total;",
            f"selp.b32 ${number}, before, -1, yes; popc.b32 votes, votes; add.s32 total, total, votes;",
        ]
    # Results are written before all arguments are read.
    constraints = ",".join(["=&r"] * held + ["f" if kind == "f32" else "r"] * 2 * held)
    shape = jax.ShapeDtypeStruct(numbers.shape, jnp.int32)
    return plt.elementwise_inline_asm(
        " ".join([*lines, "}"]),
        args=[numbers, jnp.full(numbers.shape, limit)],
        constraints=constraints,
        pack=held,
        result_shape_dtypes=[shape],
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


class _Held(_List):
    """The same in registers, as scores, which are counted in floats: both units of a multiprocessor have work."""

    def __init__(
        self,
        scores: jax.Array,
        read: Callable[[jax.Array], jax.Array],
        count: jax.Array,
        piece: int,
        *,
        interpret: bool,
    ):
        super().__init__(read, count, piece)
        self.scores, self.interpret = scores, interpret

    def reaching(self, threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(self.scores >= _score(threshold), 1.0, 0.0)).astype(jnp.int32)

    def highest(self) -> jax.Array:
        return _integers(jnp.max(self.scores), interpret=self.interpret)


def _select(
    scores_ref, first_ref, end_ref, places_ref, kept_scores, kept_places, *, top_k, num_kept, sample, interpret
):
    row, first = pl.program_id(0), first_ref[...]
    count = jnp.maximum(end_ref[...] - first, 0)
    # Nought, but no constant: what is read from there on is not read in vectors, whose order votes do not know.
    nought = jnp.minimum(count, 0)

    def wait_for_all():
        if not interpret:
            plt.debug_barrier()

    def read_row(number):
        slot = _slots(number, PIECE)
        score = plt.load(scores_ref.at[row, jnp.where(slot < count, first + slot, 0)], mask=slot < count, other=0.0)
        return jnp.where(slot < count, _integers(score, interpret=interpret), LOWEST)

    def list_of(length, room):
        def read(number):
            slot = _slots(number, LIST_PIECE)
            key = _integers(kept_scores[pl.ds(number * LIST_PIECE + nought, LIST_PIECE)], interpret=interpret)
            return jnp.where(slot < length, key, LOWEST)

        if room > HELD:
            return _List(read, length, LIST_PIECE)
        scores = jnp.where(_slots(0, room) < length, kept_scores[pl.ds(0, room)], -jnp.inf)
        return _Held(scores, read, length, LIST_PIECE, interpret=interpret)

    @pl.when(count <= top_k)
    def _():
        def piece(number, _):
            slot = _slots(number, PIECE)
            target = jnp.where(slot < top_k, slot, top_k)
            plt.store(places_ref.at[target], jnp.where(slot < count, first + slot, -1), mask=slot < top_k)
            return ()

        lax.fori_loop(0, pl.cdiv(top_k, PIECE), piece, ())

    def sampled(slot):
        """Scores at equal distances. Both factors of the product are at most 2^15."""
        place = slot * (count // sample) + (slot * (count % sample)) // sample
        return plt.load(scores_ref.at[row, first + place])

    def guess():
        """About the number that the sample has at the wanted rank, some more for safety."""
        expected = sample * (top_k / count.astype(jnp.float32))
        rank = (expected + 4 * jnp.sqrt(expected) + 8).astype(jnp.int32)

        def piece(number, _):
            kept_scores[pl.ds(number * LIST_PIECE + nought, LIST_PIECE)] = sampled(_slots(number, LIST_PIECE))
            return ()

        if sample <= HELD:
            numbers: _List = _Held(sampled(_slots(0, sample)), read_row, jnp.int32(0), LIST_PIECE, interpret=interpret)
        else:
            lax.fori_loop(0, sample // LIST_PIECE, piece, ())
            wait_for_all()
            numbers = list_of(jnp.int32(sample), sample)
        threshold = numbers.threshold(rank, rank + rank // 8, jnp.minimum(count, LOWEST))
        wait_for_all()
        return threshold

    def keep(threshold):
        """Copy out what reaches the threshold, as far as there is room; returns how many reach it."""
        limit = _score(threshold)

        def copy(number, kept, *, is_last):
            slot = _slots(number, PIECE)
            place = first + slot
            if is_last:
                score = plt.load(scores_ref.at[row, jnp.where(slot < count, place, 0)], mask=slot < count, other=0.0)
                score = jnp.where(slot < count, score, jnp.nan)
            else:
                score = plt.load(scores_ref.at[row, place])
            rank = _ranks(score, limit, interpret=interpret)
            # What does not fit goes behind: there are too many then, and nothing of this list is used.
            target = jnp.minimum(kept, num_kept) + rank
            target = jnp.where(rank >= 0, target, num_kept + PIECE - 1) if interpret else target
            plt.store(kept_scores.at[target], score, mask=rank >= 0)
            plt.store(kept_places.at[target], place, mask=rank >= 0)
            return kept + jnp.max(rank) + 1

        num_whole = count // PIECE
        kept = lax.fori_loop(0, num_whole, functools.partial(copy, is_last=False), nought)
        return copy(num_whole, kept, is_last=True)

    def take(keys, read_places, low):
        """The best of a list, and of equal ones the first."""
        threshold = keys.threshold(top_k, top_k, low)
        num_equal = top_k - keys.reaching(threshold + 1)

        def piece(number, carry):
            above, equal = carry
            key = keys.read(number)
            rank = _ranks(key, threshold + 1, interpret=interpret)
            is_equal = (key == threshold) & (key > LOWEST)
            count_of_equal = _count(is_equal)

            def store(is_best, target):
                plt.store(places_ref.at[jnp.where(is_best, target, top_k)], read_places(number), mask=is_best)

            def with_equal():
                order = equal + jnp.cumsum(is_equal.astype(jnp.int32)) - is_equal.astype(jnp.int32)
                is_above = (key > threshold).astype(jnp.int32)
                target = above + jnp.cumsum(is_above) - is_above + jnp.minimum(order, num_equal)
                store((key > threshold) | (is_equal & (order < num_equal)), target)

            def without_equal():
                store(rank >= 0, above + rank + jnp.minimum(equal, num_equal))

            lax.cond(count_of_equal > 0, with_equal, without_equal)
            return above + jnp.max(rank) + 1, equal + count_of_equal

        lax.fori_loop(0, keys.num_pieces, piece, (jnp.int32(0), jnp.int32(0)))

    @pl.when(count > top_k)
    def _():
        lowest = jnp.minimum(count, LOWEST)
        is_sampled = count > num_kept
        threshold = lax.cond(is_sampled, guess, lambda: lowest)
        kept = lax.cond(is_sampled, lambda: keep(threshold), lambda: nought)
        wait_for_all()
        is_right = (kept >= top_k) & (kept <= num_kept)

        @pl.when(is_right)
        def _():
            def read_places(number):
                return kept_places[pl.ds(number * LIST_PIECE + nought, LIST_PIECE)]

            take(list_of(kept, num_kept), read_places, threshold)

        @pl.when(jnp.logical_not(is_right))
        def _():
            take(_List(read_row, count, PIECE), lambda number: first + _slots(number, PIECE), lowest)
