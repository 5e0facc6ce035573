"""Adapters in the experts' MLP: the merged weights' values, both forms' gradients, and none of a frozen weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe.api import expert_mlp

NUM_EXPERTS, WIDTH, HIDDEN, RANK, NUM_ROWS = 5, 6, 7, 2, 83


def draw(names: tuple[str, ...]):
    """Rows, their experts, weights and adapters of `names`."""
    random = np.random.default_rng(0)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: jnp.asarray(random.normal(size=(NUM_EXPERTS, *shape))) for name, shape in shapes.items()}
    adapters = {
        name: (
            jnp.asarray(random.normal(size=(NUM_EXPERTS, shapes[name][0], RANK))),
            jnp.asarray(random.normal(size=(NUM_EXPERTS, RANK, shapes[name][1]))),
        )
        for name in names
    }
    # Expert 2 takes no row.
    expert = jnp.asarray(random.choice([-1, 0, 1, 1, 3, 4], NUM_ROWS), jnp.int32)
    return jnp.asarray(random.normal(size=(NUM_ROWS, WIDTH))), expert, weights, adapters


def run(rows, expert, weights, adapters, implementation="auto"):
    return expert_mlp(
        rows, expert, **weights, activation="situ", beta=1.5, adapters=adapters, implementation=implementation
    )


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("down",)], ids=["all", "one"])
def test_adapters_are_the_merged_weights_and_both_forms_agree(names):
    with jax.enable_x64(True):
        rows, expert, weights, adapters = draw(names)
        merged = weights | {name: weights[name] + adapters[name][0] @ adapters[name][1] for name in names}
        found = {}
        for implementation in ("xla", "reference"):

            @jax.jit
            def values_and_gradients(rows, adapters, implementation=implementation):
                value, pull = jax.vjp(
                    lambda *arrays: run(arrays[0], expert, weights, arrays[1], implementation), rows, adapters
                )
                return value, pull(jnp.cos(value))

            found[implementation] = values_and_gradients(rows, adapters)
        expected = run(rows, expert, merged, None, "reference")
    np.testing.assert_allclose(found["xla"][0], expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    for one, other in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())
    for factor in map(np.asarray, jax.tree.leaves(found["xla"][1][1])):
        assert not np.any(factor[2]) and np.all(np.abs(factor[[0, 1, 3, 4]]).max(axis=(1, 2)) > 0)


def test_frozen_weights_cost_no_gradient():
    with jax.enable_x64(True):
        rows, expert, weights, adapters = draw(("gate", "up", "down"))

        def num_products(function, *arrays) -> int:
            return str(jax.make_jaxpr(lambda *arrays: jax.vjp(function, *arrays)[1](rows))(*arrays)).count(
                "dot_general"
            )

        everything = num_products(lambda weights, adapters: run(rows, expert, weights, adapters), weights, adapters)
        adapted = num_products(lambda adapters: run(rows, expert, weights, adapters), adapters)
    assert everything - adapted == 3
