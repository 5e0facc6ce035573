"""Matrices [64, 64] between shared memory and the registers of a warpgroup, in Pallas Mosaic GPU for Hopper."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE
from pallas_kernels.linear_attention.hopper_tiles import HALF, WARPGROUP


def fetch(ref: Any, pitch: int, count: int) -> None:
    """Ask the second-level cache for `count` bytes of each of 64 rows in device memory, every `pitch` bytes one."""
    if launcher.is_simulated():
        return
    instructions = (
        "{ .reg .pred other; .reg .u32 thread; .reg .u64 place, offset; "
        f"{launcher.THREAD_OF_WARPGROUP} setp.ge.u32 other, thread, {CHUNK}; mul.wide.u32 offset, thread, {pitch}; "
        f"add.u64 place, $0, offset; @!other cp.async.bulk.prefetch.L2.global [place], {count}; }}"
    )
    launcher.run_ptx(instructions, "l", [(ref, ())])


def matrix(ref: Any) -> jax.Array:
    return launcher.load(ref, plgpu.Layout.WGMMA)


def row(ref: Any) -> jax.Array:
    return launcher.load(ref, launcher.row_layout())


def wide(ref: Any) -> jax.Array:
    """A matrix of bfloat16 in shared memory, in float32."""
    return widened(matrix(ref))


def widened(array: jax.Array) -> jax.Array:
    """A matrix of bfloat16 in float32: of two numbers in a register one by a shift, one by a mask."""
    if launcher.is_simulated():
        return array.astype(jnp.float32)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=tiles.result_type(HALF))
    def widen(_, array):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        single, whole = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        registers = np.empty(array.registers.shape, dtype=object)
        for place in np.ndindex(registers.shape):
            word = utils.bitcast(array.registers[place], whole)
            bits = arith.shli(word, utils.c(16, whole)), arith.andi(word, utils.c(-0x10000, whole))
            values = [utils.bitcast(value, single) for value in bits]
            registers[place] = vector.from_elements(ir.VectorType.get((2,), single), values)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return widen(array)  # pyright: ignore[reportCallIssue]


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
        thread = tiles.thread_number()
        shift = arith.shli(tiles.warp_number(thread), utils.c(2, number))
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


def keep_rows(matrix: jax.Array, table: Any) -> None:
    """Write the rows `ANCHORS` to a table [5, 64] in shared memory."""
    if launcher.is_simulated():
        for number, row in enumerate(tiles.ANCHORS):
            table[number] = matrix[row]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def keep(_, array, table):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        whole, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        thread, equal, row_bytes = tiles.thread_number(), arith.CmpIPredicate.eq, 4 * HALF

        def number(value):
            return utils.c(value, whole)

        warp, base = tiles.warp_number(thread), utils.memref_ptr(table)
        lane_row = tiles.bits(thread, 2, 3)
        column = arith.shli(arith.andi(thread, number(3)), number(3))
        first = arith.addi(column, arith.muli(warp, number(row_bytes)))
        last = arith.addi(column, number(4 * row_bytes))
        is_first = arith.cmpi(equal, lane_row, number(0))
        # Of a tile's rows a thread holds one and the one 8 below.
        is_last = arith.cmpi(equal, arith.addi(arith.shli(warp, number(3)), lane_row), number(CHUNK // 2 - 1))
        for below, (offset, is_own) in enumerate(((first, is_first), (last, is_last))):
            for piece in range(array.registers.shape[1]):
                pair = array.registers[0, piece, 0, 0, below].reshape(())[()]
                values = [vector.extract(pair, dynamic_position=[], static_position=[place]) for place in range(2)]
                store = f"@$4 st.shared.v2.f32 [place + {32 * piece}], {{$2, $3}};"
                instructions = f"{{ .reg .u32 place; add.u32 place, $0, $1; {store} }}"
                llvm.inline_asm(void, [base, offset, *values, is_own], instructions, "r,r,f,f,b", has_side_effects=True)

    keep(matrix, table)  # pyright: ignore[reportCallIssue]


def _four_pairs(array: Any, start: int) -> list[Any]:
    """What a thread holds of four matrices of 8 rows and columns from piece `start` of 8 columns on, 32 bits each."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    pairs = [array.registers[0, start + right, 0, 0, below] for right in range(2) for below in range(2)]
    return [utils.bitcast(pair.reshape(())[()], ir.IntegerType.get_signless(32)) for pair in pairs]


