"""Weights gathered at use: their gradients add up over devices and tokens without bfloat16's rounding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import WEIGHT_AXES
from mmjax.config import MeshConfig
from mmjax.models.layers import rms_norm
from mmjax.parallel.fsdp import gather_for_use
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec


def test_a_weight_used_in_bfloat16_gets_the_float32_sum_of_its_gradients():
    # 256 + 7 x 0.5 is 256 in bfloat16, whatever the order.
    factors = jnp.asarray([256.0, *[0.5] * 7])

    def loss(weight, factor):
        used = gather_for_use(weight, ("model_weight",), jnp.bfloat16)
        return lax.psum(jnp.sum(used.astype(jnp.float32) * factor), WEIGHT_AXES)

    weight = spec("model_weight")
    mesh = make_mesh(MeshConfig(fsdp=8))
    sharded = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(weight, weight), out_specs=weight)
    gradient = jax.jit(sharded)(jnp.ones(16), factors)
    np.testing.assert_array_equal(gradient, np.full(16, 259.5, np.float32))


def test_a_norm_scale_adds_its_gradient_up_over_tokens_in_its_own_dtype():
    inputs = jnp.ones((4096, 2), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda scale: jnp.sum(rms_norm(inputs, scale, 0.0).astype(jnp.float32))))(jnp.ones(2))
    # A running sum in bfloat16 stops at 256.
    np.testing.assert_array_equal(gradient, [4096.0, 4096.0])
