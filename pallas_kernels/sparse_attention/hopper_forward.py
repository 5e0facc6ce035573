"""Attention over selected latents on Hopper: one query's 64 heads are a tile, its keys are gathered block by block.

Of a block's four warpgroups the first two sum values, half of the columns each, the third makes probabilities, the
last gathers. Probabilities take the place of the columns behind the values in the buffer of their keys, which are no
longer needed then.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import tiles
from pallas_kernels.sparse_attention.gathering import BLOCK, Arrivals, Indices, count_blocks

HEADS = 64
"""Heads of a tile: rows of a matrix product."""
PART = 128
"""Columns of values in one product: a wider one wants more registers than a thread is launched with."""
SLOTS = 2
"""Buffers of keys."""
LOWEST = -1e30
"""Below all scores, and finite: the maximum over no keys."""


class Items(NamedTuple):
    """The tiles one block of the grid takes: of all queries and head tiles, every `workers`-th."""

    workers: int
    num_tiles: int
    total: int

    def count(self) -> jax.Array:
        return pl.cdiv(self.total - lax.axis_index("worker"), self.workers)

    def place(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(query, its tile of heads); beyond the last the last."""
        item = jnp.minimum(lax.axis_index("worker") + step * self.workers, self.total - 1)
        return item // self.num_tiles, lax.rem(item, jnp.int32(self.num_tiles))


def copy_keys(
    rows: Any, keys: Any, indices: Indices, arrivals: Arrivals, emptied: Any, counts: Any, items: Items, apart: int = 0
):
    """The copying warpgroup's loop: gather every block of every item's keys, indices two blocks ahead.

    A query begins `apart` blocks behind the query before it, and comes round.
    """
    slots = keys.shape[0]

    def blocks_of(step):
        return counts[items.place(step)[0]]

    def fetch(step, block, count, number):
        """Block `block` of the item, or what is beyond its last of the next one."""
        is_beyond = (block >= count).astype(jnp.int32)
        query, _ = items.place(step + is_beyond)
        block -= is_beyond * count
        if apart:
            block = lax.rem(block + query * apart, blocks_of(step + is_beyond))
        indices.fetch(query, block, number)

    def item(step, number):
        count = blocks_of(step)

        def block(k, number):
            slot = lax.rem(number, jnp.int32(slots))

            @pl.when(number >= slots)
            def _():
                plgpu.barrier_wait(emptied.at[slot])

            # Two blocks behind everybody is done: their place in the ring is free too.
            fetch(step, k + 2, count, number + 2)
            index = indices.wait(number)
            arrivals.gather(rows, index, keys.at[slot], slot)
            return number + 1

        return lax.fori_loop(0, count, block, number)

    first = blocks_of(jnp.int32(0))
    fetch(jnp.int32(0), jnp.int32(0), first, jnp.int32(0))
    fetch(jnp.int32(0), jnp.int32(1), first, jnp.int32(1))
    number = lax.fori_loop(0, items.count(), item, jnp.int32(0))
    indices.wait_for_rest(number)
    for ago in range(slots, 0, -1):

        @pl.when(number >= ago)
        def _(ago=ago):
            plgpu.barrier_wait(emptied.at[lax.rem(number - ago, jnp.int32(slots))])


