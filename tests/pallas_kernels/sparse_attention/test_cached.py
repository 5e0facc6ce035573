"""Attention over a cache gives the newest tokens of a row what attention over the whole row gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention.api import (
    attention,
    cached_attention,
    select_cached_keys,
    select_keys,
    selected_attention,
)

# Two rows of 11 and 7 tokens, whose last 4 and 3 are new; a cache with room for 16.
LENGTHS, NEW, CAPACITY = np.array([11, 7]), np.array([4, 3]), 16
SEGMENTS = (np.arange(CAPACITY) < LENGTHS[:, None]).astype(np.int32)
PLACES = (LENGTHS - NEW)[:, None] + np.arange(4)
POSITIONS = np.where(LENGTHS[:, None] > PLACES, PLACES, -1).astype(np.int32)


def newest(whole):
    """[2, 4, ...]: the new tokens of a whole row's [2, 16, ...], zeros in padding."""
    taken = np.take_along_axis(np.asarray(whole), PLACES.reshape(2, 4, *[1] * (whole.ndim - 2)), axis=1)
    return np.where((POSITIONS >= 0).reshape(2, 4, *[1] * (whole.ndim - 2)), taken, 0)


def draw(*shape):
    return np.random.default_rng(len(shape) + shape[-1]).normal(size=(2, CAPACITY, *shape))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("chunk", [2, 512])
def test_the_newest_tokens_get_what_the_whole_row_gives_them(implementation, chunk):
    query, key, value = draw(6, 5), draw(2, 5), draw(2, 3)
    options = {"scale": 0.4, "query_chunk_tokens": chunk, "implementation": implementation}
    with jax.enable_x64(True):
        query, key, value = map(jnp.asarray, (query, key, value))
        expected = attention(query, key, value, jnp.asarray(SEGMENTS), **options)
        # Behind a row's tokens a cache holds anything.
        key = jnp.where(SEGMENTS[..., None, None] > 0, key, 1e6)
        found = cached_attention(jnp.asarray(newest(query)), key, value, jnp.asarray(POSITIONS), **options)
    np.testing.assert_allclose(found, newest(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("top_k", [3, 20])
def test_the_newest_tokens_select_the_keys_that_they_select_in_the_whole_row(implementation, top_k):
    index_query, index_key, weight = draw(2, 4), draw(4), draw(2)
    query, latent = draw(3, 5), draw(5)
    options = {"top_k": top_k, "query_chunk_tokens": 3, "implementation": implementation}
    with jax.enable_x64(True):
        arrays = [jnp.asarray(array) for array in (index_query, index_key, weight)]
        expected = select_keys(*arrays, jnp.asarray(SEGMENTS), **options)
        new_query, new_weight = jnp.asarray(newest(index_query)), jnp.asarray(newest(weight))
        found = select_cached_keys(new_query, arrays[1], new_weight, jnp.asarray(POSITIONS), **options)
        np.testing.assert_array_equal(found, np.where((POSITIONS >= 0)[..., None], newest(expected), -1))
        options = {"scale": 0.4, "value_width": 3, "implementation": implementation}
        whole = selected_attention(jnp.asarray(query), jnp.asarray(latent), expected, **options).mixed
        mixed = selected_attention(jnp.asarray(newest(query)), jnp.asarray(latent), found, **options).mixed
    np.testing.assert_allclose(mixed, newest(whole), rtol=0, atol=1e-13)
