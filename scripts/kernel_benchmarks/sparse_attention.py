"""Sparse attention: selection of keys, attention over them and its gradients, the indexer's loss, the whole layer."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sparse_attention.api import indexer_loss, select_keys, selected_attention

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


def select(index_query, index_key, weight, segments, *, implementation="pallas"):
    return select_keys(index_query, index_key, weight, segments, top_k=SELECTED, implementation=implementation)


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


def loss_step(query, latent, index_query, index_key, weight, segments, indices, sums):
    def run(index_query, index_key, weight):
        key = latent[:, :, None]
        options = {"scale": SCALE, "implementation": "pallas"}
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


def run(only, median_seconds, report):
    cases = []

    def measure(case, function, draw_arrays, flops, num_bytes=0):
        if only in case:
            cases.append((case, function, draw_arrays, flops, num_bytes))

    if not only:
        check(64)
        check(96)

    def attention_arrays(tokens, num_heads, with_gradient=False):
        arrays = normal(1, 1, tokens, num_heads, WIDTH), normal(2, 1, tokens, WIDTH), draw_indices(tokens, tokens)
        return (*arrays, normal(3, 1, tokens, num_heads, VALUES)) if with_gradient else arrays

    def index_arrays(tokens, index_heads):
        arrays = normal(4, 1, tokens, index_heads, INDEX_WIDTH), normal(5, 1, tokens, INDEX_WIDTH)
        return *arrays, normal(6, 1, tokens, index_heads, dtype=jnp.float32), jnp.ones((1, tokens), jnp.int32)

    for index_heads in (64, 32):
        flops = 2 * num_pairs(32768) * index_heads * INDEX_WIDTH
        measure(f"select T32768 J{index_heads}", select, partial(index_arrays, 32768, index_heads), flops)
    for num_heads in (64, 96):
        flops = 2 * num_pairs(32768, SELECTED) * num_heads * (WIDTH + VALUES)
        measure(f"forward T32768 H{num_heads}", attend, partial(attention_arrays, 32768, num_heads), flops)
    for tokens, num_heads, mode in ((8192, 64, ""), (8192, 64, " deterministic"), (32768, 64, ""), (32768, 96, "")):
        flops = 2 * num_pairs(tokens, SELECTED) * num_heads * (4 * WIDTH + 3 * VALUES)
        step = partial(attention_step, is_deterministic=bool(mode))
        arrays = partial(attention_arrays, tokens, num_heads, True)
        measure(f"step{mode} T{tokens} H{num_heads}", step, arrays, flops)

    def layer_arrays(tokens, num_heads, index_heads):
        query, latent, _, gradient = attention_arrays(tokens, num_heads, True)
        return query, latent, *index_arrays(tokens, index_heads), gradient

    def loss_arrays(tokens, num_heads, index_heads):
        *arrays, _ = layer_arrays(tokens, num_heads, index_heads)
        return *arrays, draw_indices(tokens, tokens), jnp.full((1, tokens, num_heads), 20.0)

    def layer_flops(tokens, num_heads, index_heads):
        selected = num_pairs(tokens, SELECTED)
        of_index = num_pairs(tokens) * index_heads + 3 * selected * index_heads
        return 2 * (of_index * INDEX_WIDTH + selected * num_heads * (5 * WIDTH + 3 * VALUES))

    measure("loss step T32768 H64 J64", loss_step, partial(loss_arrays, 32768, 64, 64), 0)
    for tokens, implementation in ((8192, "pallas"), (8192, "xla"), (32768, "pallas"), (131072, "pallas")):
        step = partial(layer_step, implementation=implementation)
        arrays, flops = partial(layer_arrays, tokens, 64, 64), layer_flops(tokens, 64, 64)
        measure(f"layer step {implementation} T{tokens} H64 J64", step, arrays, flops)

    def dense_arrays(tokens):
        """Keys and values of all heads of Kimi K3's full attention, as many as in the layer's cases."""
        query, key = normal(1, 1, tokens, 64, 192), normal(2, 1, tokens, 64, 192)
        return query, key, normal(3, 1, tokens, 64, 128), normal(7, 1, tokens, 64, 128)

    for tokens in (8192, 16384, 32768, 65536, 131072):
        flops = 2 * num_pairs(tokens) * 64 * (4 * 192 + 3 * 128)
        measure(f"dense step cuDNN T{tokens} H64", dense_step, partial(dense_arrays, tokens), flops)
    add_million(measure)
    # Compiling takes longer than running: several at a time.
    with ThreadPoolExecutor(8) as pool:
        programs = [pool.submit(compile_case, function, draw_arrays) for _, function, draw_arrays, *_ in cases]
        for (case, _, draw_arrays, *limits), program in zip(cases, programs, strict=True):
            compiled, arrays = program.result(), draw_arrays()
            is_long = limits[0] > 1e14
            rounds = {"repeats": 2, "calls": 1} if is_long else {"calls": 3}
            report(case, median_seconds(compiled, *arrays, **rounds), *limits, compiled)


def compile_case(function, draw_arrays):
    return jax.jit(function).lower(*jax.eval_shape(draw_arrays)).compile()


def add_million(measure):
    """The last 1,024 queries of 1,048,576 keys: selection and attention forward."""
    tokens, num_keys, index_heads = 1024, 2**20, 32
    positions = jnp.arange(num_keys - tokens, num_keys, dtype=jnp.int32)

    def forward(query, latent, index_query, index_key, weight, segments):
        index = index_query, index_key, weight
        indices = select_keys(*index, segments, positions, top_k=SELECTED, implementation="pallas")
        return attend(query, latent, indices)

    def arrays():
        index = normal(4, 1, tokens, index_heads, INDEX_WIDTH), normal(5, 1, num_keys, INDEX_WIDTH)
        weight, segments = normal(6, 1, tokens, index_heads, dtype=jnp.float32), jnp.ones((1, num_keys), jnp.int32)
        return normal(1, 1, tokens, 64, WIDTH), normal(2, 1, num_keys, WIDTH), *index, weight, segments

    flops = 2 * tokens * num_keys * index_heads * INDEX_WIDTH + 2 * tokens * SELECTED * 64 * (WIDTH + VALUES)
    measure("million keys, 1024 queries, forward", forward, arrays, flops)
