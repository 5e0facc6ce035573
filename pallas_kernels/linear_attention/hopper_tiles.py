"""Matrices [64, 64] that a warpgroup holds as tensor cores read and leave them, in Pallas Mosaic GPU for Hopper.

Each of its four warps holds a tile of 16 rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE, TILE_BITS
from pallas_kernels.linear_attention.gates import Functions

HALF = 64
"""Columns: key channels of one warpgroup."""
WIDTH = 2 * HALF
"""Channels of a key or a value."""
ANCHORS = (0, 16, 32, 48, 63)
"""Rows of a chunk whose sums of decays are read as such: tiles' first ones, and the last."""
WARPGROUP = 128
"""Threads."""
TILED = plgpu.RefType(launcher.swizzle(HALF, jnp.bfloat16))
"""A ref to shared memory [R, C] of bfloat16: tiles of 8 rows and 64 columns."""


def result_type(width: int) -> Any:
    return plgpu.ShapeDtypeStruct((CHUNK, width), jnp.float32, layout=plgpu.Layout.WGMMA)


def down(vector: jax.Array) -> jax.Array:
    """One number a row, for all columns."""
    return lax.broadcast_in_dim(vector, (CHUNK, HALF), (0,))


def across(vector: jax.Array) -> jax.Array:
    """One number a column, for all rows."""
    return lax.broadcast_in_dim(vector, (CHUNK, HALF), (1,))


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
        thread = thread_number()
        if dimension == 0:  # Of a warp's 32 threads four hold a row and the one 8 rows below.
            first = bits(thread, 2, 3)
            first = arith.addi(first, arith.shli(warp_number(thread), utils.c(TILE_BITS, whole)))
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


def unknown(number: Any, step: Any) -> Any:
    """The number, which compilers take for another one at each step of a loop.

    Else they keep addresses that follow from it, and spill them. There are never 2^30 steps.
    """
    return number + (step >> 30)


def column_layout() -> Any:
    return plgpu.Layout.WGMMA.reduce(0)


def within(start: jax.Array, length: jax.Array) -> jax.Array:
    """The column is one of `length` from `start` on; both [64, 64] int32. One comparison, of unsigned numbers."""
    return (iota(1) - start).astype(jnp.uint32) < length.astype(jnp.uint32)


def unmarked(matrix: jax.Array) -> jax.Array:
    """The same, not marked as varying over mesh axes, as what arguments hold is: nothing in shared memory is."""
    if launcher.is_simulated():
        return matrix
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)
    same = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(lambda _, array: array)
    return same(matrix)  # pyright: ignore[reportCallIssue]


def thread_number() -> Any:
    """The thread's number. Read anew each time: what follows from it is then not kept from one chunk to the next."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    whole = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(whole, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def bits(number: Any, start: int, count: int) -> Any:
    """The number that `count` bits of a 32-bit one make, from bit `start` on."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    whole = ir.IntegerType.get_signless(32)
    return arith.andi(arith.shrui(number, utils.c(start, whole)), utils.c(2**count - 1, whole))


def warp_number(thread: Any) -> Any:
    """Within a warpgroup, in which each of four warps holds a tile of 16 rows."""
    return bits(thread, 5, 2)


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

        pair, warp, registers = ir.IntegerType.get_signless(32), warp_number(thread_number()), array.registers.copy()
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


