"""Bias updates against NumPy written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.config import RouterConfig
from mmjax.models.moe import RouterStatistics, histogram_range, needed_bias_histogram
from mmjax.resilience.router_update import histogram_quantile, update_bias
from pallas_kernels.moe.api import router_scores, select_experts

NUM_EXPERTS, TAKEN, BINS = 64, 4, 1000


def counted(load, histogram):
    fields = dict.fromkeys(RouterStatistics._fields, jnp.zeros(load.shape[:-1], jnp.int32))
    return RouterStatistics(**fields | {"load": load, "histogram": histogram})


@jax.jit
def route(logits, bias, is_real):
    selection = select_experts(logits, bias, experts_per_token=TAKEN, scoring="sigmoid")
    scores = router_scores(logits, "sigmoid")
    histogram = needed_bias_histogram(scores, selection.threshold, bias, is_real, BINS)
    taken = jax.nn.one_hot(selection.index, NUM_EXPERTS, dtype=bool)
    load = jnp.sum(taken & is_real[:, None, None], axis=(0, 1), dtype=jnp.int32)
    return load, histogram, scores, selection.threshold


def skewed_logits(num_tokens):
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=(num_tokens, NUM_EXPERTS)) + random.normal(size=NUM_EXPERTS)[None, :] * 1.5)


def test_the_histogram_quantile_lies_within_one_bin_of_the_exact_one():
    with jax.enable_x64(True):
        logits = skewed_logits(1999)
        bias = jnp.asarray(np.random.default_rng(1).normal(size=NUM_EXPERTS))
        is_real = jnp.arange(1999) % 3 > 0
        _, histogram, scores, threshold = route(logits, bias, is_real)
        num_tokens = int(is_real.sum())
        assert histogram.sum() == num_tokens * NUM_EXPERTS
        quantile = histogram_quantile(bias, histogram, TAKEN, jnp.int32(num_tokens))
        needed = np.sort(np.asarray(threshold)[is_real][:, None] - np.asarray(scores)[is_real], axis=0)
        exact = needed[int(np.ceil(num_tokens * TAKEN / NUM_EXPERTS)) - 1]
        lowest, width = histogram_range(bias, BINS)
        assert np.all(needed >= lowest) and np.all(needed <= lowest + BINS * width)
        assert np.abs(quantile - exact).max() < width


def test_the_quantile_interpolates_inside_the_first_bin_that_reaches_the_rank():
    with jax.enable_x64(True):
        histogram = np.array([[0, 3, 0, 7], [5, 0, 2, 3], [0, 0, 0, 10]])
        bias = np.array([-0.5, 0.0, 0.5])  # range [-1.5, 1.5], 4 bins of 0.75
        rank = 10 * 2 / 3
        expected = [
            -1.5 + (3 + (rank - 3) / 7) * 0.75,
            -1.5 + (2 + (rank - 5) / 2) * 0.75,
            -1.5 + (3 + rank / 10) * 0.75,
        ]
        quantile = histogram_quantile(jnp.asarray(bias), jnp.asarray(histogram, jnp.int32), 2, jnp.int32(10))
        np.testing.assert_allclose(quantile, expected, rtol=1e-14)


def test_quantile_balancing_balances_a_skewed_router_in_five_updates():
    num_tokens = 20_000
    logits = skewed_logits(num_tokens).astype(jnp.float32)
    is_real = jnp.ones(num_tokens, bool)
    bias = jnp.zeros(NUM_EXPERTS)
    violations = []
    for _ in range(6):
        load, histogram, _, _ = route(logits, bias, is_real)
        violations.append(float(load.max() * NUM_EXPERTS / load.sum() - 1))
        statistics = counted(load, histogram)
        bias = update_bias(bias, statistics, RouterConfig(balancing="quantile"), TAKEN, jnp.int32(num_tokens))
        assert abs(float(bias.mean())) < 1e-6
    assert violations[0] > 3 and violations[1] < 0.4 and violations[5] < 0.1, violations


def test_the_sign_rule_moves_every_bias_by_its_rate_towards_the_mean_load():
    load = jnp.asarray([[4, 0, 8, 4], [1, 3, 2, 2]], jnp.int32)
    statistics = counted(load, jnp.zeros((2, 4, 0), jnp.int32))
    bias = jnp.asarray([[0.5, 0.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    moved = update_bias(bias, statistics, RouterConfig(balancing="sign", sign_rate=0.25), 2, jnp.int32(8))
    np.testing.assert_array_equal(moved - bias, [[0, 0.25, -0.25, 0], [0.25, -0.25, 0, 0]])


def test_no_balancing_and_a_step_without_tokens_move_nothing():
    bias = jnp.asarray([0.25, -0.5, 1.0])
    for balancing in ("none", "sign", "quantile"):
        empty = counted(jnp.zeros(3, jnp.int32), jnp.zeros((3, 10), jnp.int32))
        moved = update_bias(bias, empty, RouterConfig(balancing=balancing), 1, jnp.int32(0))
        np.testing.assert_array_equal(moved, bias)


def test_stacked_layers_update_as_each_alone():
    random = np.random.default_rng(2)
    bias = jnp.asarray(random.normal(size=(2, 8)), jnp.float32)
    histogram = jnp.asarray(random.multinomial(100, np.ones(50) / 50, size=(2, 8)), jnp.int32)
    statistics = counted(jnp.zeros((2, 8), jnp.int32), histogram)
    both = update_bias(bias, statistics, RouterConfig(), 2, jnp.int32(100))
    for layer in range(2):
        alone = jax.tree.map(lambda leaf, layer=layer: leaf[layer], statistics)
        moved = update_bias(bias[layer], alone, RouterConfig(), 2, jnp.int32(100))
        np.testing.assert_allclose(both[layer], moved, rtol=0, atol=1e-6)
