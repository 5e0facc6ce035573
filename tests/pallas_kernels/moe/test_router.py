"""Choosing and weighing experts against NumPy written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe.api import router_logits, router_scores, select_experts, weigh_experts


def scores_by_formula(logits, scoring):
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def select_by_formula(scores, bias, experts_per_token, num_groups, top_groups):
    index, threshold = [], []
    for biased in scores + bias[None, :]:
        groups = np.split(np.arange(len(biased)), num_groups)
        group_scores = [np.sort(biased[group])[-2:].sum() for group in groups]
        best_groups = np.argsort(-np.array(group_scores), kind="stable")[:top_groups]
        allowed = np.sort(np.concatenate([groups[g] for g in best_groups]))
        order = allowed[np.argsort(-biased[allowed], kind="stable")]
        index.append(order[:experts_per_token])
        threshold.append(biased[order[min(experts_per_token, len(order) - 1)]])
    return np.array(index), np.array(threshold)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2)])
def test_selection_and_weights_follow_the_formulas(scoring, num_groups, top_groups):
    random = np.random.default_rng(0)
    logits, bias = random.normal(size=(37, 12)), random.normal(size=12) * 0.3
    with jax.enable_x64(True):
        selection = select_experts(
            jnp.asarray(logits),
            jnp.asarray(bias),
            experts_per_token=3,
            scoring=scoring,
            num_groups=num_groups,
            top_groups=top_groups,
        )
        scores = scores_by_formula(logits, scoring)
        index, threshold = select_by_formula(scores, bias, 3, num_groups, top_groups)
        np.testing.assert_array_equal(selection.index, index)
        np.testing.assert_allclose(selection.threshold, threshold, rtol=0, atol=1e-14)
        for renormalise in (True, False):
            weights = weigh_experts(
                jnp.asarray(logits), selection.index, scoring=scoring, renormalise=renormalise, scale=2.446
            )
            expected = np.take_along_axis(scores, index, axis=1)
            expected = expected / expected.sum(axis=1, keepdims=True) if renormalise else expected
            np.testing.assert_allclose(weights, 2.446 * expected, rtol=1e-14)


def test_the_lower_of_equal_experts_comes_first():
    logits = jnp.zeros((3, 8)).at[1, 5].set(1.0)
    selection = select_experts(logits, jnp.zeros(8), experts_per_token=3, scoring="sigmoid")
    np.testing.assert_array_equal(selection.index, [[0, 1, 2], [5, 0, 1], [0, 1, 2]])
    np.testing.assert_array_equal(selection.threshold, [0.5, 0.5, 0.5])


def test_the_bias_moves_the_choice_but_never_the_weights():
    random = np.random.default_rng(1)
    logits = jnp.asarray(random.normal(size=(5, 6)), jnp.float32)
    bias = jnp.zeros(6).at[4].set(10.0)
    index = select_experts(logits, bias, experts_per_token=2, scoring="sigmoid").index
    assert np.all(np.asarray(index[:, 0]) == 4)
    weights = weigh_experts(logits, index, scoring="sigmoid", renormalise=False, scale=1.0)
    np.testing.assert_array_equal(weights, np.take_along_axis(np.asarray(jax.nn.sigmoid(logits)), index, axis=1))


def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.asarray([[0.1, 0.2, 0.3]], jnp.bfloat16)
    selection = select_experts(logits, jnp.zeros(3), experts_per_token=1, scoring="softmax")
    assert router_scores(logits, "softmax").dtype == selection.threshold.dtype == jnp.float32


def test_where_exactly_the_taken_experts_take_part_the_threshold_is_the_last_taken():
    selection = select_experts(jnp.asarray([[2.0, 1.0, 3.0]]), jnp.zeros(3), experts_per_token=3, scoring="sigmoid")
    np.testing.assert_array_equal(selection.index, [[2, 0, 1]])
    np.testing.assert_array_equal(selection.threshold, jax.nn.sigmoid(jnp.asarray([1.0])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts_per_token": 4, "num_groups": 4, "top_groups": 1}, "expected 1 to 2"),
        ({"experts_per_token": 2, "num_groups": 3}, "num_groups=3 do not fit 8 experts"),
        ({"experts_per_token": 0}, "expected 1 to 8"),
    ],
)
def test_a_choice_that_cannot_be_made_is_an_error(wrong, message):
    with pytest.raises(ValueError, match=message):
        select_experts(jnp.zeros((2, 8)), jnp.zeros(8), scoring="sigmoid", **wrong)


@pytest.mark.parametrize("width", [512, 2304, pytest.param(7168, marks=pytest.mark.gpu)])
def test_logits_of_tokens_in_bfloat16_and_their_gradients_are_as_good_as_in_float32(width):
    random = np.random.default_rng(4)
    tokens = jnp.asarray(random.normal(size=(33, width)), jnp.bfloat16)
    router = jnp.asarray(random.normal(size=(width, 21)) * 10.0 ** random.uniform(-6, 1, size=(width, 1)), jnp.float32)
    gradient = jnp.asarray(random.normal(size=(33, 21)), jnp.float32)
    of_tokens, of_router, of_gradient = (np.asarray(array, np.float64) for array in (tokens, router, gradient))
    exact = of_tokens @ of_router, of_gradient @ of_router.T, of_tokens.T @ of_gradient
    # What float32 sums of so many numbers may be off, and for tokens one rounding to bfloat16.
    sizes = abs(of_tokens) @ abs(of_router), abs(of_gradient) @ abs(of_router).T, abs(of_tokens).T @ abs(of_gradient)

    @jax.jit
    def run(tokens, router, gradient):
        logits, pullback = jax.vjp(router_logits, tokens, router)
        return logits, *pullback(gradient)

    logits, tokens_gradient, router_gradient = run(tokens, router, gradient)
    assert (logits.dtype, tokens_gradient.dtype, router_gradient.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    # How far float32 itself is off depends on the order in which a processor adds up.
    plain = jnp.matmul(tokens.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    allowed = max(2e-7, np.max(abs(plain - exact[0]) / sizes[0]))
    assert np.all(abs(logits - exact[0]) < allowed * sizes[0])
    assert np.all(abs(tokens_gradient.astype(jnp.float32) - exact[1]) < 2.0**-8 * abs(exact[1]) + 2e-5 * sizes[1])
    assert np.all(abs(router_gradient - exact[2]) < 3e-7 * sizes[2])
