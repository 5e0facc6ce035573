"""Attention residual against NumPy: values, the closed-form backward pass, the masked last source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_residual.api import attention_residual

EPSILON = 1e-5


def arguments(num_sources: int = 4, shape: tuple[int, ...] = (2, 5), width: int = 6):
    random = np.random.default_rng(0)
    sources = random.normal(size=(num_sources, *shape, width)) * random.uniform(0.003, 3, (num_sources, *shape, 1))
    return sources, random.normal(size=width), random.normal(size=width), random.normal(size=(*shape, width))


def numpy_mix(sources, norm_scale, query):
    inverse_rms = 1 / np.sqrt(np.mean(sources**2, axis=-1, keepdims=True) + EPSILON)
    normalised = sources * inverse_rms
    scores = np.sum(normalised * norm_scale * query, axis=-1, keepdims=True)
    shares = np.exp(scores - scores.max(axis=0)) / np.exp(scores - scores.max(axis=0)).sum(axis=0)
    return np.sum(shares * sources, axis=0), shares, normalised, inverse_rms


def numpy_gradients(sources, norm_scale, query, cotangent):
    """The closed form, written from the paper's formula."""
    mixed, shares, normalised, inverse_rms = numpy_mix(sources, norm_scale, query)
    direction = norm_scale * query
    to_score = shares * np.sum(cotangent * (sources - mixed), axis=-1, keepdims=True)
    to_direction = np.sum(to_score * normalised, axis=(0, 1, 2))
    to_normalised = to_score * direction
    to_sources = shares * cotangent + inverse_rms * (
        to_normalised - normalised * np.mean(to_normalised * normalised, axis=-1, keepdims=True)
    )
    return to_sources, to_direction * query, to_direction * norm_scale


def mix_and_gradients(sources, norm_scale, query, cotangent, is_live=None):
    def mix(sources, norm_scale, query):
        return attention_residual(tuple(sources), norm_scale, query, epsilon=EPSILON, is_live=is_live)

    mixed, pull = jax.vjp(mix, jnp.asarray(sources), jnp.asarray(norm_scale), jnp.asarray(query))
    return mixed, *pull(jnp.asarray(cotangent))


def assert_equal_closed_form(actual, arrays):
    expected = (numpy_mix(*arrays[:3])[0], *numpy_gradients(*arrays))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13 * np.abs(other).max())


def test_values_and_gradients_equal_the_closed_form():
    with jax.enable_x64(True):
        arrays = arguments()
        assert_equal_closed_form(jax.jit(mix_and_gradients)(*arrays), arrays)


def test_with_a_scale_the_mix_is_normalised_in_values_and_gradients():
    with jax.enable_x64(True):
        sources, norm_scale, query, cotangent = map(jnp.asarray, arguments())
        scale = jnp.asarray(np.random.default_rng(1).normal(size=query.shape))

        def normed(sources, norm_scale, query, scale):
            mix = attention_residual(tuple(sources), norm_scale, query, epsilon=EPSILON)
            return mix / jnp.sqrt(jnp.mean(mix**2, axis=-1, keepdims=True) + EPSILON) * scale[None, None, :]

        def together(sources, norm_scale, query, scale):
            return attention_residual(tuple(sources), norm_scale, query, epsilon=EPSILON, output_scale=scale)

        results = []
        for function in (normed, together):
            result, pull = jax.vjp(function, sources, norm_scale, query, scale)
            results.append((result, *pull(cotangent)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13 * np.abs(other).max())


def test_a_zero_query_gives_the_plain_mean():
    sources, norm_scale, query, _ = map(jnp.asarray, arguments())
    mixed = attention_residual(tuple(sources), norm_scale, 0 * query, epsilon=EPSILON)
    np.testing.assert_allclose(mixed, sources.mean(axis=0), atol=1e-6)


def test_the_last_source_takes_part_only_when_it_is_live():
    with jax.enable_x64(True):
        sources, *others = arguments()
        sources[-1] = 0
        run = jax.jit(mix_and_gradients)
        live = run(sources, *others, jnp.asarray(True))
        mixed, to_sources, *to_others = run(sources, *others, jnp.asarray(False))
    assert_equal_closed_form(live, (sources, *others))
    assert_equal_closed_form((mixed, to_sources[:-1], *to_others), (sources[:-1], *others))
    assert np.all(np.asarray(to_sources[-1]) == 0)


def test_bfloat16_sources_are_mixed_in_float32():
    sources, norm_scale, query, _ = arguments()
    rounded = tuple(jnp.asarray(source, jnp.bfloat16) for source in sources)
    scale, query = jnp.asarray(norm_scale, jnp.float32), jnp.asarray(query, jnp.float32)
    mixed = attention_residual(rounded, scale, query, epsilon=EPSILON)
    exact = attention_residual(tuple(source.astype(jnp.float32) for source in rounded), scale, query, epsilon=EPSILON)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(mixed, exact.astype(jnp.bfloat16))


def test_a_mask_without_another_source_is_refused():
    source = jnp.ones((3, 2))
    with pytest.raises(ValueError, match="1 sources"):
        attention_residual((source,), source[0], source[0], epsilon=EPSILON, is_live=jnp.asarray(True))