def forward(
    query: jax.Array, latent: jax.Array, indices: jax.Array, *, scale: float, value_width: int
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, V] in bfloat16, and base-2 logarithms of the sums of exponentials [T, tiles * 64] float32.

    `query` [T, H, L] and `latent` [S, L] bfloat16, `indices` [T, N] int32, N a multiple of 64, at least 128. Of a query
    without keys the logarithm is 0.
    """
    num_queries, num_heads, width = query.shape
    num_tiles = pl.cdiv(num_heads, HEADS)
    half = value_width // 2
    part = min(PART, half)
    query = tiles.whole(query)
    items = Items(min(launcher.num_multiprocessors(), num_queries * num_tiles), num_tiles, num_queries * num_tiles)
    counts = count_blocks(indices)
    factor = scale * math.log2(math.e)

    def body(
        query_gmem, latent_gmem, indices_gmem, counts_gmem, out_gmem, sums_gmem,
        *, query_smem, keys_smem, decay_smem, inverse_smem, query_filled, query_emptied, decayed, weighed, emptied,
        finished, index_ring, index_filled, arrival_words, arrivals=None,
    ):  # fmt: skip
        arrivals = Arrivals(arrival_words, arrivals, SLOTS)
        arrivals.start()
        indices = Indices(indices_gmem, index_ring, index_filled)
        warpgroup = lax.axis_index("warpgroup")
        behind = pl.ds(value_width, BLOCK)

        @pl.when(warpgroup == 3)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            copy_keys(latent_gmem, keys_smem, indices, arrivals, emptied, counts_gmem, items)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(136, action="increase")

            def item(step, number):
                place, tile = items.place(step)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(query_emptied)

                heads = pl.ds(tile * HEADS, HEADS)
                for piece in range(width // BLOCK):
                    source = query_gmem.at[place, heads, pl.ds(piece * BLOCK, BLOCK)]
                    plgpu.copy_gmem_to_smem(source, query_smem.at[piece], query_filled)
                plgpu.barrier_wait(query_filled)

                def block(_, carry):
                    number, highest, total = carry
                    slot = lax.rem(number, jnp.int32(SLOTS))
                    index = indices.wait(number)
                    arrivals.wait(slot, number // SLOTS)

                    pieces = [
                        (query_smem.at[piece], tiles.turned(keys_smem.at[slot, :, pl.ds(piece * BLOCK, BLOCK)]))
                        for piece in range(width // BLOCK)
                    ]
                    scores = tiles.product(BLOCK, *pieces) * factor + tiles.hole_bias(index)
                    new = jnp.maximum(highest, jnp.max(scores, axis=1))
                    decay = jnp.exp2(highest - new)
                    decay_smem[slot] = decay
                    plgpu.barrier_arrive(decayed.at[slot])
                    weights = jnp.exp2(scores - tiles.down(new, BLOCK))
                    keys_smem[slot, :, behind] = weights.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(weighed.at[slot])
                    return number + 1, new, total * decay + jnp.sum(weights, axis=1)

                carry = number, tiles.row_constant(LOWEST), tiles.row_constant(0.0)
                number, highest, total = lax.fori_loop(0, counts_gmem[place], block, carry)
                has_keys = total > 0
                safe = jnp.where(has_keys, total, 1.0)
                inverse_smem[...] = jnp.where(has_keys, 1 / safe, 0.0)
                plgpu.commit_smem()
                plgpu.barrier_arrive(finished)
                sums_gmem[place, heads] = jnp.where(has_keys, highest + jnp.log2(safe), 0.0)
                return number

            indices.wait_for_rest(lax.fori_loop(0, items.count(), item, jnp.int32(0)))
            plgpu.barrier_wait(query_emptied)

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(168, action="increase")

            def item(step, number):
                place, tile = items.place(step)

                def block(_, carry):
                    number, *sums = carry
                    slot = lax.rem(number, jnp.int32(SLOTS))
                    # Sums decay while the probabilities are made.
                    plgpu.barrier_wait(decayed.at[slot])
                    decay = tiles.row(decay_smem.at[slot])
                    sums = [own * tiles.down(decay, part) for own in sums]

                    plgpu.barrier_wait(weighed.at[slot])
                    weights = keys_smem.at[slot, :, behind]
                    columns = [pl.ds(warpgroup * half + start, part) for start in range(0, half, part)]
                    sums = tiles.accumulate(sums, [(weights, keys_smem.at[slot, :, own]) for own in columns])
                    plgpu.barrier_arrive(emptied.at[slot])
                    return number + 1, *sums

                carry = number, *[tiles.zeros(part)] * (half // part)
                number, *sums = lax.fori_loop(0, counts_gmem[place], block, carry)
                plgpu.barrier_wait(finished)
                inverse = tiles.row(inverse_smem)
                # All products with this query are done: its place serves for the result.
                for start, own in enumerate(sums):
                    own = (own * tiles.down(inverse, part)).astype(jnp.bfloat16)
                    for piece in range(part // BLOCK):
                        target = query_smem.at[warpgroup * (half // BLOCK) + start * (part // BLOCK) + piece]
                        target[...] = own[:, piece * BLOCK : (piece + 1) * BLOCK]
                plgpu.commit_smem()
                for piece in range(half // BLOCK):
                    number_of_piece = warpgroup * (half // BLOCK) + piece
                    target = out_gmem.at[place, pl.ds(tile * HEADS, HEADS), pl.ds(number_of_piece * BLOCK, BLOCK)]
                    plgpu.copy_smem_to_gmem(query_smem.at[number_of_piece], target)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(query_emptied)
                return number

            lax.fori_loop(0, items.count(), item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    out, sums = launcher.launch(
        body,
        (query, latent, indices, counts),
        [
            jax.ShapeDtypeStruct((*query.shape[:2], value_width), query.dtype),
            jax.ShapeDtypeStruct((num_queries, num_tiles * HEADS), jnp.float32),
        ],
        scratch=dict(
            query_smem=launcher.swizzled((width // BLOCK, HEADS, BLOCK), query.dtype),
            keys_smem=launcher.swizzled((SLOTS, BLOCK, width), query.dtype),
            decay_smem=plgpu.SMEM((SLOTS, HEADS), jnp.float32),
            inverse_smem=plgpu.SMEM((HEADS,), jnp.float32),
            query_filled=plgpu.Barrier(num_arrivals=width // BLOCK),
            query_emptied=plgpu.Barrier(num_arrivals=2),
            decayed=plgpu.Barrier(num_barriers=SLOTS),
            weighed=plgpu.Barrier(num_barriers=SLOTS),
            emptied=plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            finished=plgpu.Barrier(),
            **Indices.scratch(),
            **Arrivals.scratch(SLOTS),
        ),
        grid=(items.workers,),
        grid_names=("worker",),
        num_threads=4,
        thread_name="warpgroup",
        name="selected_attention",
    )
    return out[:, :num_heads], sums
