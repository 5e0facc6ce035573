"""Attention and its indexer, whole and in blocks of queries, against NumPy written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.sparse_attention.api import attention, indexer_loss, select_keys, selected_attention

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3], [0] * 11], np.int32)
ROWS, TOKENS = SEGMENTS.shape
GIVEN_SEGMENTS = jnp.asarray(SEGMENTS)
# 11 tokens in blocks of at most 4: three blocks, the last with one position too many.
IMPLEMENTATIONS = [
    {"implementation": "reference"},
    {"implementation": "xla"},
    {"implementation": "xla", "query_chunk_tokens": 4},
]
SCALE = 0.37


def normals(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=shape) for shape in shapes]


def visible(row: int, query: int, is_causal: bool = True) -> list[int]:
    """Keys of the query's own document, up to itself if causal."""
    segments = SEGMENTS[row]
    last = query + 1 if is_causal else TOKENS
    return [s for s in range(last) if segments[s] == segments[query] != 0]


def softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def value_and_gradients(function, arrays, cotangent):
    """The result and the gradients of its product with `cotangent`."""

    def run(arrays):
        result, pull = jax.vjp(function, *arrays)
        return result, pull(jnp.asarray(cotangent, result.dtype))

    return jax.jit(run)(tuple(map(jnp.asarray, arrays)))


def assert_close(found, expected, tolerance=1e-10):
    scale = np.abs(expected).max()
    assert np.abs(np.asarray(found) - expected).max() <= tolerance * scale


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_and_its_gradients_are_those_of_each_document_alone(is_causal):
    query, key, value, cotangent = normals(
        0, (ROWS, TOKENS, 4, 3), (ROWS, TOKENS, 2, 3), (ROWS, TOKENS, 2, 5), (ROWS, TOKENS, 4, 5)
    )
    out, dquery, dkey, dvalue = (np.zeros_like(x) for x in (cotangent, query, key, value))
    for b in range(ROWS):
        for t in range(TOKENS):
            keys = visible(b, t, is_causal)
            for h in range(4 if keys else 0):
                g = h // 2
                weights = softmax(SCALE * key[b, keys, g] @ query[b, t, h])
                out[b, t, h] = weights @ value[b, keys, g]
                dweights = value[b, keys, g] @ cotangent[b, t, h]
                dscores = SCALE * weights * (dweights - weights @ dweights)
                dquery[b, t, h] = dscores @ key[b, keys, g]
                dkey[b, keys, g] += np.outer(dscores, query[b, t, h])
                dvalue[b, keys, g] += np.outer(weights, cotangent[b, t, h])

    with jax.enable_x64(True):
        for how in IMPLEMENTATIONS:
            found, gradients = value_and_gradients(
                lambda *arrays, how=how: attention(*arrays, GIVEN_SEGMENTS, scale=SCALE, is_causal=is_causal, **how),
                (query, key, value),
                cotangent,
            )
            assert found.dtype == jnp.float64
            assert not np.asarray(found)[SEGMENTS == 0].any()
            for one, other in zip((found, *gradients), (out, dquery, dkey, dvalue), strict=True):
                assert_close(one, other)


def test_huge_scores_and_padding_give_finite_gradients_in_float32():
    query, key, value, cotangent = (1e3 * x.astype(np.float32) for x in normals(1, *((ROWS, TOKENS, 2, 4),) * 4))
    found, gradients = value_and_gradients(
        lambda *arrays: attention(*arrays, GIVEN_SEGMENTS, scale=1e6, query_chunk_tokens=4),
        (query, key, value),
        cotangent,
    )
    assert all(np.isfinite(x).all() for x in (found, *gradients))
    for gradient in gradients:
        assert not np.asarray(gradient)[SEGMENTS == 0].any()


def test_bfloat16_attention_sums_in_float32():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in normals(2, *((1, 600, 1, 8),) * 3)]
    segments = jnp.ones((1, 600), jnp.int32)
    found = attention(*arrays, segments, scale=0.1, query_chunk_tokens=128)
    exact = attention(*(x.astype(jnp.float32) for x in arrays), segments, scale=0.1, implementation="reference")
    assert found.dtype == jnp.bfloat16
    # Half a unit in the last place of bfloat16: only the result was rounded.
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8, atol=1e-6)


