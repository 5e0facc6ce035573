"""Gradients of the delta rule with one decay a channel, chunk by chunk, in Triton itself by way of jax-triton.

The sums of `chunk_kernels.gradients`, letters and masks as there, of chunks in which no token is deeper in its tile than
`DEEPEST`: three products give all pairs, of the halves of 64 and of 32 tokens and of tiles of 16.
"""

import functools

import jax
import jax.numpy as jnp
import jax_triton
import triton
from triton import language as tl

from pallas_kernels.linear_attention.chunk_kernels import CHUNK, DEEPEST

COLUMNS, WARPS = 32, 4
BLOCK, STAGES = 32, 3


@triton.jit
def _exp2(array):
    """By one instruction, which takes numbers under 2^-126 for zero."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [array], tl.float32, is_pure=True, pack=1)


@triton.jit
def _pick(mask, matrices, NUMBER: tl.constexpr):
    """One of the matrices of pairs, which lie in memory: registers do not hold them."""
    size: tl.constexpr = mask.shape[0]
    place = tl.arange(0, size)
    source = matrices + NUMBER * size * size + place[:, None] * size + place[None, :]
    return tl.load(source, mask=tl.max_constancy(mask, (1, 16)), other=0.0)


@triton.jit
def _add_pairs(late, early, mask, matrices, query, key, beta, gradients):
    """Adds the masked pairs, whose late token decays by `late` from, and early one by `early` up to, one between.

    A pair adds to the sum of its late token what it takes from that of its early one, to the last bit.
    """
    query_gradient, key_gradient, sums_gradient, by_beta = gradients
    decayed_key, correcting_key = (key * early).to(tl.bfloat16), (key * (late * beta)).to(tl.bfloat16)
    decayed_query = (query * late).to(tl.bfloat16)
    of_query = tl.dot(_pick(mask, matrices, 0), decayed_key)
    query_gradient += late * of_query
    sums_gradient += decayed_query.to(tl.float32) * of_query
    of_late_key = tl.dot(_pick(mask, matrices, 1), decayed_key)
    sums_gradient += correcting_key.to(tl.float32) * of_late_key
    of_late_key *= late
    by_beta += key * of_late_key
    key_gradient += beta * of_late_key
    of_early_key = tl.dot(_pick(mask, matrices, 2), decayed_query)
    of_early_key = tl.dot(_pick(mask, matrices, 3), correcting_key, of_early_key)
    key_gradient += early * of_early_key
    sums_gradient -= decayed_key.to(tl.float32) * of_early_key
    return query_gradient, key_gradient, sums_gradient, by_beta


@triton.jit
def _add_halves(HALF: tl.constexpr, base, STRIDE: tl.constexpr, differing, matrices, tokens, gradients):
    """Adds pairs of the late and early half of blocks of `2 HALF` tokens, whose middle is a row of the sums."""
    query, key, beta, sums = tokens
    token = tl.arange(0, sums.shape[0])
    factor = _exp2(-tl.abs(sums - tl.load(base + ((token | (2 * HALF - 1)) - HALF)[:, None] * STRIDE)))
    is_apart = differing // HALF == 1
    return _add_pairs(factor, factor, is_apart, matrices, query, key, beta, gradients)


@triton.jit
def _pair_gradients(
    first, last, written, solved, output_gradient, pairs, itself,
    HEADS: tl.constexpr, CHUNKS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradients of P and of L, and both turned: a product's result is not turned (wrong on Hopper in some Tritons)."""
    head, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (row * CHUNKS + chunk).to(tl.int64)
    token, value = tl.arange(0, CHUNK), tl.arange(0, VALUES)
    late, early = token[:, None], token[None, :]
    of_values = ((place * CHUNK + token) * HEADS + head)[:, None] * VALUES + value[None, :]
    write, solve, output = (
        tl.load(written + of_values),
        tl.load(solved + of_values),
        tl.load(output_gradient + of_values),
    )
    first_of, last_of = tl.load(first + place * CHUNK + token), tl.load(last + place * CHUNK + token)
    is_earlier = (early < late) & (early >= first_of[:, None])
    is_later = (early > late) & (early <= last_of[:, None])
    target = pairs + (place * HEADS + head) * 4 * CHUNK * CHUNK + late * CHUNK + early
    tl.store(target, tl.where(is_earlier, tl.dot(output, tl.trans(write)), 0.0).to(tl.bfloat16))
    by_late_key = tl.where(is_earlier, -tl.dot(solve, tl.trans(write)), 0.0)
    tl.store(target + CHUNK * CHUNK, by_late_key.to(tl.bfloat16))
    tl.store(target + 2 * CHUNK * CHUNK, tl.where(is_later, tl.dot(write, tl.trans(output)), 0.0).to(tl.bfloat16))
    by_late_key = tl.where(is_later, -tl.dot(write, tl.trans(solve)), 0.0)
    tl.store(target + 3 * CHUNK * CHUNK, by_late_key.to(tl.bfloat16))
    by_itself = tl.sum(output.to(tl.float32) * write.to(tl.float32), 1)
    tl.store(itself + (place * CHUNK + token) * HEADS + head, by_itself)


