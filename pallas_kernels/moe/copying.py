"""What threads of a copying warpgroup do themselves: gather rows, and unpack MXFP4 weights, into shared memory.

Buffers are tiles of 8 rows of 128 bytes whose pieces of 16 bytes are exchanged within a row (`launcher.swizzled`), as
tensor cores read them. Both are written in PTX; a simulated warpgroup does the same with arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.moe import mxfp4

UNIT = 64
"""Inputs that one thread unpacks at a time: 32 bytes, with two scales."""


class Packed(NamedTuple):
    """MXFP4 weights as the kernels read them; they stand for an array [E, out, in]."""

    codes: jax.Array
    """[E, out, in/2] uint8."""
    scales: jax.Array
    """[E, in/64, out/2] int32: each unit's two scale bytes, of all outputs one after the other."""

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, half = self.codes.shape
        return experts, outputs, 2 * half


def arrange(weight: mxfp4.PackedWeight) -> Packed:
    """Lay scales so that a tile's are contiguous: a sixteenth of the bytes of the codes is rewritten."""
    experts, outputs, groups = weight["scales"].shape
    pairs = weight["scales"].reshape(experts, outputs, groups // 2, 2)
    scales = jnp.swapaxes(pairs, 1, 2).reshape(experts, groups // 2, outputs // 2, 4)
    return Packed(weight["codes"], lax.bitcast_convert_type(scales, jnp.int32))


def gather_rows(
    rows: Any,
    token: Any,
    first: jax.Array,
    num_rows: jax.Array | int,
    column: jax.Array,
    target: Any,
    *,
    is_fetched: bool = False,
) -> None:
    """Start copying `rows[token[first : first + num_rows], column : column + width]` to `target` [height, width].

    A token beyond the rows gives zeros. `num_rows` is a multiple of 64. Tokens lie in device memory or, if
    `is_fetched`, in shared memory. Each call ends a group for `await_copies`.
    """
    (num_tokens, row_width), (height, width) = rows.shape, target.shape
    if launcher.is_simulated():
        for start in range(0, height, 64):

            @pl.when(start < num_rows)
            def _(start=start):
                tokens = token[pl.ds(first + start, 64)]
                taken = jnp.take(rows[...], jnp.minimum(tokens, num_tokens - 1), axis=0)
                taken = lax.dynamic_slice_in_dim(taken, column, width, axis=1)
                target[pl.ds(start, 64)] = jnp.where((tokens < num_tokens)[:, None], taken, jnp.zeros_like(taken))

        return
    pieces = width // 8
    step = 128 // pieces  # Rows that the warpgroup's 128 threads copy at once.
    lines = [
        "{ .reg .b32 thread, row, piece, place, even, odd, size, token, token<16>;",
        f".reg .b{32 if is_fetched else 64} list; .reg .b64 base, address; .reg .pred copies, is_row;",
        launcher.THREAD_OF_WARPGROUP,
        f"and.b32 piece, thread, {pieces - 1}; shr.u32 row, thread, {pieces.bit_length() - 1};",
        "add.u32 token, row, $3;",
        "mad.lo.u32 list, token, 4, $1;" if is_fetched else "mul.wide.u32 list, token, 4; add.u64 list, list, $1;",
        "shl.b32 token, piece, 4; add.u32 token, token, $5; cvt.u64.u32 base, token; add.u64 base, base, $0;",
        # Of a row: which tile of 64 columns, then the place of the exchanged piece.
        "shr.u32 token, piece, 3; and.b32 piece, piece, 7; and.b32 even, row, 7; xor.b32 place, piece, even;",
        "shl.b32 place, place, 4; shl.b32 token, token, 10; shl.b32 even, even, 7; add.u32 token, token, even;",
        f"shr.u32 even, row, 3; mad.lo.u32 token, even, {width * 16}, token; add.u32 token, token, $2;",
        "add.u32 even, token, place; xor.b32 place, place, 64; add.u32 odd, token, place;",
    ]
    starts, load = range(0, height, step), "ld.shared.u32" if is_fetched else "ld.global.nc.u32"
    for start in starts:
        lines += [
            f"setp.gt.u32 copies, $4, {start};" if start % 64 == 0 else "",
            f"@copies {load} token{start // step}, [list + {4 * start}];",
        ]
    for start in starts:
        token_of_row = f"token{start // step}"
        parity, offset = ("odd", 512) if start % 8 else ("even", 0)
        offset += start // 8 * width * 16
        lines += [
            f"setp.gt.u32 copies, $4, {start};" if start % 64 == 0 else "",
            f"setp.lt.u32 is_row, {token_of_row}, {num_tokens}; selp.u32 size, 16, 0, is_row;",
            f"min.u32 {token_of_row}, {token_of_row}, {num_tokens - 1};",
            f"mul.wide.u32 address, {token_of_row}, {2 * row_width}; add.u64 address, address, base;",
            f"@copies cp.async.cg.shared.global [{parity} + {offset}], [address], 16, size;",
        ]
    lines.append("cp.async.commit_group; }")
    refs = (rows, ()), (token, ()), (target, launcher.swizzle(width, target.dtype))
    launcher.run_ptx(
        "\n".join(lines), f"l,{'r' if is_fetched else 'l'},r,r,r,r", refs, (first, jnp.int32(num_rows), 2 * column)
    )


def fetch_tokens(token: Any, first: jax.Array, target: Any) -> None:
    """Start copying 64 tokens to shared memory; part of the group that the next gather ends."""
    if launcher.is_simulated():
        target[...] = token[pl.ds(first, 64)]
        return
    lines = [
        "{ .reg .b32 thread, target; .reg .b64 source; .reg .pred copies;",
        launcher.THREAD_OF_WARPGROUP,
        "setp.lt.u32 copies, thread, 16; mad.lo.u32 target, thread, 16, $1;",
        "shl.b32 thread, thread, 2; add.u32 thread, thread, $2; mul.wide.u32 source, thread, 4;",
        "add.u64 source, source, $0; @copies cp.async.cg.shared.global [target], [source], 16; }",
    ]
    launcher.run_ptx("\n".join(lines), "l,r,r", ((token, ()), (target, ())), (first,))


class Arrivals:
    """Barriers of a ring of buffers at which a warpgroup's gathers arrive by themselves when their rows are there.

    Pallas has no name for such an arrival, so these are barriers of PTX in plain shared memory: `barriers` has 8 bytes
    for each of `stages`. In a simulation, whose gathers end before they return, there is nothing to wait for.
    """

    def __init__(self, barriers: Any, stages: int):
        (num_words,) = barriers.shape
        if 2 * stages > num_words:
            raise ValueError(f"{stages} barriers of 8 bytes do not fit {num_words} words of 4")
        self.barriers, self.stages = barriers, stages

    def prepare(self) -> None:
        """Run once by the warpgroup that copies, before the others wait for anything that it tells them."""
        if not launcher.is_simulated():
            lines = [
                "{ .reg .b32 thread; .reg .pred is_first;",
                launcher.THREAD_OF_WARPGROUP,
                "setp.eq.u32 is_first, thread, 0;",
            ]
            lines += [f"@is_first mbarrier.init.shared::cta.b64 [$0 + {8 * slot}], 128;" for slot in range(self.stages)]
            launcher.run_ptx("\n".join([*lines, "}"]), "r", ((self.barriers, ()),))
        plgpu.commit_smem()

    def arrive(self, slot: jax.Array) -> None:
        """Arrive at this buffer's barrier once all copies that this thread has begun are done."""
        if not launcher.is_simulated():
            lines = "{ .reg .b32 place; mad.lo.u32 place, $1, 8, $0;"
            lines += " cp.async.mbarrier.arrive.noinc.shared::cta.b64 [place]; }"
            launcher.run_ptx(lines, "r,r", ((self.barriers, ()),), (slot,))

    def wait(self, step: jax.Array) -> None:
        """Wait, as a warpgroup that multiplies, for the rows of `step`.

        Tensor cores then see them: copies of this kind need no fence. One here and one at each step of the copying
        warpgroup, which wait for all that is under way, took twice the time of a step.
        """
        if not launcher.is_simulated():
            lines = [
                "{ .reg .b32 place; .reg .pred is_done; mad.lo.u32 place, $1, 8, $0;",
                "wait_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 is_done, [place], $2;",
                "@!is_done bra wait_${:uid}; }",
            ]
            slot, turn = lax.rem(step, self.stages), lax.rem(lax.div(step, self.stages), 2)
            launcher.run_ptx("\n".join(lines), "r,r,r", ((self.barriers, ()),), (slot, turn))


def await_copies(num_newest: int) -> None:
    """Wait for all but the newest groups of copies of each thread of the copying warpgroup, which then all see them.

    `plgpu.commit_smem` would wait for the newest ones too.
    """
    if not launcher.is_simulated():
        launcher.run_ptx(f"cp.async.wait_group {num_newest}; bar.sync 15, 128;", "")


def end_group() -> None:
    """End a group of copies without a gather."""
    if not launcher.is_simulated():
        launcher.run_ptx("cp.async.commit_group;", "")


def unpack(codes: Any, scales: Any, target: Any, *, transposed: bool) -> None:
    """Unpack a tile of weights to bfloat16, exactly.

    If `transposed`, `codes` [n, outputs, 32] uint8 and `scales` [n, outputs/2] int32 go to `target` [n, outputs, 64].
    Else `codes` [n, 64, 32] and `scales` [n, 32] are of 64 outputs and go to `target` [1, 64, 64 n].
    """
    num, outputs = codes.shape[:2]
    if launcher.is_simulated():
        bytes_ = lax.bitcast_convert_type(scales[...], jnp.uint8).reshape(num, outputs, 2)
        values = mxfp4.dequantize({"codes": codes[...], "scales": bytes_}, jnp.bfloat16)
        target[...] = values if transposed else jnp.swapaxes(values, 0, 1).reshape(target.shape)
        return
    num_units = num * outputs // 128  # Of each thread.
    lines = [
        "{ .reg .b32 thread, source, scale, target, row, both, high, half, largest, bits, place;",
        f".reg .b32 factor<{2 * num_units}>, further<{2 * num_units}>, word<{8 * num_units}>, value<4>;",
        ".reg .pred is_large, is_nan, is_second;",
        launcher.THREAD_OF_WARPGROUP,
        # Of 8 neighbours 4 read their second 16 bytes first, so that no two read the same banks.
        "shl.b32 half, thread, 2; and.b32 half, half, 16; setp.ne.u32 is_second, half, 0;",
        "mad.lo.u32 source, thread, 32, $0; add.u32 source, source, half; shl.b32 half, half, 2;",
        "mad.lo.u32 scale, thread, 2, $1; and.b32 row, thread, 7; mov.u32 largest, 0;",
    ]
    if transposed:
        stride = 128 * 128
        lines.append("mad.lo.u32 target, thread, 128, $2;")
    else:
        stride = 2 * 1024
        lines += [
            f"and.b32 place, thread, 63; shr.u32 place, place, 3; mad.lo.u32 target, place, {num * 1024}, $2;",
            "shr.u32 place, thread, 6; mad.lo.u32 target, place, 1024, target; mad.lo.u32 target, row, 128, target;",
        ]
    lines.append("shl.b32 row, row, 4; or.b32 target, target, row; xor.b32 target, target, half;")
    for unit in range(num_units):
        words = [", ".join(f"word{8 * unit + 4 * half + number}" for number in range(4)) for half in range(2)]
        lines += [
            f"xor.b32 place, source, 16; ld.shared.v4.b32 {{{words[0]}}}, [source + {4096 * unit}];",
            f"ld.shared.v4.b32 {{{words[1]}}}, [place + {4096 * unit}];",
            f"ld.shared.u16 both, [scale + {256 * unit}]; shr.u32 high, both, 8; and.b32 both, both, 255;",
            "max.u32 largest, largest, both; max.u32 largest, largest, high;",
            "selp.b32 place, high, both, is_second; selp.b32 high, both, high, is_second;",
        ]
        # Shifted into place a code is 2^-126 of its value: times 2^(scale - 1), in two factors where that is too large.
        for number, scale in enumerate(("place", "high"), start=2 * unit):
            lines += [
                f"min.u32 bits, {scale}, 128; add.u32 bits, bits, 126; mul.lo.u32 factor{number}, bits, {0x800080};",
                f"max.u32 bits, {scale}, 128; sub.u32 bits, bits, 1; mul.lo.u32 further{number}, bits, {0x800080};",
                f"setp.eq.u32 is_nan, {scale}, 255; selp.b32 further{number}, 0x7fff7fff, further{number}, is_nan;",
            ]

    def write(*, is_large: bool):
        for word in range(8 * num_units):
            yield f"shr.u32 place, word{word}, 4;"
            for byte in range(4):
                # A byte's codes at the ends of half words; then each twice, sign and magnitude where they belong.
                yield f"prmt.b32 bits, word{word}, place, {(4 + byte) << 8 | byte}; and.b32 bits, bits, 0x000f000f;"
                yield f"mul.lo.u32 bits, bits, {1 << 12 | 1 << 6}; and.b32 bits, bits, 0x81c081c0;"
                yield f"mul.rn.bf16x2 value{byte}, bits, factor{word // 4};"
                if is_large:
                    yield f"mul.rn.bf16x2 value{byte}, value{byte}, further{word // 4};"
            # The second half's place differs in the bit that `half` may have turned.
            yield f"xor.b32 place, target, {16 * (word % 8)};"
            yield f"st.shared.v4.b32 [place + {stride * (word // 8)}], {{value0, value1, value2, value3}};"

    lines += ["setp.gt.u32 is_large, largest, 128; @is_large bra large_${:uid};", *write(is_large=False)]
    lines += ["bra end_${:uid}; large_${:uid}:", *write(is_large=True), "end_${:uid}: }"]
    refs = (codes, ()), (scales, ()), (target, launcher.swizzle(UNIT, target.dtype))
    launcher.run_ptx("\n".join(lines), "r,r,r", refs)
