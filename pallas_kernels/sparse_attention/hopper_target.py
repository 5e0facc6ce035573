"""What the indexer learns on Hopper: probabilities of selected keys, summed over the heads.

Two warpgroups take the blocks of a query's keys in turns, a third gathers. Keys are the rows of the product, so that
the sum over heads stays within a row.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import tiles
from pallas_kernels.sparse_attention.gathering import BLOCK, Arrivals, Indices, count_blocks
from pallas_kernels.sparse_attention.hopper_forward import HEADS, SLOTS, Items, copy_keys


def summed_probabilities(
    query: jax.Array, latent: jax.Array, indices: jax.Array, sums: jax.Array, *, scale: float
) -> jax.Array:
    """[tiles, T, N] float32: for each tile of 64 heads the sum of its probabilities of each selected key.

    `query`, `latent`, `indices` and `sums` as in and from `hopper_forward.forward`. Behind the last block of a query,
    and for holes, anything is left.
    """
    num_queries, num_heads, width = query.shape
    num_tiles = pl.cdiv(num_heads, HEADS)
    num_pieces = width // BLOCK
    query = tiles.whole(query)
    items = Items(min(launcher.num_multiprocessors(), num_queries * num_tiles), num_tiles, num_queries * num_tiles)
    # Two warpgroups take the same number of blocks.
    counts = -(-count_blocks(indices) // 2) * 2
    factor = scale * math.log2(math.e)
    # A tile's heads beyond the last one have no part in the sum.
    is_head = jnp.arange(num_tiles * HEADS, dtype=jnp.int32) < num_heads
    sums = jnp.where(is_head[None], sums, jnp.inf)

    def body(
        query_gmem, latent_gmem, indices_gmem, counts_gmem, sums_gmem, out_gmem,
        *, query_smem, keys_smem, sums_smem, query_filled, query_emptied, emptied,
        index_ring, index_filled, arrival_words, arrivals=None,
    ):  # fmt: skip
        arrivals = Arrivals(arrival_words, arrivals, SLOTS)
        arrivals.start()
        indices = Indices(indices_gmem, index_ring, index_filled)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            copy_keys(latent_gmem, keys_smem, indices, arrivals, emptied, counts_gmem, items)

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def item(step, number):
                place, tile = items.place(step)
                heads = pl.ds(tile * HEADS, HEADS)

                @pl.when(warpgroup == 0)
                def _():
                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_wait(query_emptied)

                    for piece in range(num_pieces):
                        source = query_gmem.at[place, heads, pl.ds(piece * BLOCK, BLOCK)]
                        plgpu.copy_gmem_to_smem(source, query_smem.at[piece], query_filled)
                    plgpu.copy_gmem_to_smem(sums_gmem.at[place, heads], sums_smem, query_filled)

                plgpu.barrier_wait(query_filled)

                def block(turn, number):
                    own = number + warpgroup
                    slot = lax.rem(own, jnp.int32(SLOTS))
                    arrivals.wait(slot, own // SLOTS)
                    factors = [
                        (keys_smem.at[slot, :, pl.ds(piece * BLOCK, BLOCK)], tiles.turned(query_smem.at[piece]))
                        for piece in range(num_pieces)
                    ]
                    scores = tiles.product(HEADS, *factors)
                    plgpu.barrier_arrive(emptied.at[slot])
                    normal = launcher.load(sums_smem, plgpu.Layout.WGMMA.reduce(0))
                    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(normal, scores.shape, (1,)))
                    target = pl.ds((2 * turn + warpgroup) * BLOCK, BLOCK)
                    out_gmem[tile, place, target] = jnp.sum(weights, axis=1)
                    return number + 2

                number = lax.fori_loop(0, counts_gmem[place] // 2, block, number)
                plgpu.barrier_arrive(query_emptied)
                return number

            lax.fori_loop(0, items.count(), item, jnp.int32(0))

            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_wait(query_emptied)

    return launcher.launch(
        body,
        (query, latent, indices, counts, sums),
        [jax.ShapeDtypeStruct((num_tiles, *indices.shape), jnp.float32)],
        scratch=dict(
            query_smem=launcher.swizzled((num_pieces, HEADS, BLOCK), query.dtype),
            keys_smem=launcher.swizzled((SLOTS, BLOCK, width), query.dtype),
            sums_smem=plgpu.SMEM((HEADS,), jnp.float32),
            query_filled=plgpu.Barrier(num_arrivals=num_pieces + 1),
            query_emptied=plgpu.Barrier(num_arrivals=2),
            emptied=plgpu.Barrier(num_barriers=SLOTS),
            **Indices.scratch(),
            **Arrivals.scratch(SLOTS),
        ),
        grid=(items.workers,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="warpgroup",
        name="summed_probabilities",
    )[0]
