"""Sparse attention: selection of keys, attention over them and its gradients, the indexer's loss, the whole layer."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sparse_attention.api import indexer_loss, select_keys, selected_attention
from pallas_kernels.sparse_attention.hopper_backward import backward

WIDTH, VALUES, SELECTED, INDEX_WIDTH = 576, 512, 2048, 128
SCALE = 192**-0.5


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@partial(jax.jit, static_argnums=(0, 1))
def draw_indices(tokens, num_keys):
    """[1, tokens, 2048]: of the keys up to each of the last tokens one from each of 2048 equal parts."""
    seen = jnp.arange(num_keys - tokens, num_keys, dtype=jnp.float32)[:, None] + 1
    part = jnp.arange(SELECTED, dtype=jnp.float32)[None]
    far = (part + jax.random.uniform(jax.random.key(9), (tokens, SELECTED))) * (seen / SELECTED)
    far = jnp.minimum(far.astype(jnp.int32), seen.astype(jnp.int32) - 1)
    return jnp.where(seen > SELECTED, far, jnp.where(part < seen, part, -1).astype(jnp.int32))[None]


def num_pairs(tokens, most=None):
    """Queries times the keys they see, at most `most` each."""
    return sum(min(token + 1, most or tokens) for token in range(tokens))


def attend(query, latent, indices, *, implementation="pallas", is_deterministic=False):
    return selected_attention(
        query,
        latent,
        indices,
        scale=SCALE,
        value_width=VALUES,
        is_deterministic=is_deterministic,
        implementation=implementation,
    )


def attention_step(query, latent, indices, gradient, *, is_deterministic=False):
    run = partial(attend, indices=indices, is_deterministic=is_deterministic)
    result, pull = jax.vjp(lambda *arrays: run(*arrays).mixed, query, latent)
    return result, pull(gradient)


def select(index_query, index_key, weight, segments, *, implementation="pallas", **options):
    options |= {"top_k": SELECTED, "implementation": implementation}
    return select_keys(index_query, index_key, weight, segments, **options)


def layer_step(query, latent, index_query, index_key, weight, segments, gradient, *, implementation="pallas"):
    """Selection, attention over the selected keys, the indexer's loss, and all gradients."""

    def run(query, latent, index_query, index_key, weight):
        index = index_query, index_key, weight
        indices = select(*index, segments, implementation=implementation)
        mixed, sums = attend(query, latent, indices, implementation=implementation)
        key = latent[:, :, None]
        options = {"scale": SCALE, "query_chunk_tokens": 128, "implementation": implementation}
        losses = indexer_loss(*index, query, key, segments, indices, None, sums, **options)
        return mixed, losses.sum()

    result, pull = jax.vjp(run, query, latent, index_query, index_key, weight)
    return result, pull((gradient, jnp.ones_like(result[1])))


def loss_step(query, latent, index_query, index_key, weight, segments, indices, sums, *, is_deterministic=False):
    def run(index_query, index_key, weight):
        key = latent[:, :, None]
        options = {"scale": SCALE, "is_deterministic": is_deterministic, "implementation": "pallas"}
        index = index_query, index_key, weight
        return indexer_loss(*index, query, key, segments, indices, None, sums, **options).sum()

    return jax.value_and_grad(run, argnums=(0, 1, 2))(index_query, index_key, weight)


def dense_step(query, key, value, gradient):
    """Dense causal attention of all keys by cuDNN, with its gradients; JAX wants values as wide as keys."""

    def run(query, key, value):
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[3] - value.shape[3])))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        return mixed[..., : gradient.shape[3]]

    result, pull = jax.vjp(run, query, key, value)
    return result, pull(gradient)


