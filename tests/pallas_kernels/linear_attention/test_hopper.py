"""The Hopper kernels of the delta rule, simulated on a CPU; `test_pallas_triton` compiles and runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launcher
from pallas_kernels.linear_attention import (
    hopper,
    hopper_both_ways,
    hopper_carry,
    hopper_prepare,
    hopper_scalar,
    hopper_scan,
    launches,
    pallas_triton,
)
from pallas_kernels.linear_attention.documents import document_starts
from pallas_kernels.linear_attention.gates import Form

SETTINGS = launches.Settings(interpret=True, prepare_columns=128, gradient_columns=128, scan_width=128)


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


def gate_of(form, log_decay):
    """What a gate makes decays of, as small and as large, of: its input in bfloat16, and its rows."""
    heads = log_decay.shape[2]
    raw = jnp.log(-log_decay / (5.01 + log_decay))
    bias = jnp.linspace(-0.5, 0.5, heads * 128).reshape(heads, 128)
    return raw.astype(jnp.bfloat16), form.rows(jnp.linspace(-0.2, 0.2, heads), bias)


@functools.partial(jax.jit, static_argnums=3)
def arguments_and_expected(narrow, wide, segments, form=None):
    """What the kernel reads, and the gradients of query, key, decay and beta by the kernels of Triton, interpreted.

    With a `form` the decay is the input of its gate, whose arguments, and whose gradients, come last.
    """
    query, key, value, output_gradient = narrow
    decay, beta, state, last_gradient = wide
    gated = gate_of(form, decay) if form else ()
    decay = gated[0] if form else decay
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = launches.Launches(SETTINGS, query, value, decay, form)
    products, inverse, sums, depths, parts = call.prepare(query, key, value, decay, beta, first, last, *gated[1:])
    both = parts, products, inverse, value, beta, output_gradient, state, last_gradient
    (state_gradients, solved, _), (states, written) = call.scan_both_ways(*both)
    of_chunks = states, state_gradients, written, solved, output_gradient
    expected = call.gradients(query, key, sums, depths, beta, first, last, *of_chunks, gated=gated)
    return (query, key, sums, beta, first, last, *of_chunks), gated, expected


def simulate(function, *arguments):
    """Results of kernels simulated on a CPU, whose warpgroups and copies wait for each other."""
    with launcher.simulated(detect_races=True):
        found = jax.block_until_ready(jax.jit(function)(*arguments))
    # JAX 0.11.2 takes a copy for a race that fills one of several slots again, though it waits for their reader.
    assert jax.__version_info__ >= (0, 11) or not launcher.has_raced()
    return found


def assert_near(found, expected, names, tolerance):
    for one, other, name in zip(found, expected, names, strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert np.isfinite(one).all(), name
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("documents", "is_scalar"), [([64], False), ([20, 28, 1, 79, 192], False), ([20, 28, 1, 79, 192], True)]
)
def test_gradients_are_those_of_the_kernels_of_triton(documents, is_scalar):
    narrow, (log_decay, *wide), segments = draw(documents, 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    arguments, _, expected = arguments_and_expected(narrow, [log_decay, *wide], segments)
    if is_scalar:  # takes what tokens write in two parts
        *before, written, solved, output_gradient = arguments
        arguments = *before, written / 2, solved, output_gradient, written / 2
    else:
        # The sums of the second chunk stay.
        arguments = *arguments, jnp.zeros((1, segments.shape[1] // 64, 1), jnp.int32).at[:, 1:2].set(1)
        *before, decay_gradient, by_key = expected
        expected = *before, decay_gradient.at[:, 64:128].set(arguments[2][:, 64:128]), by_key
    found = simulate((hopper_scalar if is_scalar else hopper).gradients, *arguments)
    assert_near(found, expected, ("query", "key", "decay", "beta"), 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_gradients_of_a_gate_are_those_of_the_kernels_of_triton(kind):
    narrow, wide, segments = draw([20, 28, 1, 79, 192], 1)
    form = Form(kind, -5.0)
    arguments, gated, expected = arguments_and_expected(narrow, wide, segments, form)
    # The input of the second chunk stays.
    is_deep = jnp.zeros((1, segments.shape[1] // 64, 1), jnp.int32).at[:, 1:2].set(1)
    query, key, raw, by_key, by_bias, by_rate = expected
    raw = raw.at[:, 64:128].set(gated[0][:, 64:128])
    found = simulate(functools.partial(hopper.gradients, form=form), *arguments, is_deep, *gated)
    names = ("query", "key", "raw", "beta", "bias", "rate")
    found = *found[:4], jnp.sum(found[4], axis=3), found[5]
    assert_near(found, (query, key, raw, by_key, jnp.sum(by_bias, axis=3), by_rate), names, 3e-3)


@jax.jit
def carried_by_triton(narrow, wide, segments):
    """What `scan` reads and its results, what `scan_both_ways` reads and its results, interpreted."""
    query, key, value, output_gradient = narrow
    log_decay, beta, state, last_gradient = wide
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = launches.Launches(SETTINGS, query, value, log_decay)
    products, inverse, *_, parts = call.prepare(query, key, value, log_decay, beta, first, last)
    forward = parts.from_state, parts.from_value, parts.reading, parts.writing, parts.kept, products, state
    both = parts, products, inverse, value, beta, output_gradient, state, last_gradient
    return forward, call.scan(parts, products, state), both, call.scan_both_ways(*both)


@pytest.mark.slow
@pytest.mark.parametrize("is_scalar", [False, True])
def test_states_are_carried_as_by_the_kernels_of_triton(is_scalar):
    narrow, (log_decay, *wide), segments = draw([20, 28, 1, 79, 192], 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    arguments, expected, _, _ = carried_by_triton(narrow, [log_decay, *wide], segments)
    found = simulate(lambda *arrays: hopper_carry.launch("scan", hopper_scan.scan(*arrays)), *arguments)
    assert_near(found[0], expected, ("output", "last"), 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_scalar", [False, True])
def test_states_and_their_gradients_are_carried_side_by_side_as_by_the_kernels_of_triton(is_scalar):
    """Where decays are one a head, what tokens write is told to the digits of float32."""
    narrow, (log_decay, beta, *states), segments = draw([20, 28, 1, 79, 192], 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    _, _, (parts, products, inverse, *others), (back, forward) = carried_by_triton(
        narrow, [log_decay, beta, *states], segments
    )
    found = simulate(hopper_both_ways.scan_both_ways, *parts, products, inverse, *others)
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
    from_state, value, written = (array.reshape(1, 5, 64, 1, 128) for array in of_chunks)
    from_value = jnp.einsum("bnhts,bnshv->bnthv", jnp.float32(inverse), value, precision="highest")
    erased = jnp.einsum("bnthk,bnhkv->bnthv", from_state, jnp.float32(found[1][0]), precision="highest")
    assert_near([written], [from_value - erased], ["written"], 2e-5)


@functools.partial(jax.jit, static_argnums=3)
def prepared_by_triton(narrow, wide, segments, form=None):
    """Arguments and results; one decay a head if it has no axis of channels."""
    (query, key, value, _), (decay, beta, *_) = narrow, wide
    decay, *of_gate = gate_of(form, decay) if form else (decay,)
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = launches.Launches(SETTINGS, query, value, decay, form)
    arguments = query, key, value, decay, beta, first, last, *of_gate
    products, inverse, sums, _, parts = call.prepare(*arguments)
    return arguments, (products, inverse, sums, *parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_scalar", "form"), [(False, None), (True, None), (False, Form("bounded", -5.0)), (False, Form("softplus", 0))]
)
def test_what_tokens_read_and_write_is_that_of_the_kernels_of_triton(is_scalar, form):
    narrow, (log_decay, *wide), segments = draw([20, 28, 1, 79, 192], 1)
    log_decay = log_decay[..., 0] if is_scalar else log_decay
    arguments, expected = prepared_by_triton(narrow, [log_decay, *wide], segments, form)
    prepare = functools.partial(hopper_prepare.prepare, form=form)
    products, inverse, sums, parts, depths = simulate(prepare, *arguments)
    assert depths is None if is_scalar else 0 < float(depths.max()) < 110
    names = ("products", "inverse", "sums", "from state", "writing", "reading", "from value", "kept")
    assert_near((products, inverse, sums, *parts), expected, names, 1e-3)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_race_between_warpgroups_is_seen(is_waiting):
    def body(source, target, *, buffer, is_written):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            buffer[...] = launcher.load(source, plgpu.Layout.WG_STRIDED((128,), 1)) + 1
            plgpu.barrier_arrive(is_written)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            if is_waiting:
                plgpu.barrier_wait(is_written)
            target[...] = buffer[...]
            if not is_waiting:
                plgpu.barrier_wait(is_written)

    def launch(source):
        output = jax.ShapeDtypeStruct((128,), jnp.float32)
        scratch = {"buffer": plgpu.SMEM((128,), jnp.float32), "is_written": plgpu.Barrier(num_arrivals=1)}
        grid = {"grid": (1,), "grid_names": ("worker",), "num_threads": 2, "thread_name": "warpgroup"}
        return launcher.launch(body, (source,), [output], scratch=scratch, name="race", **grid)[0]

    with launcher.simulated(detect_races=True):
        jax.block_until_ready(jax.jit(launch)(jnp.zeros(128)))
    assert launcher.has_raced() != is_waiting


def test_registers_that_a_block_never_has_are_refused():
    assert launcher.registers(240, 240, 24) == (240, 240, 24)
    with pytest.raises(ValueError, match="warpgroups that start with 168 a thread each"):
        launcher.registers(240, 240, 32)


def test_widths_the_kernel_cannot_take_are_said():
    assert hopper.reason_against(128, 128) is None
    assert hopper.reason_against(64, 128) == "needs widths of 128, got 64 and 128"
