"""Index scores of a chunk of queries on Hopper: products of keys with all heads of some queries, summed over heads.

Warpgroups multiply, 64 keys each with 128 heads of one query or more at a time, one copies. A query sees a range of
keys; blocks of keys outside the ranges of all its neighbours are neither read nor written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import tiles

ROWS = 256
"""Heads of all queries of a tile: they stay in shared memory while keys pass."""
PART = 128
"""Heads in one product where a query has few: the next one runs while the sums of this one are taken. Of more heads all
are in one product, which reads the keys once."""
PARTS = 2
"""Warpgroups that multiply."""
KEYS = PARTS * tiles.ROWS
"""Keys of a step."""
REGISTERS = 232
SPAN = 64
"""Steps of a tile at most: later keys of the same queries are another tile's."""
STAGES = 4


def index_scores(
    index_query: jax.Array,
    index_key: jax.Array,
    head_weight: jax.Array,
    first: jax.Array,
    end: jax.Array,
    key_scale: jax.Array | None = None,
) -> jax.Array:
    """float32 [T, S'], S' >= S: sum_j head_weight[t, j] relu(index_query[t, j] . index_key[s]), first[t] <= s < end[t].

    `index_query` [T, J, K] and `index_key` [S, K] in bfloat16, or both in an 8-bit float with K = 128, `head_weight`
    [T, J] float32, `first`, `end` [T] int32. With `key_scale` [S] float32 scores are multiplied by it. Elsewhere
    anything is left.
    """
    num_queries, num_heads, width = index_query.shape
    group = ROWS // num_heads  # Queries of a tile.
    part = PART if num_heads < 64 else ROWS
    num_groups = pl.cdiv(num_queries, group)
    missing = num_groups * group - num_queries
    rows = jnp.pad(index_query, ((0, missing), (0, 0), (0, 0))).reshape(-1, width)
    weight = jnp.pad(0.5 * head_weight, ((0, missing), (0, 0))).reshape(-1)
    num_steps = pl.cdiv(index_key.shape[0], KEYS)
    num_missing_keys = num_steps * KEYS - index_key.shape[0]
    keys = jnp.pad(index_key, ((0, num_missing_keys), (0, 0)))
    scales = () if key_scale is None else (jnp.pad(key_scale, (0, num_missing_keys)),)
    spans = pl.cdiv(num_steps, SPAN)
    total = num_groups * spans
    workers = min(launcher.num_multiprocessors(), total)
    is_empty = first >= end
    steps_first = jnp.where(is_empty, num_steps, first // KEYS)
    steps_end = jnp.where(is_empty, 0, -(-end // KEYS))
    grouped = [
        jnp.pad(array, (0, missing), constant_values=fill).reshape(num_groups, group)
        for array, fill in ((steps_first, num_steps), (steps_end, 0))
    ]
    bounds = jnp.stack([jnp.min(grouped[0], axis=1), jnp.max(grouped[1], axis=1)], axis=1)

    def body(
        rows_gmem, keys_gmem, weight_gmem, bounds_gmem, *refs,
        rows_smem, keys_smem, weight_smem, rows_filled, rows_emptied, filled, emptied, scales_smem: Any = None,
    ):  # fmt: skip
        *scales_gmem, out_gmem = refs
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        count = pl.cdiv(total - worker, workers)

        def place(step):
            """(first row, first step, steps) of a tile; later queries, whose keys are more, first."""
            item = total - 1 - (worker + step * workers)
            span, tile = item // num_groups, lax.rem(item, jnp.int32(num_groups))
            start = jnp.maximum(bounds_gmem[tile, 0], span * SPAN)
            stop = jnp.minimum(bounds_gmem[tile, 1], (span + 1) * SPAN)
            return tile, start, jnp.maximum(stop - start, 0)

        @pl.when(warpgroup == PARTS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def item(step, number):
                tile, start, steps = place(step)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(rows_emptied)

                own = pl.ds(tile * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(rows_gmem.at[own], rows_smem, rows_filled)
                plgpu.copy_gmem_to_smem(weight_gmem.at[own], weight_smem, rows_filled)

                def load(k, number):
                    slot = lax.rem(number, jnp.int32(STAGES))

                    @pl.when(number >= STAGES)
                    def _():
                        plgpu.barrier_wait(emptied.at[slot])

                    own = pl.ds((start + k) * KEYS, KEYS)
                    plgpu.copy_gmem_to_smem(keys_gmem.at[own], keys_smem.at[slot], filled.at[slot])
                    for scale_gmem in scales_gmem:
                        plgpu.copy_gmem_to_smem(scale_gmem.at[own], scales_smem.at[slot], filled.at[slot])
                    return number + 1

                return lax.fori_loop(0, steps, load, number)

            number = lax.fori_loop(0, count, item, jnp.int32(0))
            plgpu.barrier_wait(rows_emptied)
            for ago in range(STAGES, 0, -1):

                @pl.when(number >= ago)
                def _(ago=ago):
                    plgpu.barrier_wait(emptied.at[lax.rem(number - ago, jnp.int32(STAGES))])

        @pl.when(warpgroup < PARTS)
        def _():
            plgpu.set_max_registers(REGISTERS, action="increase")

            def item(step, number):
                tile, start, steps = place(step)
                plgpu.barrier_wait(rows_filled)

                parts = [pl.ds(start, part) for start in range(0, ROWS, part)]
                # In registers, for all keys.
                weights = [launcher.load(weight_smem.at[own], plgpu.Layout.WGMMA.reduce(0)) for own in parts]

                def multiply(k, number):
                    slot = lax.rem(number, jnp.int32(STAGES))
                    plgpu.barrier_wait(filled.at[slot])
                    own_keys = pl.ds(warpgroup * tiles.ROWS, tiles.ROWS)
                    own = keys_smem.at[slot, own_keys]
                    scale = None if scales_smem is None else tiles.row(scales_smem.at[slot, own_keys])
                    target = pl.ds((start + k) * KEYS + warpgroup * tiles.ROWS, tiles.ROWS)

                    def sum_heads(turn, products):
                        if turn == len(parts) - 1:
                            plgpu.barrier_arrive(emptied.at[slot])
                        # Twice the ReLU: additions are twice as fast as maxima.
                        twice = products + jnp.abs(products)
                        weighted = twice * lax.broadcast_in_dim(weights[turn], products.shape, (1,))
                        for query in range(part // num_heads):
                            heads = weighted[:, query * num_heads : (query + 1) * num_heads]
                            scores = jnp.sum(heads, axis=1)
                            row = tile * group + turn * (part // num_heads) + query
                            out_gmem[row, target] = scores if scale is None else scores * scale

                    tiles.products_in_turn(part, [(own, tiles.turned(rows_smem.at[here])) for here in parts], sum_heads)
                    return number + 1

                number = lax.fori_loop(0, steps, multiply, number)
                plgpu.barrier_arrive(rows_emptied)
                return number

            lax.fori_loop(0, count, item, jnp.int32(0))

    return launcher.launch(
        body,
        (rows, keys, weight, bounds, *scales),
        [jax.ShapeDtypeStruct((num_groups * group, num_steps * KEYS), jnp.float32)],
        scratch={
            "rows_smem": launcher.swizzled((ROWS, width), rows.dtype),
            "keys_smem": launcher.swizzled((STAGES, KEYS, width), rows.dtype),
            "weight_smem": plgpu.SMEM((ROWS,), jnp.float32),
            **({} if key_scale is None else {"scales_smem": plgpu.SMEM((STAGES, KEYS), jnp.float32)}),
            "rows_filled": plgpu.Barrier(num_arrivals=2),
            "rows_emptied": plgpu.Barrier(num_arrivals=PARTS),
            "filled": plgpu.Barrier(num_arrivals=1 + len(scales), num_barriers=STAGES),
            "emptied": plgpu.Barrier(num_arrivals=PARTS, num_barriers=STAGES),
        },
        grid=(workers,),
        grid_names=("worker",),
        num_threads=PARTS + 1,
        thread_name="warpgroup",
        name="index_scores",
    )[0]
