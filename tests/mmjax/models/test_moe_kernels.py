"""The layer with adapters on its experts runs Hopper's kernels, on one device and on a slice of the experts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.axes import DATA_AXES
from mmjax.config import LoraConfig, MeshConfig, ModelConfig, MoeConfig, RouterConfig
from mmjax.models.layers import LoraFactor, LoraWeight
from mmjax.models.lora import Projection, make_factors
from mmjax.models.moe import LatentMoe
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec, state_specs
from pallas_kernels import launcher

EXPERTS, WIDTH, LATENT, HIDDEN, ROWS, POSITIONS = 4, 256, 128, 128, 2, 40
AXES = {"gate": (LATENT, HIDDEN), "up": (LATENT, HIDDEN), "down": (HIDDEN, LATENT)}
HIDDEN_AXES = {"gate": (None, "expert_hidden"), "up": (None, "expert_hidden"), "down": ("expert_hidden", None)}


def make(storage):
    """(graph, factors of the adapters, all else), described."""
    moe = MoeConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        expert_width=HIDDEN,
        latent_width=LATENT,
        num_shared_experts=1,
        expert_storage=storage,
        router=RouterConfig(balancing="none", correction_bias=False),
    )
    model = ModelConfig(width=WIDTH, moe=moe, parameter_dtype="bfloat16", compute_dtype="bfloat16")
    layer, lora = LatentMoe(model), LoraConfig(rank=8, expert_rank=8, targets=("mlp.gate",))
    for name, shape in AXES.items():
        projection = Projection(name, (EXPERTS, *shape), ("experts", *HIDDEN_AXES[name]), storage == "mxfp4")
        base = None if projection.is_packed else getattr(layer, name)
        setattr(layer, name, LoraWeight(base, *make_factors(projection, model, lora), scale=0.5, num_input_axes=1))
    return nnx.split(layer, LoraFactor, ...)


def draw(storage):
    random = np.random.default_rng(0)

    def leaf(described):
        if described.dtype == np.uint8:
            # Codes, or scales of about the power of two that fits these inputs.
            limits = (0, 256) if described.shape[-1] == LATENT // 2 else (122, 124)
            return jnp.asarray(random.integers(*limits, described.shape, np.uint8))
        scale = described.shape[-2] ** -0.5 if len(described.shape) > 1 else 1
        return jnp.asarray(random.normal(size=described.shape) * scale, described.dtype)

    _, *states = make(storage)
    inputs, cotangent = (jnp.asarray(random.normal(size=(ROWS, POSITIONS, WIDTH)), jnp.bfloat16) for _ in range(2))
    segment_ids = jnp.ones((ROWS, POSITIONS), jnp.int32).at[1, 30:].set(0)
    return *jax.tree.map(leaf, states), inputs, segment_ids, cotangent


def step_on(mesh, storage):
    """`step(factors, frozen, inputs, segment_ids, cotangent)`: the output, gradients of the factors and the inputs."""
    graph, *states = make(storage)

    def on_device(factors, frozen, inputs, segment_ids, cotangent):
        def loss(factors, inputs):
            output, _ = nnx.merge(graph, factors, frozen)(inputs, segment_ids)
            return lax.psum(jnp.sum((output * cotangent).astype(jnp.float32)), DATA_AXES), output

        gradients, output = jax.grad(loss, argnums=(0, 1), has_aux=True)(factors, inputs)
        return output, *gradients

    tokens = spec("batch", "position", None)
    factors, frozen = (state_specs(state, mesh.shape) for state in states)
    specs = (factors, frozen, tokens, spec("batch", "position"), tokens)
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(tokens, factors, tokens)), specs


def assert_kernels_are_near_the_plain_form(mesh, storage):
    """Of bfloat16 tokens and of the same in float32, which the kernels do not take."""
    step, _ = step_on(mesh, storage)
    arrays = draw(storage)
    got = jax.jit(lambda *arrays: step(*arrays))(*arrays)
    factors, frozen, inputs, segment_ids, cotangent = arrays
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *arrays: step(*arrays))(
            factors, frozen, inputs.astype(jnp.float32), segment_ids, cotangent.astype(jnp.float32)
        )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(array, np.float32) for array in (one, other))
        assert np.linalg.norm(one - other) < 2e-2 * np.linalg.norm(other), one.shape


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 does not end these simulations")
@pytest.mark.slow
@pytest.mark.parametrize("storage", ["dense", "mxfp4"])
def test_the_simulated_layer_with_adapters_is_near_the_plain_form(storage, monkeypatch):
    called, launch = [], launcher.launch
    monkeypatch.setattr(launcher, "launch", lambda *a, name, **k: called.append(name) or launch(*a, name=name, **k))
    with launcher.simulated():
        assert_kernels_are_near_the_plain_form(make_mesh(MeshConfig()), storage)
    assert {"moe_up", "moe_up_adapter", "moe_down", "moe_down_first_weights", "moe_up_second_weights"} <= set(called)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["dense", "mxfp4"])
def test_on_a_gpu_the_layer_with_adapters_is_near_the_plain_form(storage):
    assert_kernels_are_near_the_plain_form(make_mesh(MeshConfig()), storage)


@pytest.mark.multigpu
@pytest.mark.parametrize("storage", ["dense", "mxfp4"])
def test_on_two_gpus_slices_of_the_experts_with_adapters_are_near_the_plain_form(storage):
    assert_kernels_are_near_the_plain_form(make_mesh(MeshConfig(expert=2)), storage)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["dense", "mxfp4"])
def test_a_slice_of_the_experts_with_adapters_compiles_to_kernels_and_no_gradient_of_frozen_weights(storage):
    pytest.importorskip("jax_cuda13_plugin")
    from mmjax.parallel.described import described_mesh
    from mmjax.planner.topology import read_cluster

    mesh = described_mesh(MeshConfig(expert=2), read_cluster("1x2xh200"))
    step, specs = step_on(mesh, storage)
    arguments = jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes)),
        jax.eval_shape(lambda: draw(storage)),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(step).lower(*arguments).compile().as_text() or ""
    kernels = set(re.findall(r"moe_\w+?(?=_mosaic_gpu)", text))
    assert {"moe_up", "moe_down", "moe_down_backward", "moe_up_backward"} <= kernels
    assert {f"moe_{name}_{factor}_weights" for name in ("up", "down") for factor in ("first", "second")} <= kernels
    assert not kernels & {"moe_up_weights", "moe_down_weights"}
    # Rows come and go between the two devices' experts.
    assert "all-to-all" in text
