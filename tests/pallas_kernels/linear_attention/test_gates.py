"""The decay gate against its formulas, as XLA computes it and as kernels do, and where it saturates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_attention.gates import LOG2_E, DecayGate, Form, Functions

KINDS = ("bounded", "softplus")


def test_a_gate_is_finite_where_it_saturates():
    values = np.array([-1e30, -1e4, -1.0, 0.0, 1e-30, 1.0, 1e4, 1e30], np.float32)
    raw = jnp.asarray(np.broadcast_to(values[None, :, None, None], (1, 8, 4, 2)))
    log_rate = jnp.asarray([-200.0, 0.0, 50.0, 200.0])
    for kind in KINDS:
        evaluate = lambda raw, *of_gate, kind=kind: DecayGate(*of_gate, kind)(raw)  # noqa: E731
        decay, pull = jax.vjp(evaluate, raw, log_rate, jnp.zeros((4, 2)))
        raw_gradient, _, _ = pull(jnp.ones_like(decay))
        assert not np.isnan(decay).any()
        assert (np.asarray(decay) <= 0).all()
        assert np.isfinite(raw_gradient).all()
        if kind == "bounded":
            assert np.isfinite(decay).all() and (np.asarray(decay) >= -5).all()
            assert all(np.isfinite(gradient).all() for gradient in pull(jnp.ones_like(decay)))


@pytest.mark.parametrize("channels", [(), (4,)])
def test_gates_equal_their_formulas(channels):
    random = np.random.default_rng(2)
    raw, bias = random.normal(size=(2, 5, 3, *channels)), random.normal(size=(3, *channels))
    log_rate = random.normal(size=3)
    shifted, rate = raw + bias, np.exp(log_rate).reshape(3, *(1,) * len(channels))
    with jax.enable_x64(True):
        arrays = [jnp.asarray(array) for array in (log_rate, bias)]
        bounded = DecayGate(*arrays, "bounded", lower_bound=-3.0)(jnp.asarray(raw))
        softplus = DecayGate(*arrays, "softplus")(jnp.asarray(raw))
    np.testing.assert_allclose(bounded, -3 / (1 + np.exp(-rate * shifted)), rtol=1e-14)
    np.testing.assert_allclose(softplus, -rate * np.log1p(np.exp(shifted)), rtol=1e-13)


def computed(form, log_rate, bias, raw):
    """What kernels compute, of inputs [R, K], one row a head: log decay and its derivatives by raw and by log_rate."""
    shift, rate = jnp.moveaxis(form.rows(log_rate, bias), 1, 0)
    decay = form.log2_decay(raw, shift, rate, Functions()) / LOG2_E
    by_raw, by_rate = form.gradients(jnp.ones_like(raw), raw, shift, rate, Functions())
    return decay, by_raw, jax.vmap(form.finish_rate, (1, None), 1)(by_rate, log_rate)


@pytest.mark.parametrize("kind", KINDS)
def test_what_kernels_compute_has_the_digits_of_float32_wherever_the_gate_is_open(kind):
    """From a decay that hardly is to a saturated one, each number by itself: a sum would hide the small ones."""
    rates, bias = np.array([[1e-3], [1.0], [3.0]]), 0.25
    raw = np.broadcast_to(np.linspace(-30, 30, 2401), (3, 2401))
    shifted = raw + bias
    if kind == "bounded":
        share = 1 / (1 + np.exp(-rates * shifted))
        slope = -3 * share / (1 + np.exp(rates * shifted))
        expected = -3 * share, slope * rates, slope * rates * shifted
    else:
        softplus = np.log1p(np.exp(shifted))
        expected = -rates * softplus, -rates / (1 + np.exp(-shifted)), -rates * softplus
    log_rate, bias = jnp.asarray(np.log(rates[:, 0]), jnp.float32), jnp.full((3, 2401), bias)
    found = computed(Form(kind, -3.0), log_rate, bias, jnp.asarray(raw, jnp.float32))
    for one, other in zip(found, expected, strict=True):
        # An exponent of up to 131 has a relative error of 2^-24; slopes beyond e^-82 are hardly normal numbers.
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=1e-35)


@pytest.mark.parametrize("kind", KINDS)
def test_what_kernels_compute_is_finite_where_it_saturates_and_a_tail_does_not_decay(kind):
    log_rate = DecayGate(jnp.asarray([-200.0, 0.0, 200.0]), jnp.zeros((3, 1)), kind).limited_log_rate()
    raw = jnp.broadcast_to(jnp.asarray([[-1e30, -1e4, -1.0, 0.0, 1e-30, 1.0, 1e4, 1e30]]), (3, 8))
    for array in computed(Form(kind, -5.0), log_rate, jnp.zeros((3, 8)), raw):
        assert not np.isnan(array).any()
        assert np.isfinite(array).all() or kind == "softplus"
    bias = jnp.broadcast_to(jnp.asarray([[-1e4, 0.0, 1e4]]), (3, 3))
    lowest = jnp.full((3, 3), jnp.finfo(jnp.bfloat16).min, jnp.float32)
    for array in computed(Form(kind, -5.0), log_rate, bias, lowest):
        assert (np.abs(array) < 1e-10).all()