@triton.jit
def _key_gradients(
    query, key, sums, beta, first, last, state, state_gradient, written, solved, output_gradient, is_deep, pairs, itself,
    query_out, key_out, decay_out, beta_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, DEEPEST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of some key channels of a chunk and head."""
    block, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, start = block // (KEYS // COLUMNS), block % (KEYS // COLUMNS) * COLUMNS
    place = (row * CHUNKS + chunk).to(tl.int64)
    token, column = tl.arange(0, CHUNK), start + tl.arange(0, COLUMNS)
    of_token = place * CHUNK + token
    of_head = of_token * HEADS + head
    of_columns = (place * HEADS + head) * KEYS * VALUES + column[:, None] * VALUES
    key_gradient = tl.zeros((CHUNK, COLUMNS), tl.float32)
    from_state, query_gradient = tl.zeros_like(key_gradient), tl.zeros_like(key_gradient)
    carried = tl.zeros((COLUMNS,), tl.float32)
    for block in tl.range(0, VALUES, BLOCK, num_stages=STAGES):
        value = (block + tl.arange(0, BLOCK))[None, :]
        state_of, leaving_state = tl.load(state + of_columns + value), tl.load(state_gradient + of_columns + value)
        of_values = of_head[:, None] * VALUES + value
        key_gradient = tl.dot(tl.load(written + of_values), tl.trans(leaving_state), key_gradient)
        from_state = tl.dot(tl.load(solved + of_values), tl.trans(state_of), from_state)
        query_gradient = tl.dot(tl.load(output_gradient + of_values), tl.trans(state_of), query_gradient)
        carried += tl.sum(state_of.to(tl.float32) * leaving_state.to(tl.float32), 1)

    first_of, last_of = tl.load(first + of_token), tl.load(last + of_token)
    beta_of = tl.load(beta + of_head)[:, None]
    of_keys = (of_token * (HEADS // GROUP) + head // GROUP)[:, None] * KEYS + column[None, :]
    of_sums = of_head[:, None] * KEYS + column[None, :]
    base = sums + (place * CHUNK * HEADS + head) * KEYS + column[None, :]
    sum_of, end = tl.load(sums + of_sums), tl.load(base + (CHUNK - 1) * HEADS * KEYS)
    key_of, query_of = tl.load(key + of_keys).to(tl.float32), tl.load(query + of_keys).to(tl.float32)
    # To the state that leaves.
    key_gradient *= tl.where(last_of[:, None] == CHUNK - 1, _exp2(end - sum_of), 0.0)
    leaving = key_of * key_gradient
    is_kept = tl.load(first + place * CHUNK + CHUNK - 1) < 0
    end_gradient = tl.sum(leaving, 0)[None, :] + tl.where(is_kept, _exp2(end), 0.0) * carried[None, :]
    sums_gradient = tl.where(token[:, None] == CHUNK - 1, end_gradient, 0.0) - leaving
    # From the state that enters.
    from_start = tl.where(first_of[:, None] < 0, _exp2(sum_of), 0.0)
    from_state *= from_start
    key_gradient -= beta_of * from_state
    by_beta = -key_of * from_state
    sums_gradient += beta_of * by_beta
    query_gradient *= from_start
    sums_gradient += query_of * query_gradient
    by_itself = tl.load(itself + of_head)[:, None]
    query_gradient += by_itself * key_of
    key_gradient += by_itself * query_of

    gradients = query_gradient, key_gradient, sums_gradient, by_beta
    matrices = pairs + (place * HEADS + head) * 4 * CHUNK * CHUNK
    tiles = token // 16
    differing = (tiles[:, None] ^ tiles[None, :]) * 16
    tokens = query_of, key_of, beta_of, sum_of
    gradients = _add_halves(32, base, HEADS * KEYS, differing, matrices, tokens, gradients)
    tl.debug_barrier()  # lest all matrices of pairs are loaded at once, into more registers than there are
    gradients = _add_halves(16, base, HEADS * KEYS, differing, matrices, tokens, gradients)
    tl.debug_barrier()
    tile_start = tl.maximum(token // 16 * 16, first_of)
    depth = tl.load(base + tile_start[:, None] * HEADS * KEYS) - sum_of
    late, early = _exp2(-depth), _exp2(tl.minimum(depth, DEEPEST))
    gradients = _add_pairs(late, early, differing < 16, matrices, query_of, key_of, beta_of, gradients)
    query_gradient, key_gradient, sums_gradient, by_beta = gradients
    tl.store(query_out + of_sums, query_gradient.to(tl.bfloat16))
    tl.store(key_out + of_sums, key_gradient.to(tl.bfloat16))
    tl.store(beta_out + start // COLUMNS + of_head * (KEYS // COLUMNS), tl.sum(by_beta, 1))
    # To float32's digits: three parts of bfloat16.
    reaching = (token[None, :] >= token[:, None]) & (token[None, :] <= last_of[:, None])
    reaching = (reaching & (token > first_of)[:, None]).to(tl.float32).to(tl.bfloat16)
    part = sums_gradient.to(tl.bfloat16)
    decay_gradient = tl.dot(reaching, part)
    rest = sums_gradient - part.to(tl.float32)
    part = rest.to(tl.bfloat16)
    decay_gradient = tl.dot(reaching, part, decay_gradient)
    decay_gradient = tl.dot(reaching, (rest - part.to(tl.float32)).to(tl.bfloat16), decay_gradient)
    tl.debug_barrier()  # the sums, in whose place this lies, have been read
    tl.store(decay_out + of_sums, decay_gradient, mask=tl.load(is_deep + place * HEADS + head) == 0)


def gradients(
    query, key, sums, beta, first, last, states, state_gradients, written, solved, output_gradient, is_deep
) -> list[jax.Array]:
    """As `hopper.gradients`: of query, key and decay, in the place of the sums, and of beta by the keys."""
    batch, length, heads, width = sums.shape
    chunks, parts = length // CHUNK, width // COLUMNS
    call = functools.partial(
        jax_triton.triton_call,
        compute_capability=90,
        HEADS=heads,
        CHUNKS=chunks,
        VALUES=written.shape[3],
        CHUNK=CHUNK,
    )
    pairs, itself = call(
        *(first, last, written, solved, output_gradient),
        kernel=_pair_gradients,
        out_shape=[jax.ShapeDtypeStruct((batch, chunks, heads, 4, CHUNK, CHUNK), query.dtype), beta],
        grid=(heads, chunks, batch),
        name="pair_gradients_triton",
        num_warps=4,
    )
    narrow, wide = jax.ShapeDtypeStruct(sums.shape, query.dtype), jax.ShapeDtypeStruct(sums.shape, jnp.float32)
    tokens, of_values = (query, key, sums, beta, first, last), (written, solved, output_gradient)
    *results, by_beta = call(
        *(*tokens, states, state_gradients, *of_values, is_deep, pairs, itself),
        kernel=_key_gradients,
        out_shape=[narrow, narrow, wide, jax.ShapeDtypeStruct((*beta.shape, parts), jnp.float32)],
        grid=(heads * parts, chunks, batch),
        name="key_gradients_triton",
        num_warps=WARPS,
        input_output_aliases={2: 2},
        GROUP=heads // query.shape[2],
        KEYS=width,
        COLUMNS=COLUMNS,
        DEEPEST=DEEPEST,
        BLOCK=BLOCK,
        STAGES=STAGES,
    )
    return [*results, jnp.sum(by_beta, axis=-1)]
