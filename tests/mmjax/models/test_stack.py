"""A stack of layers: the same as its layers one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.models import layers
from mmjax.models.stack import scan_stack, stacked


class Scale(nnx.Module):
    def __init__(self):
        self.weight = layers.parameter(layers.normal(1.0), (3,), ("model_weight",), jnp.float32)


def layer_step(layer, carry, x):
    carry = jnp.sin(carry * layer.weight.get_value()) + x
    return carry, jnp.sum(carry)


def test_scanning_a_stack_equals_its_layers_in_turn_with_gradients():
    graph, state = nnx.split(stacked(Scale(), 4))
    state = jax.tree.map(lambda leaf: jnp.linspace(0.3, 1.7, 12).reshape(leaf.shape), state)
    start, xs = jnp.arange(3.0), jnp.arange(4.0)

    def scanned(state, remat):
        carry, sums = scan_stack(nnx.merge(graph, state), start, layer_step, xs, remat=remat)
        return jnp.sum(carry) + jnp.sum(sums * sums)

    def unrolled(state, _):
        carry, sums = start, []
        for index in range(4):
            layer = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))
            carry, layer_sum = layer_step(layer, carry, xs[index])
            sums.append(layer_sum)
        return jnp.sum(carry) + sum(layer_sum * layer_sum for layer_sum in sums)

    expected = jax.jit(jax.value_and_grad(unrolled))(state, None)
    for remat in (True, False):
        actual = jax.jit(jax.value_and_grad(scanned), static_argnums=1)(state, remat)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), actual, expected)


def test_a_stacked_variable_gains_an_axis_and_keeps_the_names_of_one_layers():
    weight = stacked(Scale(), 4).weight
    assert weight.get_value().shape == (4, 3)
    assert weight.get_metadata()["array_axes"] == ("model_weight",)


def test_initial_arrays_differ_along_a_stack_and_depend_on_the_path_alone():
    weight = stacked(Scale(), 4).weight
    drawn = layers.initial_arrays({"a": weight, "b": weight}, jax.random.key(0))
    alone = layers.initial_arrays({"b": weight}, jax.random.key(0))
    assert len(np.unique(np.stack([drawn["a"], drawn["b"]]))) == 24
    np.testing.assert_array_equal(drawn["b"], alone["b"])