def check(num_heads):
    """Print the relative error of the result and of both gradients against float64 on a few queries."""
    tokens = 160
    query, latent, gradient = normal(1, 1, tokens, num_heads, WIDTH), normal(2, 1, tokens, WIDTH), None
    gradient, indices = normal(3, 1, tokens, num_heads, VALUES), draw_indices(tokens, tokens)
    found = jax.jit(attention_step)(query, latent, indices, gradient)
    q, k, g = (np.asarray(array.astype(jnp.float32), np.float64)[0] for array in (query, latent, gradient))
    expected = np.zeros_like(g), np.zeros_like(q), np.zeros_like(k)
    for token, index in enumerate(np.asarray(indices[0])):
        keys = index[index >= 0]
        scores = q[token] @ k[keys].T * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        expected[0][token] = weights @ k[keys, :VALUES]
        by_weight = g[token] @ k[keys, :VALUES].T
        by_score = SCALE * weights * (by_weight - (weights * by_weight).sum(axis=1, keepdims=True))
        expected[1][token] = by_score @ k[keys]
        expected[2][keys] += by_score.T @ q[token]
        expected[2][keys, :VALUES] += weights.T @ g[token]
    pairs = zip(jax.tree.leaves(found), expected, strict=True)
    errors = [np.linalg.norm(np.asarray(a.astype(jnp.float32))[0] - b) / np.linalg.norm(b) for a, b in pairs]
    print(f"check {num_heads} heads: relative errors {', '.join(f'{error:.1e}' for error in errors)}", flush=True)
    assert max(errors) < 6e-3


def attention_arrays(tokens, num_heads):
    query, latent = normal(1, 1, tokens, num_heads, WIDTH), normal(2, 1, tokens, WIDTH)
    return query, latent, draw_indices(tokens, tokens), normal(3, 1, tokens, num_heads, VALUES)


