"""The exact best of each row's range of scores, in Pallas for Triton: thresholds are found bit by bit, in registers.

A sample of a row tells a threshold that a few more than wanted reach; they are copied out, and the best of them taken.
Where the sample misleads, too few or too many reaching it, the row is taken piece by piece, each with the best before.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

PIECE = 4096
"""Scores read at a time."""
SAMPLE = 4096
WARPS = 8
LOWEST = -(2**31)
"""Below the integer of every score."""


def top_k_of_rows(
    scores: jax.Array, first: jax.Array, end: jax.Array, top_k: int, *, interpret: bool = False
) -> jax.Array:
    """int32 [T, top_k]: places of the best of `scores[t, first[t] : end[t]]`, ascending, then -1.

    `scores` [T', S'] float32 with T' >= T. Of equal scores the earlier is better. `top_k` is a power of two.
    """
    num_rows, num_kept = first.shape[0], (2 if scores.shape[1] <= 2**16 else 4) * top_k
    sample = SAMPLE if scores.shape[1] <= 2**16 else 4 * SAMPLE
    whole = pl.BlockSpec(scores.shape, lambda row: (0, 0))
    bound = pl.BlockSpec((None,), lambda row: (row,))
    # Interpreted, a masked store writes back what it read, for which each row gets one more place.
    widths = [width + interpret for width in (top_k, num_kept, num_kept)]
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


def _slots(count: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (count,), 0)


def _count(is_counted: jax.Array) -> jax.Array:
    return jnp.sum(is_counted.astype(jnp.int32))


def _read_keys(scores_ref: Any, row: jax.Array, place: jax.Array, is_read: jax.Array) -> jax.Array:
    """Integers in the order of the scores; the lowest where nothing is read."""
    score = plt.load(scores_ref.at[row, jnp.where(is_read, place, 0)], mask=is_read, other=0.0)
    # Minus zero equals zero.
    bits = lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return jnp.where(is_read, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


def _threshold(key: jax.Array, rank: jax.Array | int) -> jax.Array:
    """A number that `rank` or more of the keys reach: exactly `rank` of them, or else the largest such number."""

    def try_bit(carry):
        bit, threshold, _ = carry
        higher = threshold + (jnp.int32(1) << bit)
        reached = _count(key >= higher)
        is_enough = reached >= rank
        return bit - 1, jnp.where(is_enough, higher, threshold), jnp.where(is_enough, reached, 0)

    start = jnp.int32(31), jnp.int32(LOWEST), jnp.int32(0)
    return lax.while_loop(lambda carry: (carry[0] >= 0) & (carry[2] != rank), try_bit, start)[1]


def _best(key: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """(which are the best, their places among them, `top_k` for the others); of equal ones the first."""
    threshold = _threshold(key, top_k)
    is_above = key > threshold
    is_equal = (key == threshold) & (key > LOWEST)
    rank = jnp.cumsum(is_equal.astype(jnp.int32))
    is_best = is_above | (is_equal & (rank <= top_k - _count(is_above)))
    return is_best, jnp.where(is_best, jnp.cumsum(is_best.astype(jnp.int32)) - 1, top_k)


def _select(scores_ref, first_ref, end_ref, places_ref, kept_keys, kept_places, *, top_k, num_kept, sample, interpret):
    row, first = pl.program_id(0), first_ref[...]
    count = jnp.maximum(end_ref[...] - first, 0)

    def wait_for_all():
        if not interpret:
            plt.debug_barrier()

    @pl.when(count <= top_k)
    def _():
        places_ref[pl.ds(0, top_k)] = jnp.where(_slots(top_k) < count, first + _slots(top_k), -1)

    def guess():
        """The key that the sample has at the wanted rank, some more for safety."""
        # Both below 2^15.
        place = _slots(sample) * (count // sample) + (_slots(sample) * (count % sample)) // sample
        key = _read_keys(scores_ref, row, first + place, _slots(sample) >= 0)
        expected = sample * (top_k / count.astype(jnp.float32))
        return _threshold(key, (expected + 4 * jnp.sqrt(expected) + 8).astype(jnp.int32))

    def keep(threshold):
        """Copy out what reaches the threshold, as far as there is room; returns how many reach it."""

        def piece(number, kept):
            place = number * PIECE + _slots(PIECE)
            key = _read_keys(scores_ref, row, first + place, place < count)
            is_kept = (key >= threshold) & (key > LOWEST)
            target = kept + jnp.cumsum(is_kept.astype(jnp.int32)) - 1
            has_room = is_kept & (target < num_kept)
            target = jnp.where(has_room, target, num_kept)
            plt.store(kept_keys.at[target], key, mask=has_room)
            plt.store(kept_places.at[target], first + place, mask=has_room)
            return kept + _count(is_kept)

        return lax.fori_loop(0, pl.cdiv(count, PIECE), piece, jnp.int32(0))

    def take(kept):
        """The best of those copied out."""
        slot = _slots(num_kept)
        key = plt.load(kept_keys.at[slot], mask=slot < kept, other=LOWEST)
        place = plt.load(kept_places.at[slot], mask=slot < kept, other=-1)
        is_best, target = _best(key, top_k)
        plt.store(places_ref.at[target], place, mask=is_best)

    def take_by_pieces():
        slot, fresh = _slots(2 * top_k), 2 * top_k

        def piece(number, _):
            is_old = (slot < top_k) & (number > 0)
            offset = jnp.where(number > 0, fresh + (number - 1) * (fresh - top_k) + slot - top_k, slot)
            key = _read_keys(scores_ref, row, first + offset, jnp.logical_not(is_old) & (offset < count))
            old = jnp.where(is_old, slot, 0)
            key = jnp.where(is_old, plt.load(kept_keys.at[old], mask=is_old, other=LOWEST), key)
            place = jnp.where(is_old, plt.load(places_ref.at[old], mask=is_old, other=-1), first + offset)
            is_best, target = _best(key, top_k)
            # All threads have read what was kept.
            wait_for_all()
            plt.store(places_ref.at[target], place, mask=is_best)
            plt.store(kept_keys.at[target], key, mask=is_best)
            wait_for_all()
            return ()

        num_pieces = 1 + pl.cdiv(jnp.maximum(count - fresh, 0), fresh - top_k)
        lax.fori_loop(0, num_pieces, piece, ())

    @pl.when(count > top_k)
    def _():
        threshold = lax.cond(count > 2 * sample, guess, lambda: jnp.minimum(count, LOWEST))
        kept = keep(threshold)
        wait_for_all()
        is_right = (kept >= top_k) & (kept <= num_kept)

        @pl.when(is_right)
        def _():
            take(kept)

        @pl.when(jnp.logical_not(is_right))
        def _():
            take_by_pieces()
