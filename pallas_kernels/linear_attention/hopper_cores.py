"""Products of matrices [64, 64] on tensor cores, from registers and shared memory, in PTX for Hopper."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper_tiles as tiles
from pallas_kernels.linear_attention.chunk_kernels import CHUNK, TILE
from pallas_kernels.linear_attention.hopper_tiles import HALF, WARPGROUP


class Factor(NamedTuple):
    """A ref to shared memory or, at the left, an array in registers: bfloat16, swizzled."""

    array: Any
    is_turned: bool = False
    """Its transpose, of a ref."""
    is_negative: bool = False
    """What is at the left, times -1."""


Factors = tuple[Any, Any] | tuple[Any, Any, Sequence[int]]
"""Left, [64, 64] in registers or in shared memory, and right, in shared memory: perhaps as `Factor`.

A third entry names the tiles of left's columns, and of right's rows, that are multiplied, if not all are.
"""


def turned(ref: Any) -> Factor:
    return Factor(ref, is_turned=True)


def negative(factor: Any) -> Factor:
    return _factor(factor)._replace(is_negative=True)


def _factor(factor: Any) -> Factor:
    return factor if isinstance(factor, Factor) else Factor(factor)


def product(*factors: Factors) -> jax.Array:
    """Sum of products [64, C] @ [C, 64], of bfloat16 in float32."""
    return products([factors], (HALF,))[0]


def products(factors: Sequence[Sequence[Factors]], widths: Sequence[int]) -> list[jax.Array]:
    """Several sums of products [64, C] @ [C, width], all under way at once."""
    if launcher.is_simulated():
        return [_simulated(pairs) for pairs in factors]
    return _multiply(factors, widths)


def accumulate(totals: Sequence[jax.Array], factors: Sequence[Sequence[Factors]]) -> list[jax.Array]:
    """Each total [64, 64] plus a sum of products, all under way at once."""
    if launcher.is_simulated():
        return [total + _simulated(pairs) for total, pairs in zip(totals, factors, strict=True)]
    return _multiply(factors, [HALF] * len(totals), totals)


def start(
    factors: Sequence[Sequence[Factors]], widths: Sequence[int], totals: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Like `products` or `accumulate`, but still under way: to be taken by `finish`, or as totals by another start."""
    if launcher.is_simulated():
        return accumulate(totals, factors) if totals else products(factors, widths)
    return _multiply(factors, widths, totals, is_awaited=False)


def finish(results: Sequence[jax.Array], later: int = 0) -> list[jax.Array]:
    """The results of a `start`, once no more than the `later` ones behind it are under way."""
    return _passed(results, later)


