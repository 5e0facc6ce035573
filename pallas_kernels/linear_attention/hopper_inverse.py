"""The inverse of a chunk's unit lower triangular matrix, in Pallas Mosaic GPU and PTX for Hopper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_cores as cores
from pallas_kernels.linear_attention import hopper_shared as shared
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE, TILE_BITS
from pallas_kernels.linear_attention.hopper_tiles import HALF


def invert(lower: Any, parts: Any, spare: Any) -> jax.Array:
    """`(I + lower)^-1` in bfloat16 and a Newton step with twice its digits; `lower` is a pair of refs, high and low.

    With D the inverses of the tiles on the diagonal and N = -D lower off them, N^4 = 0 and the inverse is
    (I + N^2) (D + N D). `parts` are two matrices of memory, `spare` one.
    """
    narrow = jnp.bfloat16
    of_tiles = _inverse_of_tiles(lower.at[0]).astype(narrow)

    step = cores.start([[(of_tiles, lower.at[0])]], (CHUNK,))
    spare[...] = of_tiles
    (step,) = cores.finish(step)
    step = tiles.choose_tiles((-step).astype(narrow), lambda row, column: row > column)
    parts[1] = step
    plgpu.commit_smem()
    twice, inverse = cores.products([[(step, parts.at[1])], [(step, spare)]], (CHUNK, CHUNK))
    inverse += shared.matrix(spare).astype(jnp.float32)
    parts[0] = inverse.astype(narrow)
    plgpu.commit_smem()
    inverse = (inverse + cores.product((twice.astype(narrow), parts.at[0]))).astype(narrow)
    spare[...] = inverse
    plgpu.commit_smem()
    # The product of `I + lower` and the inverse so far, whose diagonal is exactly one: other entries keep their digits.
    product = cores.product((lower.at[0], spare), (lower.at[1], spare)) + inverse.astype(jnp.float32)
    parts[1] = (-product).astype(narrow)
    plgpu.commit_smem()
    return 2 * inverse.astype(jnp.float32) + cores.product((inverse, parts.at[1]))


def _inverse_of_tiles(lower: Any) -> jax.Array:
    """[64, 64] float32: the inverses of the tiles on the diagonal of `I + lower`, by blocks of doubled size; else zero.

    `lower` is a swizzled buffer in bfloat16, of which each warp takes the tile in its rows.
    """
    if launcher.is_simulated():
        narrow, differing = jnp.bfloat16, tiles.iota(0) ^ tiles.iota(1)
        lower = jnp.where(differing < TILE, lower[...].astype(jnp.float32), 0)
        inverse = jnp.where(differing == 0, 1.0, jnp.where(differing == 1, -lower, 0))
        for bit in range(1, TILE_BITS):
            corner = cores.product((inverse.astype(narrow), lower.astype(narrow)))
            corner = jnp.where(differing >> bit == 1, corner, 0).astype(narrow)
            inverse = inverse - cores.product((corner, inverse.astype(narrow)))
        return inverse
    buffer = plgpu.RefType(launcher.swizzle(HALF, jnp.bfloat16))
    result = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(buffer,), return_type=result)
    def invert(_, lower):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        whole, single = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair, narrow_pair = ir.VectorType.get((2,), single), ir.VectorType.get((2,), ir.BF16Type.get())
        equal, thread = arith.CmpIPredicate.eq, tiles.thread_number()
        warp, zero = tiles.warp_number(thread), utils.c(0, whole)

        def number(value):
            return utils.c(value, whole)

        def run(instruction, operands, kinds, kind, count):
            own = single if kind == "f" else whole
            structure = llvm.StructType.get_literal([own] * count)
            constraints = ",".join([f"={kind}"] * count + list(kinds))
            values: Any = llvm.inline_asm(structure, operands, instruction, constraints, has_side_effects=True)
            return [llvm.extractvalue(own, values, [place]) for place in range(count)]

        # A tile is four matrices of 8 rows and columns, named by whether they lie below and right. A thread holds two
        # entries of each, and says where one row of one lies.
        corners = [(below, right) for right in range(2) for below in range(2)]
        own_row, below, right = tiles.bits(thread, 0, 3), tiles.bits(thread, 3, 1), tiles.bits(thread, 4, 1)
        row = arith.addi(arith.shli(arith.addi(arith.shli(warp, number(1)), below), number(3)), own_row)
        piece = arith.xori(arith.addi(arith.shli(warp, number(1)), right), own_row)
        place = arith.addi(arith.shli(row, number(7)), arith.shli(piece, number(4)))
        place = arith.addi(place, llvm.ptrtoint(whole, utils.memref_ptr(lower)))

        def load(kind):
            instruction = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
            return dict(zip(corners, run(instruction, [place], "r", "r", 4), strict=True))

        def multiply(left, right, column, total):
            """`total + left @ right` for 8 columns; what is not in `left` or `right` is zero."""
            operands = [left.get(corner, zero) for corner in corners]
            operands += [right.get((below, column), zero) for below in range(2)]
            nothing = arith.constant(single, ir.FloatAttr.get(single, 0.0))
            for below in range(2):
                values = total.get((below, column))
                for part in range(2):
                    value = nothing
                    if values is not None:
                        value = vector.extract(values, dynamic_position=[], static_position=[part])
                    operands.append(value)
            instruction = (
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
            )
            values = run(instruction, operands, "rrrrrrffff", "f", 4)
            return {(below, column): vector.from_elements(pair, values[2 * below :][:2]) for below in range(2)}

        def narrowed(values):
            return utils.bitcast(arith.truncf(narrow_pair, values), whole)

        def transposed(value):
            return run("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [value], "r", "r", 1)[0]

        # Entries of a pair and their row, within 8, differ in the same bits but the lowest.
        half_row, half_column = tiles.bits(thread, 3, 2), tiles.bits(thread, 0, 2)
        differing, is_odd = arith.xori(half_row, half_column), arith.cmpi(equal, tiles.bits(thread, 2, 1), number(1))
        is_near = arith.cmpi(equal, differing, zero)
        one, opposite = arith.constant(single, ir.FloatAttr.get(single, 1.0)), number(-0x7FFF8000)
        negative = {corner: arith.xori(value, opposite) for corner, value in load("").items()}
        turned_negative = {corner: arith.xori(value, opposite) for corner, value in load(".trans").items()}
        inverse = {}
        for corner in ((0, 0), (1, 1)):
            # Above the diagonal all is zero.
            first = utils.bitcast(arith.shli(negative[corner], number(16)), single)
            first = arith.select(is_odd, first, one)
            second = arith.select(is_odd, one, utils.bitcast(zero, single))
            values = [arith.select(is_near, value, utils.bitcast(zero, single)) for value in (first, second)]
            inverse[corner] = vector.from_elements(pair, values)
        for bit in range(1, TILE_BITS):
            narrow = {corner: narrowed(values) for corner, values in inverse.items()}
            turned = {corner: transposed(value) for corner, value in narrow.items()}
            # The inverse so far is zero outside its blocks: its product with the whole tile holds that with corners.
            product = {}
            for column in range(2 if bit < TILE_BITS - 1 else 1):
                product |= multiply(narrow, turned_negative, column, {})
            if bit == TILE_BITS - 1:
                left = {(1, 0): narrowed(product[1, 0])}
                inverse |= {(1, 0): multiply(left, turned, 0, {})[1, 0]}
                continue
            is_corner = arith.cmpi(equal, arith.shrui(differing, number(bit - 1)), number(1))
            left = {corner: arith.select(is_corner, narrowed(product[corner]), zero) for corner in inverse}
            for corner in list(inverse):
                inverse[corner] = multiply(left, turned, corner[1], inverse)[corner]
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((CHUNK, CHUNK)), dtype=object)
        nothing = utils.bitcast(arith.constant(ir.IntegerType.get_signless(64), 0), pair)
        for place in np.ndindex(registers.shape):
            # The second number counts pieces of 8 columns, the fifth of 8 rows.
            is_own = arith.cmpi(equal, warp, number(place[1] // 2))
            value = inverse.get((place[4], place[1] % 2))
            registers[place] = nothing if value is None else arith.select(is_own, value, nothing)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return invert(lower)  # pyright: ignore[reportCallIssue]
