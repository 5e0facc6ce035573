"""Gradients of attention over selected latents on Hopper: tiles of 64 heads of a query, its keys block by block.

Two warpgroups compute: the first makes probabilities, the second their gradients, then each takes half of the columns
of the gradients of query and latents. The third gathers keys. Gradients of latents are added in device memory:
in float32, or as integers, whose sum does not depend on the order.

Registers are short: where they do not suffice, the assembler lets no two products run one behind the other. So the sum
of the query's last 64 columns lies in device memory between blocks, and places in shared memory are computed anew for
each block.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import tiles
from pallas_kernels.sparse_attention.gathering import BLOCK, Arrivals, Indices, count_blocks
from pallas_kernels.sparse_attention.hopper_forward import HEADS, Items, copy_keys

APART = 5
"""Blocks of keys from where one query begins to where the next one does: neighbours, which are computed at the same
time and have many keys in common, would else add to the same ones at the same time."""
PARTS = 2
"""Warpgroups that compute."""
THREADS = 128 * (PARTS + 1)


def backward(
    query: jax.Array,
    latent: jax.Array,
    indices: jax.Array,
    sums: jax.Array,
    output_gradient: jax.Array,
    inner: jax.Array,
    *,
    scale: float,
    unit: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the query [T, H, L] in bfloat16 and of the latents [S, L] in float32.

    `query`, `latent`, `indices` and `sums` as in and from `hopper_forward.forward`, `output_gradient` [T, H, V] in
    bfloat16 with V = L - 64, `inner` [T, tiles * 64] float32 its inner products with the output. With `unit` [1]
    float32 the gradient of the latents is summed in integers that count this unit; no sum may reach 2^63 of it.
    """
    num_queries, num_heads, width = query.shape
    num_tiles = pl.cdiv(num_heads, HEADS)
    num_pieces = width // BLOCK
    query, output_gradient = tiles.whole(query), tiles.whole(output_gradient)
    items = Items(min(launcher.num_multiprocessors(), num_queries * num_tiles), num_tiles, num_queries * num_tiles)
    counts = count_blocks(indices)
    factor = scale * math.log2(math.e)
    # What the blocks of the grid count in until all have cleared their share. It depends on an argument, so that no two
    # calls share it.
    waiting = jnp.minimum(counts[:1], 0)

    def body(
        query_gmem, latent_gmem, indices_gmem, counts_gmem, sums_gmem, gradient_gmem, inner_gmem, waiting_gmem, *refs,
        query_smem, gradient_smem, keys_smem, weights_smem, scores_smem, query_filled, query_emptied, weighed, graded,
        added, emptied, index_ring, index_filled, arrival_words, arrivals=None,
    ):  # fmt: skip
        *unit_gmem, query_out, latent_out, rest_gmem = refs
        arrivals = Arrivals(arrival_words, arrivals, 1)
        arrivals.start()
        indices = Indices(indices_gmem, index_ring, index_filled)
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        _clear(latent_out, waiting_gmem, items.workers)

        @pl.when(warpgroup == PARTS)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            copy_keys(latent_gmem, keys_smem, indices, arrivals, emptied, counts_gmem, items, APART)

        def compute(part: int):
            plgpu.set_max_registers(240, action="increase")
            pieces = _own_pieces(part, num_pieces)
            # As wide as a product can be.
            held = [piece for piece in pieces if piece < num_pieces - 1]
            cuts = [held[start : start + 4] for start in range(0, len(held), 4)]
            has_rest = len(held) < len(pieces)

            def rest():
                return launcher.load(rest_gmem.at[worker], plgpu.Layout.WGMMA, is_strided=True)

            def item(step, number):
                place, tile = items.place(step)
                heads = pl.ds(tile * HEADS, HEADS)
                if part == 0:

                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_wait(query_emptied)

                    for piece in range(num_pieces):
                        columns = pl.ds(piece * BLOCK, BLOCK)
                        plgpu.copy_gmem_to_smem(
                            query_gmem.at[place, heads, columns], query_smem.at[piece], query_filled
                        )
                    for piece in range(num_pieces - 1):
                        source = gradient_gmem.at[place, heads, pl.ds(piece * BLOCK, BLOCK)]
                        plgpu.copy_gmem_to_smem(source, gradient_smem.at[piece], query_filled)
                of_rows = launcher.load(
                    (sums_gmem if part == 0 else inner_gmem).at[place, heads], launcher.row_layout(), is_strided=True
                )
                plgpu.barrier_wait(query_filled)

                def block(_, carry):
                    number, *gradient = carry
                    # Nought, but nothing that the compiler could compute once for all blocks.
                    slot = lax.shift_right_arithmetic(number, jnp.int32(31))
                    index = indices.wait(number)
                    arrivals.wait(slot, number)

                    def columns_of_keys(cut):
                        return keys_smem.at[slot, :, pl.ds(cut[0] * BLOCK, len(cut) * BLOCK)]

                    if part == 0:
                        factors = [
                            (query_smem.at[i + slot], tiles.turned(columns_of_keys([i]))) for i in range(num_pieces)
                        ]
                        scores = tiles.product(BLOCK, *factors) * factor + tiles.hole_bias(index)
                        weights = jnp.exp2(scores - tiles.down(of_rows, BLOCK))

                        @pl.when(number > 0)
                        def _():
                            plgpu.barrier_wait(added)

                        weights_smem[slot] = weights.astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(weighed)
                        plgpu.barrier_wait(graded)
                    else:
                        factors = [
                            (gradient_smem.at[i + slot], tiles.turned(columns_of_keys([i])))
                            for i in range(num_pieces - 1)
                        ]
                        by_weight = tiles.product(BLOCK, *factors)
                        plgpu.barrier_wait(weighed)
                        weights = tiles.matrix(weights_smem.at[slot]).astype(jnp.float32)
                        by_score = weights * (by_weight - tiles.down(of_rows, BLOCK)) * scale
                        scores_smem[slot] = by_score.astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(graded)
                    scores_of_block = scores_smem.at[slot]
                    gradient = tiles.accumulate(gradient, [(scores_of_block, columns_of_keys(cut)) for cut in cuts])
                    if has_rest:
                        last = scores_of_block, columns_of_keys([num_pieces - 1])
                        (rest_gmem[worker],) = tiles.accumulate([rest()], [last])
                    plgpu.barrier_arrive(emptied.at[slot])
                    for piece in pieces:
                        factors = [(tiles.turned(scores_of_block), query_smem.at[piece + slot])]
                        if piece < num_pieces - 1:
                            factors.append((tiles.turned(weights_smem.at[slot]), gradient_smem.at[piece + slot]))
                        rows = tiles.product(BLOCK, *factors)
                        _add_rows(rows, index, latent_out, jnp.int32(piece * BLOCK), unit_gmem)
                    plgpu.barrier_arrive(added)
                    return number + 1, *gradient

                if has_rest:
                    rest_gmem[worker] = tiles.zeros(BLOCK)
                carry = number, *[tiles.zeros(len(cut) * BLOCK) for cut in cuts]
                number, *gradient = lax.fori_loop(0, counts_gmem[place], block, carry)
                parts = list(zip(cuts, gradient, strict=True))
                if has_rest:
                    parts.append(([num_pieces - 1], rest()))
                # Nobody else reads these columns of the query any more.
                for cut, of_cut in parts:
                    of_cut = of_cut.astype(jnp.bfloat16)
                    for i, piece in enumerate(cut):
                        query_smem.at[piece][...] = of_cut[:, i * BLOCK : (i + 1) * BLOCK]
                plgpu.commit_smem()
                for piece in pieces:
                    columns = pl.ds(piece * BLOCK, BLOCK)
                    plgpu.copy_smem_to_gmem(query_smem.at[piece], query_out.at[place, heads, columns])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(query_emptied)
                return number

            indices.wait_for_rest(lax.fori_loop(0, items.count(), item, jnp.int32(0)))
            plgpu.wait_smem_to_gmem(0)
            if part == 0:
                plgpu.barrier_wait(added)
                plgpu.barrier_wait(query_emptied)

        for part in range(PARTS):
            pl.when(warpgroup == part)(functools.partial(compute, part))

    units = () if unit is None else (unit,)
    # An integer is kept as two words.
    latent_type = (latent.shape, jnp.float32) if unit is None else ((latent.shape[0], 2 * width), jnp.int32)
    query_gradient, latent_gradient, _ = launcher.launch(
        body,
        (query, latent, indices, counts, sums, output_gradient, inner, waiting, *units),
        [
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(*latent_type),
            jax.ShapeDtypeStruct((items.workers, HEADS, BLOCK), jnp.float32),
        ],
        scratch=dict(
            query_smem=launcher.swizzled((num_pieces, HEADS, BLOCK), query.dtype),
            gradient_smem=launcher.swizzled((num_pieces - 1, HEADS, BLOCK), query.dtype),
            keys_smem=launcher.swizzled((1, BLOCK, width), query.dtype),
            weights_smem=launcher.swizzled((1, HEADS, BLOCK), query.dtype),
            scores_smem=launcher.swizzled((1, HEADS, BLOCK), query.dtype),
            query_filled=plgpu.Barrier(num_arrivals=2 * num_pieces - 1),
            query_emptied=plgpu.Barrier(num_arrivals=PARTS),
            weighed=plgpu.Barrier(),
            graded=plgpu.Barrier(),
            added=plgpu.Barrier(num_arrivals=PARTS),
            emptied=plgpu.Barrier(num_arrivals=PARTS, num_barriers=1),
            **Indices.scratch(),
            **Arrivals.scratch(1),
        ),
        grid=(items.workers,),
        grid_names=("worker",),
        num_threads=PARTS + 1,
        thread_name="warpgroup",
        name="selected_attention_backward",
    )
    if unit is not None:
        latent_gradient = integers_to_floats(latent_gradient.reshape(*latent.shape, 2), unit)
    elif not launcher.is_simulated():
        latent_gradient = in_order(latent_gradient)
    return query_gradient[:, :num_heads], latent_gradient