def computed(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same, computed here and not, by a compiler's choice, while products that start behind are under way.

    Of a number that a product once left in a register ptxas waits for all of those.
    """
    return _passed(arrays, None)


def _passed(results: Sequence[jax.Array], later: int | None) -> list[jax.Array]:
    if launcher.is_simulated():
        return list(results)
    widths = [result.shape[1] for result in results]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(results), return_type=[tiles.result_type(width) for width in widths]
    )
    def pass_on(_, *arrays):
        return _instructions([[] for _ in widths], widths, arrays, later=later)

    return pass_on(*results)  # pyright: ignore[reportCallIssue]


def acquire() -> None:
    """Lets tensor cores and bulk copies read what other threads wrote before a barrier that this one has waited for.

    Those who wrote go on at once: in `plgpu.commit_smem` they would wait until what they wrote has arrived.
    """
    if not launcher.is_simulated():
        launcher.run_ptx("fence.proxy.async.shared::cta;", "")


def wait_for_warps() -> None:
    """What warps of a warpgroup have read, others may overwrite behind this."""
    if launcher.is_simulated():
        return

    @plgpu.inline_mgpu()
    def wait(_):
        from jax.experimental.mosaic.gpu import utils

        utils.warpgroup_barrier()

    wait()  # pyright: ignore[reportCallIssue]


def _simulated(factors: Sequence[Factors]) -> jax.Array:
    def read(factor):
        array, is_turned, is_negative = _factor(factor)
        array = array[...].T if is_turned else array[...]
        return -array if is_negative else array

    def multiply(left, right, chosen=None):
        left, right = read(left), read(right)
        places = [slice(None)] if chosen is None else [slice(TILE * tile, TILE * (tile + 1)) for tile in chosen]
        return [jnp.dot(left[:, place], right[place], preferred_element_type=jnp.float32) for place in places]

    return functools.reduce(jnp.add, [product for pair in factors for product in multiply(*pair)])


def _multiply(factors, widths, totals: Sequence[jax.Array] = (), *, is_awaited: bool = True) -> list[jax.Array]:
    """Sums of products by one piece of PTX, which makes descriptors of factors in shared memory from their addresses.

    `plgpu.wgmma` makes them outside, 64 bits each, which compilers keep from chunk to chunk, and spill.
    """
    flat = [_factor(factor) for pairs in factors for pair in pairs for factor in pair[:2]]
    operands = [factor.array for factor in flat]
    types = [plgpu.Layout.WGMMA if isinstance(operand, jax.Array) else tiles.TILED for operand in operands]

    @plgpu.inline_mgpu(
        arg_types=(*types, *(plgpu.Layout.WGMMA for _ in totals)),
        return_type=[tiles.result_type(width) for width in widths],
    )
    def multiply(_, *arguments):
        own = (factor._replace(array=array) for factor, array in zip(flat, arguments, strict=False))
        pairs = [[(next(own), next(own), *pair[2:]) for pair in group] for group in factors]
        return _instructions(pairs, widths, arguments[len(flat) :], later=0 if is_awaited else None)

    return multiply(*operands, *totals)  # pyright: ignore[reportCallIssue]


def _instructions(sums, widths: Sequence[int], totals, *, later: int | None) -> list[Any]:
    """PTX that adds products of factors to totals, or to nothing, and waits for all but `later` groups of products."""
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

    def own_register(word) -> str:
        # Of a constant that stands four times among operands ptxas 13.5 sets one of four registers.
        name = f"w{len(constraints)}"
        lines.append(f".reg .b32 {name}; mov.b32 {name}, {operand(word, 'r')};")
        return name

    def steps_of(factor, is_turned: bool, is_left: bool, chosen: Sequence[int] | None) -> list[str]:
        """Of every 16 columns of a left factor, or rows of a right one, how an instruction names them."""
        if isinstance(factor, fragmented_array.FragmentedArray):
            words = [utils.bitcast(pair, ir.IntegerType.get_signless(32)) for pair in factor.registers.flat]
            steps = [words[start : start + 4] for start in range(0, len(words), 4)]
            steps = steps if chosen is None else [steps[step] for step in chosen]
            return [f"{{{','.join(own_register(word) for word in step)}}}" for step in steps]
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
        offsets = offsets if chosen is None else [offsets[step] for step in chosen]
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
        for left, right, *rest in pairs:
            chosen = rest[0] if rest else None
            left_steps = steps_of(left.array, left.is_turned, True, chosen)
            right_steps = steps_of(right.array, right.is_turned, False, chosen)
            turns = f"{int(not right.is_turned)}"
            if not isinstance(left.array, fragmented_array.FragmentedArray):
                turns = f"{int(left.is_turned)}, {turns}"
            sign = -1 if left.is_negative else 1
            for one, other in zip(left_steps, right_steps, strict=True):
                products.append(
                    f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{results}}}, {one}, {other}, "
                    f"{scale}, {sign}, 1, {turns};"
                )
                scale = "all"
    if products:
        lines += ["wgmma.fence.sync.aligned;", *products, "wgmma.commit_group.sync.aligned;"]
    if later is not None:
        lines.append(f"wgmma.wait_group.sync.aligned {later};")
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    result: Any = llvm.inline_asm(
        struct, operands, " ".join([*lines, "}"]), ",".join(constraints), has_side_effects=True
    )
    values = [llvm.extractvalue(single, result, [place]) for place in range(count)]
    arrays = []
    for shape in shapes:
        registers = np.empty(shape, dtype=object)
        for place in np.ndindex(shape):
            registers[place] = vector.from_elements(ir.VectorType.get((2,), single), [values.pop(0), values.pop(0)])
        arrays.append(fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
    return arrays
