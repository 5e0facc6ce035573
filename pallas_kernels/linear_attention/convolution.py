"""The short convolution with its SiLU, and the L2 norm of heads behind it, forward and backward, in Pallas for Triton.

A program takes some tokens of one head. Its backward pass makes the gradient of what SiLU is taken of anew from the
inputs, of its tokens and the few behind them, and adds it up, through memory, over the tokens that an input reaches.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels import launcher
from pallas_kernels.linear_attention.chunk_kernels import multiply_add, wait_for_all
from pallas_kernels.linear_attention.documents import document_index

EPSILON = 1e-6
"""Added to the sum of squares."""
LOG2_E = math.log2(math.e)
MOST_TAPS = 8
PLACES = 2**31
MOST_TOKENS = 2**21  # of a row: blocks of 64 within the 65,535 that a launch takes along one axis


class Settings(NamedTuple):
    """How the kernels are launched; the defaults were the fastest on an H200."""

    interpret: bool = False
    tokens: int = 64
    warps: int = 4


def reason_against(inputs: jax.Array, taps: jax.Array) -> str | None:
    """Why these kernels cannot take such arrays; None if they can."""
    if not launcher.is_hopper() or launcher.is_simulated():
        return "needs a Hopper GPU (compute capability 9.0)"
    if inputs.ndim != 4 or inputs.dtype != jnp.bfloat16:
        return f"needs bfloat16 inputs [B, S, H, K], got {inputs.ndim} axes of {inputs.dtype}"
    if inputs.shape[3] not in (32, 64, 128, 256) or not 2 <= taps.shape[0] <= MOST_TAPS:
        return f"needs 2 to {MOST_TAPS} taps and heads of 32 to 256, got {taps.shape[0]} and {inputs.shape[3]}"
    if inputs.size >= PLACES or inputs.shape[1] > MOST_TOKENS:
        return (
            f"numbers places in 31 bits and blocks in 16, too few for {inputs.size} inputs of {inputs.shape[1]} tokens"
        )
    return None


def short_convolution(
    inputs: Float[Array, "B S H K"],
    taps: Float[Array, "W H K"],
    segment_ids: Int[Array, "B S"],
    *,
    initial_tail: Float[Array, "B W-1 H K"] | None = None,
    norm_scale: float | None = None,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> Float[Array, "B S H K"]:
    """See `api.short_convolution`: inputs in bfloat16, computed in float32. Keeps its arguments alone."""
    width, (batch, length, heads, channels) = taps.shape[0], inputs.shape
    has_tail = initial_tail is not None
    if initial_tail is None:
        initial_tail = jnp.zeros((batch, width - 1, heads, channels), inputs.dtype)
    # How many tokens back the document reaches: the first one's as far as the tail.
    index = document_index(segment_ids)
    same = [index[:, distance:] == index[:, : length - distance] for distance in range(1, min(width, length + 1))]
    reach = sum(
        (jnp.pad(array.astype(jnp.int32), ((0, 0), (length - array.shape[1], 0))) for array in same),
        jnp.zeros_like(index),
    )
    reach = jnp.where(index == 0, width - 1, reach)
    tail = ((0, 0), (0, -length % settings.tokens))
    inputs = jnp.pad(inputs, (*tail, (0, 0), (0, 0)))
    arrays = inputs, taps.astype(jnp.float32), initial_tail.astype(inputs.dtype), jnp.pad(reach, tail)
    output: Any = _convolve((settings, norm_scale, has_tail), *launcher.vary_together(*arrays))
    return output[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(options, inputs, taps, tail, reach):
    return _forward(options, inputs, taps, tail, reach)[0]


def _forward(options, inputs, taps, tail, reach):
    call = _Calls(options, inputs, taps)
    return call.forward(inputs, taps, tail, reach), (inputs, taps, tail, reach)


def _backward(options, saved, gradient):
    inputs, taps, tail, reach = saved
    call = _Calls(options, inputs, taps)
    input_gradient, taps_gradient, tail_gradient = call.backward(inputs, taps, tail, reach, gradient)
    taps_gradient = jnp.moveaxis(jnp.sum(taps_gradient, axis=(0, 1)), 0, 1)
    # Without a tail its gradient is not written.
    return input_gradient, taps_gradient, tail_gradient if call.has_tail else jnp.zeros_like(tail), None


_convolve.defvjp(_forward, _backward)


class _Calls:
    """The kernels' launches for arrays of given shapes."""

    def __init__(self, options: tuple[Settings, float | None, bool], inputs: jax.Array, taps: jax.Array):
        self.settings, self.scale, self.has_tail = options
        self.batch, self.length, self.heads, self.channels = inputs.shape
        self.width, self.dtype = taps.shape[0], inputs.dtype
        self.grid = self.heads, self.length // self.settings.tokens, self.batch
        self.manual_axis_type = jax.typeof(inputs).manual_axis_type
        whole = pl.BlockSpec((None, self.length, None, self.channels), lambda h, n, b: (b, 0, h, 0))
        tail = pl.BlockSpec((None, self.width - 1, None, self.channels), lambda h, n, b: (b, 0, h, 0))
        of_taps = pl.BlockSpec((self.width, None, self.channels), lambda h, n, b: (0, h, 0))
        reach = pl.BlockSpec((None, self.length), lambda h, n, b: (b, 0))
        self.arguments, self.whole, self.tail = [whole, of_taps, tail, reach], whole, tail

    def shape(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype, manual_axis_type=self.manual_axis_type)

    def call(self, kernel, in_specs, out_specs, out_shape):
        interpret = self.settings.interpret
        return pl.pallas_call(
            functools.partial(
                kernel,
                width=self.width,
                tokens=self.settings.tokens,
                scale=self.scale,
                has_tail=self.has_tail,
                interpret=interpret,
            ),
            grid=self.grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=plt.CompilerParams(num_warps=self.settings.warps, num_stages=1),
            interpret=interpret,
            name=kernel.__name__,
        )

    def forward(self, *arguments):
        shape = self.shape(self.batch, self.length, self.heads, self.channels)
        return self.call(convolve, self.arguments, self.whole, shape)(*arguments)

    def backward(self, *arguments):
        """Gradients of inputs, of taps [B, blocks, H, W, K] and of the tail."""
        tokens, behind = self.settings.tokens, pl.next_power_of_2(self.width - 1)
        sums = pl.BlockSpec((None, None, None, self.width, self.channels), lambda h, n, b: (b, n, h, 0, 0))
        scratch = pl.BlockSpec((None, None, None, tokens + behind, self.channels), lambda h, n, b: (b, n, h, 0, 0))
        blocks = self.batch, self.grid[1], self.heads
        *gradients, _ = self.call(
            convolve_back,
            [*self.arguments, self.whole],
            [self.whole, sums, self.tail, scratch],
            [
                self.shape(self.batch, self.length, self.heads, self.channels),
                self.shape(*blocks, self.width, self.channels, dtype=jnp.float32),
                self.shape(self.batch, self.width - 1, self.heads, self.channels),
                self.shape(*blocks, tokens + behind, self.channels),
            ],
        )(*arguments)
        return gradients


