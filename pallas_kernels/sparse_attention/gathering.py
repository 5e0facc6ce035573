"""What a copying warpgroup does itself: gather selected rows into shared memory, by copies that announce themselves.

Pallas cannot name the copies of single threads, nor barriers that such copies arrive at: both are written in PTX. A
simulated warpgroup does the same with arrays and a barrier of Pallas.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher

BLOCK = 64
"""Keys gathered at a time."""
RING = 4
"""Blocks whose indices lie in shared memory."""


class Arrivals:
    """Barriers in shared memory, one for each of `count` buffers, that a gather of a block of rows completes."""

    def __init__(self, words: Any, simulated: Any, count: int):
        self.words, self.simulated, self.count = words, simulated, count

    @staticmethod
    def scratch(count: int) -> dict[str, Any]:
        scratch: dict[str, Any] = {"arrival_words": plgpu.SMEM((2 * count,), jnp.int32)}
        if launcher.is_simulated():
            scratch["arrivals"] = plgpu.Barrier(num_arrivals=1, num_barriers=count)
        return scratch

    def start(self) -> None:
        """Make the barriers; every thread of the block calls this once, before any other use."""
        if launcher.is_simulated():
            return
        lines = ["{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"]
        lines += [f"@first mbarrier.init.shared::cta.b64 [$0 + {8 * number}], 128;" for number in range(self.count)]
        lines += ["@first fence.proxy.async.shared::cta; barrier.sync 0; }"]
        launcher.run_ptx("\n".join(lines), "r", ((self.words, ()),))

    def wait(self, slot: jax.Array, use: jax.Array) -> None:
        """Wait until buffer `slot` is filled for the `use`-th time, counted from 0."""
        if launcher.is_simulated():
            plgpu.barrier_wait(self.simulated.at[slot])
            return
        lines = [
            "{ .reg .pred done; .reg .b32 barrier; mad.lo.u32 barrier, $1, 8, $0;",
            "again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], $2;",
            # What threads copied is read by tensor cores, which see shared memory by another way.
            "@!done bra again_${:uid}; fence.proxy.async.shared::cta; }",
        ]
        launcher.run_ptx("\n".join(lines), "r,r,r", ((self.words, ()),), (slot, lax.rem(use, jnp.int32(2))))

    def gather(self, rows: Any, index: Any, target: Any, slot: jax.Array) -> None:
        """Start copying `rows[index]` [64, L] to buffer `slot`, which is `target`. An index of -1 gives zeros.

        `index` [64] int32 lies in shared memory.
        """
        width = rows.shape[1]
        if launcher.is_simulated():
            indices = index[...]
            taken = jnp.take(rows[...], jnp.maximum(indices, 0), axis=0)
            target[...] = jnp.where((indices >= 0)[:, None], taken, jnp.zeros_like(taken))
            plgpu.barrier_arrive(self.simulated.at[slot])
            return
        lines = [
            "{ .reg .b32 thread, row, piece, list, turn, target, size, token<4>;",
            ".reg .b64 base, address; .reg .pred is_row;",
            launcher.THREAD_OF_WARPGROUP,
            # 8 threads copy 128 bytes of a row; a thread has rows `row`, `row + 16`, ...
            "and.b32 piece, thread, 7; shr.u32 row, thread, 3; mad.lo.u32 list, row, 4, $1;",
            "shl.b32 target, piece, 4; cvt.u64.u32 base, target; add.u64 base, base, $0;",
            # Tiles of 8 rows of 128 bytes, whose pieces of 16 bytes are exchanged within a row.
            "and.b32 turn, row, 7; xor.b32 piece, piece, turn; shl.b32 piece, piece, 4;",
            "shl.b32 turn, turn, 7; add.u32 piece, piece, turn;",
            f"shr.u32 target, row, 3; mad.lo.u32 target, target, {width * 16}, piece; add.u32 target, target, $2;",
        ]
        lines += [f"ld.shared.s32 token{number}, [list + {64 * number}];" for number in range(4)]
        for number in range(4):
            lines += [
                f"setp.ge.s32 is_row, token{number}, 0; selp.u32 size, 16, 0, is_row;",
                f"max.s32 token{number}, token{number}, 0;",
                f"mul.wide.u32 address, token{number}, {2 * width}; add.u64 address, address, base;",
            ]
            lines += [
                f"cp.async.cg.shared.global.L2::128B [target + {number * width * 32 + 1024 * tile}],"
                f" [address + {128 * tile}], 16, size;"
                for tile in range(width // 64)
            ]
        lines += [
            "mad.lo.u32 list, $4, 8, $3;",
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [list]; }",
        ]
        refs = (rows, ()), (index, ()), (target, launcher.swizzle(width, target.dtype)), (self.words, ())
        launcher.run_ptx("\n".join(lines), "l,r,r,r,r", refs, (slot,))


class Indices:
    """Indices of the next blocks, copied ahead into a ring in shared memory."""

    def __init__(self, indices: Any, ring: Any, filled: Any):
        self.indices, self.ring, self.filled = indices, ring, filled

    @staticmethod
    def scratch() -> dict[str, Any]:
        return {
            "index_ring": plgpu.SMEM((RING, BLOCK), jnp.int32),
            "index_filled": plgpu.Barrier(num_barriers=RING),
        }

    def fetch(self, query: jax.Array, block: jax.Array, number: jax.Array) -> None:
        """Start copying the indices of a query's block, the `number`-th block of all."""
        place = lax.rem(number, jnp.int32(RING))
        source = self.indices.at[query, pl.ds(block * BLOCK, BLOCK)]
        plgpu.copy_gmem_to_smem(source, self.ring.at[place], self.filled.at[place])

    def wait(self, number: jax.Array) -> Any:
        """The indices of the `number`-th block. Each warpgroup that reads them waits for every block."""
        place = lax.rem(number, jnp.int32(RING))
        plgpu.barrier_wait(self.filled.at[place])
        return self.ring.at[place]

    def wait_for_rest(self, number: jax.Array) -> None:
        """Wait for the two blocks from `number` on, which were copied ahead for nothing."""
        for ahead in range(2):
            self.wait(number + ahead)


def count_blocks(indices: jax.Array) -> jax.Array:
    """[T, N] -> [T] int32: blocks up to the last key that is no hole, at least 2."""
    place = jnp.arange(1, indices.shape[1] + 1, dtype=jnp.int32)
    last = jnp.max(jnp.where(indices >= 0, place[None], 0), axis=1)
    return jnp.maximum(-(-last // BLOCK), 2)