def keep_between(start: jax.Array, stop: jax.Array, matrix: jax.Array) -> jax.Array:
    """A matrix in bfloat16 in the columns of each row from `start` on, before `stop`; else zero.

    Both [64, 64] int32 hold one number a row, `stop` none below 0. The bits of two words say what a row keeps; one
    instruction makes masks of two of them for a register that holds two numbers, which are never compared one by one.
    """
    if launcher.is_simulated():
        return jnp.where((iota(1) >= start) & (iota(1) < stop), matrix, 0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * 3, return_type=result)
    def keep(_, start, stop, array):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        pair, pieces = ir.IntegerType.get_signless(32), CHUNK // 8
        lane, registers = thread_number(), array.registers.copy()
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * pieces)})>")
        # Shifts by 32 and more leave nothing, so that of `(1 << stop) - 1` every bit is set.
        lines = [
            "{ .reg .b32 start, stop, left, right, word, first, second;",
            f"and.b32 left, ${pieces + 2}, 3; shl.b32 left, left, 1; sub.u32 left, 7, left; sub.u32 right, left, 1;",
        ]
        for word in range(CHUNK // 32):
            for name, place in (("start", pieces), ("stop", pieces + 1)):
                lines.append(f"sub.s32 {name}, ${place}, {32 * word}; max.s32 {name}, {name}, 0;")
                lines.append(f"shl.b32 {name}, 1, {name}; sub.u32 {name}, {name}, 1;")
            # Of each byte the bits of this thread's two columns become the highest, of which a byte is then filled.
            lines.append("not.b32 start, start; and.b32 word, start, stop;")
            lines.append("shl.b32 first, word, left; shl.b32 second, word, right;")
            for piece in range(4):
                selector = 0x11 * (8 + piece) + 0x1100 * (12 + piece)
                lines.append(f"prmt.b32 ${4 * word + piece}, first, second, {selector};")
        constraints = ",".join(["=&r"] * pieces + ["r"] * 3)
        masks = []
        for below in range(2):
            bounds = [bound.registers[0, 0, 0, 0, below].reshape(())[()] for bound in (start, stop)]
            bounds = [vector.extract(bound, [], [0]) for bound in bounds]
            words: Any = llvm.inline_asm(struct, [*bounds, lane], " ".join([*lines, "}"]), constraints)
            masks.append([llvm.extractvalue(pair, words, [piece]) for piece in range(pieces)])
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns, the fifth of 8 rows.
            value = arith.andi(utils.bitcast(registers[place], pair), masks[place[4]][place[1]])
            registers[place] = utils.bitcast(value, registers[place].type)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return keep(start, stop, matrix)  # pyright: ignore[reportCallIssue]


def filled(value: int) -> jax.Array:
    """[64, 64] bfloat16."""
    matrix = jnp.full((CHUNK, CHUNK), value, jnp.bfloat16)
    return matrix if launcher.is_simulated() else plgpu.layout_cast(matrix, plgpu.Layout.WGMMA)


def keep_where(is_kept: jax.Array, matrix: jax.Array) -> jax.Array:
    """A matrix in bfloat16 where a row is kept, else zero; `is_kept` [64, 64] holds one truth a row.

    Compilers take a selection between numbers of 16 bits apart, four instructions for the two of a register.
    """
    if launcher.is_simulated():
        return jnp.where(is_kept, matrix, 0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    def keep(_, is_kept, array):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        pair, registers = ir.IntegerType.get_signless(32), array.registers.copy()
        for place in np.ndindex(registers.shape):
            is_own = vector.extract(is_kept.registers[place], [], [0])
            value = arith.select(is_own, utils.bitcast(registers[place], pair), utils.c(0, pair))
            registers[place] = utils.bitcast(value, registers[place].type)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return keep(is_kept, matrix)  # pyright: ignore[reportCallIssue]


def by_tiles_apart(matrix: jax.Array, starts: Sequence[int]) -> jax.Array:
    """[64, 64] whose tiles on the diagonal lie in a wider matrix from column 0 on, those n below from `starts[n]` on.

    What lies above the diagonal is to be masked.
    """
    if launcher.is_simulated():
        apart, result = iota(0) // TILE - iota(1) // TILE, matrix[:, :CHUNK]
        for number, start in enumerate(starts[1:], 1):
            columns = matrix[:, start : start + CHUNK - number * TILE]
            result = jnp.where(apart == number, jnp.pad(columns, ((0, 0), (0, number * TILE))), result)
        return result
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result_type(CHUNK))
    def choose(_, array):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        whole, registers = ir.IntegerType.get_signless(32), array.registers[:, : CHUNK // 8].copy()
        warp = warp_number(thread_number())
        is_row = [arith.cmpi(arith.CmpIPredicate.eq, warp, utils.c(row, whole)) for row in range(4)]
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns.
            column = place[1] * 8 // TILE
            for number in range(1, 4 - column):
                other = array.registers[(place[0], place[1] + starts[number] // 8, *place[2:])]
                registers[place] = arith.select(is_row[column + number], other, registers[place])
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return choose(matrix)  # pyright: ignore[reportCallIssue]


def columns(matrix: jax.Array, start: int, count: int) -> jax.Array:
    """Some columns, whole pieces of 8, of a matrix in float32."""
    if launcher.is_simulated():
        return matrix[:, start : start + count]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result_type(count))
    def take(_, array):
        from jax.experimental.mosaic.gpu import fragmented_array

        registers = array.registers[:, start // 8 : (start + count) // 8]
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return take(matrix)  # pyright: ignore[reportCallIssue]


def approximate(instruction: str, matrix: jax.Array) -> jax.Array:
    """`rcp` or `lg2` of a matrix in float32 by one instruction, which takes numbers that are not normal for zero."""
    if launcher.is_simulated():
        return 1 / matrix if instruction == "rcp" else jnp.log2(matrix)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result_type(matrix.shape[1]))
    def compute(_, array):
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        single, registers = ir.F32Type.get(), array.registers.copy()
        for place in np.ndindex(registers.shape):
            values = [vector.extract(registers[place], [], [element]) for element in range(2)]
            values = [
                llvm.inline_asm(single, [value], f"{instruction}.approx.ftz.f32 $0, $1;", "=f,f") for value in values
            ]
            registers[place] = vector.from_elements(ir.VectorType.get((2,), single), values)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return compute(matrix)  # pyright: ignore[reportCallIssue]


GATE_FUNCTIONS = Functions(log2=functools.partial(approximate, "lg2"), reciprocal=functools.partial(approximate, "rcp"))


def rounded(array: jax.Array) -> jax.Array:
    """Float32 with no more digits than bfloat16; cheaper than there and back."""
    bits = lax.bitcast_convert_type(array, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)


def parts(array: jax.Array, count: int) -> list[jax.Array]:
    """An array in float32 as a sum of arrays in bfloat16."""
    parts = []
    for _ in range(count - 1):
        part = rounded(array)
        parts.append(part.astype(jnp.bfloat16))
        array = array - part
    return [*parts, array.astype(jnp.bfloat16)]


def diagonal(matrix: jax.Array) -> jax.Array:
    """[64, 64] float32 -> [64], one number a row."""
    if launcher.is_simulated():
        return jnp.sum(jnp.where(iota(0) == iota(1), matrix, 0), axis=1)
    result = plgpu.ShapeDtypeStruct((CHUNK,), jnp.float32, layout=launcher.row_layout())

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def take(_, array):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        single, whole, thread = ir.F32Type.get(), ir.IntegerType.get_signless(32), thread_number()
        warp, lane_row = warp_number(thread), bits(thread, 2, 3)
        is_warp = [arith.cmpi(arith.CmpIPredicate.eq, warp, utils.c(number, whole)) for number in range(3)]
        is_odd = arith.trunci(ir.IntegerType.get_signless(1), lane_row)
        # Of the four threads that hold a row, one holds its number on the diagonal.
        owner = arith.andi(thread, utils.c(28, whole))
        owner = arith.ori(owner, arith.shrui(lane_row, utils.c(1, whole)))
        layout = fragmented_array.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((CHUNK,)), dtype=object)
        for below in range(2):
            pair = array.registers[0, 6 + below, 0, 0, below].reshape(())[()]
            for number in range(3):
                own = array.registers[0, 2 * number + below, 0, 0, below].reshape(())[()]
                pair = arith.select(is_warp[number], own, pair)
            one, other = (vector.extract(pair, [], [place]) for place in range(2))
            operands = [arith.select(is_odd, other, one), owner]
            instruction = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
            value: Any = llvm.inline_asm(single, operands, instruction, "=f,f,r", has_side_effects=True)
            registers[0, 0, below] = vector.from_elements(ir.VectorType.get((1,), single), [value])
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return take(matrix)  # pyright: ignore[reportCallIssue]


def sum_tiles(matrix: jax.Array, table: Any) -> None:
    """Write sums of a matrix in float32 over the rows of each tile to a table [4, 64] in shared memory."""
    if launcher.is_simulated():
        table[...] = jnp.sum(matrix.reshape(4, TILE, HALF), axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def add_up(_, array, table):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        whole, void, thread = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void"), thread_number()
        sums = []
        for piece in range(HALF // 8):
            rows = [array.registers[0, piece, 0, 0, below].reshape(())[()] for below in range(2)]
            pair = arith.addf(*rows)
            sums += [vector.extract(pair, [], [place]) for place in range(2)]
        # Of what it and another thread hold a thread takes over one half: at last, of 64 columns, two.
        for bit in (4, 3, 2):
            is_upper = arith.trunci(ir.IntegerType.get_signless(1), arith.shrui(thread, utils.c(bit, whole)))
            lower, upper = sums[: len(sums) // 2], sums[len(sums) // 2 :]
            sums = [
                arith.addf(
                    arith.select(is_upper, other, one), utils.shfl_bfly(arith.select(is_upper, one, other), 1 << bit)
                )
                for one, other in zip(lower, upper, strict=True)
            ]
        offset = arith.shli(arith.andi(thread, utils.c(WARPGROUP - 1, whole)), utils.c(3, whole))
        instructions = "{ .reg .u32 place; add.u32 place, $0, $1; st.shared.v2.f32 [place], {$2, $3}; }"
        llvm.inline_asm(void, [utils.memref_ptr(table), offset, *sums], instructions, "r,r,f,f", has_side_effects=True)

    add_up(matrix, table)  # pyright: ignore[reportCallIssue]


def add_to_last_row(matrix: jax.Array, table: Any) -> jax.Array:
    """A matrix in float32 to whose last row those of a table [R, 64] in shared memory are added, by its warp alone."""
    if launcher.is_simulated():
        return matrix + jnp.where(iota(0) == CHUNK - 1, jnp.sum(table[...], axis=0), 0)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result_type(HALF))
    def add(_, array, table):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        single, registers = ir.F32Type.get(), array.registers.copy()
        places = [place for place in np.ndindex(registers.shape) if place[4] == 1]
        own = [vector.extract(registers[place], [], [element]) for place in places for element in range(2)]
        count, rows = len(own), ir.MemRefType(table.type).shape[0]
        lines = [
            "{ .reg .pred others; .reg .u32 place; .reg .f32 one, two;",
            f"and.b32 place, ${2 * count + 1}, {WARPGROUP - 1}; setp.lt.u32 others, place, {WARPGROUP - 4};",
            f"@others bra DONE; and.b32 place, place, 3; mad.lo.u32 place, place, 8, ${2 * count};",
        ]
        for row in range(rows):
            for piece in range(count // 2):
                lines.append(f"ld.shared.v2.f32 {{one, two}}, [place + {4 * (row * HALF + 8 * piece)}];")
                lines += [
                    f"add.f32 ${2 * piece + element}, ${2 * piece + element}, {name};"
                    for element, name in enumerate(("one", "two"))
                ]
        constraints = ",".join(["=f"] * count + [str(place) for place in range(count)] + ["r", "r"])
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
        operands = [*own, utils.memref_ptr(table), thread_number()]
        result: Any = llvm.inline_asm(
            struct, operands, " ".join([*lines, "DONE: }"]), constraints, has_side_effects=True
        )
        for number, place in enumerate(places):
            values = [llvm.extractvalue(single, result, [2 * number + element]) for element in range(2)]
            registers[place] = vector.from_elements(ir.VectorType.get((2,), single), values)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return add(matrix, table)  # pyright: ignore[reportCallIssue]
