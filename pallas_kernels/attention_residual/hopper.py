"""Attention residuals in Pallas Mosaic GPU for Hopper: every source is read once forward and once backward.

A block is one warpgroup. It takes every so many-th token, and of a token one row after the other, whole in registers.
Rows are copied to a ring in shared memory, so many ahead that device memory is busy while a row is summed up. Backward,
the gradient's inner product with the mix is that of the shares' weighted mean, so that a source's gradient follows
from one pass over it. An RMSNorm that follows is part of the same kernels: the mix is not read for it again, and the
mix's gradient is neither written nor read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher

COLUMNS = 256
"""A row is copied as a matrix of so many columns, the most that one copy takes."""
WIDEST = 8192
SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor that blocks divide among them, less 1 KiB for each."""
BACKWARD_BLOCKS = 2
"""Blocks on a multiprocessor, the fastest on an H200."""
KINDS, MOST_SOURCES = 4, 32
"""Numbers kept of a token: its sources' shares, inverse lengths, what their own length takes off their gradients; and
the inverse length of the mix."""
LOWEST = -1e30
"""The score of a source that takes no part: its share is 0 beside any other's."""


def reason_against(sources: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take such sources; None if they can."""
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if sources[0].dtype != jnp.bfloat16:
        return f"needs bfloat16 sources, got {sources[0].dtype}"
    width = sources[0].shape[-1]
    if width % COLUMNS or width > WIDEST:
        return f"needs a width that is a multiple of {COLUMNS} and at most {WIDEST}, got {width}"
    if len(sources) > MOST_SOURCES:
        return f"needs at most {MOST_SOURCES} sources, got {len(sources)}"
    if not 0 < sources[0].size < 2**31:
        return f"needs sources of 1 to {2**31 - 1} numbers, got {sources[0].size}"
    return None


def mix(
    sources: tuple[jax.Array, ...],
    norm_scale: jax.Array,
    query: jax.Array,
    is_live: jax.Array | None,
    output_scale: jax.Array | None,
    epsilon: float,
) -> jax.Array:
    """See `api.attention_residual`. Keeps sources and mix for the backward pass, and 512 bytes of each token."""
    shape = sources[0].shape
    direction = (norm_scale.astype(jnp.float32) * query.astype(jnp.float32)).reshape(-1, COLUMNS)
    live = jnp.ones((len(sources),), jnp.int32)
    if is_live is not None:
        live = live.at[-1].set(is_live.astype(jnp.int32)) if is_live.ndim == 0 else is_live.astype(jnp.int32)
    given = [source.reshape(-1, *direction.shape) for source in sources]
    scales = [] if output_scale is None else [output_scale.astype(jnp.float32).reshape(direction.shape)]
    *given, direction, live = launcher.vary_together(*given, *scales, direction, live)
    result: Any = _mix(epsilon, tuple(given[: len(sources)]), tuple(given[len(sources) :]), direction, live)
    return result.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(epsilon: float, sources, scales, direction, live):
    return _forward(epsilon, sources, scales, direction, live)[0]


def _forward(epsilon, sources, scales, direction, live):
    mixed, *normed, numbers = forward(epsilon, sources, scales, direction, live)
    return normed[0] if scales else mixed, (sources, scales, direction, numbers, mixed)


def _backward(epsilon, saved, gradient):
    *to_sources, sums = backward(epsilon, *saved, gradient)
    to_direction, *to_scales = jnp.sum(sums, axis=0)
    return tuple(to_sources), tuple(to_scales), to_direction, None


_mix.defvjp(_forward, _backward)


class _Rows:
    """The rows of `arrays` for one token after the other, in their order, copied ahead of being taken."""

    def __init__(self, arrays, tokens: int, buffers, filled):
        self.arrays, self.tokens, self.buffers, self.filled = arrays, tokens, buffers, filled
        self.count = buffers.shape[0]
        self.layout = _layout(buffers.shape[1] * COLUMNS)

    def fetch_first(self) -> None:
        for number in range(self.count):
            self._fetch(number)

    def buffer(self, number):
        return self.buffers.at[lax.rem(number, self.count)]

    def take(self, number) -> jax.Array:
        """Row `number`, counted over all tokens of the block."""
        plgpu.barrier_wait(self.filled.at[lax.rem(number, self.count)])
        return launcher.load(self.buffer(number), self.layout)

    def release(self, number) -> None:
        """Copy a later row to where this one lay, of which no thread reads any more."""
        self._fetch(number + self.count)

    def _fetch(self, number) -> None:
        token, place, slot = _token(number // len(self.arrays)), number % len(self.arrays), number % self.count
        for one, array in enumerate(self.arrays):

            @pl.when((place == one) & (token < self.tokens))
            def _(array=array):
                plgpu.copy_gmem_to_smem(array.at[token], self.buffers.at[slot], self.filled.at[slot])


def _layout(width: int) -> Any:
    """A row side by side in pieces of up to 16 bytes of bfloat16."""
    vector = next(vector for vector in (8, 4, 2) if width % (128 * vector) == 0)
    return plgpu.Layout.WG_STRIDED((width // COLUMNS, COLUMNS), vector)


def _token(step):
    return lax.axis_index("block") + step * lax.axis_size("block")


def _steps(tokens: int):
    return pl.cdiv(tokens - lax.axis_index("block"), lax.axis_size("block"))


def _zeros(shape: tuple[int, ...], layout) -> jax.Array:
    array = jnp.zeros(shape, jnp.float32)
    return array if launcher.is_simulated() else plgpu.layout_cast(array, layout)


def _numbers(layout) -> jax.Array:
    shape = (KINDS * MOST_SOURCES,)
    if launcher.is_simulated():
        return lax.broadcasted_iota(jnp.int32, shape, 0)
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)


def _launch(body, arguments, outputs, *, rows: int, blocks: int, scratch, name: str, taken_bytes: int = 0):
    tokens, height, _ = arguments[0].shape
    of_block = SHARED_BYTES // blocks - 3 * 1024 - taken_bytes
    count = min(of_block // (height * COLUMNS * 2), 2 * rows)
    return launcher.launch(
        body,
        arguments,
        outputs,
        scratch={
            "buffers": plgpu.SMEM((count, height, COLUMNS), jnp.bfloat16),
            "filled": plgpu.Barrier(num_arrivals=1, num_barriers=count),
            **scratch,
        },
        name=name,
        grid=(min(blocks * launcher.num_multiprocessors(), tokens),),
        grid_names=("block",),
    )


@launcher.traced_once
def forward(epsilon: float, sources, scales, direction, live):
    """The mix [T, R, 256] of sources [T, R, 256], if there is a scale its norm, numbers [T, 128] for `backward`."""
    scales = [scale.astype(jnp.bfloat16) for scale in scales]  # Their gradients stay float32.
    tokens, height, _ = sources[0].shape
    num_sources, width, layout = len(sources), height * COLUMNS, _layout(height * COLUMNS)
    of_token = plgpu.Layout.WG_STRIDED((KINDS * MOST_SOURCES,), 1)

    def body(*refs, buffers, filled):
        refs = list(refs)
        sources, scale_refs = ([refs.pop(0) for _ in range(number)] for number in (num_sources, len(scales)))
        direction_ref, live_ref, mixed_ref, *normed_refs, numbers_ref = refs
        rows = _Rows(sources, tokens, buffers, filled)
        rows.fetch_first()
        direction = launcher.load(direction_ref, layout)
        held_scales = [launcher.load(ref, layout) for ref in scale_refs]
        number = _numbers(of_token)
        of_source, kind = number % MOST_SOURCES, number // MOST_SOURCES

        def mix(step, _):
            def add(place, carry):
                mixed, largest, total, scores, inverses = carry
                is_live = (live_ref[place] != 0) | (place == 0)
                value = rows.take(step * num_sources + place).astype(jnp.float32)
                inverse = lax.rsqrt(jnp.sum(value * value) * (1 / width) + epsilon)
                rows.release(step * num_sources + place)  # For the sum every thread has read it.
                score = jnp.where(is_live, jnp.sum(value * direction) * inverse, LOWEST)
                new_largest = jnp.maximum(largest, score)
                old, new = jnp.exp(largest - new_largest), jnp.exp(score - new_largest)
                scores, inverses = (
                    jnp.where(of_source == place, one, others) for one, others in ((score, scores), (inverse, inverses))
                )
                return mixed * old + value * new, new_largest, total * old + new, scores, inverses

            nothing = _zeros((KINDS * MOST_SOURCES,), of_token)
            start = _zeros((height, COLUMNS), layout), jnp.float32(LOWEST), jnp.float32(0), nothing, nothing
            mixed, largest, total, scores, inverses = lax.fori_loop(0, num_sources, add, start)
            share = 1 / total
            rounded = (mixed * share).astype(jnp.bfloat16)
            mixed_ref[_token(step)] = rounded
            inverse = jnp.float32(0)
            for scale, normed_ref in zip(held_scales, normed_refs, strict=True):
                value = rounded.astype(jnp.float32)
                inverse = lax.rsqrt(jnp.sum(value * value) * (1 / width) + epsilon)
                normed_ref[_token(step)] = (value * inverse).astype(jnp.bfloat16) * scale
            # What a source's own length takes off its gradient; its share is 0 where it takes no part.
            of_length = jnp.maximum(scores, -1e9) * inverses * inverses * (1 / width)
            shares = jnp.exp(scores - largest) * share
            beside = jnp.where(kind == 1, inverses, jnp.where(kind == 2, of_length, inverse))
            numbers_ref[_token(step)] = jnp.where(kind == 0, shares, beside)
            return ()

        lax.fori_loop(0, _steps(tokens), mix, ())

    return _launch(
        body,
        (*sources, *scales, direction, live),
        [jax.ShapeDtypeStruct(sources[0].shape, jnp.bfloat16)] * (1 + len(scales))
        + [jax.ShapeDtypeStruct((tokens, KINDS * MOST_SOURCES), jnp.float32)],
        rows=num_sources,
        blocks=min(4, max(2, 14336 // width)),  # As many as have registers; the fastest on an H200.
        scratch={},
        name="attention_residual_forward",
    )


@launcher.traced_once
def backward(epsilon: float, sources, scales, direction, numbers, mixed, gradient):
    """Gradients of the sources and, by blocks, of direction and scale, if there is one [blocks, 1 or 2, R, 256]."""
    scales = [scale.astype(jnp.bfloat16) for scale in scales]  # Their gradients stay float32.
    tokens, height, _ = sources[0].shape
    num_sources, width, layout = len(sources), height * COLUMNS, _layout(height * COLUMNS)
    blocks = min(BACKWARD_BLOCKS * launcher.num_multiprocessors(), tokens)

    def body(*refs, buffers, filled, numbers_smem, numbers_in, **of_norm):
        refs = list(refs)
        taken, scale_refs = ([refs.pop(0) for _ in range(number)] for number in (num_sources + 2, len(scales)))
        direction_ref, numbers, *to_sources, sums_ref = refs
        rows = _Rows(taken, tokens, buffers, filled)

        def fetch_numbers(step):
            token, slot = _token(step), lax.rem(step, 2)

            @pl.when(token < tokens)
            def _():
                plgpu.copy_gmem_to_smem(numbers.at[token], numbers_smem.at[slot], numbers_in.at[slot])

        fetch_numbers(0)
        rows.fetch_first()
        direction = launcher.load(direction_ref, layout)
        if scales:
            of_norm["to_scale"][...] = _zeros((height, COLUMNS), layout)

        def leave_norm(first, slot, product):
            """The mix's gradient and its product with the mix; from that of the mix and the norm's scaled gradient."""
            inverse, to_scale = numbers_smem[slot, 3 * MOST_SOURCES], of_norm["to_scale"]
            # Rows are read again: registers would not hold them.
            gradient, normed = (
                launcher.load(rows.buffer(row), layout).astype(jnp.float32) * inverse for row in (first, first + 1)
            )
            to_scale[...] = launcher.load(to_scale, layout) + gradient * normed * (1 / inverse)
            gradient *= launcher.load(scale_refs[0], layout).astype(jnp.float32)
            along = product * inverse * inverse
            narrow = (gradient - normed * (along * (1 / width))).astype(jnp.bfloat16)
            plgpu.commit_smem()  # Every thread has read both rows.
            # Of the mix only epsilon leaves anything. Summed up, it would show the roundings of both.
            return narrow, along * inverse * epsilon

        def differentiate(step, to_direction):
            token, slot, first = _token(step), lax.rem(step, 2), step * len(taken)
            narrow, mixed = rows.take(first), rows.take(first + 1)
            plgpu.barrier_wait(numbers_in.at[slot])
            gradient = narrow.astype(jnp.float32)
            for ref in scale_refs:
                gradient *= launcher.load(ref, layout).astype(jnp.float32)
            mean = jnp.sum(gradient * mixed.astype(jnp.float32))
            if scales:
                narrow, mean = leave_norm(first, slot, mean)
            # For the sum every thread has read both, and the numbers of the token before.
            rows.release(first)
            rows.release(first + 1)
            fetch_numbers(step + 1)

            def of_source(place, to_direction):
                share, inverse, of_length = (numbers_smem[slot, kind * MOST_SOURCES + place] for kind in range(3))
                row = first + 2 + place
                value, gradient = rows.take(row).astype(jnp.float32), narrow.astype(jnp.float32)
                # A source that takes part alone moves no share, whatever rounding leaves of the difference.
                to_score = jnp.where(share < 1 - 1e-6, share * (jnp.sum(gradient * value) - mean), 0.0)
                along, across = to_score * inverse, to_score * of_length
                # The gradient leaves from where the source lay. Once the one before has left, its place is free.
                rows.buffer(row)[...] = (share * gradient + along * direction - across * value).astype(jnp.bfloat16)
                plgpu.commit_smem()
                for one, to_source in enumerate(to_sources):

                    @pl.when(place == one)
                    def _(to_source=to_source):
                        plgpu.copy_smem_to_gmem(rows.buffer(row), to_source.at[token])

                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                @pl.when(row > 2)
                def _():
                    rows.release(jnp.where(place == 0, row - 3, row - 1))

                return to_direction + along * value

            return lax.fori_loop(0, num_sources, of_source, to_direction)

        block = lax.axis_index("block")
        sums_ref[block, 0] = lax.fori_loop(0, _steps(tokens), differentiate, _zeros((height, COLUMNS), layout))
        if scales:
            sums_ref[block, 1] = launcher.load(of_norm["to_scale"], layout)
        plgpu.wait_smem_to_gmem(0)

    return _launch(
        body,
        (gradient, mixed, *sources, *scales, direction, numbers),
        [jax.ShapeDtypeStruct(sources[0].shape, jnp.bfloat16)] * num_sources
        + [jax.ShapeDtypeStruct((blocks, 1 + len(scales), height, COLUMNS), jnp.float32)],
        rows=num_sources + 2,
        blocks=BACKWARD_BLOCKS,
        scratch={
            "numbers_smem": plgpu.SMEM((2, KINDS * MOST_SOURCES), jnp.float32),
            "numbers_in": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            **({"to_scale": plgpu.SMEM((height, COLUMNS), jnp.float32)} if scales else {}),
        },
        taken_bytes=4 * width * len(scales),
        name="attention_residual_backward",
    )
