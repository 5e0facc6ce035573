"""Attention residuals on NVIDIA GPUs: forward reads every source once, backward reads it and writes its gradient.

Forward, a program takes one token and its sources one after the other, with a running softmax. Backward, a program
takes many tokens, lest the query's gradient be written for each. Of a token it goes through the sources twice: for the
mix, whose inner product with its gradient every source's needs, and for their gradients; the second time they come from
the second-level cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import launcher

WIDEST = 16384
LOWEST = -1e30
"""The score of a source that takes no part: its share is 0 beside any other's."""


class Settings(NamedTuple):
    """How the kernels are launched; the defaults were the fastest on an H200."""

    interpret: bool = False
    forward_warps: int = 4
    backward_warps: int = 16
    backward_programs: int = 264


class Options(NamedTuple):
    """What a compiled program depends on beside its arrays."""

    epsilon: float
    settings: Settings


def reason_against(sources: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take such sources; None if they can."""
    if not launcher.is_hopper() or launcher.is_simulated():
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
    epsilon: float,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> jax.Array:
    """See `api.attention_residual`. Keeps its sources for the backward pass, and three numbers of each and token."""
    shape = sources[0].shape
    direction = norm_scale.astype(jnp.float32) * query.astype(jnp.float32)
    live = jnp.ones((len(sources),), jnp.int32)
    if is_live is not None:
        live = live.at[-1].set(is_live.astype(jnp.int32)) if is_live.ndim == 0 else is_live.astype(jnp.int32)
    given = [source.reshape(-1, shape[-1]) for source in sources]
    *given, direction, live = launcher.vary_together(*given, direction, live)
    mixed: Any = _mix(Options(epsilon, settings), tuple(given), direction, live)
    return mixed.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(options: Options, sources, direction, live):
    return _forward(options, sources, direction, live)[0]


def _forward(options, sources, direction, live):
    tokens, width = sources[0].shape
    row = pl.BlockSpec((None, width), lambda token: (token, 0))
    of_sources = pl.BlockSpec((None, 3 * len(sources)), lambda token: (token, 0))
    result, numbers = _call(
        functools.partial(_mix_token, epsilon=options.epsilon),
        options,
        sources,
        grid=(tokens,),
        in_specs=[row] * len(sources) + [pl.BlockSpec()] * 2,
        out_specs=[row, of_sources],
        out_shape=[(sources[0].shape, sources[0].dtype), ((tokens, 3 * len(sources)), jnp.float32)],
        # Of narrower rows a thread then has half as many numbers.
        warps=options.settings.forward_warps * (2 if width <= 4096 else 1),
        name="attention_residual_forward",
    )(*sources, direction, live)
    return result, (sources, direction, numbers)


def _backward(options, saved, gradient):
    sources, direction, numbers = saved
    tokens, width = sources[0].shape
    programs = min(options.settings.backward_programs, tokens)
    *to_sources, sums = _call(
        functools.partial(_differentiate_tokens, tokens=tokens),
        options,
        sources,
        grid=(programs,),
        in_specs=[pl.BlockSpec()] * (len(sources) + 3),
        out_specs=[pl.BlockSpec()] * len(sources) + [pl.BlockSpec((None, width), lambda program: (program, 0))],
        out_shape=[(sources[0].shape, sources[0].dtype)] * len(sources) + [((programs, width), jnp.float32)],
        warps=options.settings.backward_warps,
        name="attention_residual_backward",
    )(*sources, gradient, numbers, direction)
    return tuple(to_sources), jnp.sum(sums, axis=0), None


_mix.defvjp(_forward, _backward)


def _call(kernel, options: Options, sources, *, grid, in_specs, out_specs, out_shape, warps: int, name: str):
    manual_axis_type = jax.typeof(sources[0]).manual_axis_type
    width = sources[0].shape[1]
    return pl.pallas_call(
        functools.partial(kernel, num_sources=len(sources), width=width, block=max(16, pl.next_power_of_2(width))),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual_axis_type) for shape, dtype in out_shape],
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=options.settings.interpret,
        name=name,
    )


class _Row:
    """Reads and writes rows of `width` numbers as arrays of `block`, zero behind the last."""

    def __init__(self, width: int, block: int):
        self.places = pl.ds(0, block)
        self.mask = None if width == block else lax.broadcasted_iota(jnp.int32, (block,), 0) < width

    def load(self, ref, *row):
        return plt.load(ref.at[(*row, self.places)], mask=self.mask, other=None if self.mask is None else 0)

    def store(self, ref, value, *row) -> None:
        plt.store(ref.at[(*row, self.places)], value.astype(ref.dtype), mask=self.mask)


def _mix_token(*refs, num_sources: int, width: int, block: int, epsilon: float):
    sources, (direction_ref, live_ref, result_ref, numbers_ref) = refs[:num_sources], refs[num_sources:]
    row = _Row(width, block)
    direction = row.load(direction_ref)
    narrow = row.load(sources[0])
    scores, inverses = [], []
    mixed, largest, total = jnp.zeros((block,), jnp.float32), jnp.float32(LOWEST), jnp.float32(0)
    for place in range(num_sources):
        # The next one is on its way while this one is summed up.
        following = row.load(sources[place + 1]) if place + 1 < num_sources else narrow
        value = narrow.astype(jnp.float32)
        inverses.append(lax.rsqrt(jnp.sum(value * value) * (1 / width) + epsilon))
        score = jnp.sum(value * direction) * inverses[-1]
        if place:
            score = jnp.where(live_ref[place] != 0, score, LOWEST)
        new_largest = jnp.maximum(largest, score)
        old, new = jnp.exp(largest - new_largest), jnp.exp(score - new_largest)
        mixed, largest, total = mixed * old + value * new, new_largest, total * old + new
        scores.append(score)
        narrow = following
    row.store(result_ref, mixed * (1 / total))
    for place, (score, inverse) in enumerate(zip(scores, inverses, strict=True)):
        numbers_ref[place] = jnp.exp(score - largest) / total
        numbers_ref[num_sources + place] = inverse
        # What a source's own length takes off its gradient; its share is 0 where it takes no part.
        numbers_ref[2 * num_sources + place] = jnp.maximum(score, -1e9) * inverse * inverse * (1 / width)


def _differentiate_tokens(*refs, num_sources: int, width: int, block: int, tokens: int):
    sources, (gradient_ref, numbers_ref, direction_ref) = refs[:num_sources], refs[num_sources : num_sources + 3]
    to_sources, sums_ref = refs[num_sources + 3 : -1], refs[-1]
    row = _Row(width, block)
    program, programs = pl.program_id(0), pl.num_programs(0)
    direction = row.load(direction_ref)

    def differentiate(step, to_direction):
        token = program + step * programs
        gradient = row.load(gradient_ref, token).astype(jnp.float32)
        mixed = jnp.zeros((block,), jnp.float32)
        for place in range(num_sources):
            mixed = mixed + row.load(sources[place], token).astype(jnp.float32) * numbers_ref[token, place]
        inner = jnp.sum(gradient * mixed)
        for place in range(num_sources):
            share, inverse = numbers_ref[token, place], numbers_ref[token, num_sources + place]
            of_length = numbers_ref[token, 2 * num_sources + place]
            value = row.load(sources[place], token).astype(jnp.float32)
            to_score = share * (jnp.sum(gradient * value) - inner)
            to_source = share * gradient + (to_score * inverse) * direction - (to_score * of_length) * value
            row.store(to_sources[place], to_source, token)
            to_direction = to_direction + (to_score * inverse) * value
        return to_direction

    steps = (tokens - program + programs - 1) // programs
    row.store(sums_ref, lax.fori_loop(0, steps, differentiate, jnp.zeros((block,), jnp.float32)))