def in_order(sums: jax.Array) -> jax.Array:
    """[S, L], columns as threads add them, to their order: of 16 a thread adds two pairs, 8 apart, to one place."""
    parts = sums.reshape(sums.shape[0], -1, 4, 2, 2)
    return jnp.swapaxes(parts, 2, 3).reshape(sums.shape)


def integers_to_floats(words: jax.Array, unit: jax.Array) -> jax.Array:
    """[..., 2] int32, the low word first, to float32."""
    low, high = words[..., 0], words[..., 1]
    # Of the low word's two's complement the high one counts what is borrowed.
    high = high + (low < 0).astype(jnp.int32)
    return (high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)) * unit[0]


def _own_pieces(part: int, num_pieces: int) -> list[int]:
    """The pieces of 64 columns of a warpgroup. The first has the last piece too, which costs half: it has no values."""
    half = num_pieces // 2
    return list(range(half, num_pieces) if part == 0 else range(half))


def _clear(target: Any, waiting: Any, workers: int) -> None:
    """Set device memory to zero, all blocks of the grid together, and wait for all of them."""
    if launcher.is_simulated():

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            target[...] = jnp.zeros(target.shape, target.dtype)

        return
    num_bytes = 4 * target.shape[0] * target.shape[1]
    lines = [
        "{ .reg .u32 thread, count, zero; .reg .u64 at, end; .reg .pred ends, first, waits;",
        f"mov.u32 thread, %tid.x; mad.lo.u32 count, $2, {THREADS}, thread; mul.wide.u32 at, count, 16;",
        f"add.u64 at, at, $0; add.u64 end, $0, {num_bytes}; mov.u32 zero, 0;",
        "more_${:uid}: setp.ge.u64 ends, at, end; @ends bra cleared_${:uid};",
        f"st.global.v4.b32 [at], {{zero, zero, zero, zero}}; add.u64 at, at, {16 * THREADS * workers};",
        "bra more_${:uid}; cleared_${:uid}: fence.acq_rel.gpu; barrier.sync 0; setp.ne.u32 first, thread, 0;",
        "@first bra all_${:uid}; red.release.gpu.global.add.u32 [$1], 1;",
        f"again_${{:uid}}: ld.acquire.gpu.global.u32 count, [$1]; setp.lt.u32 waits, count, {workers};",
        "@waits bra again_${:uid}; all_${:uid}: barrier.sync 0; }",
    ]
    refs = (target, ()), (waiting, ())
    launcher.run_ptx("\n".join(lines), "l,l,r", refs, (lax.axis_index("worker"),))


