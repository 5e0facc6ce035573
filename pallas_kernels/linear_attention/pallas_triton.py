"""The gated delta rule on NVIDIA GPUs, forward and backward, by the kernels of `chunk_kernels` and `scan_kernels`.

Each chunk by itself: `prepare` makes the matrices of pairs of tokens, inverts one, and makes what the tokens read from
the state and write into it. `scan` carries the state over chunks and writes the output, or, for the backward pass, the
states and what each token writes; `scan_back` carries the state's gradient from the last chunk to the first;
`gradients`, each chunk by itself, finishes. At widths of 128 the kernels of the modules `hopper...` take their places,
but for chunks in which one of the decays a channel is deeper in a tile than `DEEPEST`; with one decay a head, the two
scans of the backward pass share a launch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import launcher
from pallas_kernels.linear_attention import (
    chunk_kernels,
    hopper,
    hopper_both_ways,
    hopper_carry,
    hopper_prepare,
    hopper_scalar,
    hopper_scan,
    scan_kernels,
)
from pallas_kernels.linear_attention.chunk_kernels import CHUNK
from pallas_kernels.linear_attention.documents import document_starts, per_value_head, starting_state
from pallas_kernels.linear_attention.gates import DecayGate, Form

WIDTHS = (64, 128)
MOST_PIECES = 16
MOST_LOOKED_AT = 32
"""Chunks by one program: to start one for each chunk, only to find that it is not deep, took 0.13 ms."""
DEPTH = 3
"""Place of depths among the results of `chunk_kernels.prepare`."""
MOST_BLOCKS = 65535
"""Of a launch's grid along its second or third axis: rows, heads or chunks."""


class Settings(NamedTuple):
    """How the kernels are launched; the defaults were the fastest on an H200."""

    interpret: bool = False
    prepare_warps: int = 4
    prepare_columns: int = 64
    scan_width: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    gradient_warps: int = 4
    gradient_columns: int = 32
    pieces: int | None = 1
    """Into how many a row is cut for the scans; None for as many as fill the GPU. A row stays whole unless
    told: no step in pieces was timed."""


def reason_against(
    query: Float[Array, "B S G K"], key: Float[Array, "B S G K"], value: Float[Array, "B S H V"]
) -> str | None:
    """Why these kernels cannot take such arrays; None if they can."""
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if any(array.dtype != jnp.bfloat16 for array in (query, key, value)):
        return f"needs bfloat16 queries, keys and values, got {query.dtype}, {key.dtype} and {value.dtype}"
    widths = query.shape[3], value.shape[3]
    if any(width not in WIDTHS for width in widths):
        return f"needs key and value widths of {' or '.join(map(str, WIDTHS))}, got {widths[0]} and {widths[1]}"
    batch, _, heads, _ = value.shape
    if batch > MOST_BLOCKS or heads > MOST_BLOCKS:
        return f"takes up to {MOST_BLOCKS} rows and heads, got {batch} rows of {heads} heads"
    return None


