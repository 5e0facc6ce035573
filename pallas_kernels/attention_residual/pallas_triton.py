"""Attention residuals on NVIDIA GPUs: forward reads every source once, backward reads it and writes its gradient.

A program goes through a token's sources twice, piece by piece: once for sums over the width (lengths and scores, or
inner products with the gradient), once for what follows from them. The second time they come from the caches, so no
row has to stay in registers, and many loads are under way at a time. Backward, a program takes many tokens, lest the
query's gradient be written for each.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import launcher

WIDEST = 16384
OWN = 8
"""Numbers next to each other that a thread has of a row: 16 bytes."""
LOWEST = -1e30
"""The score of a source that takes no part: its share is 0 beside any other's."""


class Settings(NamedTuple):
    """How the kernels are launched."""

    interpret: bool = False
    piece: int = 4096
    """Columns at a time, eight a thread."""
    programs: int = 132
    """Of the backward pass."""


class Options(NamedTuple):
    """What a compiled program depends on beside its arrays."""

    epsilon: float
    settings: Settings


def reason_against(sources: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take such sources; None if they can."""
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if sources[0].dtype != jnp.bfloat16:
        return f"needs bfloat16 sources, got {sources[0].dtype}"
    if sources[0].shape[-1] > WIDEST:
        return f"needs a width of at most {WIDEST}, got {sources[0].shape[-1]}"
    if sources[0].size >= 2**31:
        return f"numbers places in 31 bits, too few for {sources[0].size}"
    return None


def mix(
    sources: tuple[jax.Array, ...],
    norm_scale: jax.Array,
    query: jax.Array,
    is_live: jax.Array | None,
    output_scale: jax.Array | None,
    epsilon: float,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> jax.Array:
    """See `api.attention_residual`. Keeps its sources for the backward pass, and three numbers of each and token."""
    shape = sources[0].shape
    direction = norm_scale.astype(jnp.float32) * query.astype(jnp.float32)
    live = jnp.ones((len(sources),), jnp.int32)
    if is_live is not None:
        live = live.at[-1].set(is_live.astype(jnp.int32)) if is_live.ndim == 0 else is_live.astype(jnp.int32)
    scale = None if output_scale is None else output_scale.astype(jnp.float32)
    given = [source.reshape(-1, shape[-1]) for source in sources]
    *given, direction, live = launcher.vary_together(*given, direction, live)
    if scale is not None:
        scale, _ = launcher.vary_together(scale, direction)
    return _mix(Options(epsilon, settings), tuple(given), direction, live, scale).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(options: Options, sources, direction, live, scale):
    return _forward(options, sources, direction, live, scale)[0]


def _forward(options, sources, direction, live, scale):
    tokens, width = sources[0].shape
    row = pl.BlockSpec((None, width), lambda token: (token, 0))
    arrays = [*sources, direction, live, *([] if scale is None else [scale])]
    result, numbers = _call(
        _mix_token,
        options,
        sources,
        scale,
        grid=(tokens,),
        in_specs=[row] * len(sources) + [pl.BlockSpec()] * (len(arrays) - len(sources)),
        out_specs=[row, pl.BlockSpec((None, 3 * len(sources)), lambda token: (token, 0))],
        out_shape=[(sources[0].shape, sources[0].dtype), ((tokens, 3 * len(sources)), jnp.float32)],
        name="attention_residual_forward",
    )(*arrays)
    return result, (sources, direction, scale, numbers)


def _backward(options, saved, gradient):
    sources, direction, scale, numbers = saved
    tokens, width = sources[0].shape
    programs = min(options.settings.programs, tokens)
    arrays = [*sources, gradient, numbers, direction, *([] if scale is None else [scale])]
    num_sums = 1 if scale is None else 2
    *to_sources, sums = _call(
        functools.partial(_differentiate_tokens, tokens=tokens),
        options,
        sources,
        scale,
        grid=(programs,),
        in_specs=[pl.BlockSpec()] * len(arrays),
        out_specs=[pl.BlockSpec()] * len(sources)
        + [pl.BlockSpec((None, num_sums, width), lambda program: (program, 0, 0))],
        out_shape=[(sources[0].shape, sources[0].dtype)] * len(sources) + [((programs, num_sums, width), jnp.float32)],
        name="attention_residual_backward",
    )(*arrays)
    to_direction, *to_scale = jnp.sum(sums, axis=0)
    return tuple(to_sources), to_direction, None, to_scale[0] if to_scale else None


_mix.defvjp(_forward, _backward)


def _call(kernel, options: Options, sources, scale, *, grid, in_specs, out_specs, out_shape, name: str):
    manual_axis_type = jax.typeof(sources[0]).manual_axis_type
    width = sources[0].shape[1]
    piece = min(options.settings.piece, max(OWN, pl.next_power_of_2(width)))
    return pl.pallas_call(
        functools.partial(
            kernel,
            num_sources=len(sources),
            pieces=[_Piece(start, piece, width) for start in range(0, width, piece)],
            has_scale=scale is not None,
            epsilon=options.epsilon,
        ),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual_axis_type) for shape, dtype in out_shape],
        compiler_params=plt.CompilerParams(num_warps=max(1, piece // (32 * OWN)), num_stages=1),
        interpret=options.settings.interpret,
        name=name,
    )


class _Piece(NamedTuple):
    """Columns of rows, read and written as arrays of `columns` numbers, zero behind the last one of a row."""

    start: int
    columns: int
    width: int

    def load(self, ref, *row, is_last: bool = False):
        """`is_last`: this program does not read it again."""
        policy = "evict_first" if is_last else "evict_last"
        return plt.load(ref.at[(*row, self._places())], mask=self._mask(), other=self._other(), eviction_policy=policy)

    def store(self, ref, value, *row) -> None:
        plt.store(ref.at[(*row, self._places())], value.astype(ref.dtype), mask=self._mask())

    def _places(self):
        # A number of the program: a slice that reaches behind the end is refused.
        return pl.ds(jnp.int32(self.start), self.columns)

    def _mask(self):
        if self.start + self.columns <= self.width:
            return None
        return self.start + lax.broadcasted_iota(jnp.int32, (self.columns,), 0) < self.width

    def _other(self):
        return None if self.start + self.columns <= self.width else 0


def _own_sums(array):
    """Of every thread's own columns."""
    return jnp.sum(array.reshape(array.shape[0] // OWN, OWN), axis=1)


def _mix_token(*refs, num_sources: int, pieces: list[_Piece], has_scale: bool, epsilon: float):
    sources, direction_ref, live_ref = refs[:num_sources], refs[num_sources], refs[num_sources + 1]
    result_ref, numbers_ref = refs[-2:]
    width = pieces[0].width
    squares, products = [0.0] * num_sources, [0.0] * num_sources
    for piece in pieces:
        values = [piece.load(source) for source in sources]
        direction = piece.load(direction_ref)
        for place, value in enumerate(values):
            value = value.astype(jnp.float32)
            squares[place] += _own_sums(value * value)
            products[place] += _own_sums(value * direction)
    inverses = [lax.rsqrt(jnp.sum(square) * (1 / width) + epsilon) for square in squares]
    scores = [jnp.sum(product) * inverse for product, inverse in zip(products, inverses, strict=True)]
    for place in range(1, num_sources):
        scores[place] = jnp.where(live_ref[place] != 0, scores[place], LOWEST)
    largest = functools.reduce(jnp.maximum, scores)
    shares = [jnp.exp(score - largest) for score in scores]
    inverse_total = 1 / functools.reduce(jnp.add, shares)
    shares = [share * inverse_total for share in shares]
    mixed = []
    for piece in pieces:
        values = [piece.load(source, is_last=True) for source in sources]
        mixed.append(_weighted(values, shares).astype(result_ref.dtype))
    if has_scale:
        wide = [part.astype(jnp.float32) for part in mixed]
        length = functools.reduce(jnp.add, [_own_sums(part * part) for part in wide])
        inverse = lax.rsqrt(jnp.sum(length) * (1 / width) + epsilon)
        for number, piece in enumerate(pieces):
            scale = piece.load(refs[num_sources + 2]).astype(result_ref.dtype)
            mixed[number] = (wide[number] * inverse).astype(result_ref.dtype) * scale
    for part, piece in zip(mixed, pieces, strict=True):
        piece.store(result_ref, part)
    for place, (share, inverse, score) in enumerate(zip(shares, inverses, scores, strict=True)):
        numbers_ref[place] = share
        numbers_ref[num_sources + place] = inverse
        # What a source's own length takes off its gradient; its share is 0 where it takes no part.
        numbers_ref[2 * num_sources + place] = jnp.maximum(score, -1e9) * inverse * inverse * (1 / width)


def _weighted(values, shares):
    return functools.reduce(jnp.add, [v.astype(jnp.float32) * share for v, share in zip(values, shares, strict=True)])


def _differentiate_tokens(*refs, num_sources: int, pieces: list[_Piece], has_scale: bool, epsilon: float, tokens: int):
    """With a = gradient * scale, n the normalised mix h / |h|:  dh = (a - n mean(a n)) / |h|, or the gradient itself.

    Its inner products with the sources follow from those of a and of h, so one pass gives all sums.
    """
    sources, (gradient_ref, numbers_ref, direction_ref) = refs[:num_sources], refs[num_sources : num_sources + 3]
    to_sources, sums_ref = refs[-1 - num_sources : -1], refs[-1]
    program, programs, width = pl.program_id(0), pl.num_programs(0), pieces[0].width
    dtype = sources[0].dtype

    def scaled(piece, gradient):
        if not has_scale:
            return gradient
        return gradient * piece.load(refs[num_sources + 3]).astype(dtype).astype(jnp.float32)

    def differentiate(step, sums):
        token = program + step * programs
        shares, inverses, of_lengths = (
            [numbers_ref[token, group * num_sources + place] for place in range(num_sources)] for group in range(3)
        )
        with_gradient, with_mix, length, along = [0.0] * num_sources, [0.0] * num_sources, 0.0, 0.0
        for piece in pieces:
            values = [piece.load(source, token) for source in sources]
            gradient = scaled(piece, piece.load(gradient_ref, token).astype(jnp.float32))
            if has_scale:
                mixed = _weighted(values, shares).astype(dtype).astype(jnp.float32)
                length += _own_sums(mixed * mixed)
                along += _own_sums(mixed * gradient)
            for place, value in enumerate(values):
                value = value.astype(jnp.float32)
                with_gradient[place] += _own_sums(value * gradient)
                if has_scale:
                    with_mix[place] += _own_sums(value * mixed)
        inner = [jnp.sum(product) for product in with_gradient]
        inverse_length = back = 0.0
        if has_scale:
            inverse_length = lax.rsqrt(jnp.sum(length) * (1 / width) + epsilon)
            back = jnp.sum(along) * inverse_length * inverse_length * (1 / width)
            inner = [
                inverse_length * (product - back * jnp.sum(of_mix))
                for product, of_mix in zip(inner, with_mix, strict=True)
            ]
        mean = functools.reduce(jnp.add, [share * product for share, product in zip(shares, inner, strict=True)])
        to_scores = [share * (product - mean) for share, product in zip(shares, inner, strict=True)]
        new_sums = []
        for number, piece in enumerate(pieces):
            values = [piece.load(source, token, is_last=True) for source in sources]
            given = piece.load(gradient_ref, token, is_last=True).astype(jnp.float32)
            gradient, totals = scaled(piece, given), sums[number]
            if has_scale:
                mixed = _weighted(values, shares).astype(dtype).astype(jnp.float32)
                rounded = (mixed * inverse_length).astype(dtype).astype(jnp.float32)
                totals = (totals[0], totals[1] + given * rounded)
                gradient = inverse_length * (gradient - mixed * back)
            direction, to_direction = piece.load(direction_ref), totals[0]
            for place, value in enumerate(values):
                value = value.astype(jnp.float32)
                of_direction = to_scores[place] * inverses[place]
                to_source = shares[place] * gradient + of_direction * direction
                piece.store(to_sources[place], to_source - (to_scores[place] * of_lengths[place]) * value, token)
                to_direction = to_direction + of_direction * value
            new_sums.append((to_direction, *totals[1:]))
        return tuple(new_sums)

    zeros = jnp.zeros((pieces[0].columns,), jnp.float32)
    start = tuple((zeros,) * (2 if has_scale else 1) for _ in pieces)
    sums = lax.fori_loop(0, (tokens - program + programs - 1) // programs, differentiate, start)
    for piece, totals in zip(pieces, sums, strict=True):
        for place, total in enumerate(totals):
            piece.store(sums_ref, total, jnp.int32(place))