def _add_rows(rows: jax.Array, index: Any, target: Any, column: jax.Array, unit: list[Any]) -> None:
    """Add `rows` [64, 64] to `target[index, column : column + 64]`, those of holes not at all."""
    if launcher.is_simulated():
        columns, indices = pl.ds(column, BLOCK), index[...]
        is_target = lax.broadcasted_iota(jnp.int32, (target.shape[0], BLOCK), 0) == indices[None]
        target[:, columns] = target[:, columns] + jnp.dot(is_target.astype(rows.dtype), rows)
        return
    layout = plgpu.Layout.WGMMA
    types = layout, plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[plgpu.RefType() for _ in unit]

    @plgpu.inline_mgpu(arg_types=types)
    def add(_, array, index, target, column, *unit):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        # Of a register the second number of its place counts pieces of 8 columns, the fifth pieces of 8 rows.
        places = sorted(np.ndindex(array.registers.shape), key=lambda place: (place[4], place[1]))
        values = [
            vector.extract(array.registers[place], dynamic_position=[], static_position=[number])
            for place in places
            for number in range(2)
        ]
        pointers = [utils.memref_ptr(ref) for ref in (index, target)]
        operands = [*pointers, column.registers.item(), *(utils.memref_ptr(ref) for ref in unit), *values]
        constraints = ",".join(["r", "l", "r", *("l" for _ in unit), *("f" for _ in values)])
        void = ir.Type.parse("!llvm.void")
        width = target_width // 2 if unit else target_width
        llvm.inline_asm(void, operands, _adding(width, is_integer=bool(unit)), constraints, has_side_effects=True)

    target_width = target.shape[1]
    add(rows, index, target, column, *unit)  # pyright: ignore[reportCallIssue]


