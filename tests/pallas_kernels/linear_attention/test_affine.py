"""Parts of a row whose initial state comes later give what the recurrence gives from that state."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_attention import pallas_triton, reference
from pallas_kernels.linear_attention.api import affine_delta_rule, delta_rule
from pallas_kernels.linear_attention.gates import DecayGate

DECAYS = {
    "bounded": lambda random, shape: -5 * random.uniform(0.9, 1, shape),
    "very fast": lambda random, shape: -80 * random.uniform(0.5, 1, shape),
    "hardly any": lambda random, shape: -1e-4 * random.uniform(0, 1, shape),
    "mixed": lambda random, shape: -np.exp(random.uniform(-9, 4.5, shape)),
}
# One document; and several, the first of which ends inside the row.
SEGMENTS = np.array([[1] * 37, [2] * 20 + [3] * 17], np.int32)
GIVEN_SEGMENTS = jnp.asarray(SEGMENTS)
NAMES = ("output", "state", "query", "key", "value", "log_decay", "beta", "initial_state")


def inputs(decay: str, *, is_scalar: bool) -> list[np.ndarray]:
    random, (rows, length) = np.random.default_rng(3), SEGMENTS.shape
    heads, key_width, value_width = 2, 3, 5
    query, key = random.normal(size=(2, rows, length, 1 if is_scalar else heads, key_width))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(rows, length, heads, value_width))
    log_decay = DECAYS[decay](random, (rows, length, heads) if is_scalar else (rows, length, heads, key_width))
    beta = random.uniform(0.2, 1, (rows, length, heads))
    return [query, key, value, log_decay, beta, random.normal(size=(rows, heads, key_width, value_width))]


@functools.cache
def run(implementation: Literal["recurrence", "xla", "reference", "pallas"]):
    """Jitted: output and last state from a given state, and the gradients of a weighted sum."""

    def results(arrays):
        query, key, value, log_decay, beta, state = arrays
        tokens = (query, key, value, log_decay, beta, GIVEN_SEGMENTS)
        if implementation == "recurrence":
            return delta_rule(*tokens, initial_state=state, implementation="reference")
        parts = affine_delta_rule(*tokens, chunk_tokens=16, implementation=implementation)
        output = parts.output + jnp.einsum("bshk,bhkv->bshv", parts.reach, state)
        return output, parts.state + jnp.einsum("bhkl,bhlv->bhkv", parts.transition, state)

    def loss(arrays):
        output, state = results(arrays)
        weights = (np.random.default_rng(7).normal(size=array.shape) for array in (output, state))
        return sum(jnp.vdot(*pair) for pair in zip((output, state), weights, strict=True)), (output, state)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels take both parts one after the other, and a gate; which kernels, does not matter here."""

    def take(query, key, value, decay, *rest, gate, initial_state):
        return reference.delta_rule(
            query, key, value, gate(decay) if gate else decay, *rest, initial_state=initial_state
        )

    monkeypatch.setattr(pallas_triton, "reason_against", lambda query, key, value: None)
    monkeypatch.setattr(pallas_triton, "delta_rule", take)


@pytest.mark.parametrize("is_scalar", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference", "pallas"])
@pytest.mark.usefixtures("kernels")
def test_the_affine_form_is_the_recurrence_in_values_and_gradients(implementation, is_scalar):
    with jax.enable_x64(True):
        for decay in DECAYS:
            arrays = inputs(decay, is_scalar=is_scalar)
            (_, found), gradients = run(implementation)(arrays)
            (_, expected), expected_gradients = run("recurrence")(arrays)
            pairs = zip((*found, *gradients), (*expected, *expected_gradients), strict=True)
            for name, (one, other) in zip(NAMES, pairs, strict=True):
                assert np.abs(one - other).max() <= 1e-12 * np.abs(other).max(), (decay, name)


@pytest.mark.parametrize("implementation", ["xla", "reference", "pallas"])
@pytest.mark.usefixtures("kernels")
def test_a_gate_gives_both_parts_their_decays(implementation):
    with jax.enable_x64(True):
        query, key, value, raw, beta, _ = map(jnp.asarray, inputs("mixed", is_scalar=False))
        gate = DecayGate(jnp.asarray([0.1, -0.2]), jnp.linspace(-1, 1, 6).reshape(2, 3), "softplus")
        rule = functools.partial(affine_delta_rule, implementation=implementation)
        found = rule(query, key, value, raw, beta, GIVEN_SEGMENTS, gate=gate)
        expected = rule(query, key, value, gate(raw), beta, GIVEN_SEGMENTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_reaches_behind_a_border():
    with jax.enable_x64(True):
        tokens = map(jnp.asarray, inputs("hardly any", is_scalar=False)[:5])
        parts = jax.jit(functools.partial(affine_delta_rule, implementation="xla"))(*tokens, GIVEN_SEGMENTS)
    assert not np.asarray(parts.transition)[1].any() and not np.asarray(parts.reach)[1, 20:].any()
    assert np.asarray(parts.transition)[0].any() and np.asarray(parts.reach)[1, 19].any()


def test_half_precision_keeps_states_wide():
    tokens = [jnp.asarray(array, jnp.bfloat16) for array in inputs("bounded", is_scalar=False)[:5]]
    parts = jax.jit(affine_delta_rule)(*tokens, GIVEN_SEGMENTS)
    assert [part.dtype for part in parts] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
