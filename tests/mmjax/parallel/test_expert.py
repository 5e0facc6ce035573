"""The exchange of rows with experts' devices against plain indexing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES, EXPERT
from mmjax.config import MeshConfig
from mmjax.parallel.expert import exchange_experts
from mmjax.parallel.fsdp import make_varying
from mmjax.parallel.mesh import make_mesh

NUM_EXPERTS, CHOICES, WIDTH, TOKENS = 8, 3, 2, 10  # TOKENS of one device


def exchange(mesh_config, capacity_factor, overflow):
    """`(rows, index, factor [E], cotangent) -> (outputs, dropped per device, gradients of rows and factor)`.

    An expert multiplies its rows by its factor; where `factor` counts in more than one place, its gradient is the sum.
    """

    def on_device(rows, index, factor, cotangent):
        def loss(rows, factor):
            factor = make_varying(factor)

            def apply(rows, expert):
                return jnp.where(expert >= 0, factor[expert], 0)[:, None] * rows

            outputs, dropped = exchange_experts(
                rows,
                index,
                apply,
                num_experts=NUM_EXPERTS,
                capacity_factor=capacity_factor,
                overflow=overflow,
            )
            return lax.psum(jnp.sum(outputs * cotangent), DATA_AXES), (outputs, dropped[None])

        gradients, (outputs, dropped) = jax.grad(loss, argnums=(0, 1), has_aux=True)(rows, factor)
        return outputs, dropped, *gradients

    tokens, experts = PartitionSpec(DATA_AXES), PartitionSpec(EXPERT)
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh(mesh_config),
            in_specs=(tokens, tokens, experts, tokens),
            out_specs=(tokens, tokens, tokens, experts),
            check_vma=True,
        )
    )


def draw(num_devices, skew):
    random = np.random.default_rng(0)
    num_tokens = TOKENS * num_devices
    preference = random.normal(size=(num_tokens, NUM_EXPERTS)) - skew * np.arange(NUM_EXPERTS)
    index = np.argsort(-preference, axis=1)[:, :CHOICES].astype(np.int32)
    index[random.random(num_tokens) < 0.3] = -1
    rows, factor = random.normal(size=(num_tokens, WIDTH)), random.normal(size=NUM_EXPERTS)
    return rows, index, factor, random.normal(size=(num_tokens, CHOICES, WIDTH))


def expect(rows, index, factor, cotangent, carried):
    weight = np.where(carried, factor[index], 0)[:, :, None]
    factor_gradient = np.zeros(NUM_EXPERTS)
    np.add.at(factor_gradient, index[carried], np.sum(cotangent * rows[:, None, :], axis=-1)[carried])
    return weight * rows[:, None, :], np.sum(weight * cotangent, axis=1), factor_gradient


def carried_by_one_round(index, num_devices, num_expert_devices, capacity_factor):
    """By hand: each device sends its first `capacity` choices to each of the experts' devices."""
    capacity = math.ceil(capacity_factor * TOKENS * CHOICES / num_expert_devices)
    carried = np.zeros(index.shape, bool)
    for sender in range(num_devices):
        sent = [0] * num_expert_devices
        for token in range(sender * TOKENS, (sender + 1) * TOKENS):
            for choice in range(CHOICES):
                if index[token, choice] >= 0:
                    receiver = index[token, choice] // (NUM_EXPERTS // num_expert_devices)
                    carried[token, choice] = sent[receiver] < capacity
                    sent[receiver] += 1
    return carried


MESHES = {"expert=1": MeshConfig(), "expert=4": MeshConfig(expert=4), "fsdp=2,expert=4": MeshConfig(fsdp=2, expert=4)}


@pytest.mark.parametrize(
    ("mesh", "capacity_factor", "skew"),
    [
        ("expert=1", 1.0, 0.0),
        ("expert=4", 1.0, 0.0),
        ("expert=4", 100.0, 5.0),  # one round holds everything
        ("fsdp=2,expert=4", 0.3, 5.0),  # nearly all to one device: seven rounds
    ],
)
def test_rounds_carry_every_choice_with_its_gradients(mesh, capacity_factor, skew):
    with jax.enable_x64(True):
        config = MESHES[mesh]
        arrays = draw(config.num_devices, skew)
        outputs, dropped, *gradients = exchange(config, capacity_factor, "rounds")(*map(jnp.asarray, arrays))
        expected = expect(*arrays, arrays[1] >= 0)
        for result, wanted in zip((outputs, *gradients), expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12)
        assert not np.any(dropped)


def test_drop_leaves_out_exactly_what_one_round_cannot_carry():
    with jax.enable_x64(True):
        config = MESHES["expert=4"]
        arrays = draw(config.num_devices, 1.0)
        index = arrays[1]
        carried = carried_by_one_round(index, config.num_devices, config.expert, 0.5)
        outputs, dropped, *gradients = exchange(config, 0.5, "drop")(*map(jnp.asarray, arrays))
        for result, wanted in zip((outputs, *gradients), expect(*arrays, carried), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12)
        per_device = np.sum((index >= 0) & ~carried, axis=1).reshape(config.num_devices, -1).sum(axis=1)
        assert per_device.sum() > 10
        np.testing.assert_array_equal(dropped, per_device)


def test_one_device_exchanges_nothing():
    arrays = [jnp.asarray(array, jnp.int32 if array.dtype == np.int32 else jnp.float32) for array in draw(1, 0.0)]
    text = exchange(MESHES["expert=1"], 1.0, "rounds").lower(*arrays).compile().as_text()
    assert "all-to-all" not in text