def gradient_arrays(tokens, num_heads, is_random=False):
    """As the kernel of gradients takes them; keys drawn at random from the whole row, or as `draw_indices` does."""
    query, latent, indices, gradient = (array[0] for array in attention_arrays(tokens, num_heads))
    if is_random:
        indices = jax.random.randint(jax.random.key(8), indices.shape, 0, tokens, jnp.int32)
    sums = jnp.full((tokens, -(-num_heads // 64) * 64), 30.0)
    return query, latent, indices, sums, gradient, jnp.zeros_like(sums)


def index_arrays(tokens, index_heads):
    arrays = normal(4, 1, tokens, index_heads, INDEX_WIDTH), normal(5, 1, tokens, INDEX_WIDTH)
    return *arrays, normal(6, 1, tokens, index_heads, dtype=jnp.float32), jnp.ones((1, tokens), jnp.int32)


def layer_arrays(tokens, num_heads, index_heads):
    query, latent, _, gradient = attention_arrays(tokens, num_heads)
    return query, latent, *index_arrays(tokens, index_heads), gradient


def loss_arrays(tokens, num_heads, index_heads):
    *arrays, _ = layer_arrays(tokens, num_heads, index_heads)
    return *arrays, draw_indices(tokens, tokens), jnp.full((1, tokens, num_heads), 20.0)


def dense_arrays(tokens):
    """Keys and values of all heads of Kimi K3's full attention, as many as in the layer's cases."""
    query, key = normal(1, 1, tokens, 64, 192), normal(2, 1, tokens, 64, 192)
    return query, key, normal(3, 1, tokens, 64, 128), normal(7, 1, tokens, 64, 128)


def million_arrays():
    tokens, num_keys, index_heads = 1024, 2**20, 32
    index = normal(4, 1, tokens, index_heads, INDEX_WIDTH), normal(5, 1, num_keys, INDEX_WIDTH)
    weight, segments = normal(6, 1, tokens, index_heads, dtype=jnp.float32), jnp.ones((1, num_keys), jnp.int32)
    return normal(1, 1, tokens, 64, WIDTH), normal(2, 1, num_keys, WIDTH), *index, weight, segments


def million(query, latent, index_query, index_key, weight, segments):
    """Selection and attention forward of the last queries of a row."""
    positions = jnp.arange(segments.shape[1] - query.shape[1], segments.shape[1], dtype=jnp.int32)
    index = index_query, index_key, weight
    return attend(query, latent, select_keys(*index, segments, positions, top_k=SELECTED, implementation="pallas"))


def cases():
    """(name, function, what draws its arguments, floating-point operations of products) of each case."""
    step_flops, gradient_flops = 4 * WIDTH + 3 * VALUES, 3 * WIDTH + 2 * VALUES
    for index_heads in (64, 32):
        flops = 2 * num_pairs(32768) * index_heads * INDEX_WIDTH
        for score_dtype in ("own", "float8_e4m3fn"):
            run = partial(select, score_dtype=score_dtype)
            yield f"select {score_dtype} T32768 J{index_heads}", run, partial(index_arrays, 32768, index_heads), flops
    for num_heads in (64, 96):
        flops = 2 * num_pairs(32768, SELECTED) * num_heads * (WIDTH + VALUES)

        def forward(query, latent, indices, _):
            return attend(query, latent, indices)

        yield f"forward T32768 H{num_heads}", forward, partial(attention_arrays, 32768, num_heads), flops
    for tokens, num_heads, is_random in ((8192, 64, False), (8192, 64, True), (32768, 64, False), (32768, 96, False)):
        pairs = tokens * SELECTED if is_random else num_pairs(tokens, SELECTED)
        name = f"gradients T{tokens} H{num_heads}{' random keys' if is_random else ''}"
        arrays = partial(gradient_arrays, tokens, num_heads, is_random)
        yield name, partial(backward, scale=SCALE), arrays, 2 * pairs * num_heads * gradient_flops
    for tokens, num_heads, mode in ((8192, 64, ""), (8192, 64, " deterministic"), (32768, 64, ""), (32768, 96, "")):
        step = partial(attention_step, is_deterministic=bool(mode))
        flops = 2 * num_pairs(tokens, SELECTED) * num_heads * step_flops
        yield f"step{mode} T{tokens} H{num_heads}", step, partial(attention_arrays, tokens, num_heads), flops
    for tokens, mode in ((8192, ""), (8192, " deterministic"), (32768, "")):
        step = partial(loss_step, is_deterministic=bool(mode))
        yield f"loss step{mode} T{tokens} H64 J64", step, partial(loss_arrays, tokens, 64, 64), 0
    lengths = (8192, 16384, 24576, 32768, 65536, 131072)
    for tokens, implementation in (*[(tokens, "pallas") for tokens in lengths], (8192, "xla")):
        selected = num_pairs(tokens, SELECTED)
        of_index = (num_pairs(tokens) + 3 * selected) * 64 * INDEX_WIDTH
        flops = 2 * (of_index + selected * 64 * (5 * WIDTH + 3 * VALUES))
        step = partial(layer_step, implementation=implementation)
        yield f"layer step {implementation} T{tokens} H64 J64", step, partial(layer_arrays, tokens, 64, 64), flops
    for tokens in lengths:
        flops = 2 * num_pairs(tokens) * 64 * (4 * 192 + 3 * 128)
        yield f"dense step cuDNN T{tokens} H64", dense_step, partial(dense_arrays, tokens), flops
    flops = 2 * 1024 * (2**20 * 32 * INDEX_WIDTH + SELECTED * 64 * (WIDTH + VALUES))
    yield "million keys, 1024 queries, forward", million, million_arrays, flops


def run(only, median_seconds, report):
    if not only:
        check(64)
        check(96)
    wanted = [case for case in cases() if only in case[0]]
    # Compiling takes longer than running: several at a time.
    with ThreadPoolExecutor(8) as pool:
        programs = [pool.submit(compile_case, function, draw_arrays) for _, function, draw_arrays, _ in wanted]
        for (name, _, draw_arrays, flops), program in zip(wanted, programs, strict=True):
            compiled, arrays = program.result(), draw_arrays()
            rounds = {"repeats": 2, "least": 1} if flops > 1e14 else {"least": 3}
            report(name, median_seconds(compiled, *arrays, **rounds), flops, 0, compiled)


def compile_case(function, draw_arrays):
    return jax.jit(function).lower(*jax.eval_shape(draw_arrays)).compile()
