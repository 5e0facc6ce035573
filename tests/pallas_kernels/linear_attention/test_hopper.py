"""The Hopper kernels of the delta rule, simulated on a CPU; `test_pallas_triton` compiles and runs them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.linear_attention import hopper, hopper_prepare, pallas_triton
from pallas_kernels.linear_attention.documents import document_starts

SETTINGS = pallas_triton.Settings(interpret=True, prepare_columns=128, gradient_columns=128, scan_width=128)


def draw(documents, heads, seed=0):
    """Tokens of decays down to -5, an entering state, gradients of output and leaving state, and segments."""
    random, length = np.random.default_rng(seed), sum(documents)
    query, key = random.normal(size=(2, 1, length, heads, 128))
    query, key = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (query, key))
    value, gradient = random.normal(size=(2, 1, length, heads, 128))
    log_decay = -5 / (1 + np.exp(-2 * random.normal(size=(1, length, heads, 128))))
    beta = random.uniform(0.2, 1, (1, length, heads))
    states = random.normal(size=(2, 1, heads, 128, 128))
    narrow = [jnp.asarray(array, jnp.bfloat16) for array in (query, key, value, gradient)]
    segments = np.repeat(np.arange(1, len(documents) + 1), documents)[None].astype(np.int32)
    return narrow, [jnp.asarray(array, jnp.float32) for array in (log_decay, beta, *states)], jnp.asarray(segments)


@jax.jit
def arguments_and_expected(narrow, wide, segments):
    """What the kernel reads, and the gradients of query, key, decay and beta by the kernels of Triton, interpreted."""
    query, key, value, output_gradient = narrow
    log_decay, beta, state, last_gradient = wide
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = pallas_triton._Calls(SETTINGS, query, value, log_decay)
    products, inverse, sums, depth, parts = call.prepare(query, key, value, log_decay, beta, first, last)
    states, written = call.scan(parts, products, state, keep_states=True)
    state_gradients, solved, _ = call.scan_back(parts, products, inverse, output_gradient, last_gradient)
    of_chunks = states, state_gradients, written, solved, output_gradient
    tokens = query, key, value, sums, depth, beta, first, last
    query_gradient, key_gradient, _, decay_gradient, beta_gradient = call.gradients(*tokens, *of_chunks)
    by_value = jnp.sum(solved.astype(jnp.float32) * value.astype(jnp.float32), axis=3)
    expected = query_gradient, key_gradient, decay_gradient, beta_gradient - by_value
    return (query, key, sums, beta, first, last, *of_chunks), expected


@pytest.mark.slow
@pytest.mark.parametrize("documents", [[192], [20, 28, 1, 79]])
def test_gradients_are_those_of_the_kernels_of_triton(documents):
    arguments, expected = arguments_and_expected(*draw(documents, 1))
    with launcher.simulated():
        found = jax.jit(hopper.gradients)(*arguments)
    for one, other, name in zip(found, expected, ("query", "key", "decay", "beta"), strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert np.isfinite(one).all(), name
        assert np.linalg.norm(one - other) < 2e-3 * np.linalg.norm(other), name


@jax.jit
def prepared_by_triton(narrow, wide, segments):
    """Arguments and results; one decay a head if `log_decay` has no axis of channels."""
    (query, key, value, _), (log_decay, beta, *_) = narrow, wide
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = pallas_triton._Calls(SETTINGS, query, value, log_decay)
    products, inverse, sums, _, parts = call.prepare(query, key, value, log_decay, beta, first, last)
    return (query, key, value, log_decay, beta, first, last), (products, inverse, sums, *parts)


@pytest.mark.slow
@pytest.mark.parametrize("is_scalar", [False, True])
def test_what_tokens_read_and_write_is_that_of_the_kernels_of_triton(is_scalar):
    narrow, (log_decay, *wide), segments = draw([20, 28, 1, 79], 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    arguments, expected = prepared_by_triton(narrow, [log_decay, *wide], segments)
    with launcher.simulated():
        products, inverse, sums, depth, parts = jax.jit(hopper_prepare.prepare)(*arguments)
    assert is_scalar or 0 < float(depth.max()) < 110
    for one, other in zip((products, inverse, sums, *parts), expected, strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert np.isfinite(one).all()
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)


def test_widths_the_kernel_cannot_take_are_said():
    assert hopper.reason_against(128, 128) is None
    assert hopper.reason_against(64, 128) == "needs widths of 128, got 64 and 128"
