"""Kernels of the gated delta rule over chunks of 64 tokens, in Pallas for Triton; letters as in `xla.delta_rule`.

Decays between two tokens of a chunk are never formed pair by pair nor as a quotient of far sums. With s the highest bit
in which the numbers of a pair of tokens differ, the pair lies in the late and early half of a block of 2 s tokens: the
late one decays from the middle on, the early one up to the middle, so both factors are at most 1 whatever the decay,
and one matrix product a size s = 32, 16, ..., 1 gives all pairs. Sizes below 16 are one product for late tokens which
decay by no more than 2^-110 since the first of their tile (or document in it), as all do with a gate bounded by -5:
they decay from it on, early ones grow back to it. That is decided by a token's past alone, lest a later one move its
last digits; chunks in which every token passes skip the sizes. One decay a head needs a single product.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.linear_attention.gates import LOG2_E, Form, Functions

CHUNK = 64
CHUNK_BITS = 6
TILE, TILE_BITS = 16, 4
TILES = CHUNK // TILE
DEEPEST = 110.0  # base 2: leaves 2^17 of what float32 and bfloat16 reach


def dot(a, b, *, transpose_a: bool = False, transpose_b: bool = False):
    """Matrix product summed in float32."""
    contracting = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32)


def _parts(array, dtype, count: int):
    """`array` in float32 as a sum of `count` arrays of a narrower dtype."""
    parts = []
    for _ in range(count):
        parts.append(array.astype(dtype))
        array = array - parts[-1].astype(jnp.float32)
    return parts


def _wide_dot(a, b, interpret: bool):
    """Product of float32 matrices in TensorFloat-32, which keeps four times the digits of bfloat16."""
    precision = None if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _masked_sums(mask, array, dtype):
    """Sums over the rows that the mask names, to float32: [C, C], [C, K or 1] -> the same."""
    if array.shape[1] == 1:
        return jnp.sum(jnp.where(mask, array.reshape(1, -1), 0), axis=1)[:, None]
    mask = mask.astype(jnp.float32).astype(dtype)
    return functools.reduce(jnp.add, [dot(mask, part) for part in _parts(array, dtype, 3)])


class _Pairs:
    """Masks of a chunk's tokens and of their pairs, from as few numbers as possible: registers are scarce."""

    def __init__(self, first_ref, last_ref):
        self.row = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        self.column = lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        self.first, self.last = first_ref[...][:, None], last_ref[...][:, None]
        # The entering state is seen before the first boundary only; the last document alone is carried on.
        self.seen, self.writing = self.first < 0, self.last == CHUNK - 1
        self.is_kept = first_ref[CHUNK - 1] < 0
        self.is_end = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) == CHUNK - 1

    def earlier(self):
        """The column's token lies before the row's, in its document."""
        return (self.column < self.row) & (self.column >= self.first)

    def reached(self):
        """The column's token decays what the row's reads: not if first of its document, where nothing is carried."""
        return (self.column <= self.row) & (self.column > self.first)

    def later(self):
        return (self.column > self.row) & (self.column <= self.last)

    def reaching(self):
        return (self.column >= self.row) & (self.column <= self.last) & (self.row > self.first)

    def same(self):
        return self.row == self.column

    def differing_bits(self):
        return self.row ^ self.column

    def apart(self, size):
        """The two lie in the halves of a block of `2 size` tokens."""
        return (self.differing_bits() >= size) & (self.differing_bits() < 2 * size)


def _exp2(array, interpret: bool):
    """2^array by one instruction, which takes numbers under 2^-126 for zero."""
    if interpret:
        return jnp.exp2(array)
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    asm, constraints = "ex2.approx.ftz.f32 $0, $1;", "=f,f"
    return plt.elementwise_inline_asm(asm, args=[array], constraints=constraints, pack=1, result_shape_dtypes=[shape])[
        0
    ]


