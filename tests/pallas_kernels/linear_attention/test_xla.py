"""The chunked delta rule against the token recurrence: values and all gradients, at every decay speed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_attention.api import delta_rule

ARGUMENTS = ("query", "key", "value", "log_decay", "beta", "initial_state")
# Log decay of each token and channel: lower bound of Kimi-K3, far below it, hardly any, and fast after slow.
DECAYS = {
    "bounded": lambda random, shape: -5 * random.uniform(0.9, 1, shape),
    "very fast": lambda random, shape: -80 * random.uniform(0.5, 1, shape),
    "slow": lambda random, shape: -1e-3 * random.uniform(0, 1, shape),
    "mixed": lambda random, shape: -np.exp(random.uniform(-9, 4.5, shape)),
}
# Documents of the two rows: boundaries at the edges of chunks and tiles, one-token documents, a padded tail.
DOCUMENTS = [(16, 48, 1, 1, 14, 48, 30), (5, 59, 40)]


def segments(length: int) -> np.ndarray:
    ids = np.zeros((len(DOCUMENTS), length), np.int32)
    for row, lengths in enumerate(DOCUMENTS):
        numbered = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:length]
        ids[row, : len(numbered)] = numbered
    return ids


def inputs(
    length: int, decay: str = "mixed", dtype=np.float64, *, key_heads: int = 2, is_scalar: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    random = np.random.default_rng(length)
    rows, heads, key_width, value_width = len(DOCUMENTS), 2, 3, 5
    query, key = random.normal(size=(2, rows, length, key_heads, key_width))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(rows, length, heads, value_width))
    log_decay = DECAYS[decay](random, (rows, length, heads) if is_scalar else (rows, length, heads, key_width))
    beta = random.uniform(0.2, 1, (rows, length, heads))
    state = random.normal(size=(rows, heads, key_width, value_width))
    return [array.astype(dtype) for array in (query, key, value, log_decay, beta, state)], segments(length)


@functools.cache
def run(implementation: str, chunk_tokens: int = 64):
    def loss(arrays, weights, segment_ids):
        *tokens, state = arrays
        results = delta_rule(
            *tokens,
            segment_ids,
            initial_state=state,
            implementation=implementation,
            chunk_tokens=chunk_tokens,
        )
        return sum(jnp.vdot(weight, result) for weight, result in zip(weights, results, strict=True)), results

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def evaluate(implementation: str, arrays, segment_ids, chunk_tokens: int = 64):
    """Output, last state, and the gradients in the order of ARGUMENTS."""
    random = np.random.default_rng(7)
    weights = [random.normal(size=shape).astype(arrays[2].dtype) for shape in (arrays[2].shape, arrays[5].shape)]
    (_, results), gradients = run(implementation, chunk_tokens)(arrays, weights, segment_ids)
    return jax.tree.map(np.asarray, [*results, *gradients])


def largest_error(found, expected) -> float:
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("length", "chunk_tokens"), [(1, 64), (15, 64), (16, 16), (63, 64), (65, 16), (130, 32), (130, 64)]
)
def test_chunks_equal_the_recurrence_in_values_and_gradients(length, chunk_tokens):
    with jax.enable_x64(True):
        for decay in DECAYS:
            arrays, segment_ids = inputs(length, decay)
            expected = evaluate("reference", arrays, segment_ids)
            found = evaluate("xla", arrays, segment_ids, chunk_tokens)
            for name, one, other in zip(("output", "state", *ARGUMENTS), found, expected, strict=True):
                error = largest_error([one], [other])
                assert error < 1e-10, (decay, name)


@pytest.mark.parametrize(("length", "chunk_tokens"), [(1, 64), (65, 16), (130, 64)])
def test_chunks_equal_the_recurrence_with_one_decay_a_head_and_shared_keys(length, chunk_tokens):
    with jax.enable_x64(True):
        for decay in DECAYS:
            arrays, segment_ids = inputs(length, decay, key_heads=1, is_scalar=True)
            expected = evaluate("reference", arrays, segment_ids)
            found = evaluate("xla", arrays, segment_ids, chunk_tokens)
            for name, one, other in zip(("output", "state", *ARGUMENTS), found, expected, strict=True):
                assert one.shape == other.shape
                assert largest_error([one], [other]) < 1e-10, (decay, name)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_one_decay_a_head_is_that_decay_in_every_channel_and_a_shared_key_is_a_repeated_one(implementation):
    with jax.enable_x64(True):
        (query, key, value, log_decay, *others), segment_ids = inputs(65, key_heads=1, is_scalar=True)
        spread = [np.repeat(array, 2, axis=2) for array in (query, key)]
        spread += [value, np.repeat(log_decay[..., None], key.shape[-1], axis=-1), *others]
        found = evaluate(implementation, [query, key, value, log_decay, *others], segment_ids)
        expected = evaluate(implementation, spread, segment_ids)
    for place in (2, 3):  # gradients of query and key
        expected[place] = expected[place].sum(axis=2, keepdims=True)
    expected[5] = expected[5].sum(axis=-1)
    for name, one, other in zip(("output", "state", *ARGUMENTS), found, expected, strict=True):
        assert largest_error([one], [other]) < 1e-12, name


def test_the_recurrence_equals_a_loop_in_numpy():
    with jax.enable_x64(True):
        (query, key, value, log_decay, beta, state), segment_ids = inputs(65)
        output, final_state = evaluate("reference", [query, key, value, log_decay, beta, state], segment_ids)[:2]
    for row in range(query.shape[0]):
        for head in range(query.shape[2]):
            matrix = state[row, head]
            for t in range(query.shape[1]):
                if t and segment_ids[row, t] != segment_ids[row, t - 1]:
                    matrix = np.zeros_like(matrix)
                k = key[row, t, head]
                forget = (np.eye(len(k)) - beta[row, t, head] * np.outer(k, k)) @ np.diag(
                    np.exp(log_decay[row, t, head])
                )
                matrix = forget @ matrix + beta[row, t, head] * np.outer(k, value[row, t, head])
                np.testing.assert_allclose(output[row, t, head], matrix.T @ query[row, t, head], atol=1e-12)
            np.testing.assert_allclose(final_state[row, head], matrix, atol=1e-12)


@pytest.mark.parametrize(
    ("implementation", "is_scalar"), [("reference", False), ("reference", True), ("xla", False), ("xla", True)]
)
def test_a_changed_document_moves_nothing_of_another(implementation, is_scalar):
    """Rows change in their first document and in the state that enters it; later ones keep every bit."""
    with jax.enable_x64(True):
        for decay in DECAYS:
            arrays, segment_ids = inputs(130, decay, is_scalar=is_scalar)
            others, _ = inputs(130, "slow" if decay == "very fast" else "very fast", is_scalar=is_scalar)
            first = segment_ids == 1
            changed = [
                np.where(first.reshape(*first.shape, *[1] * (old.ndim - 2)), other + 1, old)
                for old, other in zip(arrays[:5], others[:5], strict=True)
            ]
            changed[3] = np.minimum(changed[3], 0)
            before = evaluate(implementation, arrays, segment_ids)
            after = evaluate(implementation, [*changed, arrays[5] + 1], segment_ids)
            for name, one, other in zip(("output", "state", *ARGUMENTS), before, after, strict=True):
                if name == "initial_state":
                    continue
                moved = one != other if name == "state" else (one != other)[~first]
                assert not moved.any(), (decay, name)
            assert (before[0] != after[0])[first].any()


@pytest.mark.parametrize("is_scalar", [False, True])
def test_single_precision_stays_finite_and_close_at_every_decay_speed(is_scalar):
    for decay in DECAYS:
        arrays, segment_ids = inputs(130, decay, np.float32, is_scalar=is_scalar)
        found = evaluate("xla", arrays, segment_ids)
        assert all(np.isfinite(array).all() for array in found)
        assert largest_error(found, evaluate("reference", arrays, segment_ids)) < 1e-4, decay


def test_equal_keys_that_are_never_forgotten_keep_their_accuracy():
    """The hardest inverse: all keys equal, beta 1, no decay; powers of the matrix grow, its inverse does not."""
    arrays, segment_ids = inputs(130, "slow", np.float32)
    arrays[1] = np.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    arrays[3], arrays[4] = np.zeros_like(arrays[3]), np.ones_like(arrays[4])
    assert largest_error(evaluate("xla", arrays, segment_ids), evaluate("reference", arrays, segment_ids)) < 1e-4


def test_bfloat16_inputs_are_computed_in_float32():
    (query, key, value, log_decay, beta, state), segment_ids = inputs(65, "bounded", np.float32)
    query, key, value = (jnp.asarray(array, jnp.bfloat16) for array in (query, key, value))
    for implementation in ("xla", "reference"):
        call = jax.jit(functools.partial(delta_rule, implementation=implementation, initial_state=jnp.asarray(state)))
        output, final_state = call(query, key, value, log_decay, beta, segment_ids)
        wide = (array.astype(jnp.float32) for array in (query, key, value))
        expected, expected_state = call(*wide, log_decay, beta, segment_ids)
        assert output.dtype == jnp.bfloat16
        assert final_state.dtype == jnp.float32
        np.testing.assert_array_equal(output, expected.astype(jnp.bfloat16))
        np.testing.assert_array_equal(final_state, expected_state)


def test_a_chunk_that_is_no_power_of_two_times_a_tile_is_refused():
    arrays, segment_ids = jax.tree.map(jnp.asarray, inputs(15, dtype=np.float32))
    for chunk_tokens in (8, 48):
        with pytest.raises(ValueError, match=f"chunk_tokens is {chunk_tokens}"):
            delta_rule(*arrays[:5], segment_ids, chunk_tokens=chunk_tokens)


def test_value_heads_that_key_heads_do_not_divide_are_refused():
    (query, key, *others, _), segment_ids = inputs(15, dtype=np.float32)
    query, key = (np.repeat(array, 3, axis=2) for array in (query, key))
    with pytest.raises(ValueError, match="2 heads, no multiple of the 6"):
        delta_rule(*map(jnp.asarray, (query, key, *others)), jnp.asarray(segment_ids))