def _place_in_four(thread: Any) -> list[Any]:
    """Of a thread that says where a line of one of four matrices goes: the line, and whether it is below, or right."""
    return [tiles.bits(thread, start, count) for start, count in ((0, 3), (3, 1), (4, 1))]


def _column_place() -> Any:
    """Of four matrices of 8 rows and columns, stored or loaded at once, where one of their columns lies, in bytes.

    In the row of that number of a swizzled buffer that holds the transpose; a row's pieces of 16 bytes are swizzled by
    its number. Each thread says so of one.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    def number(value):
        return utils.c(value, ir.IntegerType.get_signless(32))

    thread = tiles.thread_number()
    column, below, right = _place_in_four(thread)
    piece = arith.xori(arith.addi(arith.shli(tiles.warp_number(thread), number(1)), below), column)
    place = arith.addi(arith.shli(column, number(7)), arith.shli(piece, number(4)))
    return arith.addi(place, arith.shli(right, number(10)))


def store_turned(matrix: jax.Array, target: Any) -> None:
    """Write a matrix [64, 64] in bfloat16 to a swizzled buffer in shared memory as its transpose."""
    if launcher.is_simulated():
        target[...] = matrix.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(launcher.swizzle(HALF, jnp.bfloat16))))
    def store(_, array, target):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        void, place, base = ir.Type.parse("!llvm.void"), _column_place(), utils.memref_ptr(target)
        for start in range(0, HALF // 8, 2):
            pairs = _four_pairs(array, start)
            instructions = (
                "{ .reg .u32 place; add.u32 place, $0, $1; stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                f"[place + {start * 1024}], {{$2, $3, $4, $5}}; }}"
            )
            llvm.inline_asm(void, [base, place, *pairs], instructions, "r,r,r,r,r,r", has_side_effects=True)

    store(matrix, target)  # pyright: ignore[reportCallIssue]


def turned_matrix(source: Any) -> jax.Array:
    """The transpose of a swizzled buffer [64, 64] of bfloat16 in shared memory."""
    if launcher.is_simulated():
        return source[...].T
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((HALF, CHUNK), jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(launcher.swizzle(HALF, jnp.bfloat16)),), return_type=result)
    def load(_, source):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        whole, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        struct = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        place, base, layout = _column_place(), utils.memref_ptr(source), fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((HALF, CHUNK)), dtype=object)
        for start in range(0, CHUNK // 8, 2):
            instructions = (
                "{ .reg .u32 place; add.u32 place, $4, $5; ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                f"{{$0, $1, $2, $3}}, [place + {start * 1024}]; }}"
            )
            words: Any = llvm.inline_asm(struct, [base, place], instructions, "=r,=r,=r,=r,r,r", has_side_effects=True)
            for number, (right, below) in enumerate(np.ndindex(2, 2)):
                word = llvm.extractvalue(whole, words, [number])
                registers[0, start + right, 0, 0, below] = utils.bitcast(word, pair)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)  # pyright: ignore[reportCallIssue]


def store_first_rows(matrix: jax.Array, target: Any) -> None:
    """Write a matrix [64, 64] in bfloat16 to a swizzled buffer in shared memory of fewer rows, whole tiles."""
    if launcher.is_simulated():
        target[...] = matrix[: target.shape[0]]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, tiles.TILED))
    def store(_, array, target):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        whole, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")

        def number(value):
            return utils.c(value, whole)

        # An instruction stores four matrices of 8 rows and columns. A thread says where one of their rows goes, whose
        # pieces of 16 bytes are swizzled by its number.
        thread = tiles.thread_number()
        warp = tiles.warp_number(thread)
        own_row, below, right = _place_in_four(thread)
        row = arith.addi(arith.shli(arith.addi(arith.shli(warp, number(1)), below), number(3)), own_row)
        place = arith.addi(arith.shli(row, number(7)), arith.shli(arith.xori(right, own_row), number(4)))
        base = utils.memref_ptr(target)
        is_taken = arith.cmpi(arith.CmpIPredicate.ult, warp, number(ir.MemRefType(target.type).shape[0] * 8 // TILE))
        for start in range(0, HALF // 8, 2):
            pairs = _four_pairs(array, start)
            instructions = (
                f"{{ .reg .u32 place; xor.b32 place, $1, {start * 16}; add.u32 place, place, $0; "
                "@$6 stmatrix.sync.aligned.m8n8.x4.shared.b16 [place], {$2, $3, $4, $5}; }"
            )
            operands = [base, place, *pairs, is_taken]
            llvm.inline_asm(void, operands, instructions, "r,r,r,r,r,r,b", has_side_effects=True)

    store(matrix, target)  # pyright: ignore[reportCallIssue]


def spill(matrix: jax.Array, ref: Any) -> None:
    """Put a matrix [64, 64] in float32 aside, each thread what it holds, in the place of the rows of a swizzled buffer.

    Of float32, or [64, 128] of bfloat16. It is cheaper than to write the buffer, whose rows threads share.
    """
    if launcher.is_simulated():
        ref[...] = matrix if ref.dtype == jnp.float32 else jnp.concatenate(tiles.parts(matrix, 2), axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(launcher.swizzle(HALF, ref.dtype))))
    def store(_, array, ref):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        void, base = ir.Type.parse("!llvm.void"), _own_place(ref)
        values = [vector.extract(pair, [], [place]) for pair in array.registers.flat for place in range(2)]
        for start in range(0, len(values), 4):
            address = f"[$0 + {4 * start * WARPGROUP}]"
            instruction = f"st.shared.v4.f32 {address}, {{$1, $2, $3, $4}};"
            llvm.inline_asm(void, [base, *values[start : start + 4]], instruction, "r,f,f,f,f", has_side_effects=True)

    store(matrix, ref)  # pyright: ignore[reportCallIssue]


def spilled(ref: Any) -> jax.Array:
    """What has been put aside."""
    if launcher.is_simulated():
        return jnp.sum(ref[...].astype(jnp.float32).reshape(CHUNK, -1, HALF), axis=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(launcher.swizzle(HALF, ref.dtype)),), return_type=tiles.result_type(HALF)
    )
    def load(_, ref):
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        single, base, values = ir.F32Type.get(), _own_place(ref), []
        struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
        for start in range(0, CHUNK * HALF // WARPGROUP, 4):
            instruction = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * start * WARPGROUP}];"
            loaded: Any = llvm.inline_asm(struct, [base], instruction, "=f,=f,=f,=f,r", has_side_effects=True)
            values += [llvm.extractvalue(single, loaded, [place]) for place in range(4)]
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((CHUNK, HALF)), dtype=object)
        for place in np.ndindex(registers.shape):
            registers[place] = vector.from_elements(ir.VectorType.get((2,), single), [values.pop(0), values.pop(0)])
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)  # pyright: ignore[reportCallIssue]


def _own_place(ref: Any) -> Any:
    """The address of a thread's first 16 bytes of a buffer in which those of a warpgroup take turns."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    whole = ir.IntegerType.get_signless(32)
    number = arith.andi(tiles.thread_number(), utils.c(WARPGROUP - 1, whole))
    return arith.addi(llvm.ptrtoint(whole, utils.memref_ptr(ref)), arith.shli(number, utils.c(4, whole)))