def multiply_add(one, other, addend, interpret: bool):
    """`one * other + addend`, rounded once: XLA forbids its compiler to fuse the two."""
    if interpret:
        return one * other + addend
    arrays = [jnp.broadcast_to(array, addend.shape) for array in (one, other, addend)]
    shape = jax.ShapeDtypeStruct(addend.shape, addend.dtype)
    asm, constraints = "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"
    return plt.elementwise_inline_asm(asm, args=arrays, constraints=constraints, pack=1, result_shape_dtypes=[shape])[0]


def wait_for_all(interpret: bool):
    """What threads of a program have written is read by others behind this."""
    if not interpret:
        plt.debug_barrier()


def _of_gate(gate_ref, columns, interpret: bool):
    """Shift and rate of some key channels, [1, K] each, and what a gate is computed by."""
    functions = Functions(exp2=functools.partial(_exp2, interpret=interpret))
    return gate_ref[0, columns][None], gate_ref[1, columns][None], functions


def _log2_decays(decay_ref, gate_ref, columns, form: Form | None, interpret: bool):
    """Of some key channels, to base 2, from log decays or from what goes into a gate."""
    if form is None:
        return decay_ref[:, columns] * LOG2_E
    return form.log2_decay(decay_ref[:, columns].astype(jnp.float32), *_of_gate(gate_ref, columns, interpret))


def _sums_and_end(sums_ref, columns, pairs):
    """Of some columns, or of all as one: [C, K or 1] and the last row [1, K or 1]."""
    if sums_ref.ndim == 2:
        return sums_ref[:, columns], sums_ref[CHUNK - 1, columns][None]
    sums = sums_ref[...][:, None]
    return sums, jnp.sum(jnp.where(pairs.is_end, sums, 0), axis=0)[None]


class _Decay:
    """Factors between the tokens of pairs, from the sums of one decay a channel."""

    def __init__(self, sums_ref, first_ref, interpret: bool):
        self.sums_ref, self.exp2 = sums_ref, functools.partial(_exp2, interpret=interpret)
        self.token = lax.broadcasted_iota(jnp.int32, (CHUNK,), 0)
        self.tile_start = jnp.maximum(self.token >> TILE_BITS << TILE_BITS, first_ref[...])

    def halves(self, sums, columns, size):
        """Of each token from, or up to, the middle of its block of `2 size` tokens."""
        middle = self.sums_ref[(self.token | (2 * size - 1)) - size, columns]
        return self.exp2(-jnp.abs(sums - middle))

    def in_tile(self, sums, columns):
        """Of each late token from the first of its tile or document on, and of each early one back to it."""
        depth = self.sums_ref[self.tile_start, columns] - sums
        return self.exp2(-depth), self.exp2(jnp.minimum(depth, DEEPEST))

    def deepen(self, columns, depth):
        """The largest decay of each token since the first of its tile or document, base 2."""
        return jnp.maximum(depth, jnp.max(self.sums_ref[self.tile_start, columns] - self.sums_ref[:, columns], axis=1))