def _sigmoid(array, interpret: bool):
    if interpret:
        return jax.nn.sigmoid(array)
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    asm = (
        "{ .reg .f32 grown; ex2.approx.ftz.f32 grown, $1; add.ftz.f32 grown, grown, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, grown; }"
    )
    options: Any = {"constraints": "=f,f", "pack": 1, "result_shape_dtypes": [shape]}
    return plt.elementwise_inline_asm(asm, args=[array * -LOG2_E], **options)[0]


def _load(ref, row, mask, interpret: bool):
    """Rows [n, K] to float32, zero where the mask [n] says no."""
    mask = jnp.broadcast_to(mask[:, None], (*row.shape, ref.shape[1]))
    if interpret:  # which takes no mask beside rows in any order
        return jnp.where(mask, ref[row, :], jnp.zeros((), ref.dtype)).astype(jnp.float32)
    return plt.load(ref.at[row, :], mask=mask, other=0.0).astype(jnp.float32)


class _Tokens:
    """The inputs of the tokens `rows` and of those before them."""

    def __init__(self, inputs_ref, taps_ref, tail_ref, reach_ref, rows, width: int, has_tail: bool, interpret: bool):
        self.inputs_ref, self.taps_ref, self.tail_ref, self.rows = inputs_ref, taps_ref, tail_ref, rows
        self.width, self.has_tail, self.interpret = width, has_tail, interpret
        self.is_inside = rows < inputs_ref.shape[0]
        self.reach = reach_ref[jnp.minimum(rows, inputs_ref.shape[0] - 1)]

    def before(self, distance: int):
        """The inputs so many tokens before, float32; zero if of another document."""
        source, places = self.rows - distance, self.inputs_ref.shape[0]
        is_reached = self.is_inside & (self.reach >= distance)
        load = functools.partial(_load, interpret=self.interpret)
        inputs = load(self.inputs_ref, jnp.clip(source, 0, places - 1), is_reached & (source >= 0))
        if distance == 0 or not self.has_tail:
            return inputs
        place = jnp.clip(source + self.width - 1, 0, self.width - 2)
        return inputs + load(self.tail_ref, place, is_reached & (source < 0))

    def convolved(self):
        total = self.taps_ref[self.width - 1, :][None] * self.before(0)
        for distance in range(1, self.width):
            tap = jnp.broadcast_to(self.taps_ref[self.width - 1 - distance, :][None], total.shape)
            total = multiply_add(tap, self.before(distance), total, self.interpret)
        return total

    def gradient(self, gradient_ref, scale: float | None):
        """Of the convolution's result, from that of what is made of it."""
        place = jnp.minimum(self.rows, self.inputs_ref.shape[0] - 1)
        gradient, total = _load(gradient_ref, place, self.is_inside, self.interpret), self.convolved()
        gate = _sigmoid(total, self.interpret)
        if scale is not None:
            result = total * gate
            inverse = lax.rsqrt(jnp.sum(result * result, axis=1) + EPSILON)[:, None]
            along = jnp.sum(result * gradient, axis=1)[:, None] * inverse * inverse
            gradient = (scale * inverse) * (gradient - along * result)
        return gradient * gate * (1 + total * (1 - gate))


