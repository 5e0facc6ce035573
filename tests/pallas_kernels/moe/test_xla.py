"""Experts' MLP over sorted blocks against the masked loop: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels.moe.api import expert_mlp
from pallas_kernels.moe.grouping import group_rows

NUM_EXPERTS, WIDTH, HIDDEN, NUM_ROWS = 5, 6, 7, 83


def draw(dtype):
    random = np.random.default_rng(0)
    shapes = (
        (NUM_ROWS, WIDTH),
        (NUM_EXPERTS, WIDTH, HIDDEN),
        (NUM_EXPERTS, WIDTH, HIDDEN),
        (NUM_EXPERTS, HIDDEN, WIDTH),
    )
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def run(implementation, activation="situ"):
    @jax.jit
    def values_and_gradients(expert, cotangent, *arrays):
        outputs, transpose = jax.vjp(
            lambda rows, gate, up, down: expert_mlp(
                rows, expert, gate, up, down, activation=activation, beta=1.5, implementation=implementation
            ),
            *arrays,
        )
        return outputs, transpose(cotangent)

    return values_and_gradients


ROUTINGS = {
    "uneven": lambda random: random.choice([0, 1, 1, 1, 3, 4], NUM_ROWS),  # expert 2 takes none
    "with empty slots": lambda random: random.integers(-1, NUM_EXPERTS, NUM_ROWS),
    "all to one": lambda random: np.full(NUM_ROWS, 3),
    "all empty": lambda random: np.full(NUM_ROWS, -1),
    "blocks just full": lambda random: np.repeat([4, 2, -1], [16, 64, 3]),
}


@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_sorted_blocks_equal_the_masked_loop_in_float64(activation):
    with jax.enable_x64(True):
        arrays = draw(jnp.float64)
        random = np.random.default_rng(1)
        cotangent = jnp.asarray(random.normal(size=(NUM_ROWS, WIDTH)))
        fast, slow = run("xla", activation), run("reference", activation)
        for name, routing in ROUTINGS.items():
            expert = jnp.asarray(routing(random), jnp.int32)
            outputs, gradients = fast(expert, cotangent, *arrays)
            expected, expected_gradients = slow(expert, cotangent, *arrays)
            np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-12, err_msg=name)
            np.testing.assert_allclose(gradients[0], expected_gradients[0], rtol=0, atol=1e-12, err_msg=name)
            for gradient, wanted in zip(gradients[1:], expected_gradients[1:], strict=True):
                for e in range(NUM_EXPERTS):  # relative to each expert's own scale
                    scale = np.abs(wanted[e]).max()
                    assert np.abs(gradient[e] - wanted[e]).max() <= 1e-12 * scale, (name, e)
            is_empty = np.asarray(expert) < 0
            assert not np.any(np.asarray(outputs)[is_empty]) and not np.any(np.asarray(gradients[0])[is_empty])


def test_gradients_of_the_definition_are_differences_of_its_values():
    with jax.enable_x64(True):
        expert = jnp.asarray(np.random.default_rng(2).integers(-1, NUM_EXPERTS, NUM_ROWS), jnp.int32)

        @jax.jit
        def loss(*arrays):
            return jnp.sum(jnp.sin(expert_mlp(arrays[0], expert, *arrays[1:], activation="situ")))

        check_grads(loss, draw(jnp.float64), order=1, modes=["rev"], eps=1e-6, rtol=1e-6)


def test_an_empty_slot_is_not_read():
    rows, *weights = draw(jnp.float32)
    expert = jnp.zeros(NUM_ROWS, jnp.int32).at[7].set(-1)
    values, gradients = run("xla")(expert, jnp.ones_like(rows), rows.at[7].set(jnp.nan), *weights)
    assert np.all(np.isfinite(values)) and all(np.all(np.isfinite(gradient)) for gradient in gradients)


def test_bfloat16_stays_near_the_float32_result_for_every_implementation():
    arrays = draw(jnp.bfloat16)
    expert = jnp.asarray(np.random.default_rng(3).integers(-1, NUM_EXPERTS, NUM_ROWS), jnp.int32)
    cotangent = jnp.ones((NUM_ROWS, WIDTH), jnp.float32)
    expected, expected_gradients = run("reference")(expert, cotangent, *(array.astype(jnp.float32) for array in arrays))
    for implementation in ("xla", "reference"):
        outputs, gradients = run(implementation)(expert, cotangent.astype(jnp.bfloat16), *arrays)
        assert outputs.dtype == jnp.bfloat16
        for result, wanted in zip((outputs, *gradients), (expected, *expected_gradients), strict=True):
            assert np.abs(result.astype(jnp.float32) - wanted).max() <= 2e-2 * np.abs(wanted).max()


def test_rows_are_ordered_stably_and_ranked_inside_their_group():
    grouping = group_rows(jnp.asarray([2, -1, 0, 2, 0, 2], jnp.int32), 4)
    np.testing.assert_array_equal(grouping.order, [2, 4, 0, 3, 5, 1])
    np.testing.assert_array_equal(grouping.counts, [2, 0, 3, 0])
    np.testing.assert_array_equal(grouping.rank, [0, 0, 0, 1, 1, 2])