def test_attention_refuses_heads_that_cannot_be_grouped():
    query, key = map(jnp.asarray, normals(3, (1, 2, 3, 4), (1, 2, 2, 4)))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        attention(query, key, key, jnp.ones((1, 2), jnp.int32), scale=1.0)


def index_arrays(seed: int) -> list[np.ndarray]:
    return normals(seed, (ROWS, TOKENS, 3, 4), (ROWS, TOKENS, 4), (ROWS, TOKENS, 3))


def index_scores(index_query, index_key, head_weight):
    activations = np.maximum(np.einsum("bqjk,bsk->bqjs", index_query, index_key) / np.sqrt(4), 0)
    return np.einsum("bqj,bqjs->bqs", head_weight, activations)


@pytest.mark.parametrize("top_k", [3, 20])
def test_selected_keys_are_the_best_of_the_own_document_and_the_earlier_of_equals(top_k):
    # Small integers: many scores are equal, many are zero, and some zeros are negative.
    arrays = [np.round(x) for x in index_arrays(4)]
    arrays[2][:, ::2] = -np.abs(arrays[2][:, ::2])
    scores = index_scores(*arrays)
    expected = np.full((ROWS, TOKENS, top_k), -1)
    for b in range(ROWS):
        for t in range(TOKENS):
            best = sorted(visible(b, t), key=lambda s, b=b, t=t: (-scores[b, t, s], s))[:top_k]
            expected[b, t, : len(best)] = sorted(best)
    for how in IMPLEMENTATIONS:
        found = jax.jit(lambda *arrays, how=how: select_keys(*arrays, GIVEN_SEGMENTS, top_k=top_k, **how))(
            *(x.astype(np.float32) for x in arrays)
        )
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, expected)