@functools.cache
def _adding(width: int, *, is_integer: bool) -> str:
    """PTX that adds a thread's values: of two rows, 8 pairs each."""
    size = 8 if is_integer else 4
    lines = [
        "{ .reg .u32 thread, row, column; .reg .s32 token<2>; .reg .u64 at, base; .reg .pred is_key;",
        ".reg .f32 scale, scaled; .reg .s64 whole;",
        "mov.u32 thread, %tid.x; and.b32 thread, thread, 127; shr.u32 row, thread, 5; shl.b32 row, row, 4;",
        # Four numbers in a row are those of one thread, see `in_order`; integers lie in the order of columns.
        f"and.b32 column, thread, 3; shl.b32 column, column, {1 if is_integer else 2}; add.u32 column, column, $2;",
        "shr.u32 thread, thread, 2; and.b32 thread, thread, 7; add.u32 row, row, thread; mad.lo.u32 row, row, 4, $0;",
        f"mul.wide.u32 base, column, {size}; add.u64 base, base, $1;",
        "ld.shared.s32 token0, [row]; ld.shared.s32 token1, [row + 32];",
    ]
    if is_integer:
        lines.append("ld.global.nc.f32 scale, [$3]; rcp.approx.f32 scale, scale;")
    first = 4 if is_integer else 3
    for number in range(2):
        lines += [
            f"setp.ge.s32 is_key, token{number}, 0; max.s32 token{number}, token{number}, 0;",
            f"mul.wide.u32 at, token{number}, {size * width}; add.u64 at, at, base;",
        ]
        if is_integer:
            for place in range(16):
                value, at = f"${first + 16 * number + place}", 64 * (place // 2) + 8 * (place % 2)
                lines.append(f"mul.f32 scaled, {value}, scale; cvt.rni.s64.f32 whole, scaled;")
                lines.append(f"@is_key red.relaxed.gpu.global.add.u64 [at + {at}], whole;")
            continue
        for pair in range(4):
            four = ", ".join(f"${first + 16 * number + 4 * pair + value}" for value in range(4))
            lines.append(f"@is_key red.relaxed.gpu.global.add.v4.f32 [at + {64 * pair}], {{{four}}};")
    lines.append("}")
    return "\n".join(lines)
