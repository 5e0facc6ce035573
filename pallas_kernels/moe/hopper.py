"""Routed experts on Hopper: rows in blocks by expert, five grouped products, sums in the router's order.

Where experts are narrow, rows are not sorted: the products that need them, or their gradients, fetch each from its
token's place.
Forward keeps the rows' gate and up values, not the hidden values or the experts' outputs. Backward recomputes the
activation, and takes the gradient of a router weight as the inner product of hidden values and their gradient.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launcher
from pallas_kernels.gated_activation.api import Activation
from pallas_kernels.moe.contraction import contract_rows
from pallas_kernels.moe.copying import Packed
from pallas_kernels.moe.grouped import multiply
from pallas_kernels.moe.rows import add_choices, take_rows
from pallas_kernels.moe.tiles import BLOCK, Counter, Shape, cut_tiles, running_total


class Options(NamedTuple):
    """What a compiled program depends on beside its arrays."""

    activation: Activation
    beta: float
    linear_beta: float


def reason_against(
    rows: jax.Array | jax.ShapeDtypeStruct,
    num_choices: int,
    gate: Any,
    weight_dtype: jnp.dtype | None = None,
) -> str | None:
    """Why the kernels cannot take `rows` [T, R], so many choices, weights like `gate` [E, R, F]; None if they can.

    `gate` is an array, or a packed weight of that many inputs and outputs.
    """
    if isinstance(gate, dict):
        (num_experts, outputs, half), weights = gate["codes"].shape, jnp.dtype(jnp.bfloat16)
        widths = 2 * half, outputs
    else:
        (num_experts, *widths), weights = gate.shape, gate.dtype
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if rows.dtype != jnp.bfloat16 or weights != jnp.bfloat16:
        return f"needs bfloat16 rows and weights, got {rows.dtype} and {weights}"
    if any(width % 128 for width in widths):
        return f"needs widths that are multiples of 128, got {widths[0]} and {widths[1]}"
    if weight_dtype is not None and weight_dtype != jnp.float32:  # NumPy's float64 equals None.
        return f"needs float32 router weights, got {weight_dtype}"
    if (num_experts + 1) * num_choices >= 2**31:
        return f"numbers {num_experts} experts times {num_choices} choices in 31 bits"
    return None


class Adapters(NamedTuple):
    """Low-rank factors, ranks padded to 128: `x @ W + (x @ first) @ second`; None for a product without."""

    up_first: jax.Array | None = None
    """[E, R, Z]: of gate and up side by side."""
    gate_second: jax.Array | None = None
    """[E, Z, F]: zero for the ranks of up."""
    up_second: jax.Array | None = None
    """[E, Z, F]: zero for the ranks of gate."""
    down_first: jax.Array | None = None
    """[E, F, Z]."""
    down_second: jax.Array | None = None
    """[E, Z, R]."""


def join_adapters(adapters: Mapping[str, tuple[jax.Array, jax.Array]]) -> Adapters:
    """Pad factors ([E, in, r], [E, r, out]) of any of gate, up and down, and lay those of gate and up side by side."""

    def pad(first: jax.Array, second: jax.Array, before: int, ranks: int) -> tuple[jax.Array, jax.Array]:
        around = (before, ranks - before - first.shape[2])
        return jnp.pad(first, ((0, 0), (0, 0), around)), jnp.pad(second, ((0, 0), around, (0, 0)))

    def padded(ranks: int) -> int:
        return -(-ranks // 128) * 128

    joined = Adapters()
    if "down" in adapters:
        first, second = pad(*adapters["down"], 0, padded(adapters["down"][0].shape[2]))
        joined = joined._replace(down_first=first, down_second=second)
    names = [name for name in ("gate", "up") if name in adapters]
    if names:
        ranks = padded(sum(adapters[name][0].shape[2] for name in names))
        before, firsts, seconds = 0, [], {}
        for name in names:
            first, seconds[name] = pad(*adapters[name], before, ranks)
            firsts.append(first)
            before += adapters[name][0].shape[2]
        zero = jnp.zeros_like(seconds[names[0]])
        joined = joined._replace(
            up_first=sum(firsts[1:], firsts[0]),
            gate_second=seconds.get("gate", zero),
            up_second=seconds.get("up", zero),
        )
    return joined


class Plan(NamedTuple):
    """Where choices lie when sorted by expert, each expert's in whole blocks."""

    num_blocks: jax.Array
    """[E] int32."""
    slot: jax.Array
    """[T, A] int32: the place of a choice; beyond the slots for none."""
    choice: jax.Array
    """[slots] int32: the choice at a place; beyond the choices for padding."""