def convolve(inputs_ref, taps_ref, tail_ref, reach_ref, output_ref, *, width, tokens, scale, has_tail, interpret):
    start = pl.program_id(1) * tokens
    rows = start + lax.broadcasted_iota(jnp.int32, (tokens,), 0)
    total = _Tokens(inputs_ref, taps_ref, tail_ref, reach_ref, rows, width, has_tail, interpret).convolved()
    result = total * _sigmoid(total, interpret)
    if scale is not None:
        result *= scale * lax.rsqrt(jnp.sum(result * result, axis=1) + EPSILON)[:, None]
    output_ref[pl.ds(start, tokens), :] = result.astype(output_ref.dtype)


def convolve_back(
    inputs_ref, taps_ref, tail_ref, reach_ref, gradient_ref, input_gradient_ref, taps_gradient_ref, tail_gradient_ref,
    results_ref, *, width, tokens, scale, has_tail, interpret,
):  # fmt: skip
    start, dtype = pl.program_id(1) * tokens, input_gradient_ref.dtype
    own = lax.broadcasted_iota(jnp.int32, (tokens,), 0)
    behind = lax.broadcasted_iota(jnp.int32, (results_ref.shape[0] - tokens,), 0)
    arguments = inputs_ref, taps_ref, tail_ref, reach_ref
    read = functools.partial(_Tokens, *arguments, width=width, has_tail=has_tail, interpret=interpret)
    inputs = read(rows=start + own)
    gradient = inputs.gradient(gradient_ref, scale)
    for distance in range(width):
        taps_gradient_ref[width - 1 - distance, :] = jnp.sum(gradient * inputs.before(distance), axis=0)
    results_ref[:tokens, :] = gradient.astype(dtype)
    results_ref[tokens:, :] = read(rows=start + tokens + behind).gradient(gradient_ref, scale).astype(dtype)
    wait_for_all(interpret)  # rows of other threads are read back

    def spread(place):
        """The sum, over the tokens that the inputs at `start + place` reach, of what they give back."""
        total = jnp.zeros((*place.shape, inputs_ref.shape[1]), jnp.float32)
        for distance in range(width):
            target = place + distance
            row = jnp.clip(start + target, 0, inputs_ref.shape[0] - 1)
            is_reaching = (reach_ref[row] >= distance) & (start + target < inputs_ref.shape[0]) & (target >= 0)
            given = _load(results_ref, jnp.maximum(target, 0), is_reaching, interpret)
            tap = jnp.broadcast_to(taps_ref[width - 1 - distance, :][None], total.shape)
            total = multiply_add(tap, given, total, interpret)
        return total

    input_gradient_ref[pl.ds(start, tokens), :] = spread(own).astype(dtype)
    if has_tail:

        @pl.when(pl.program_id(1) == 0)
        def _():
            given = spread(behind - (width - 1))
            for place in range(width - 1):
                chosen = jnp.where((behind == place)[:, None], given, 0)
                tail_gradient_ref[place, :] = jnp.sum(chosen, axis=0).astype(dtype)