def random_selection(seed: int, top_k: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    indices = np.full((ROWS, TOKENS, top_k), -1, np.int32)
    for b in range(ROWS):
        for t in range(TOKENS):
            chosen = random.permutation(visible(b, t))[:top_k]
            # Holes may stand anywhere.
            indices[b, t, random.permutation(top_k)[: len(chosen)]] = chosen
    return indices


def test_selected_attention_and_its_gradients_follow_the_closed_form():
    value_width, indices = 4, random_selection(5, 3)
    query, latent, cotangent = normals(6, (ROWS, TOKENS, 2, 6), (ROWS, TOKENS, 6), (ROWS, TOKENS, 2, value_width))
    out, dquery, dlatent = (np.zeros_like(x) for x in (cotangent, query, latent))
    for b in range(ROWS):
        for t in range(TOKENS):
            keys = indices[b, t][indices[b, t] >= 0]
            for h in range(2 if len(keys) else 0):
                weights = softmax(SCALE * latent[b, keys] @ query[b, t, h])
                out[b, t, h] = weights @ latent[b, keys, :value_width]
                delta = cotangent[b, t, h] @ out[b, t, h]
                dscores = weights * (latent[b, keys, :value_width] @ cotangent[b, t, h] - delta)
                dquery[b, t, h] = SCALE * dscores @ latent[b, keys]
                dlatent[b, keys] += SCALE * np.outer(dscores, query[b, t, h])
                dlatent[b, keys, :value_width] += np.outer(weights, cotangent[b, t, h])

    with jax.enable_x64(True):
        for how in IMPLEMENTATIONS:
            found, gradients = value_and_gradients(
                lambda query, latent, how=how: (
                    selected_attention(
                        query, latent, jnp.asarray(indices), scale=SCALE, value_width=value_width, **how
                    ).mixed
                ),
                (query, latent),
                cotangent,
            )
            for one, other in zip((found, *gradients), (out, dquery, dlatent), strict=True):
                assert_close(one, other)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_indexer_loss_and_its_gradients_follow_the_closed_form(is_sparse):
    index_query, index_key, head_weight = index_arrays(7)
    query, key, cotangent = normals(8, (ROWS, TOKENS, 4, 6), (ROWS, TOKENS, 1 if is_sparse else 2, 6), (ROWS, TOKENS))
    indices = random_selection(9, 3) if is_sparse else None
    given_indices = jnp.asarray(indices) if is_sparse else None
    scores = index_scores(index_query, index_key, head_weight)
    loss = np.zeros((ROWS, TOKENS))
    dindex_query, dindex_key, dhead_weight = (np.zeros_like(x) for x in (index_query, index_key, head_weight))
    for b in range(ROWS):
        for t in range(TOKENS):
            keys = np.array(visible(b, t), int)
            if is_sparse:
                keys = indices[b, t][indices[b, t] >= 0]
            if not len(keys):
                continue
            groups = key.shape[2]
            target = sum(softmax(SCALE * key[b, keys, h * groups // 4] @ query[b, t, h]) for h in range(4))
            target = target / target.sum()
            predicted = softmax(scores[b, t, keys])
            loss[b, t] = target @ np.log(target / predicted)
            dscores = cotangent[b, t] * (predicted - target)
            activations = index_query[b, t] @ index_key[b, keys].T / np.sqrt(4)
            dhead_weight[b, t] = np.maximum(activations, 0) @ dscores
            dactivations = head_weight[b, t][:, None] * dscores[None] * (activations > 0) / np.sqrt(4)
            dindex_query[b, t] = dactivations @ index_key[b, keys]
            dindex_key[b, keys] += dactivations.T @ index_query[b, t]

    with jax.enable_x64(True):
        for how in IMPLEMENTATIONS:
            found, gradients = value_and_gradients(
                lambda *arrays, how=how: indexer_loss(*arrays, GIVEN_SEGMENTS, given_indices, scale=SCALE, **how),
                (index_query, index_key, head_weight, query, key),
                cotangent,
            )
            assert not np.asarray(found)[SEGMENTS == 0].any()
            assert not any(np.asarray(gradient).any() for gradient in gradients[3:])
            for one, other in zip((found, *gradients[:3]), (loss, dindex_query, dindex_key, dhead_weight), strict=True):
                assert_close(one, other)


def test_indexer_loss_refuses_selected_keys_of_many_heads():
    *index, key = map(jnp.asarray, (*index_arrays(10), *normals(11, (ROWS, TOKENS, 2, 6))))
    with pytest.raises(ValueError, match="got 2 key heads"):
        indexer_loss(*index, key, key, GIVEN_SEGMENTS, jnp.asarray(random_selection(9, 3)), scale=1.0)


def test_sums_that_should_be_deterministic_and_are_not_taken_in_integers_are_said_once(caplog):
    query, latent = map(jnp.asarray, normals(14, (ROWS, TOKENS, 2, 6), (ROWS, TOKENS, 6)))
    launcher.log_once.cache_clear()
    for is_deterministic in (False, True, True):
        selected_attention(
            query,
            latent,
            jnp.asarray(random_selection(5, 3)),
            scale=SCALE,
            value_width=4,
            is_deterministic=is_deterministic,
        )
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "selected_attention: gradients of keys are not summed in integers" in warning.message
    assert "needs a Hopper GPU" in warning.message


def test_scores_of_all_queries_never_exist_at_one_time():
    tokens, chunk = 96, 8
    index = normals(12, (1, tokens, 2, 3), (1, tokens, 3), (1, tokens, 2))
    query, latent = normals(13, (1, tokens, 2, 5), (1, tokens, 5))
    segments, key, how = jnp.ones((1, tokens), jnp.int32), latent[:, :, None], {"query_chunk_tokens": chunk}
    arrays = jax.tree.map(lambda x: x.astype(np.float32), (index, query, key))

    def everything(index, query, key):
        mixed = attention(query, key, key, segments, scale=SCALE, **how)
        indices = select_keys(*index, segments, top_k=4, **how)
        selected = selected_attention(query, key[:, :, 0], indices, scale=SCALE, value_width=5, **how).mixed
        losses = (indexer_loss(*index, query, key, segments, i, scale=SCALE, **how) for i in (None, indices))
        return mixed.sum() + selected.sum() + sum(loss.sum() for loss in losses)

    text = str(jax.make_jaxpr(jax.grad(everything, argnums=(0, 1, 2)))(*arrays))
    assert f"{chunk},{tokens}]" in text
    assert f"{tokens},{tokens}]" not in text and f"{tokens},4," not in text
