"""Short convolution and L2 normalisation against their formulas, and where they saturate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_attention.api import convolution_tail, l2_normalise, short_convolution

SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 0], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0]], np.int32)


def looped_convolution(inputs, taps, segment_ids):
    output = np.zeros_like(inputs)
    width = len(taps)
    for row, t in np.ndindex(*segment_ids.shape):
        for tap in range(width):
            source = t - (width - 1) + tap
            if source >= 0 and segment_ids[row, source] == segment_ids[row, t]:
                output[row, t] += taps[tap] * inputs[row, source]
    return output / (1 + np.exp(-output))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_convolution_equals_a_loop_in_numpy(width):
    random = np.random.default_rng(0)
    inputs, taps = random.normal(size=(*SEGMENTS.shape, 2, 3)), random.normal(size=(width, 2, 3))
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(short_convolution)(inputs, taps, SEGMENTS))
    np.testing.assert_allclose(found, looped_convolution(inputs, taps, SEGMENTS), rtol=0, atol=1e-14)


@pytest.mark.parametrize("cut", [1, 4, 5, 6, 11])
def test_a_row_cut_in_two_gives_the_convolution_of_the_whole(cut):
    random = np.random.default_rng(cut)
    inputs, taps = random.normal(size=(*SEGMENTS.shape, 3)), random.normal(size=(4, 3))

    def loss(inputs, taps, pieces):
        outputs, tail, start = [], None, 0
        for end in pieces:
            piece, ids = inputs[:, start:end], jnp.asarray(SEGMENTS[:, start:end])
            if tail is not None:  # of another document if one starts here
                goes_on = SEGMENTS[:, start] == SEGMENTS[:, start - 1]
                tail = jnp.where(jnp.asarray(goes_on)[:, None, None], tail, 0)
            outputs.append(short_convolution(piece, taps, ids, initial_tail=tail))
            tail, start = convolution_tail(piece, ids, len(taps), initial_tail=tail), end
        output = jnp.concatenate(outputs, axis=1)
        return jnp.vdot(output, jnp.asarray(random.permutation(output.size).reshape(output.shape) * 1.0)), output

    with jax.enable_x64(True):
        arrays = jnp.asarray(inputs), jnp.asarray(taps)
        length, results = SEGMENTS.shape[1], []
        for pieces in ((length,), (cut, length)):
            random = np.random.default_rng(9)
            results.append(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arrays, pieces))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_the_first_tokens_of_a_document_see_nothing_of_the_one_before():
    random = np.random.default_rng(1)
    inputs, taps = random.normal(size=(*SEGMENTS.shape, 3)), random.normal(size=(4, 3))
    weight = np.where(SEGMENTS[..., None] > 1, random.normal(size=inputs.shape), 0)
    changed = np.where(SEGMENTS[..., None] == 1, 100.0, inputs)

    def loss(inputs):
        output = short_convolution(inputs, jnp.asarray(taps), jnp.asarray(SEGMENTS))
        return jnp.vdot(output, weight), output

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        (before, output_before), (after, output_after) = gradient(inputs), gradient(changed)
    first = SEGMENTS == 1
    np.testing.assert_array_equal(output_before[~first], output_after[~first])
    np.testing.assert_array_equal(before[~first], after[~first])
    np.testing.assert_array_equal(before[first], 0)


def test_normalisation_adds_its_epsilon_to_the_sum_of_squares():
    inputs = np.array([[3e-4, 4e-4], [0.0, 0.0], [3.0, 4.0]])
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(l2_normalise)(inputs))
        gradient = np.asarray(jax.jit(jax.grad(lambda array: l2_normalise(array).sum()))(inputs))
    np.testing.assert_allclose(found, inputs / np.sqrt((inputs**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-14)
    assert np.isfinite(gradient).all()