def _over_columns(ref, block: int, step: Callable, carry: Any = 0):
    """`carry = step(columns, carry)` for the columns of `ref`, at most `block`, which registers hold, at a time."""
    block = min(block, ref.shape[1])
    return lax.fori_loop(0, ref.shape[1] // block, lambda index, carry: step(pl.ds(index * block, block), carry), carry)


def _over_small_sizes(step, carry):
    """`carry = step(size, carry)` for the sizes 8, 4, 2 and 1."""
    size = lambda index: jnp.left_shift(jnp.int32(1), jnp.int32(TILE_BITS - 1) - index)  # noqa: E731
    return lax.fori_loop(0, TILE_BITS, lambda index, carry: step(size(index), carry), carry)


def _between(sums, mask, interpret: bool):
    """Decay between the tokens of the pairs in the mask, one a head: [C, 1] -> [C, C]; 1 elsewhere."""
    return _exp2(jnp.where(mask, sums - sums.reshape(1, -1), 0), interpret)


def _unit_lower_inverse(lower, pairs: _Pairs, interpret: bool):
    """`(I + lower)^-1` by blocks of doubled size; see `xla`."""
    differing = pairs.differing_bits()
    inverse = jnp.where(pairs.same(), 1.0, jnp.where(differing == 1, -lower, 0.0))

    def double(size, inverse):
        corner = jnp.where((differing >= size) & (differing < 2 * size), lower, 0.0)
        return inverse - _wide_dot(_wide_dot(inverse, corner, interpret), inverse, interpret)

    return lax.fori_loop(1, CHUNK_BITS, lambda bit, inverse: double(jnp.left_shift(1, bit), inverse), inverse)


def _pairs(
    query_ref, key_ref, decay_ref, gate_ref, beta_ref, first_ref, last_ref,
    products_ref, inverse_ref, sums_ref, depth_ref,
    *, form, block, interpret,
):  # fmt: skip
    dtype = query_ref.dtype
    pairs = _Pairs(first_ref, last_ref)
    beta = beta_ref[...][:, None]
    if decay_ref.ndim == 1:
        depth_ref[...] = jnp.zeros((CHUNK,), jnp.float32)
        sums = _masked_sums(pairs.reached(), decay_ref[...][:, None] * LOG2_E, dtype)
        sums_ref[...] = sums.reshape(-1)
        between = _between(sums, pairs.earlier(), interpret)
        products = dot(query_ref[...], key_ref[...], transpose_b=True) * between
        lower = dot(key_ref[...], key_ref[...], transpose_b=True) * between
    else:

        def add_up(columns, least):
            decays = _log2_decays(decay_ref, gate_ref, columns, form, interpret)
            sums_ref[:, columns] = _masked_sums(pairs.reached(), decays, dtype)
            return jnp.minimum(least, jnp.min(decays))

        is_steep = _over_columns(sums_ref, block, add_up, 0.0) < -DEEPEST / (TILE - 1)
        wait_for_all(interpret)  # rows of other threads are read back
        decay = _Decay(sums_ref, first_ref, interpret)

        def add_products(factors, closer, products_and_lower):
            """Replaces the products of the pairs that `closer` names."""

            def add_columns(columns, total):
                products, lower = total
                late, early = factors(columns)
                key, query = key_ref[:, columns].astype(jnp.float32), query_ref[:, columns].astype(jnp.float32)
                decayed_key = (key * early).astype(dtype)
                products += dot((query * late).astype(dtype), decayed_key, transpose_b=True)
                return products, lower + dot((key * late).astype(dtype), decayed_key, transpose_b=True)

            added = _over_columns(sums_ref, block, add_columns, (zeros, zeros))
            return tuple(jnp.where(closer, one, other) for one, other in zip(added, products_and_lower, strict=True))

        def add_halves(size, products_and_lower):
            is_closer = pairs.differing_bits() < 2 * size
            return add_products(
                lambda columns: (decay.halves(sums_ref[:, columns], columns, size),) * 2, is_closer, products_and_lower
            )

        def add_small_sizes(pair_products):
            depth = _over_columns(sums_ref, block, decay.deepen, jnp.zeros((CHUNK,), jnp.float32))
            return *_over_small_sizes(add_halves, pair_products), depth

        def skip_small_sizes(pair_products):
            return *pair_products, jnp.zeros((CHUNK,), jnp.float32)

        zeros = jnp.zeros((CHUNK, CHUNK), jnp.float32)
        pair_products = zeros, zeros
        for size in (32, 16):
            pair_products = add_halves(size, pair_products)
        *pair_products, depth = lax.cond(is_steep, add_small_sizes, skip_small_sizes, pair_products)
        depth_ref[...] = depth
        is_in_tile = (pairs.differing_bits() < TILE) & (depth <= DEEPEST)[:, None]
        factors = lambda columns: decay.in_tile(sums_ref[:, columns], columns)  # noqa: E731
        products, lower = add_products(factors, is_in_tile, pair_products)

    def multiply(columns, total):
        query, key = query_ref[:, columns].astype(jnp.float32), key_ref[:, columns].astype(jnp.float32)
        return total + jnp.sum(query * key, axis=1)

    itself = _over_columns(key_ref, block, multiply, jnp.zeros((CHUNK,), jnp.float32))[:, None]
    products_ref[...] = jnp.where(pairs.earlier(), products, jnp.where(pairs.same(), itself, 0)).astype(dtype)
    lower = jnp.where(pairs.earlier(), lower * beta, 0)
    inverse_ref[...] = _unit_lower_inverse(lower, pairs, interpret).astype(dtype)


def _parts_of_tokens(
    query_ref, key_ref, value_ref, inverse_ref, sums_ref, beta_ref, first_ref, last_ref,
    from_state_ref, writing_ref, reading_ref, from_value_ref, kept_ref,
    *, block, interpret,
):  # fmt: skip
    dtype = key_ref.dtype
    pairs = _Pairs(first_ref, last_ref)
    # Of beta and the inverse, as both are taken with keys and values.
    by_token = (inverse_ref[...].astype(jnp.float32) * beta_ref[...][None]).astype(dtype)

    def finish_keys(columns, _):
        query, key = query_ref[:, columns].astype(jnp.float32), key_ref[:, columns].astype(jnp.float32)
        sums, end = _sums_and_end(sums_ref, columns, pairs)
        from_start = jnp.where(pairs.seen, _exp2(sums, interpret), 0)
        reading_ref[:, columns] = (query * from_start).astype(dtype)
        writing_ref[:, columns] = (key * jnp.where(pairs.writing, _exp2(end - sums, interpret), 0)).astype(dtype)
        from_state_ref[:, columns] = dot(by_token, (from_start * key).astype(dtype)).astype(dtype)
        kept = jnp.where(pairs.is_kept, _exp2(end, interpret), 0)
        if kept_ref.ndim == 1:
            kept_ref[columns] = kept.reshape(-1)
        else:
            kept_ref[...] = kept.reshape(())
        return 0

    def finish_values(columns, _):
        from_value_ref[:, columns] = dot(by_token, value_ref[:, columns].astype(dtype)).astype(dtype)
        return 0

    _over_columns(key_ref, block, finish_keys)
    _over_columns(value_ref, block, finish_values)


def prepare(
    query_ref, key_ref, value_ref, decay_ref, beta_ref, first_ref, last_ref, *refs, form: Form | None, block, interpret,
):  # fmt: skip
    """With a `form` of gate `decay_ref` holds its raw input, and the ref behind `last_ref` its `rows` [2, K]."""
    gate_ref: Any = None
    if form:
        gate_ref, *refs = refs
    (products_ref, inverse_ref, sums_ref, depth_ref), parts_refs = refs[:4], refs[4:]
    arguments = query_ref, key_ref, decay_ref, gate_ref, beta_ref, first_ref, last_ref
    of_pairs = products_ref, inverse_ref, sums_ref, depth_ref
    _pairs(*arguments, *of_pairs, form=form, block=block, interpret=interpret)
    wait_for_all(interpret)  # entries of other threads are read back
    tokens = query_ref, key_ref, value_ref, inverse_ref, sums_ref, beta_ref, first_ref, last_ref
    _parts_of_tokens(*tokens, *parts_refs, block=block, interpret=interpret)


class _OfChunk:
    """What a ref of several chunks, or of their tokens, holds of one, indexed like a ref of that alone."""

    def __init__(self, ref, chunk, *, is_of_tokens: bool):
        self.ref, self.chunk, self.is_of_tokens, self.dtype = ref, chunk, is_of_tokens, ref.dtype
        self.shape = ref.shape if is_of_tokens else ref.shape[1:]
        self.ndim = len(self.shape)

    def _places(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if index and index[0] is Ellipsis:
            index = (slice(None),) * self.ndim
        if not self.is_of_tokens:
            return self.chunk, *index
        row, *rest = index
        start = self.chunk * CHUNK
        return pl.ds(start, CHUNK) if isinstance(row, slice) else start + row, *rest

    def __getitem__(self, index):
        return self.ref[self._places(index)]

    def __setitem__(self, index, array):
        self.ref[self._places(index)] = array


def _again(kernel, arguments, gates, results, chunks: int, is_any, is_deep: Callable, **options):
    """`kernel` for those of a program's chunks that are deep, if any is; `gates`, none or one, are of all chunks."""

    def look(chunk, _):
        @pl.when(is_deep(chunk))
        def _():
            of_chunk = lambda refs: [_OfChunk(ref, chunk, is_of_tokens=ref.shape[0] > chunks) for ref in refs]  # noqa: E731
            kernel(*of_chunk(arguments), *gates, *of_chunk(results), **options)

        return 0

    @pl.when(is_any)
    def _():
        lax.fori_loop(0, chunks, look, 0)


def _largest(arrays):
    """Of all that was read: at once, not each once the one before is known."""
    return jnp.max(functools.reduce(jnp.maximum, arrays))


def _take(refs, *counts: int):
    """The refs, as many at a time."""
    refs = iter(refs)
    return [tuple(itertools.islice(refs, count)) for count in counts]


def prepare_again(*refs, form, **options):
    """`prepare` of chunks in which a token is deeper in its tile than `DEEPEST`; and which are.

    The arguments of `prepare`, how deep tokens are in each half of the channels [2, S], and results so far but the
    depths, in whose places the results lie. Depths are those of deep chunks alone.
    """
    arguments, gates, (halves_ref,), _, results, (is_deep_ref,) = _take(refs, 7, 1 if form else 0, 1, 8, 9, 1)
    chunks = is_deep_ref.shape[0]

    def depths(chunk):
        return halves_ref[:, pl.ds(chunk * CHUNK, CHUNK)]

    def is_deep(chunk):
        is_deep = jnp.max(depths(chunk)) > DEEPEST
        is_deep_ref[chunk] = is_deep.astype(jnp.int32)
        return is_deep

    def clear(chunk, _):
        is_deep_ref[chunk] = jnp.int32(0)
        return 0

    is_any = _largest(map(depths, range(chunks))) > DEEPEST
    lax.fori_loop(0, chunks, clear, 0)
    _again(prepare, arguments, gates, results, chunks, is_any, is_deep, form=form, **options)


def value_gradients(value_ref, beta_ref, solved_ref, by_key_ref, value_gradient_ref, beta_gradient_ref, *, interpret):
    """Of the value, in the place of what is solved, and of beta by the value, added to what the keys give."""
    solved = solved_ref[...].astype(jnp.float32)
    wait_for_all(interpret)
    value_gradient_ref[...] = (beta_ref[...][:, None] * solved).astype(value_ref.dtype)
    beta_gradient_ref[...] = by_key_ref[...] + jnp.sum(solved * value_ref[...].astype(jnp.float32), axis=1)


def _once(ref):
    array = ref[...]
    return lambda: array


def _every_time(ref):
    return lambda: ref[...]


def gradients(
    query_ref, key_ref, sums_ref, depth_ref, beta_ref, first_ref, last_ref, state_ref, state_gradient_ref,
    written_ref, solved_ref, output_gradient_ref, *refs,
    form: Form | None, block, interpret,
):  # fmt: skip
    """With y = (I + L)^-T of the gradient of what the tokens write, v: dL = -y v^T, and (I + L)^-T dw = -y S^T.

    Behind the arguments stand the gradients of query, key, decay and beta. That of the decay lies in the place of the
    sums. That of beta lacks what the values give.

    With a `form` of gate two more arguments are its raw input and its `rows` [2, K]. The gradient of the former takes
    its place, instead of that of the decay; the last two results are of the bias [4, K], to be added up, and, of each
    token [S], what `Form.finish_rate` takes.
    """
    raw_ref: Any = None
    gate_ref: Any = None
    if form:
        raw_ref, gate_ref, *refs = refs
    query_gradient_ref, key_gradient_ref, decay_gradient_ref, beta_gradient_ref, *of_gate_refs = refs
    dtype = written_ref.dtype
    pairs = _Pairs(first_ref, last_ref)
    beta = beta_ref[...][:, None]
    is_scalar = sums_ref.ndim == 1

    # Gradients of P and of L where a pair counts, and both transposed: a product's result is never transposed.
    read = _once if is_scalar else _every_time
    written, solved, output_gradient = read(written_ref), read(solved_ref), read(output_gradient_ref)
    late = dot(output_gradient(), written(), transpose_b=True), -dot(solved(), written(), transpose_b=True)
    early = dot(written(), output_gradient(), transpose_b=True), -dot(written(), solved(), transpose_b=True)
    if is_scalar:
        sums = sums_ref[...][:, None]
        late = [matrix * _between(sums, pairs.earlier(), interpret) for matrix in late]
        early = [matrix * _between(-sums, pairs.later(), interpret) for matrix in early]
    pair_matrices = [jnp.where(pairs.earlier(), matrix, 0).astype(dtype) for matrix in late]
    pair_matrices += [jnp.where(pairs.later(), matrix, 0).astype(dtype) for matrix in early]

    def add_written(columns, total):
        written = written_ref[:, columns].astype(jnp.float32)
        return total + jnp.sum(output_gradient_ref[:, columns].astype(jnp.float32) * written, axis=1)

    itself = _over_columns(written_ref, block, add_written, jnp.zeros((CHUNK,), jnp.float32))[:, None]

    def finish_keys(columns, carry):
        beta_gradient, scalar_sums_gradient, rate_gradient = carry
        sums, end = _sums_and_end(sums_ref, columns, pairs)
        key, query = key_ref[:, columns].astype(jnp.float32), query_ref[:, columns].astype(jnp.float32)
        # To the state that leaves.
        state_gradient = state_gradient_ref[columns, :]
        carried = jnp.sum(state_ref[columns, :].astype(jnp.float32) * state_gradient.astype(jnp.float32), axis=1)[None]
        to_end = jnp.where(pairs.writing, _exp2(end - sums, interpret), 0)
        key_gradient = to_end * dot(written(), state_gradient, transpose_b=True)
        leaving = key * key_gradient
        end_gradient = jnp.sum(leaving, axis=0)[None] + jnp.where(pairs.is_kept, _exp2(end, interpret), 0) * carried
        sums_gradient = jnp.where(pairs.is_end, end_gradient, 0) - leaving
        # From the state that enters.
        from_start = jnp.where(pairs.seen, _exp2(sums, interpret), 0)
        from_state = from_start * dot(solved(), state_ref[columns, :], transpose_b=True)
        key_gradient -= beta * from_state
        sums_gradient -= beta * key * from_state
        query_gradient = from_start * dot(output_gradient(), state_ref[columns, :], transpose_b=True)
        sums_gradient += query * query_gradient
        # A token with itself does not decay.
        query_gradient += itself * key
        key_gradient += itself * query

        def add_pairs(factors, matrices, gradients):
            (late, early), (products, lower, turned_products, turned_lower) = factors, matrices
            query_gradient, key_gradient, sums_gradient, by_beta = gradients
            # A pair adds the same number to the sum of its late token and takes it from that of its early one, to the
            # last bit, so that the gradient of a decay which does not lie between them stays zero.
            decayed_key, correcting_key = (key * early).astype(dtype), (key * (late * beta)).astype(dtype)
            decayed_query = (query * late).astype(dtype)
            by_query = dot(products, decayed_key)
            query_gradient = fused(late, by_query, query_gradient)
            sums_gradient = fused(decayed_query.astype(jnp.float32), by_query, sums_gradient)
            by_late_key = dot(lower, decayed_key)
            sums_gradient = fused(correcting_key.astype(jnp.float32), by_late_key, sums_gradient)
            by_late_key *= late
            by_beta = fused(key, by_late_key, by_beta)
            key_gradient = fused(beta, by_late_key, key_gradient)
            by_early_key = dot(turned_products, decayed_query) + dot(turned_lower, correcting_key)
            key_gradient = fused(early, by_early_key, key_gradient)
            sums_gradient = fused(-decayed_key.astype(jnp.float32), by_early_key, sums_gradient)
            return query_gradient, key_gradient, sums_gradient, by_beta

        def chosen(of_late, of_early):
            masks = of_late, of_late, of_early, of_early
            zero = jnp.zeros((CHUNK, CHUNK), dtype)
            return [jnp.where(mask, matrix, zero) for mask, matrix in zip(masks, pair_matrices, strict=True)]

        def add_small_size(size, gradients):
            is_at_size, is_deep = pairs.apart(size), depth_ref[...] > DEEPEST
            matrices = chosen(is_at_size & is_deep[:, None], is_at_size & is_deep[None])
            factors = decay.halves(sums, columns, size)
            return add_pairs((factors, factors), matrices, gradients)

        fused = functools.partial(multiply_add, interpret=interpret)
        by_beta = key * -from_state
        gradients = query_gradient, key_gradient, sums_gradient, by_beta
        if is_scalar:
            ones = jnp.ones((CHUNK, 1), jnp.float32)
            gradients = add_pairs((ones, ones), pair_matrices, gradients)
        else:
            decay = _Decay(sums_ref, first_ref, interpret)
            for size in (32, 16):
                factors = decay.halves(sums, columns, size)
                gradients = add_pairs((factors, factors), chosen(pairs.apart(size), pairs.apart(size)), gradients)
            depth, is_in_tile = depth_ref[...], pairs.differing_bits() < TILE
            small_sizes = functools.partial(_over_small_sizes, add_small_size)
            gradients = lax.cond(jnp.max(depth) > DEEPEST, small_sizes, lambda gradients: gradients, gradients)
            is_near = depth <= DEEPEST
            in_tile = chosen(is_in_tile & is_near[:, None], is_in_tile & is_near[None])
            gradients = add_pairs(decay.in_tile(sums, columns), in_tile, gradients)
        query_gradient, key_gradient, sums_gradient, by_beta = gradients
        beta_gradient += jnp.sum(by_beta, axis=1)
        query_gradient_ref[:, columns] = query_gradient.astype(dtype)
        key_gradient_ref[:, columns] = key_gradient.astype(dtype)
        if is_scalar:
            scalar_sums_gradient += jnp.sum(sums_gradient, axis=1)
        else:
            decay_gradient = _masked_sums(pairs.reaching(), sums_gradient, dtype)
            if form is not None:
                raw, of_gate = raw_ref[:, columns].astype(jnp.float32), _of_gate(gate_ref, columns, interpret)
                decay_gradient, by_rate = form.gradients(decay_gradient, raw, *of_gate)
                rate_gradient += jnp.sum(by_rate, axis=1)
                is_first = lax.broadcasted_iota(jnp.int32, (TILES, decay_gradient.shape[1]), 0) == 0
                of_gate_refs[0][:, columns] = jnp.where(is_first, jnp.sum(decay_gradient, axis=0)[None], 0)
            wait_for_all(interpret)  # what lies in these columns has been read
            decay_gradient_ref[:, columns] = decay_gradient.astype(decay_gradient_ref.dtype)
        return beta_gradient, scalar_sums_gradient, rate_gradient

    zeros = jnp.zeros((CHUNK,), jnp.float32)
    beta_gradient, sums_gradient, rate_gradient = _over_columns(key_ref, block, finish_keys, (zeros, zeros, zeros))
    beta_gradient_ref[...] = beta_gradient
    if form is not None:
        of_gate_refs[1][...] = rate_gradient
    if is_scalar:
        wait_for_all(interpret)  # all sums have been read
        decay_gradient_ref[...] = _masked_sums(pairs.reaching(), sums_gradient[:, None], dtype).reshape(-1)


def gradients_again(*refs, form, **options):
    """`gradients` of chunks whose sums, or raw input of a gate, have been left as they were.

    Its arguments, which chunks are deep, results so far, and the results, in the places of those and of what was left.
    """
    gated = 1 if form else 0
    arguments, gates, (is_deep_ref,), _, results = _take(refs, 12 + gated, gated, 1, 3 + 2 * gated, 4 + 2 * gated)
    chunks = is_deep_ref.shape[0]
    is_any = _largest(is_deep_ref[chunk] for chunk in range(chunks)) > 0
    is_deep = lambda chunk: is_deep_ref[chunk] > 0  # noqa: E731
    _again(gradients, arguments, gates, results, chunks, is_any, is_deep, form=form, **options)
