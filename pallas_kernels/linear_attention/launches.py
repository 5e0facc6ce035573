"""Launches of the gated delta rule's kernels on NVIDIA GPUs, for arrays of given shapes: grids, blocks, aliases.

Those of `chunk_kernels` and `scan_kernels`, in Pallas for Triton, or at widths of 128 those of the modules `hopper...`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

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
from pallas_kernels.linear_attention.gates import Form

MOST_PIECES = 16
MOST_LOOKED_AT = 32
"""Chunks by one program: to start one for each chunk, only to find that it is not deep, took 0.13 ms."""
DEPTH = 3
"""Place of depths among the results of `chunk_kernels.prepare`."""


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


_prepare_on_hopper = launcher.traced_once(lambda form, *arrays: hopper_prepare.prepare(*arrays, form=form))
_gradients_on_hopper = launcher.traced_once(lambda form, *arrays: hopper.gradients(*arrays, form=form))
_scalar_gradients_on_hopper = launcher.traced_once(lambda _, *arrays: hopper_scalar.gradients(*arrays))
_scan_on_hopper = launcher.traced_once(
    lambda _, *arrays: hopper_carry.launch("scan_chunks", hopper_scan.scan(*arrays))[0]
)
_scan_both_ways_on_hopper = launcher.traced_once(lambda _, *arrays: hopper_both_ways.scan_both_ways(*arrays))


class Parts(NamedTuple):
    """What a chunk's tokens read and write; letters as in `xla.delta_rule`.

    In this order XLA gives the first ones places that results of the backward pass take afterwards.
    """

    from_state: jax.Array  # w: (I + L)^-1 beta exp(G) key
    writing: jax.Array  # r: exp(G_C - G) key
    reading: jax.Array  # exp(G) query
    from_value: jax.Array | None  # u: (I + L)^-1 beta value
    kept: jax.Array  # exp(G_C)


class Depths(NamedTuple):
    """How deep tokens decay in their tiles."""

    of_tokens: jax.Array | None = None
    """[B, S, H]; on Hopper those of deep chunks alone."""
    is_deep: jax.Array | None = None
    """[B, N, H] int32, on Hopper: whether one of a chunk is deeper than `DEEPEST`."""


def _matrix_product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=lax.Precision.HIGHEST)


class Launches:
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
        """P, (I + L)^-1, G, `Depths` and the parts."""
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
            return products, inverse, sums, Depths(depth), Parts(*parts)
        *prepared, parts, halves = _prepare_on_hopper(self.form, *arguments)
        if self.looked_at is None:
            return *prepared, Depths(), Parts(*parts)
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
        return products, inverse, sums, Depths(depth, is_deep), Parts(*parts)

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

    def split(self, parts: Parts, state: jax.Array) -> tuple[jax.Array | None, jax.Array]:
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

    def split_back(self, parts: Parts, products, output_gradient, transition, state_gradient) -> jax.Array:
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

    def scan(self, parts: Parts, products: jax.Array, entering: jax.Array, *, keep_states: bool = False):
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

    def scan_back(self, parts: Parts, products, inverse, output_gradient, leaving):
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

    def scan_both_ways(self, parts: Parts, products, inverse, value, beta, output_gradient, entering, leaving):
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
