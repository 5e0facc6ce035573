"""Weights gathered at use: their gradients add up over devices and tokens without bfloat16's rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mmjax.axes import DATA_AXES, TENSOR, WEIGHT_AXES
from mmjax.config import MeshConfig
from mmjax.models.layers import rms_norm
from mmjax.parallel.fsdp import gather_for_use, make_varying
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import RULES, rests_on, spec


def test_a_weight_used_in_bfloat16_gets_the_float32_sum_of_its_gradients():
    # 256 + 7 x 0.5 is 256 in bfloat16, whatever the order.
    factors = jnp.asarray([256.0, *[0.5] * 7])

    def loss(weight, factor):
        used = gather_for_use(weight, ("model_weight",), (16,), jnp.bfloat16)
        return lax.psum(jnp.sum(used.astype(jnp.float32) * factor), WEIGHT_AXES)

    weight = spec("model_weight")
    mesh = make_mesh(MeshConfig(fsdp=8))
    sharded = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(weight, weight), out_specs=weight)
    gradient = jax.jit(sharded)(jnp.ones(16), factors)
    np.testing.assert_array_equal(gradient, np.full(16, 259.5, np.float32))


@pytest.mark.parametrize(
    ("array_axis", "size", "mesh_axes"),
    [
        ("model_weight", 16, ("fsdp", "expert")),
        ("rank_weight", 20, ("expert",)),
        ("model_weight", 18, ("fsdp",)),
        ("model_weight", 7, ()),
        ("expert_hidden", 12, ("tensor", "fsdp")),
        ("expert_hidden", 9, ("tensor",)),
        # Must be divided, or is refused.
        ("heads", 7, ("tensor",)),
        ("expert_hidden", 7, ("tensor",)),
    ],
)
def test_a_weight_rests_split_over_as_many_devices_as_divide_it(array_axis, size, mesh_axes):
    assert rests_on(array_axis, size, {"fsdp": 2, "expert": 4, "tensor": 3}) == mesh_axes


@pytest.mark.parametrize("is_marked_first", [True, False])
@pytest.mark.parametrize("size", [16, 20, 18, 7])
def test_a_weight_that_a_mesh_does_not_divide_is_whole_at_use_and_its_gradient_is_summed_once(size, is_marked_first):
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    resting = jax.sharding.PartitionSpec(rests_on("model_weight", size, mesh.shape))
    factors = np.random.default_rng(0).integers(-9, 9, (8, size)).astype(np.float32)

    def loss(weight, factors):
        weight = make_varying(weight) if is_marked_first else weight
        used = gather_for_use(weight, ("model_weight",), (size,), jnp.float32)
        assert used.shape == (size,)
        return lax.psum(jnp.sum(make_varying(used) * factors[0]), DATA_AXES)

    step = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=mesh,
        in_specs=(resting, jax.sharding.PartitionSpec(RULES["batch"])),
        out_specs=(jax.sharding.PartitionSpec(), resting),
    )
    value, gradient = jax.jit(step)(jnp.arange(size, dtype=jnp.float32), factors)
    np.testing.assert_array_equal(gradient, factors.sum(axis=0))
    assert value == (factors @ np.arange(size)).sum()


def test_a_norm_scale_adds_its_gradient_up_over_tokens_in_its_own_dtype():
    inputs = jnp.ones((4096, 2), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda scale: jnp.sum(rms_norm(inputs, scale, 0.0).astype(jnp.float32))))(jnp.ones(2))
    # A running sum in bfloat16 stops at 256.
    np.testing.assert_array_equal(gradient, [4096.0, 4096.0])


def test_experts_are_gathered_along_an_axis_of_their_own_and_come_out_in_order():
    weight, factors = np.arange(2.0 * 8 * 3).reshape(2, 8, 3), np.cos(np.arange(48.0)).reshape(2, 8, 3)
    mesh, resting = make_mesh(MeshConfig(fsdp=4)), spec("experts", "expert_hidden", None)

    def use(weight):
        return make_varying(gather_for_use(weight, ("experts", "expert_hidden", None), (2, 8, 3), np.float32))

    def loss(weight, factors):
        return lax.psum(jnp.sum(use(weight) * make_varying(factors)), (*DATA_AXES, TENSOR))

    def run(function, *specs, out):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))

    whole = run(lambda weight: use(weight)[None], resting, out=jax.P((*DATA_AXES, TENSOR)))(weight.astype(np.float32))
    np.testing.assert_array_equal(whole, np.broadcast_to(weight, (4, 2, 8, 3)))
    gradient = run(jax.grad(loss), resting, jax.P(), out=resting)(*(a.astype(np.float32) for a in (weight, factors)))
    np.testing.assert_allclose(gradient, 4 * factors, rtol=1e-6)
