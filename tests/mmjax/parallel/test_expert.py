"""The exchange of rows with experts' devices, by every transport, against plain indexing."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES
from mmjax.config import MeshConfig
from mmjax.errors import ConfigurationError
from mmjax.parallel.expert import ExpertExchange, check_transport, exchange_experts
from mmjax.parallel.fsdp import make_varying
from mmjax.parallel.mesh import make_mesh

NUM_EXPERTS, CHOICES, WIDTH, TOKENS = 8, 3, 5, 10  # TOKENS of one device


def exchange(mesh_config, **settings):
    """`(rows, index, weight, factor [E], cotangent) -> (mixed, rounds and dropped per device, gradients)`.

    An expert multiplies its rows by its factor; where `factor` counts in more than one place, its gradient is the sum.
    """
    settings = ExpertExchange(num_experts=NUM_EXPERTS, **settings)

    def on_device(rows, index, weight, factor, cotangent):
        def loss(rows, weight, factor):
            factor = make_varying(factor)

            def apply(experts, rows, expert):
                factor = experts[0]
                return jnp.where(expert >= 0, factor[expert], 0)[:, None] * rows

            exchanged = exchange_experts(rows, index, weight, apply, settings, factor)
            counts = exchanged.num_rounds[None], exchanged.num_dropped[None]
            return lax.psum(jnp.sum(exchanged.mixed * cotangent), DATA_AXES), (exchanged.mixed, *counts)

        gradients, results = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(rows, weight, factor)
        return *results, *gradients

    # Tokens of the devices in the order of the mesh.
    tokens, experts = PartitionSpec(("replica", "fsdp", "context", "expert")), PartitionSpec(settings.mesh_axes)
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh(mesh_config),
            in_specs=(tokens, tokens, tokens, experts, tokens),
            out_specs=(tokens, tokens, tokens, tokens, tokens, experts),
            check_vma=True,
        )
    )


def draw(num_devices, skew=0.0, dtype=np.float64):
    """Arrays of `exchange`; with a skew of 100 all tokens take the first experts and the last ones are unused."""
    random = np.random.default_rng(0)
    num_tokens = TOKENS * num_devices
    preference = random.normal(size=(num_tokens, NUM_EXPERTS)) - skew * np.arange(NUM_EXPERTS)
    index = np.argsort(-preference, axis=1)[:, :CHOICES].astype(np.int32)
    index[random.random(num_tokens) < 0.3] = -1
    rows, weight, factor, cotangent = (
        random.normal(size=shape).astype(dtype)
        for shape in ((num_tokens, WIDTH), index.shape, NUM_EXPERTS, (num_tokens, WIDTH))
    )
    return rows, index, weight, factor, cotangent


def expect(rows, index, weight, factor, cotangent, carried):
    """(mixed, gradients of rows, weight and factor) where only `carried` choices count."""
    scale = np.where(carried, factor[index], 0)
    agreement = np.sum(cotangent * rows, axis=1)[:, None]
    factor_gradient = np.zeros(NUM_EXPERTS)
    np.add.at(factor_gradient, index[carried], (weight * agreement)[carried])
    total = np.sum(weight * scale, axis=1)[:, None]
    return total * rows, total * cotangent, scale * agreement, factor_gradient


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


EXPERT4, FSDP2_EXPERT4 = MeshConfig(expert=4), MeshConfig(fsdp=2, expert=4)
CONTEXT2_EXPERT2 = MeshConfig(context=2, expert=2)


@pytest.mark.parametrize(
    ("mesh", "skew", "settings", "rounds"),
    [
        pytest.param(MeshConfig(), 0, {}, 0, id="one device"),
        pytest.param(EXPERT4, 0, {"capacity_factor": 1.5}, None, id="all to all"),
        # Of 30 choices nearly all go to one device: ceil(0.7 * 21 / 2.25) rounds at most.
        pytest.param(FSDP2_EXPERT4, 100, {"capacity_factor": 0.3, "num_chunks": 2}, None, id="all to one"),
        pytest.param(EXPERT4, 100, {"capacity_factor": 100.0, "num_chunks": 3}, 1, id="one round for all"),
        pytest.param(FSDP2_EXPERT4, 100, {"capacity_factor": 0.5, "transport": "ring"}, None, id="ring"),
        pytest.param(
            FSDP2_EXPERT4, 100, {"capacity_factor": 0.3, "transport": "by_node", "node_devices": 2}, None, id="by node"
        ),
        pytest.param(
            CONTEXT2_EXPERT2,
            0,
            {"transport": "by_node", "node_devices": 2, "mesh_axes": ("context", "expert")},
            None,
            id="spread by node",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            CONTEXT2_EXPERT2, 0, {"capacity_factor": 0.5, "mesh_axes": ("context", "expert")}, None, id="spread"
        ),
        pytest.param(
            CONTEXT2_EXPERT2,
            1,
            {"capacity_factor": 2.0, "transport": "ring", "mesh_axes": ("context", "expert")},
            None,
            id="spread ring",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_choice_is_carried_with_its_gradients(mesh, skew, settings, rounds):
    check_all_are_carried(mesh, skew, settings, rounds)


@pytest.mark.parametrize(
    ("mesh", "skew", "settings", "rounds"),
    [
        pytest.param(EXPERT4, 1, {"capacity_factor": 0.5, "num_chunks": 2}, None, id="rounds and chunks"),
        pytest.param(
            CONTEXT2_EXPERT2,
            100,
            {"capacity_factor": 4.0, "mesh_axes": ("context", "expert")},
            1,
            id="spread, one round",
        ),
        pytest.param(
            FSDP2_EXPERT4, 0, {"capacity_factor": 0.3, "num_chunks": 3}, None, id="three chunks", marks=pytest.mark.slow
        ),
    ],
)
def test_every_choice_is_carried_without_gaps(ragged_on_cpu, mesh, skew, settings, rounds):
    check_all_are_carried(mesh, skew, {"transport": "ragged", **settings}, rounds)


def check_all_are_carried(mesh, skew, settings, rounds):
    with jax.enable_x64(True):
        arrays = draw(mesh.num_devices, skew)
        settings = {"capacity_factor": 1.0, **settings}
        mixed, num_rounds, dropped, *gradients = exchange(mesh, **settings)(*map(jnp.asarray, arrays))
        expected = expect(*arrays, arrays[1] >= 0)
        for result, wanted in zip((mixed, *gradients), expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12)
        assert not np.any(dropped)
        if rounds is None:
            assert num_rounds.max() > 1 or settings["capacity_factor"] >= 1
        else:
            np.testing.assert_array_equal(num_rounds, rounds)


@pytest.mark.parametrize("transport", ["all_to_all", "by_node", "ring"])
def test_drop_leaves_out_exactly_what_one_round_cannot_carry(transport):
    with jax.enable_x64(True):
        arrays = draw(4, 1.0)
        index = arrays[1]
        carried = carried_by_one_round(index, 4, 4, 0.5)
        run = exchange(EXPERT4, capacity_factor=0.5, overflow="drop", transport=transport, node_devices=2)
        mixed, _, dropped, *gradients = run(*map(jnp.asarray, arrays))
        for result, wanted in zip((mixed, *gradients), expect(*arrays, carried), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12)
        per_device = np.sum((index >= 0) & ~carried, axis=1).reshape(4, -1).sum(axis=1)
        assert per_device.sum() > 10 and np.sum(dropped) == per_device.sum()
        if transport != "ring":
            np.testing.assert_array_equal(dropped, per_device)


def test_an_exchange_without_gaps_is_refused_on_cpus():
    check_transport("ragged", ("expert",), make_mesh(MeshConfig(fsdp=2)))
    with pytest.raises(ConfigurationError, match=r"'ragged' on CPU devices.*give all_to_all or ring"):
        check_transport("ragged", ("expert",), make_mesh(EXPERT4))


def compiled_text(mesh, **settings):
    arrays = draw(mesh.num_devices, dtype=np.float32)
    return exchange(mesh, **settings).lower(*map(jnp.asarray, arrays)).compile().as_text()


def num_collectives(text, name):
    return len(re.findall(rf" {name}(?:-start)?\(", text))


@pytest.mark.parametrize(
    ("settings", "collectives"),
    [
        # Experts' numbers with weights, and their gradients; of each chunk rows, results, and the gradients of both.
        ({"num_chunks": 2}, {"all-to-all": 2 + 2 * 4, "collective-permute": 0}),
        # The same in each node, which rows are whose, and between nodes rows, sums, and the gradients of both.
        ({"transport": "by_node", "node_devices": 2}, {"all-to-all": 2 + 2 * 4 + 1, "collective-permute": 4}),
        # Rows, indices and weights, at first and in each step; sums in each step and at last; gradients of all but
        # indices.
        ({"transport": "ring"}, {"all-to-all": 0, "collective-permute": 3 + 4 + 1 + 2 + 3 + 1}),
    ],
    ids=["all to all", "by node", "ring"],
)
def test_the_program_holds_the_exchanges_meant_and_no_row_for_every_expert_and_token(settings, collectives):
    text = compiled_text(EXPERT4, capacity_factor=1.0, overflow="drop", **settings)
    assert {name: num_collectives(text, name) for name in collectives} == collectives
    assert num_collectives(text, "all-gather") == 0
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"(?:f32|s32|pred)\[([\d,]+)\]", text)]
    assert max(sizes) < NUM_EXPERTS * TOKENS * WIDTH


def test_one_device_exchanges_nothing():
    text = compiled_text(MeshConfig(), capacity_factor=1.0)
    assert not any(num_collectives(text, name) for name in ("all-to-all", "collective-permute", "all-gather"))
