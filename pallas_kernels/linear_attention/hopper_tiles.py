"""Matrices [64, 64] that a warpgroup holds as tensor cores read and leave them, in Pallas Mosaic GPU for Hopper.

Each of its four warps holds a tile of 16 rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE, TILE_BITS

HALF = 64
"""Columns: key channels of one warpgroup."""
WARPGROUP = 128
"""Threads."""
_TILED = plgpu.RefType(launcher.swizzle(HALF, jnp.bfloat16))
"""A ref to shared memory [R, C] of bfloat16: tiles of 8 rows and 64 columns."""


class Turned(NamedTuple):
    """The transpose of a ref to shared memory."""

    ref: Any


Factors = tuple[Any, Any]
"""Left, in registers [64, 64] or in shared memory, and right, in shared memory: bfloat16, swizzled, perhaps turned."""


def turned(ref: Any) -> Turned:
    return Turned(ref)


def product(*factors: Factors) -> jax.Array:
    """Sum of products [64, C] @ [C, 64], of bfloat16 in float32."""
    return products([factors], (HALF,))[0]


def products(
    factors: Sequence[Sequence[Factors]], widths: Sequence[int], meanwhile: Callable[[], None] | None = None
) -> list[jax.Array]:
    """Several sums of products [64, C] @ [C, width], all under way at once; `meanwhile` is run before they are done."""
    if launcher.is_simulated():
        results = [_simulated(pairs) for pairs in factors]
        if meanwhile is not None:
            meanwhile()
        return results
    results = _multiply(factors, widths, is_awaited=meanwhile is None)
    if meanwhile is None:
        return results
    meanwhile()
    return _awaited(results)


def accumulate(totals: Sequence[jax.Array], factors: Sequence[Sequence[Factors]]) -> list[jax.Array]:
    """Each total [64, 64] plus a sum of products, all under way at once."""
    if launcher.is_simulated():
        return [total + _simulated(pairs) for total, pairs in zip(totals, factors, strict=True)]
    return _multiply(factors, [HALF] * len(totals), totals)


def _simulated(factors: Sequence[Factors]) -> jax.Array:
    def read(factor):
        return factor.ref[...].T if isinstance(factor, Turned) else factor[...]

    products = [jnp.dot(read(left), read(right), preferred_element_type=jnp.float32) for left, right in factors]
    return sum(products[1:], products[0])


def _result(width: int) -> Any:
    return plgpu.ShapeDtypeStruct((CHUNK, width), jnp.float32, layout=plgpu.Layout.WGMMA)


def _multiply(factors, widths, totals: Sequence[jax.Array] = (), *, is_awaited: bool = True) -> list[jax.Array]:
    """Sums of products by one piece of PTX, which makes descriptors of factors in shared memory from their addresses.

    `plgpu.wgmma` makes them outside, 64 bits each, which compilers keep from chunk to chunk, and spill.
    """
    flat = [factor for pairs in factors for pair in pairs for factor in pair]
    are_turned = [isinstance(factor, Turned) for factor in flat]
    operands = [factor.ref if isinstance(factor, Turned) else factor for factor in flat]
    types = [plgpu.Layout.WGMMA if isinstance(operand, jax.Array) else _TILED for operand in operands]

    @plgpu.inline_mgpu(
        arg_types=(*types, *(plgpu.Layout.WGMMA for _ in totals)), return_type=[_result(width) for width in widths]
    )
    def multiply(_, *arguments):
        places = iter(zip(arguments[: len(flat)], are_turned, strict=True))
        pairs = [[(next(places), next(places)) for _ in group] for group in factors]
        return _instructions(pairs, widths, arguments[len(flat) :], is_awaited=is_awaited)

    return multiply(*operands, *totals)  # pyright: ignore[reportCallIssue]


def _awaited(results: Sequence[jax.Array]) -> list[jax.Array]:
    widths = [result.shape[1] for result in results]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * len(results), return_type=[_result(width) for width in widths])
    def wait(_, *arrays):
        return _instructions([[] for _ in widths], widths, arrays)

    return wait(*results)  # pyright: ignore[reportCallIssue]


def _instructions(sums, widths: Sequence[int], totals, *, is_awaited: bool = True) -> list[Any]:
    """PTX that adds products to totals, or to nothing; of each factor what holds it and whether it is turned."""
    from jax.experimental.mosaic.gpu import fragmented_array, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    single, layout = ir.F32Type.get(), fragmented_array.WGMMA_LAYOUT
    shapes = [layout.registers_shape((CHUNK, width)) for width in widths]
    # Of a piece of 8 columns a thread holds two in one row and two 8 rows below.
    own = [vector.extract(pair, [], [place]) for total in totals for pair in total.registers.flat for place in range(2)]
    count = sum(CHUNK * width // WARPGROUP for width in widths)
    operands, constraints = list(own), ["=f"] * count + [str(place) for place in range(len(own))]
    lines = ["{ .reg .pred none, all; setp.ne.b32 none, 0, 0; setp.ne.b32 all, 1, 0;"]

    def operand(value, constraint: str) -> str:
        operands.append(value)
        constraints.append(constraint)
        return f"${len(constraints) - 1}"

    def steps_of(factor, is_turned: bool, is_left: bool) -> list[str]:
        """Of every 16 columns of a left factor, or rows of a right one, how an instruction names them."""
        if isinstance(factor, fragmented_array.FragmentedArray):
            words = [utils.bitcast(pair, ir.IntegerType.get_signless(32)) for pair in factor.registers.flat]
            names = [f"w{len(constraints) + place}" for place in range(len(words))]
            # Each in a register of its own: of a constant that stands four times ptxas 13.5 sets one of four registers.
            for name, word in zip(names, words, strict=True):
                lines.append(f".reg .b32 {name}; mov.b32 {name}, {operand(word, 'r')};")
            return [f"{{{','.join(names[place : place + 4])}}}" for place in range(0, len(names), 4)]
        memory = ir.MemRefType(factor.type)
        (down, aside, *_), _ = memory.get_strides_and_offset()
        rows, columns = 8 * memory.shape[0], HALF * memory.shape[1]
        # Bytes from 8 rows to the next, and from 64 columns to the next.
        down, aside = 2 * down, 2 * aside
        is_along_columns = is_left != is_turned
        if is_along_columns:
            offsets = [step // 4 * aside + step % 4 * 32 for step in range(columns // 16)]
        else:
            offsets = [step * 2 * down for step in range(rows // 16)]
        name = f"p{len(constraints)}"
        lines.append(f".reg .b32 {name}; bfe.u32 {name}, {operand(utils.memref_ptr(factor), 'r')}, 4, 14;")
        # The distances that an instruction strides itself, in units of 16 bytes; bit 62 says: swizzled by 128 bytes.
        low, high = 0 if is_along_columns else aside >> 4 << 16, (down >> 4) + (1 << 30)
        for step, offset in enumerate(offsets):
            own = f"{name}s{step}"
            lines.append(f".reg .b32 {own}; add.u32 {own}, {name}, {low + (offset >> 4)};")
            lines.append(f".reg .b64 {own}d; mov.b64 {own}d, {{{own}, {high}}};")
        return [f"{name}s{step}d" for step in range(len(offsets))]

    products, first = [], 0
    for pairs, width in zip(sums, widths, strict=True):
        last = first + CHUNK * width // WARPGROUP
        results = ",".join(f"${place}" for place in range(first, last))
        first = last
        scale = "all" if totals else "none"
        for (left, is_left_turned), (right, is_right_turned) in pairs:
            left_steps, right_steps = steps_of(left, is_left_turned, True), steps_of(right, is_right_turned, False)
            turns = f"{int(not is_right_turned)}"
            if not isinstance(left, fragmented_array.FragmentedArray):
                turns = f"{int(is_left_turned)}, {turns}"
            for one, other in zip(left_steps, right_steps, strict=True):
                products.append(
                    f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{results}}}, {one}, {other}, "
                    f"{scale}, 1, 1, {turns};"
                )
                scale = "all"
    if products:
        lines += ["wgmma.fence.sync.aligned;", *products, "wgmma.commit_group.sync.aligned;"]
    if is_awaited:
        lines.append("wgmma.wait_group.sync.aligned 0;")
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    result = llvm.inline_asm(struct, operands, " ".join([*lines, "}"]), ",".join(constraints), has_side_effects=True)
    values = [llvm.extractvalue(single, result, [place]) for place in range(count)]
    arrays = []
    for shape in shapes:
        registers = np.empty(shape, dtype=object)
        for place in np.ndindex(shape):
            registers[place] = vector.from_elements(ir.VectorType.get((2,), single), [values.pop(0), values.pop(0)])
        arrays.append(fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
    return arrays


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
