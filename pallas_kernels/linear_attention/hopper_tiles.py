"""Matrices [64, 64] that a warpgroup holds as tensor cores read and leave them, in Pallas Mosaic GPU for Hopper.

Each of its four warps holds a tile of 16 rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE, TILE_BITS

HALF = 64
"""Columns: key channels of one warpgroup."""


def product(*factors: tuple[Any, Any]) -> jax.Array:
    """Sum of products [64, C] @ [C, 64], of bfloat16 in float32."""
    if launcher.is_simulated():  # which takes no left factor in registers
        products = [jnp.dot(left[...], right[...], preferred_element_type=jnp.float32) for left, right in factors]
        return sum(products[1:], products[0])

    def scope(total):
        for left, right in factors:
            plgpu.wgmma(total, left, right)
        plgpu.wgmma_wait(0)
        return total[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((CHUNK, HALF)))


def products(
    factors: Sequence[Sequence[tuple[Any, Any]]], widths: Sequence[int], meanwhile: Callable[[], None] | None = None
) -> list[jax.Array]:
    """Several sums of products [64, C] @ [C, width], all under way at once; `meanwhile` is run before they are done."""
    if launcher.is_simulated():
        results = [product(*pairs) for pairs in factors]
        if meanwhile is not None:
            meanwhile()
        return results

    def scope(*totals):
        for total, pairs in zip(totals, factors, strict=True):
            for left, right in pairs:
                plgpu.wgmma(total, left, right)
        if meanwhile is not None:
            meanwhile()
        plgpu.wgmma_wait(0)
        return tuple(total[...] for total in totals)

    return list(pl.run_scoped(scope, *(plgpu.WGMMAAccumulatorRef((CHUNK, width)) for width in widths)))


def accumulate(totals: Sequence[jax.Array], factors: Sequence[Sequence[tuple[Any, Any]]]) -> tuple[jax.Array, ...]:
    """Each total [64, 64] plus a sum of products, all under way at once."""
    if launcher.is_simulated():
        return tuple(total + product(*pairs) for total, pairs in zip(totals, factors, strict=True))

    def add(totals):
        for total, pairs in zip(totals, factors, strict=True):
            for left, right in pairs:
                plgpu.wgmma(total, left, right)

    # What is run on refs gives values back.
    return cast(Any, pl.run_state(add)(tuple(plgpu.WGMMAAccumulatorRef.init(total) for total in totals)))


def turned(ref: Any) -> Any:
    return ref[...].T if launcher.is_simulated() else ref.transpose((1, 0))


def down(vector: jax.Array) -> jax.Array:
    """One number a row, for all columns."""
    return lax.broadcast_in_dim(vector, (CHUNK, HALF), (0,))


def across(vector: jax.Array) -> jax.Array:
    """One number a column, for all rows."""
    return lax.broadcast_in_dim(vector, (CHUNK, HALF), (1,))


def ones() -> jax.Array:
    array = jnp.ones((CHUNK, CHUNK), jnp.bfloat16)
    return array if launcher.is_simulated() else plgpu.layout_cast(array, plgpu.Layout.WGMMA)


def iota(dimension: int) -> jax.Array:
    """The row or column of each entry [64, 64], computed anew wherever it is used: registers are scarce."""
    if launcher.is_simulated():
        return lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), dimension)
    result = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.int32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(return_type=result)
    def number(_):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        whole = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), whole)
        thread = _thread()
        if dimension == 0:  # Of a warp's 32 threads four hold a row and the one 8 rows below.
            first = arith.andi(arith.shrui(thread, utils.c(2, whole)), utils.c(7, whole))
            first = arith.addi(first, arith.shli(_warp(thread), utils.c(TILE_BITS, whole)))
        else:
            first = arith.shli(arith.andi(thread, utils.c(3, whole)), utils.c(1, whole))
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((CHUNK, CHUNK)), dtype=object)
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns, the fifth of 8 rows.
            start = arith.addi(first, utils.c(8 * place[4 if dimension == 0 else 1], whole))
            values = [start, start if dimension == 0 else arith.addi(start, utils.c(1, whole))]
            registers[place] = vector.from_elements(pair, values)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return number()  # pyright: ignore[reportCallIssue]


def column_layout() -> Any:
    return plgpu.Layout.WGMMA.reduce(0)


def within(start: jax.Array, length: jax.Array) -> jax.Array:
    """The column is one of `length` from `start` on; both [64, 64] int32. One comparison, of unsigned numbers."""
    return (iota(1) - start).astype(jnp.uint32) < length.astype(jnp.uint32)


def matrix(ref: Any) -> jax.Array:
    return launcher.load(ref, plgpu.Layout.WGMMA)


def unmarked(matrix: jax.Array) -> jax.Array:
    """The same, not marked as varying over mesh axes, as what arguments hold is: nothing in shared memory is."""
    if launcher.is_simulated():
        return matrix
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)
    same = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(lambda _, array: array)
    return same(matrix)  # pyright: ignore[reportCallIssue]


def row(ref: Any) -> jax.Array:
    return launcher.load(ref, launcher.row_layout())


def _thread() -> Any:
    """The thread's number. Read anew each time: what follows from it is then not kept from one chunk to the next."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    whole = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(whole, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def _warp(thread: Any) -> Any:
    """Within a warpgroup, in which each of four warps holds a tile of 16 rows."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    whole = ir.IntegerType.get_signless(32)
    return arith.andi(arith.shrui(thread, utils.c(5, whole)), utils.c(3, whole))


def choose_tiles(matrix: jax.Array, is_chosen: Callable[[int, int], bool]) -> jax.Array:
    """[64, 64] bfloat16 where the tiles of row and column are chosen, by constants and a range of rows; else zero."""
    if launcher.is_simulated():
        row, column = iota(0) // TILE, iota(1) // TILE
        tiles = [(one, other) for one in range(4) for other in range(4) if is_chosen(one, other)]
        masks = [(row == one) & (column == other) for one, other in tiles]
        return jnp.where(functools.reduce(jnp.logical_or, masks), matrix, 0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def choose(_, array):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        pair, warp, registers = ir.IntegerType.get_signless(32), _warp(_thread()), array.registers.copy()
        zero = utils.c(0, pair)
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns.
            rows = [row for row in range(4) if is_chosen(row, place[1] * 8 // TILE)]
            value = utils.bitcast(registers[place], pair) if rows else zero
            if rows and rows[0] > 0:
                is_inside = arith.cmpi(arith.CmpIPredicate.sge, warp, utils.c(rows[0], pair))
                value = arith.select(is_inside, value, zero)
            if rows and rows[-1] < 3:
                is_inside = arith.cmpi(arith.CmpIPredicate.sle, warp, utils.c(rows[-1], pair))
                value = arith.select(is_inside, value, zero)
            registers[place] = utils.bitcast(value, registers[place].type)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return choose(matrix)  # pyright: ignore[reportCallIssue]


def corners(matrix: jax.Array, bit: Any) -> jax.Array:
    """[64, 64] bfloat16 where the highest bit in which row and column differ is number `bit`, not 0; else zero."""
    if launcher.is_simulated():
        return jnp.where((iota(0) ^ iota(1)) >> bit == 1, matrix, 0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.Layout.WG_SPLAT), return_type=result)
    def choose(_, array, bit):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        whole, thread, registers = ir.IntegerType.get_signless(32), _thread(), array.registers.copy()

        def bits(start, count):
            return arith.andi(arith.shrui(thread, utils.c(start, whole)), utils.c(2**count - 1, whole))

        # Both columns of a pair differ from the row in the same bits but the lowest: all are told without it.
        half_row = arith.addi(arith.shli(_warp(thread), utils.c(TILE_BITS - 1, whole)), bits(3, 2))
        differing = arith.xori(half_row, bits(0, 2))
        shift, zero = arith.subi(bit.registers.item(), utils.c(1, whole)), utils.c(0, whole)
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns, the fifth of 8 rows.
            own = arith.xori(differing, utils.c(4 * place[1] ^ 4 * place[4], whole))
            is_corner = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(own, shift), utils.c(1, whole))
            value = arith.select(is_corner, utils.bitcast(registers[place], whole), zero)
            registers[place] = utils.bitcast(value, registers[place].type)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return choose(matrix, bit)  # pyright: ignore[reportCallIssue]


def by_tiles_apart(matrices: Sequence[jax.Array]) -> jax.Array:
    """[64, 64] whose tiles on the diagonal come from the first matrix, those n tiles below it from the n-th next.

    Matrices hold the columns that they are asked for. What lies above the diagonal is to be masked.
    """
    if launcher.is_simulated():
        apart, result = iota(0) // TILE - iota(1) // TILE, matrices[0]
        for number, matrix in enumerate(matrices[1:], 1):
            result = jnp.where(apart == number, jnp.pad(matrix, ((0, 0), (0, CHUNK - matrix.shape[1]))), result)
        return result
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(matrices), return_type=result)
    def choose(_, *arrays):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        whole, registers = ir.IntegerType.get_signless(32), arrays[0].registers.copy()
        warp = _warp(_thread())
        is_row = [arith.cmpi(arith.CmpIPredicate.eq, warp, utils.c(row, whole)) for row in range(4)]
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns.
            column = place[1] * 8 // TILE
            for number in range(1, 4 - column):
                registers[place] = arith.select(
                    is_row[column + number], arrays[number].registers[place], registers[place]
                )
        return fragmented_array.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    return choose(*matrices)  # pyright: ignore[reportReturnType]


def keep_rows(matrix: jax.Array, table: Any, rows: Sequence[int]) -> None:
    """Write some rows, each the first or the last of a tile, to a table in shared memory."""
    if launcher.is_simulated():
        for number, row in enumerate(rows):
            table[number] = matrix[row]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def keep(_, array, table):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        whole, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        thread = _thread()
        base = utils.memref_ptr(table)
        lane_row = arith.andi(arith.shrui(thread, utils.c(2, whole)), utils.c(7, whole))
        own_row = arith.addi(lane_row, arith.shli(_warp(thread), utils.c(TILE_BITS, whole)))
        lane = arith.shli(arith.andi(thread, utils.c(3, whole)), utils.c(3, whole))
        for number, row in enumerate(rows):
            # Of a tile's rows a thread holds one and the one 8 below.
            below = row % TILE // 8
            is_own = arith.cmpi(arith.CmpIPredicate.eq, own_row, utils.c(row - 8 * below, whole))
            for piece in range(array.registers.shape[1]):
                pair = array.registers[0, piece, 0, 0, below].reshape(())[()]
                values = [vector.extract(pair, dynamic_position=[], static_position=[place]) for place in range(2)]
                offset = arith.addi(lane, utils.c(4 * (number * HALF + 8 * piece), whole))
                instructions = "{ .reg .u32 place; add.u32 place, $0, $1; @$4 st.shared.v2.f32 [place], {$2, $3}; }"
                llvm.inline_asm(void, [base, offset, *values, is_own], instructions, "r,r,f,f,b", has_side_effects=True)

    keep(matrix, table)  # pyright: ignore[reportCallIssue]


def store_turned(matrix: jax.Array, target: Any) -> None:
    """Write a matrix [64, 64] in bfloat16 to a swizzled buffer in shared memory as its transpose."""
    if launcher.is_simulated():
        target[...] = matrix.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(launcher.swizzle(HALF, jnp.bfloat16))))
    def store(_, array, target):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        whole, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")

        def number(value):
            return utils.c(value, whole)

        def bits(start, count):
            return arith.andi(arith.shrui(thread, number(start)), number(2**count - 1))

        # An instruction stores four matrices of 8 rows and columns. A thread says where one of their columns goes: to
        # the row of that number, whose pieces of 16 bytes are swizzled by it.
        thread = _thread()
        column, below, right = bits(0, 3), bits(3, 1), bits(4, 1)
        piece = arith.xori(arith.addi(arith.shli(_warp(thread), number(1)), below), column)
        place = arith.addi(arith.shli(column, number(7)), arith.shli(piece, number(4)))
        place, base = arith.addi(place, arith.shli(right, number(10))), utils.memref_ptr(target)
        for start in range(0, HALF // 8, 2):
            pairs = [array.registers[0, start + right, 0, 0, below] for right in range(2) for below in range(2)]
            pairs = [utils.bitcast(pair.reshape(())[()], whole) for pair in pairs]
            instructions = (
                "{ .reg .u32 place; add.u32 place, $0, $1; stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                f"[place + {start * 1024}], {{$2, $3, $4, $5}}; }}"
            )
            llvm.inline_asm(void, [base, place, *pairs], instructions, "r,r,r,r,r,r", has_side_effects=True)

    store(matrix, target)  # pyright: ignore[reportCallIssue]


def rows_of_tiles(table: Any, rows: Sequence[int]) -> jax.Array:
    """[64, 64] whose rows in tile n of four are row `rows[n]` of a table in shared memory."""
    if launcher.is_simulated():
        return jnp.concatenate([jnp.broadcast_to(table[row][None], (TILE, HALF)) for row in rows])
    result = plgpu.ShapeDtypeStruct((CHUNK, HALF), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def spread(_, table):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        number, single = ir.IntegerType.get_signless(32), ir.F32Type.get()
        packed = utils.c(sum(row << 4 * tile for tile, row in enumerate(rows)), number)
        thread = _thread()
        shift = arith.shli(_warp(thread), utils.c(2, number))
        row = arith.andi(arith.shrui(packed, shift), utils.c(15, number))
        row = arith.index_cast(ir.IndexType.get(), row)
        lane = arith.andi(thread, utils.c(3, number))
        lane = arith.index_cast(ir.IndexType.get(), arith.shli(lane, utils.c(1, number)))
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((CHUNK, HALF)), dtype=object)
        for piece in range(registers.shape[1]):
            column = arith.addi(lane, utils.c(8 * piece, ir.IndexType.get()))
            registers[:, piece] = vector.load(ir.VectorType.get((2,), single), table, [row, column])
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return spread(table)  # pyright: ignore[reportCallIssue]


def row_across(table: Any, row: int = 0) -> jax.Array:
    """[64, 64] whose rows are all one row of a table in shared memory.

    The compiler's search for layouts may never end where vectors across columns meet ones down rows.
    """
    return rows_of_tiles(table, (row,) * 4)


def rounded(array: jax.Array) -> jax.Array:
    """Float32 with no more digits than bfloat16; cheaper than there and back."""
    bits = lax.bitcast_convert_type(array, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)


def parts(array: jax.Array, count: int) -> list[jax.Array]:
    """An array in float32 as a sum of arrays in bfloat16."""
    parts = []
    for _ in range(count):
        part = rounded(array)
        parts.append(part.astype(jnp.bfloat16))
        array = array - part
    return parts