def num_slots(num_choices: int, num_experts: int) -> int:
    """Places that hold any spread of the choices over the experts."""
    return BLOCK * -(-(num_choices + (BLOCK - 1) * min(num_choices, num_experts)) // BLOCK)


def plan(index: jax.Array, num_experts: int) -> Plan:
    """Sort choices `index` [T, A] int32 (-1: none) by expert, stably, by counting; nothing waits for the host."""
    num_choices, slots = index.size, num_slots(index.size, num_experts)
    group = jnp.where(index < 0, num_experts, index).reshape(-1)
    # Expert and choice in one key: several times faster than a stable sort of pairs.
    key = jnp.sort(group * num_choices + jnp.arange(num_choices, dtype=jnp.int32))
    bounds = jnp.arange(num_experts + 1, dtype=jnp.int32) * num_choices
    bounds = jnp.searchsorted(key, bounds, method="scan_unrolled").astype(jnp.int32)
    num_blocks = -(-jnp.diff(bounds) // BLOCK)
    shift = (running_total(num_blocks) - num_blocks) * BLOCK - bounds[:-1]
    group, choice = key // num_choices, key % num_choices
    place = jnp.arange(num_choices, dtype=jnp.int32)
    # Choices of no expert are sent beyond the slots.
    slot = place + jnp.where(group < num_experts, shift[jnp.minimum(group, num_experts - 1)], slots)
    slot = jnp.zeros_like(slot).at[choice].set(slot, unique_indices=True).reshape(index.shape)
    last_block = running_total(num_blocks)
    block = jnp.arange(slots // BLOCK, dtype=jnp.int32)
    expert = jnp.sum(last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    source = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, :] - shift[expert][:, None]
    is_filled = (source < bounds[1:][expert][:, None]) & (block < last_block[-1])[:, None]
    choice = jnp.where(is_filled, choice[jnp.minimum(source, num_choices - 1)], num_choices).reshape(-1)
    return Plan(num_blocks, slot, choice)


def reciprocal(positive: jax.Array) -> jax.Array:
    """1 / x through the fast reciprocal root, exact to float32's rounding."""
    root = lax.rsqrt(positive)
    return root * root


def activate(gate: jax.Array, up: jax.Array, options: Options) -> jax.Array:
    """The gated activation of float32 values, in exponentials and one reciprocal."""
    return activate_and_derive(gate, up, options)[0]


def activate_and_derive(gate: jax.Array, up: jax.Array, options: Options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(activation, its derivative by gate, its derivative by up)."""
    _, beta, linear_beta = options
    assert options.activation in ("situ", "silu"), options.activation
    if options.activation == "silu":
        sigmoid = reciprocal(1 + jnp.exp(jnp.minimum(-gate, 80.0)))
        bent = gate * sigmoid
        return bent * up, up * sigmoid * (1 + gate - bent), bent
    # tanh(x) = (1 - exp(-2x)) / (1 + exp(-2x)). Beyond the clamps nothing changes in float32, and nothing overflows.
    of_gate = jnp.exp(jnp.minimum(gate * (-2 / beta), 20.0))
    of_sigmoid = of_gate * of_gate if beta == 4 else jnp.exp(jnp.minimum(-gate, 40.0))
    of_up = jnp.exp(jnp.minimum(up * (-2 / linear_beta), 20.0))
    a, s, b = 1 + of_gate, 1 + of_sigmoid, 1 + of_up
    inverse = reciprocal(a * s * b)
    tanh_gate, sigmoid, tanh_up = (1 - of_gate) * (inverse * s * b), inverse * a * b, (1 - of_up) * (inverse * a * s)
    bent = beta * tanh_gate * sigmoid
    by_gate = linear_beta * tanh_up * sigmoid * (1 - tanh_gate * tanh_gate + beta * tanh_gate * (1 - sigmoid))
    return bent * linear_beta * tanh_up, by_gate, bent * (1 - tanh_up * tanh_up)


def _piece(tile, start: int, width: int):
    """The part of an output that a tile's piece of 64 columns covers, where a tile covers `width`."""
    return pl.ds(tile.row, BLOCK), pl.ds(tile.column * width + start, BLOCK)


def _store_result(tile, results, refs, store, _):
    (result,) = results
    width = result.shape[1]
    for number in range(width // BLOCK):
        start = number * BLOCK
        store(result[:, start : start + BLOCK], refs[0].at[_piece(tile, start, width)], number % 2)


def _turn(factor: jax.Array | None, weight: jax.Array | Packed) -> jax.Array:
    """Factors [E, in, out] to lie as `weight` does, whose term they follow: packed weights are [E, out, in]."""
    assert factor is not None
    return jnp.swapaxes(factor, 1, 2) if isinstance(weight, Packed) else factor


def _fit(shape: Shape, columns: int, weight: jax.Array | Packed) -> Shape:
    """Of packed weights a tile has whole columns, and there is room for one buffer less."""
    if columns % shape.width:
        shape = shape._replace(width=128)
    return shape._replace(stages=3) if isinstance(weight, Packed) else shape


def _hidden_width(gate: jax.Array | Packed) -> int:
    return gate.shape[1 if isinstance(gate, Packed) else 2]


def _apply_gate_and_up(terms, token, tiles, counter, options: Options, shape: Shape):
    """(gate values, up values, hidden values) [slots, F] of terms (rows, (gate weight, up weight))."""
    half = shape.width // 2
    weight = terms[0][1][0]
    is_packed = isinstance(weight, Packed)
    columns = _hidden_width(weight)
    num_slots = terms[0][0].shape[0] if token is None else token.shape[0]

    def epilogue(tile, results, refs, store, _):
        for number in range(half // BLOCK):
            start = number * BLOCK
            gate, up = (result[:, start : start + BLOCK] for result in results)
            for buffer, (value, ref) in enumerate(zip((gate, up, activate(gate, up, options)), refs, strict=True)):
                store(value, ref.at[_piece(tile, start, half)], (number + buffer) % 2)

    outputs = [jax.ShapeDtypeStruct((num_slots, columns), terms[0][0].dtype)] * 3
    return multiply(
        terms,
        tiles,
        outputs,
        epilogue,
        columns=columns,
        transposed=is_packed,
        token=token,
        shape=shape._replace(stages=3) if is_packed else shape,
        counter=counter,
        name="moe_up",
    )


def _multiply(terms, tiles, counter, shape: Shape, *, transposed: bool, name: str, token=None) -> jax.Array:
    """The sum over terms (rows, weight) of rows @ weight[e], or of rows @ weight[e]^T. `token` as in `multiply`."""
    rows, weight = terms[0]
    columns = weight.shape[1 if transposed else 2]
    num_slots = rows.shape[0] if token is None else token.shape[0]
    return multiply(
        [(rows, (weight,)) for rows, weight in terms],
        tiles,
        [jax.ShapeDtypeStruct((num_slots, columns), rows.dtype)],
        _store_result,
        columns=columns,
        transposed=transposed,
        token=token,
        shape=_fit(shape, columns, weight),
        counter=counter,
        name=name,
    )[0]


def _differentiate_down(terms, token, gate_values, up_values, weight, tiles, counter, options: Options, shape: Shape):
    """(gradients of gate and up values, weighted hidden values [slots, F], d weight in parts [n, slots]).

    From terms (gradient of outputs, down weight), gate and up values [slots, F] and router weights [slots].
    """
    num_rows, width = gate_values.shape
    is_packed = isinstance(terms[0][1], Packed)
    shape = _fit(shape, width, terms[0][1]) if is_packed else shape

    def epilogue(tile, results, refs, store, read_beside):
        (result,) = results
        *outputs, d_weight, weight = refs
        rows = pl.ds(tile.row, BLOCK)
        layout = launcher.row_layout()
        scale = lax.broadcast_in_dim(launcher.load(weight.at[rows], layout, is_strided=True), (BLOCK, BLOCK), (0,))
        inner = None
        for number in range(shape.width // BLOCK):
            start = number * BLOCK
            gate, up = read_beside(number)
            d_hidden = result[:, start : start + BLOCK]
            hidden, by_gate, by_up = activate_and_derive(gate, up, options)
            product = jnp.sum(d_hidden * hidden, axis=1)
            inner = product if inner is None else inner + product
            d_hidden = d_hidden * scale
            here = _piece(tile, start, shape.width)
            results = (d_hidden * by_gate, d_hidden * by_up, hidden * scale)
            for buffer, (value, ref) in enumerate(zip(results, outputs, strict=True)):
                store(value, ref.at[here], (number + buffer) % 2)
        d_weight[tile.column, rows] = inner

    outputs = [jax.ShapeDtypeStruct((num_rows, width), gate_values.dtype)] * 3
    outputs.append(jax.ShapeDtypeStruct((pl.cdiv(width, shape.width), num_rows), jnp.float32))
    return multiply(
        [(rows, (weight,)) for rows, weight in terms],
        tiles,
        outputs,
        epilogue,
        columns=width,
        transposed=not is_packed,
        token=token,
        beside=(gate_values, up_values),
        row_values=(weight,),
        shape=shape,
        counter=counter,
        name="moe_down_backward",
    )


def _shape(gate: jax.Array | Packed) -> Shape:
    """Tiles of 128 rows and 256 columns: as fast as narrower and taller ones, or faster, at all measured shapes."""
    return Shape(width=256 if min(gate.shape[1:]) >= 256 else 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_experts(options: Options, rows, index, weight, gate, up, down, adapters: Adapters):
    """See `api.routed_experts`. `weight` None stands for ones."""
    return _forward(options, rows, index, weight, gate, up, down, adapters)[0]


WIDEST_GATHERED = 1408
"""Up to this hidden width rows are fetched from their tokens' places; each is read again for every 128 columns.

Measured, sorted and fetched, at 1408: a forward pass 2.91 and 2.88 ms, all kernels of a step 8.81 and 8.64 ms.
"""


def _locate(rows: jax.Array, choices: Plan, hidden: int) -> tuple[jax.Array, jax.Array | None]:
    """(rows, each slot's token), or sorted rows, zero for padding, and None."""
    token = choices.choice // choices.slot.shape[1]
    if hidden <= WIDEST_GATHERED:
        return rows, token
    return take_rows(rows, token, jnp.sum(choices.num_blocks, keepdims=True, dtype=jnp.int32), BLOCK), None


def _count(choices: Plan) -> Iterator[Counter]:
    """A counter for each kernel. They depend on the choices, so that none is a constant of the program."""
    zeros = jnp.minimum(choices.num_blocks[0], 0) + jnp.zeros((16,), jnp.int32)
    return (Counter(zeros, place) for place in range(16))


@launcher.traced_once
def _forward(options: Options, rows, index, weight, gate, up, down, adapters: Adapters):
    shape = _shape(gate)
    choices = plan(index, gate.shape[0])
    tiles = cut_tiles(choices.num_blocks, choices.choice.size // BLOCK, shape.warpgroups)
    counters = _count(choices)
    project = functools.partial(_multiply, tiles=tiles, shape=shape)
    located, token = _locate(rows, choices, _hidden_width(gate))
    terms, narrow = [(located, (gate, up))], None
    if adapters.up_first is not None:
        terms_of_narrow = [(located, adapters.up_first)]
        narrow = project(terms_of_narrow, token=token, transposed=False, counter=next(counters), name="moe_up_adapter")
        terms.append((narrow, (_turn(adapters.gate_second, gate), _turn(adapters.up_second, gate))))
    gate_values, up_values, hidden = _apply_gate_and_up(terms, token, tiles, next(counters), options, shape)
    terms = [(hidden, down)]
    if adapters.down_first is not None:
        narrow_hidden = project(
            [(hidden, adapters.down_first)], transposed=False, counter=next(counters), name="moe_down_adapter"
        )
        terms.append((narrow_hidden, _turn(adapters.down_second, down)))
    outputs = project(terms, transposed=isinstance(down, Packed), counter=next(counters), name="moe_down")
    kept = rows, narrow, choices, weight, gate, up, down, adapters, gate_values, up_values
    return add_choices(outputs, choices.slot, weight), kept


@launcher.traced_once
def _backward(options: Options, kept, d_outputs):
    rows, narrow, choices, weight, gate, up, down, adapters, gate_values, up_values = kept
    shape = _shape(gate)
    tiles = cut_tiles(choices.num_blocks, choices.choice.size // BLOCK, shape.warpgroups)
    counters = _count(choices)
    for _ in range(4):  # The forward pass counts in the first ones.
        next(counters)
    project = functools.partial(_multiply, tiles=tiles, shape=shape)
    first_block = running_total(choices.num_blocks) - choices.num_blocks

    def contract(lhs, rhs, name, gathers=None):
        width = shape.width if rhs[0].shape[1] % shape.width == 0 or len(rhs) == 2 else 128
        return contract_rows(
            lhs,
            rhs,
            first_block,
            choices.num_blocks,
            token=token if gathers else None,
            gathers=gathers if token is not None else None,
            counter=next(counters),
            shape=shape._replace(width=width),
            name=f"{name}_weights",
        )

    d_adapters = Adapters()
    d_outputs, token = _locate(d_outputs.astype(rows.dtype), choices, _hidden_width(gate))
    if weight is None:
        scale = (choices.choice < choices.slot.size).astype(jnp.float32)
    else:
        scale = weight.reshape(-1).at[choices.choice].get(mode="fill", fill_value=0)
    terms = [(d_outputs, down)]
    if adapters.down_first is not None:
        terms_of_narrow = [(d_outputs, adapters.down_second)]
        d_narrow = project(terms_of_narrow, token=token, transposed=True, counter=next(counters), name="moe_d_down")
        terms.append((d_narrow, _turn(adapters.down_first, down)))
    d_gate, d_up, hidden, d_weight = _differentiate_down(
        terms, token, gate_values, up_values, scale, tiles, next(counters), options, shape
    )
    d_weight = jnp.sum(d_weight, axis=0).at[choices.slot].get(mode="fill", fill_value=0)
    if adapters.down_first is not None:
        narrow_hidden = project(
            [(hidden, adapters.down_first)], transposed=False, counter=next(counters), name="moe_narrow"
        )
        (d_first,) = contract(hidden, [d_narrow], "moe_down_first")
        (d_second,) = contract(narrow_hidden, [d_outputs], "moe_down_second", "rhs")
        d_adapters = d_adapters._replace(down_first=d_first, down_second=d_second)
    d_down_weight = None
    if not isinstance(down, Packed):
        (d_down_weight,) = contract(hidden, [d_outputs], "moe_down", "rhs")
    # One after the other: what each needs is large, and freed before the next.
    d_gate, d_up, d_down_weight = lax.optimization_barrier((d_gate, d_up, d_down_weight))
    terms = [(d_gate, gate), (d_up, up)]
    if adapters.up_first is not None:
        seconds = [(d_gate, adapters.gate_second), (d_up, adapters.up_second)]
        d_narrow = project(seconds, transposed=True, counter=next(counters), name="moe_d_up")
        terms.append((d_narrow, _turn(adapters.up_first, gate)))
    d_rows = project(terms, transposed=not isinstance(gate, Packed), counter=next(counters), name="moe_up_backward")
    d_rows = add_choices(d_rows, choices.slot, None)
    # Sorted again, where they are, rather than kept: a twenty-fifth of a step's time for a third of what a layer keeps.
    d_rows, rows = lax.optimization_barrier((d_rows, rows))
    rows, _ = _locate(rows, choices, _hidden_width(gate))
    if adapters.up_first is not None:
        (d_first,) = contract(rows, [d_narrow], "moe_up_first", "lhs")
        d_gate_second, d_up_second = contract(narrow, [d_gate, d_up], "moe_up_second")
        d_adapters = d_adapters._replace(up_first=d_first, gate_second=d_gate_second, up_second=d_up_second)
    d_gate_weight = d_up_weight = None
    if not isinstance(gate, Packed):
        d_gate_weight, d_up_weight = contract(rows, [d_gate, d_up], "moe_up", "lhs")
    d_weight = None if weight is None else d_weight
    return d_rows, None, d_weight, d_gate_weight, d_up_weight, d_down_weight, d_adapters


routed_experts.defvjp(_forward, _backward)
