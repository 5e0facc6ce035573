"""The Hopper kernels of the delta rule, simulated on a CPU; `test_pallas_triton` compiles and runs them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.linear_attention import (
    hopper,
    hopper_both_ways,
    hopper_carry,
    hopper_prepare,
    hopper_scalar,
    hopper_scan,
    pallas_triton,
)
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
    both = parts, products, inverse, value, beta, output_gradient, state, last_gradient
    (state_gradients, solved, _), (states, written) = call.scan_both_ways(*both)
    of_chunks = states, state_gradients, written, solved, output_gradient
    expected = call.gradients(query, key, sums, depth, beta, first, last, *of_chunks)
    return (query, key, sums, beta, first, last, *of_chunks), expected


def assert_near(found, expected, names, tolerance):
    for one, other, name in zip(found, expected, names, strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert np.isfinite(one).all(), name
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("documents", "is_scalar"), [([192], False), ([20, 28, 1, 79], False), ([20, 28, 1, 79], True)]
)
def test_gradients_are_those_of_the_kernels_of_triton(documents, is_scalar):
    narrow, (log_decay, *wide), segments = draw(documents, 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    arguments, expected = arguments_and_expected(narrow, [log_decay, *wide], segments)
    if is_scalar:  # takes what tokens write in two parts
        *before, written, solved, output_gradient = arguments
        arguments = *before, written / 2, solved, output_gradient, written / 2
    else:
        # The sums of the second chunk stay.
        arguments = *arguments, jnp.zeros((1, segments.shape[1] // 64, 1), jnp.int32).at[:, 1].set(1)
        *before, decay_gradient, by_key = expected
        expected = *before, decay_gradient.at[:, 64:128].set(arguments[2][:, 64:128]), by_key
    with launcher.simulated():
        found = jax.jit((hopper_scalar if is_scalar else hopper).gradients)(*arguments)
    assert_near(found, expected, ("query", "key", "decay", "beta"), 2e-3)


@jax.jit
def carried_by_triton(narrow, wide, segments):
    """What `scan` reads and its results, what `scan_both_ways` reads and its results, interpreted."""
    query, key, value, output_gradient = narrow
    log_decay, beta, state, last_gradient = wide
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = pallas_triton._Calls(SETTINGS, query, value, log_decay)
    products, inverse, *_, parts = call.prepare(query, key, value, log_decay, beta, first, last)
    forward = parts.from_state, parts.from_value, parts.reading, parts.writing, parts.kept, products, state
    both = parts, products, inverse, value, beta, output_gradient, state, last_gradient
    return forward, call.scan(parts, products, state), both, call.scan_both_ways(*both)


@pytest.mark.slow
@pytest.mark.parametrize("is_scalar", [False, True])
def test_states_are_carried_as_by_the_kernels_of_triton(is_scalar):
    narrow, (log_decay, *wide), segments = draw([20, 28, 1, 79, 128], 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    arguments, expected, _, _ = carried_by_triton(narrow, [log_decay, *wide], segments)
    with launcher.simulated():
        found = jax.jit(lambda *arrays: hopper_carry.launch("scan", hopper_scan.scan(*arrays)))(*arguments)
    assert_near(found[0], expected, ("output", "last"), 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_scalar", [False, True])
def test_states_and_their_gradients_are_carried_side_by_side_as_by_the_kernels_of_triton(is_scalar):
    """Where decays are one a head, what tokens write is told to the digits of float32."""
    narrow, (log_decay, beta, *states), segments = draw([20, 28, 1, 79, 128], 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    _, _, (parts, products, inverse, *others), (back, forward) = carried_by_triton(
        narrow, [log_decay, beta, *states], segments
    )
    with launcher.simulated():
        found = jax.jit(hopper_both_ways.scan_both_ways)(*parts, products, inverse, *others)
    assert_near(found[0][:3], back, ("state gradients", "solved", "first"), 2e-3)
    assert_near(found[1][:2], forward, ("states", "written"), 4e-3 if is_scalar else 2e-3)
    if not is_scalar:
        assert list(map(len, found)) == [3, 2]
        return
    value, solved = (np.asarray(array, np.float64) for array in (narrow[2], back[1]))
    expected = np.asarray(beta)[..., None] * solved, np.sum(solved * value, axis=3)
    assert_near(found[0][3:], expected, ("value", "beta"), 4e-3)
    of_chunks = (
        jnp.float32(parts.from_state),
        jnp.float32(narrow[2]) * beta[..., None],
        sum(map(jnp.float32, found[1][1:])),
    )
    from_state, value, written = (array.reshape(1, 4, 64, 1, 128) for array in of_chunks)
    from_value = jnp.einsum("bnhts,bnshv->bnthv", jnp.float32(inverse), value, precision="highest")
    erased = jnp.einsum("bnthk,bnhkv->bnthv", from_state, jnp.float32(found[1][0]), precision="highest")
    assert_near([written], [from_value - erased], ["written"], 2e-5)


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
    names = ("products", "inverse", "sums", "from state", "writing", "reading", "from value", "kept")
    assert_near((products, inverse, sums, *parts), expected, names, 1e-3)


def test_widths_the_kernel_cannot_take_are_said():
    assert hopper.reason_against(128, 128) is None
    assert hopper.reason_against(64, 128) == "needs widths of 128, got 64 and 128"