def delta_rule(
    query: Float[Array, "B S G K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S H V"],
    decay: Float[Array, "B S H K"] | Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    segment_ids: Int[Array, "B S"],
    *,
    gate: DecayGate | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H K V"]]:
    """See `api.delta_rule`: query, key and value in bfloat16, the rest computed in float32.

    The kernels compute a gate of one decay a channel from its input in bfloat16; another stands in front of them, which
    is logged once.

    Rows of more than `MOST_BLOCKS` chunks are taken in pieces, one after the other.

    Keeps its arguments for the backward pass, sums of the decays in the place of given ones or beside what goes into a
    gate, two matrices [64, 64] a chunk and what its tokens read and write: four arrays like `value`. They are gone when
    the backward pass needs most memory.
    """
    if gate is not None and (reason := _reason_against_gate(decay)):
        launcher.log_once(f"delta_rule: the decay gate is computed in front of the kernels ({reason})")
        decay, gate = gate(decay), None
    length, heads = value.shape[1:3]
    state = starting_state(initial_state, per_value_head(query, heads), value, key, decay, beta).astype(jnp.float32)
    # The tail neither decays, writes nor starts a document.
    tail = ((0, 0), (0, -length % CHUNK))

    def filled(array: jax.Array, number: float = 0) -> jax.Array:
        return jnp.pad(array, (*tail, *((0, 0) for _ in array.shape[2:])), constant_values=number)

    decay = filled(decay.astype(jnp.float32)) if gate is None else filled(decay, float(jnp.finfo(decay.dtype).min))
    tokens = [filled(query), filled(key), filled(value), decay, filled(beta.astype(jnp.float32))]
    of_gate = () if gate is None else (gate.limited_log_rate().astype(jnp.float32), gate.bias.astype(jnp.float32))
    starts = filled(document_starts(segment_ids))
    query, key, value, decay, beta, starts, state, *of_gate = launcher.vary_together(*tokens, starts, state, *of_gate)
    tokens = [query, key, value, decay, beta, *_document_bounds(starts)]
    outputs = []
    most = MOST_BLOCKS * CHUNK
    cuts = list(range(most, query.shape[1], most))
    for piece in zip(*(jnp.split(array, cuts, axis=1) for array in tokens), strict=True):
        results: Any = _delta_rule(settings, gate and gate.form, *piece, state, tuple(of_gate))
        outputs.append(results[0])
        state = results[1]
    return jnp.concatenate(outputs, axis=1)[:, :length], state


def _reason_against_gate(raw: jax.Array) -> str | None:
    """Why the kernels do not compute a gate of this input; None if they do."""
    if raw.ndim == 3:
        return "one decay a head is too little work to matter"
    return None if raw.dtype == jnp.bfloat16 else f"its input is {raw.dtype}, not bfloat16"


def _document_bounds(starts: Bool[Array, "B S"]) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Place in its chunk of the first token of each token's document, -1 if in an earlier chunk; and of the last."""
    starts = starts.reshape(starts.shape[0], -1, CHUNK)
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None, None]
    first = lax.cummax(jnp.where(starts, place, -1), axis=2)
    ends = jnp.pad(starts[..., 1:], ((0, 0), (0, 0), (0, 1)))
    last = lax.cummin(jnp.where(ends, place, CHUNK - 1), axis=2, reverse=True)
    return first.reshape(starts.shape[0], -1), last.reshape(starts.shape[0], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(
    settings: Settings, form: Form | None, query, key, value, decay, beta, first, last, state, of_gate
) -> tuple[jax.Array, jax.Array]:
    return _forward(settings, form, query, key, value, decay, beta, first, last, state, of_gate)[0]


def _forward(settings, form, query, key, value, decay, beta, first, last, state, of_gate):
    call = _Calls(settings, query, value, decay, form)
    gated = (form.rows(*of_gate),) if form else ()
    products, inverse, sums, depths, parts = call.prepare(query, key, value, decay, beta, first, last, *gated)
    transition, entering = call.split(parts, state)
    results = call.scan(parts, products, entering)
    if call.is_exact:  # what is written is made again, to more digits
        parts = parts._replace(from_value=None)
    saved = query, key, value, beta, first, last, transition, entering, products, inverse, sums, depths, parts
    return results, (saved, (decay, *of_gate) if form else ())


def _backward(settings, form, saved, gradients):
    (query, key, value, beta, first, last, transition, entering, products, inverse, sums, depths, parts), gated = saved
    output_gradient, state_gradient = gradients
    call = _Calls(settings, query, value, sums, form)
    leaving = call.split_back(parts, products, output_gradient, transition, state_gradient)
    arguments = parts, products, inverse, value, beta, output_gradient, entering, leaving
    (state_gradients, solved, initial_gradient, *of_value), (states, written, *low) = call.scan_both_ways(*arguments)
    tokens = query, key, sums, depths, beta, first, last
    of_chunks = states, state_gradients, written, solved, output_gradient, *low
    if form:
        raw, log_rate, bias = gated
        gated = raw, form.rows(log_rate, bias)
    query_gradient, key_gradient, decay_gradient, by_key, *by_gate = call.gradients(*tokens, *of_chunks, gated=gated)
    of_gate = ()
    if form:
        by_bias, by_rate = by_gate
        by_rate = form.finish_rate(jnp.sum(by_rate, axis=(0, 1)), log_rate)
        of_gate = by_rate, jnp.sum(by_bias, axis=(0, 1, 3))
    if call.is_exact:
        value_gradient, by_value = of_value
        beta_gradient = by_key + by_value
    else:
        value_gradient, beta_gradient = call.value_gradients(value, beta, solved, by_key)
    query_gradient, key_gradient = (_sum_groups(array, query) for array in (query_gradient, key_gradient))
    of_tokens = query_gradient, key_gradient, value_gradient, decay_gradient, beta_gradient
    return *of_tokens, None, None, initial_gradient, of_gate


_delta_rule.defvjp(_forward, _backward)


def _sum_groups(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """[B, S, H, K] -> [B, S, G, K]: the sum over the value heads that a key head serves."""
    if gradient.shape == like.shape:
        return gradient
    grouped = gradient.reshape(*like.shape[:3], -1, like.shape[3])
    return jnp.sum(grouped, axis=3, dtype=jnp.float32).astype(like.dtype)


_prepare_on_hopper = launcher.traced_once(lambda form, *arrays: hopper_prepare.prepare(*arrays, form=form))
_gradients_on_hopper = launcher.traced_once(lambda form, *arrays: hopper.gradients(*arrays, form=form))
_scalar_gradients_on_hopper = launcher.traced_once(lambda _, *arrays: hopper_scalar.gradients(*arrays))
_scan_on_hopper = launcher.traced_once(
    lambda _, *arrays: hopper_carry.launch("scan_chunks", hopper_scan.scan(*arrays))[0]
)
_scan_both_ways_on_hopper = launcher.traced_once(lambda _, *arrays: hopper_both_ways.scan_both_ways(*arrays))


class _Parts(NamedTuple):
    """What a chunk's tokens read and write; letters as in `xla.delta_rule`.

    In this order XLA gives the first ones places that results of the backward pass take afterwards.
    """

    from_state: jax.Array  # w: (I + L)^-1 beta exp(G) key
    writing: jax.Array  # r: exp(G_C - G) key
    reading: jax.Array  # exp(G) query
    from_value: jax.Array | None  # u: (I + L)^-1 beta value
    kept: jax.Array  # exp(G_C)


class _Depths(NamedTuple):
    """How deep tokens decay in their tiles."""

    of_tokens: jax.Array | None = None
    """[B, S, H]; on Hopper those of deep chunks alone."""
    is_deep: jax.Array | None = None
    """[B, N, H] int32, on Hopper: whether one of a chunk is deeper than `DEEPEST`."""


def _matrix_product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=lax.Precision.HIGHEST)


class _Calls:
    """The kernels' launches for arrays of given shapes."""

    def __init__(
        self, settings: Settings, query: jax.Array, value: jax.Array, decay: jax.Array, form: Form | None = None
    ):
        self.settings, self.dtype, self.form = settings, value.dtype, form
        self.batch, self.length, self.heads, self.value_width = value.shape
        self.key_width, self.group = query.shape[3], self.heads // query.shape[2]
        self.chunks = self.length // CHUNK
        self.decay_width = decay.shape[3:]
        self.is_on_hopper = not (settings.interpret or hopper.reason_against(self.key_width, self.value_width))
        self.is_exact = self.is_on_hopper and not self.decay_width
        self.pieces = settings.pieces or self.most_pieces()
        # Chunks of a program that looks for deep ones.
        counts = range(MOST_LOOKED_AT, 0, -1)
        looked_at = next(count for count in counts if self.chunks % count == 0)
        self.looked_at = looked_at if self.is_on_hopper and self.decay_width else None
        self.manual_axis_type = jax.typeof(query).manual_axis_type

    def most_pieces(self) -> int:
        """A row in pieces takes three scans instead of one: it pays from four pieces on, of eight chunks at least.

        Each piece costs two small products, one after the other: more than 16 cost more than they save.
        """
        width = hopper_carry.HALF if self.is_on_hopper else self.settings.scan_width
        blocks = self.batch * self.heads * max(1, self.value_width // width)
        places = 1 if self.settings.interpret else launcher.num_multiprocessors()
        most = min(places // blocks, MOST_PIECES)
        fitting = (cut for cut in range(most, 3, -1) if self.chunks % cut == 0 and self.chunks >= 8 * cut)
        return next(fitting, 1)

    def shape(self, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype, manual_axis_type=self.manual_axis_type)

    def tokens(self, *width: int, dtype=None) -> jax.ShapeDtypeStruct:
        return self.shape(self.batch, self.length, self.heads, *width, dtype=dtype)

    def of_chunks(self, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
        return self.shape(self.batch, self.chunks, self.heads, *shape, dtype=dtype)

    def call(
        self, kernel, grid, in_specs, out_specs, out_shape, *, warps: int, stages: int = 1, aliases=None, **options
    ):
        return pl.pallas_call(
            functools.partial(kernel, interpret=self.settings.interpret, **options),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=self.settings.interpret,
            input_output_aliases=aliases or {},
            name=kernel.__name__,
        )

    def chunk_specs(self, count: int | None = None):
        """Blocks of one chunk and head; the grid is [heads, chunks, rows]: neighbouring heads share memory pages.

        With `count` those of as many chunks.
        """
        group, length = self.group, CHUNK * (count or 1)

        def token(*width: int, group: int = 1) -> pl.BlockSpec:
            zeros = (0,) * len(width)
            return pl.BlockSpec((None, length, None, *width), lambda h, n, b: (b, n, h // group, *zeros))

        def chunk(*shape: int) -> pl.BlockSpec:
            zeros = (0,) * len(shape)
            return pl.BlockSpec((None, count, None, *shape), lambda h, n, b: (b, n, h, *zeros))

        keys = token(self.key_width, group=group)
        bounds = pl.BlockSpec((None, length), lambda h, n, b: (b, n))
        return token, chunk, keys, bounds

    def parts_shapes(self, count: int | None = None):
        token, chunk, _, _ = self.chunk_specs(count)
        width, values = self.key_width, self.value_width
        keys, kept = token(width), chunk(*self.decay_width)
        shapes = [self.tokens(width), self.tokens(width), self.tokens(width), self.tokens(values)]
        kept_shape = self.of_chunks(*self.decay_width, dtype=jnp.float32)
        return [keys, keys, keys, token(values), kept], [*shapes, kept_shape]

    def gate_rows(self) -> list[pl.BlockSpec]:
        """Of `Form.rows`, if there is a gate."""
        return [pl.BlockSpec((None, 2, self.key_width), lambda h, n, b: (h, 0, 0))] if self.form else []

    def prepare(self, query, key, value, decay, beta, first, last, *gated):
        """P, (I + L)^-1, G, `_Depths` and the parts."""
        token, chunk, keys, bounds = self.chunk_specs(self.looked_at)
        decays, square = token(*self.decay_width), chunk(CHUNK, CHUNK)
        parts_specs, parts_shapes = self.parts_shapes(self.looked_at)
        arguments = query, key, value, decay, beta, first, last, *gated
        argument_specs = [keys, keys, token(self.value_width), decays, token(), bounds, bounds, *self.gate_rows()]
        specs = [square, square, decays, token(), *parts_specs]
        shapes = [
            self.of_chunks(CHUNK, CHUNK),
            self.of_chunks(CHUNK, CHUNK),
            self.tokens(*self.decay_width, dtype=jnp.float32),
            self.tokens(dtype=jnp.float32),
            *parts_shapes,
        ]
        call = functools.partial(
            self.call,
            grid=(self.heads, self.chunks // (self.looked_at or 1), self.batch),
            out_specs=specs,
            out_shape=shapes,
            warps=self.settings.prepare_warps,
            block=self.settings.prepare_columns,
            form=self.form,
        )
        if not self.is_on_hopper:
            products, inverse, sums, depth, *parts = call(chunk_kernels.prepare, in_specs=argument_specs)(*arguments)
            return products, inverse, sums, _Depths(depth), _Parts(*parts)
        *prepared, parts, halves = _prepare_on_hopper(self.form, *arguments)
        if self.looked_at is None:
            return *prepared, _Depths(), _Parts(*parts)
        prepared += parts
        of_halves = pl.BlockSpec((2, None, None, CHUNK * self.looked_at), lambda h, n, b: (0, b, h, n))
        places = [place for place in range(len(specs)) if place != DEPTH]
        again = call(
            chunk_kernels.prepare_again,
            in_specs=[*argument_specs, of_halves, *(specs[place] for place in places)],
            out_specs=[*specs, chunk()],
            out_shape=[*shapes, self.of_chunks(dtype=jnp.int32)],
            aliases={len(arguments) + 1 + number: place for number, place in enumerate(places)},
        )
        products, inverse, sums, depth, *parts, is_deep = again(*arguments, halves, *prepared)
        return products, inverse, sums, _Depths(depth, is_deep), _Parts(*parts)

    def cut(self, array: jax.Array) -> jax.Array:
        """Something of tokens or of chunks: each piece a row of its own."""
        return array.reshape(self.batch * self.pieces, -1, *array.shape[2:])

    def whole(self, array: jax.Array) -> jax.Array:
        """The way back."""
        return array.reshape(self.batch, -1, *array.shape[2:])

    def cut_all(self, arguments: list[tuple[str, jax.Array]]) -> list[jax.Array]:
        return [array if name == "state" else self.cut(array) for name, array in arguments]

    def scan_call(self, kernel, arguments: list[tuple[str, jax.Array]], results: list[tuple[str, Any]], **options):
        """Launch blocks of one piece, one head and some value channels. Arrays are named for what they hold."""
        width = min(self.settings.scan_width, self.value_width)
        length, chunks = self.length // self.pieces, self.chunks // self.pieces
        zeros = (0,) * len(self.decay_width)
        specs = {
            "keys": pl.BlockSpec((None, length, None, self.key_width), lambda i, h, b: (b, 0, h, 0)),
            "values": pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h, i)),
            "squares": pl.BlockSpec((None, chunks, None, CHUNK, CHUNK), lambda i, h, b: (b, 0, h, 0, 0)),
            "kept": pl.BlockSpec((None, chunks, None, *self.decay_width), lambda i, h, b: (b, 0, h, *zeros)),
            "state": pl.BlockSpec((None, None, self.key_width, width), lambda i, h, b: (b, h, 0, i)),
            "states": pl.BlockSpec((None, chunks, None, self.key_width, width), lambda i, h, b: (b, 0, h, 0, i)),
        }
        columns = max(array.shape[-1] for name, array in [*arguments, *results] if name in ("values", "state"))
        rows = self.batch * self.pieces
        return self.call(
            kernel,
            (columns // width, self.heads, rows),
            [specs[name] for name, _ in arguments],
            [specs[name] for name, _ in results],
            [self.shape(rows, *shape.shape[1:], dtype=shape.dtype) for _, shape in results],
            warps=self.settings.scan_warps,
            stages=self.settings.scan_stages,
            **options,
        )(*self.cut_all(arguments))

    def state(self, columns: int) -> tuple[str, jax.ShapeDtypeStruct]:
        return "state", self.shape(1, self.heads, self.key_width, columns, dtype=jnp.float32)

    def split(self, parts: _Parts, state: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """Transitions of the pieces [B, pieces, H, K, K], None for whole rows; the states that enter the pieces."""
        if self.pieces == 1:
            return None, state
        writing = [("keys", parts.writing), ("kept", parts.kept)]
        rows = self.batch * self.pieces
        nothing = jnp.zeros((rows, *state.shape[1:]), state.dtype)
        identity = jnp.broadcast_to(jnp.eye(self.key_width), (*nothing.shape[:3], self.key_width))
        nothing, identity, _ = launcher.vary_together(nothing, identity, state)
        from_state = ("keys", parts.from_state)
        arguments = [from_state, ("values", parts.from_value), *writing, ("state", nothing)]
        (added,) = self.scan_call(scan_kernels.carry, arguments, [self.state(self.value_width)])
        arguments = [from_state, *writing, ("state", identity)]
        (transition,) = self.scan_call(scan_kernels.carry_identity, arguments, [self.state(self.key_width)])
        added, transition = (array.reshape(self.batch, self.pieces, *array.shape[1:]) for array in (added, transition))
        entering = [state]
        for piece in range(self.pieces - 1):
            entering.append(added[:, piece] + _matrix_product(transition[:, piece], entering[-1]))
        return transition, jnp.stack(entering, axis=1).reshape(nothing.shape)

    def split_back(self, parts: _Parts, products, output_gradient, transition, state_gradient) -> jax.Array:
        """Gradients of the states that leave the pieces."""
        if transition is None:
            return state_gradient
        rows = self.batch * self.pieces
        nothing = jnp.zeros((rows, *state_gradient.shape[1:]), state_gradient.dtype)
        nothing, _ = launcher.vary_together(nothing, state_gradient)
        arguments = [
            ("keys", parts.from_state),
            ("keys", parts.reading),
            ("keys", parts.writing),
            ("kept", parts.kept),
            ("squares", products),
            ("values", output_gradient),
            ("state", nothing),
        ]
        (added,) = self.scan_call(scan_kernels.carry_back, arguments, [self.state(self.value_width)])
        added = added.reshape(self.batch, self.pieces, *added.shape[1:])
        leaving = [state_gradient]
        for piece in range(self.pieces - 1, 0, -1):
            through = _matrix_product(jnp.swapaxes(transition[:, piece], 2, 3), leaving[0])
            leaving.insert(0, added[:, piece] + through)
        return jnp.stack(leaving, axis=1).reshape(-1, *state_gradient.shape[1:])

    def scan(self, parts: _Parts, products: jax.Array, entering: jax.Array, *, keep_states: bool = False):
        """Output and last state; or the states that enter the chunks and what the tokens write."""
        arguments = [
            ("keys", parts.from_state),
            ("values", parts.from_value),
            ("keys", parts.reading),
            ("keys", parts.writing),
            ("kept", parts.kept),
            ("squares", products),
            ("state", entering),
        ]
        chunks, length = self.chunks // self.pieces, self.length // self.pieces
        tokens = ("values", self.shape(1, length, self.heads, self.value_width))
        states = ("states", self.shape(1, chunks, self.heads, self.key_width, self.value_width))
        results = [states, tokens] if keep_states else [tokens, self.state(self.value_width)]
        if self.is_on_hopper and not keep_states:
            first, second = _scan_on_hopper(None, *self.cut_all(arguments))
        else:
            first, second = self.scan_call(scan_kernels.scan, arguments, results, keep_states=keep_states)
        if keep_states:
            return self.whole(first), self.whole(second)
        return self.whole(first), second.reshape(self.batch, self.pieces, *second.shape[1:])[:, -1]

    def scan_back(self, parts: _Parts, products, inverse, output_gradient, leaving):
        """Gradients of the states that leave the chunks, (I + L)^-T of those of what is written, of the first state."""
        arguments = [
            ("keys", parts.from_state),
            ("keys", parts.reading),
            ("keys", parts.writing),
            ("kept", parts.kept),
            ("squares", products),
            ("squares", inverse),
            ("values", output_gradient),
            ("state", leaving),
        ]
        chunks, length = self.chunks // self.pieces, self.length // self.pieces
        tokens = ("values", self.shape(1, length, self.heads, self.value_width))
        states = ("states", self.shape(1, chunks, self.heads, self.key_width, self.value_width))
        results = [states, tokens, self.state(self.value_width)]
        return self.whole_back(*self.scan_call(scan_kernels.scan_back, arguments, results))

    def whole_back(self, states, solved, initial, *of_value):
        initial = initial.reshape(self.batch, self.pieces, *initial.shape[1:])[:, 0]
        return self.whole(states), self.whole(solved), initial, *map(self.whole, of_value)

    def scan_both_ways(self, parts: _Parts, products, inverse, value, beta, output_gradient, entering, leaving):
        """What `scan_back` gives, and the states that enter the chunks and what the tokens write.

        Where `is_exact`, the former with the gradient of the value and of beta by the value, the latter in two parts.
        """
        if not self.is_on_hopper:
            back = self.scan_back(parts, products, inverse, output_gradient, leaving)
            # Behind it, when what only `scan_back` reads is no longer held.
            parts, back = lax.optimization_barrier((parts, back))
            return back, self.scan(parts, products, entering, keep_states=True)
        tokens = jax.tree.map(self.cut, (*parts, products, inverse, value, beta, output_gradient))
        back, forward = _scan_both_ways_on_hopper(None, *tokens, entering, leaving)
        return self.whole_back(*back), map(self.whole, forward)

    def gradients(
        self, query, key, sums, depths, beta, first, last, states, state_gradients, written, solved, *of_values,
        gated=(),
    ):  # fmt: skip
        """Of query, key and decay, and of beta by the keys; of a gate as `chunk_kernels.gradients` gives them.

        `gated` are its raw input and its `rows`.
        """
        of_chunks = states, state_gradients, written, solved, *of_values
        token, chunk, keys, bounds = self.chunk_specs(self.looked_at)
        width, values = self.key_width, token(self.value_width)
        decay, state = token(*self.decay_width), chunk(width, self.value_width)
        specs = [keys, keys, decay, token(), token(), bounds, bounds, state, state, values, values, values]
        result_specs = [token(width), token(width), decay, token()]
        narrow, wide = self.tokens(width), self.tokens(dtype=jnp.float32)
        results = [narrow, narrow, self.tokens(*self.decay_width, dtype=jnp.float32), wide]
        place = 2  # of an argument that the gradient of the decay takes
        if gated:
            place = len(specs)
            specs += [decay, *self.gate_rows()]
            result_specs += [chunk(chunk_kernels.TILES, width), token()]
            results[2] = narrow
            results += [self.of_chunks(chunk_kernels.TILES, width, dtype=jnp.float32), wide]
        call = functools.partial(
            self.call,
            grid=(self.heads, self.chunks // (self.looked_at or 1), self.batch),
            out_specs=result_specs,
            out_shape=results,
            warps=self.settings.gradient_warps,
            block=self.settings.gradient_columns,
            form=self.form,
        )
        if not self.is_on_hopper:
            arguments = query, key, sums, depths.of_tokens, beta, first, last, *of_chunks, *gated
            return call(chunk_kernels.gradients, in_specs=specs, aliases={place: 2})(*arguments)
        if not self.decay_width:
            return _scalar_gradients_on_hopper(None, query, key, sums, beta, first, last, *of_chunks)
        of_hopper = query, key, sums, beta, first, last, *of_chunks, depths.is_deep, *gated
        query_gradient, key_gradient, decay_gradient, *others = _gradients_on_hopper(self.form, *of_hopper)
        tokens = query, key, sums, depths.of_tokens, beta, first, last
        arguments = [*tokens, *of_chunks, *gated]
        arguments[place] = decay_gradient
        found = {0: query_gradient, 1: key_gradient, **dict(enumerate(others, 3))}
        aliases = {place: 2, **{len(arguments) + 1 + number: result for number, result in enumerate(found)}}
        in_specs = [*specs, chunk(), *(result_specs[result] for result in found)]
        again = call(chunk_kernels.gradients_again, in_specs=in_specs, aliases=aliases)
        return again(*arguments, depths.is_deep, *found.values())

    def value_gradients(self, value, beta, solved, by_key):
        """Of value and beta."""
        token, *_ = self.chunk_specs()
        values = token(self.value_width)
        return self.call(
            chunk_kernels.value_gradients,
            (self.heads, self.chunks, self.batch),
            [values, token(), values, token()],
            [values, token()],
            [self.tokens(self.value_width), self.tokens(dtype=jnp.float32)],
            warps=self.settings.gradient_warps,
            aliases={2: 0},
        )(value, beta, solved, by_key)
