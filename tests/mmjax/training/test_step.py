"""The training step: every mesh and every accumulation gives one device's loss, gradients, norm and update."""

import dataclasses
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import (
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import init_state, make_update, make_value_and_gradient, place_batch

# Every part of Kimi-K3 and its indexer, in sizes that eight devices can split; buffers so small that rounds repeat.
MODEL = ModelConfig(
    width=32,
    num_layers=5,
    vocabulary_size=64,
    full_attention_layers=(3, 4),
    residual_block_layers=4,
    initializer_range=0.2,
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=8, value_width=8, decay_rank=8, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=2,
        query_rank=16,
        latent_width=8,
        nope_width=8,
        shared_key_width=4,
        value_width=8,
        query_chunk_tokens=16,
        indexer=IndexerConfig(stage="sparse", num_heads=2, head_width=8, top_k=6, loss_coefficient=0.3),
    ),
    moe=MoeConfig(
        num_experts=8, experts_per_token=2, expert_width=8, latent_width=16, dense_width=32, capacity_factor=0.6
    ),
    vision=VisionConfig(num_layers=2, width=16, num_heads=1, head_width=16, hidden_width=32, patch_pixels=2),
    loss_chunk_tokens=40,
)
MESHES = {
    "fsdp=8": MeshConfig(fsdp=8),
    "expert=8": MeshConfig(expert=8),
    "tensor=2,expert=4": MeshConfig(tensor=2, expert=4),
    "fsdp=2,tensor=2,expert=2": MeshConfig(fsdp=2, tensor=2, expert=2),
    "replica=2,fsdp=2,expert=2": MeshConfig(replica=2, fsdp=2, expert=2),
}


def run_config(dtype: str, *, accumulation: int = 1, optimizer: str = "adamw", **model) -> RunConfig:
    return RunConfig(
        model=dataclasses.replace(MODEL, parameter_dtype=dtype, compute_dtype=dtype, **model),
        optimizer=OptimizerConfig(name=optimizer, warmup_steps=0, max_gradient_norm=0.5),
        training=TrainingConfig(accumulation=accumulation),
    )


def one_step(config: RunConfig, mesh_config: MeshConfig, batch):
    """Loss, counts, gradients, then metrics and parameters after one update; as NumPy."""
    mesh = make_mesh(mesh_config)
    state, placed = init_state(config, mesh), place_batch(batch, mesh)
    # Zero residual queries hide half of their gradients: move every parameter off its initial value.
    parameters = {
        p: a + 0.05 * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for p, a in state.parameters.items()
    }
    state = dataclasses.replace(
        state, parameters=jax.tree.map(lambda a, old: jax.device_put(a, old.sharding), parameters, state.parameters)
    )
    value_and_gradient = jax.jit(make_value_and_gradient(config, mesh))
    loss, report, counts, gradients = value_and_gradient(state.parameters, state.router_biases, placed)
    new_state, metrics = jax.jit(make_update(config))(state, loss, report, counts, gradients)
    return jax.device_get((loss, report, counts, gradients, metrics, new_state.parameters, new_state.router_biases))


@cache
def reference(dtype: str, accumulation: int, optimizer: str, batch_key) -> tuple:
    return one_step(run_config(dtype, accumulation=accumulation, optimizer=optimizer), MeshConfig(), batch_key.batch)


def assert_same(ours, theirs, bound: float) -> None:
    """Every leaf of `ours` within `bound` of `theirs`, relative to that leaf's own largest value."""
    chex.assert_trees_all_equal_structs(ours, theirs)
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, mine), other in leaves:
        scale = np.abs(other).max(initial=0)
        difference = np.abs(np.asarray(mine, np.float64) - np.asarray(other, np.float64)).max(initial=0)
        assert difference <= bound * scale + 1e-300, f"{jax.tree_util.keystr(path)}: {difference} against {scale}"


@dataclasses.dataclass(frozen=True)
class BatchKey:
    """A batch that can be a cache key: two of the same name are the same."""

    name: str
    batch: object = dataclasses.field(compare=False)


@pytest.fixture
def uneven_batch(make_batch) -> BatchKey:
    """16 rows of packed, uneven documents with images; half of the rows are nothing but padding."""
    return BatchKey("uneven", make_batch(MODEL, rows=16, row_tokens=20, row_patches=16, empty_rows=8))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "mesh_name",
    [
        pytest.param("fsdp=8", marks=SLOW),
        pytest.param("expert=8", marks=SLOW),
        "tensor=2,expert=4",
        "fsdp=2,tensor=2,expert=2",
        pytest.param("replica=2,fsdp=2,expert=2", marks=SLOW),
    ],
)
def test_every_mesh_gives_one_devices_loss_gradients_and_update(mesh_name, uneven_batch):
    with jax.enable_x64(True):
        theirs = reference("float64", 1, "adamw", uneven_batch)
        ours = one_step(run_config("float64"), MESHES[mesh_name], uneven_batch.batch)
    assert_same(ours, theirs, 1e-9)


@pytest.mark.slow
def test_muon_on_a_mesh_updates_as_on_one_device(uneven_batch):
    with jax.enable_x64(True):
        theirs = reference("float64", 1, "muon", uneven_batch)
        ours = one_step(run_config("float64", optimizer="muon"), MESHES["fsdp=2,tensor=2,expert=2"], uneven_batch.batch)
    assert_same(ours, theirs, 1e-9)


def test_a_float32_mesh_stays_within_rounding_of_one_device(uneven_batch):
    theirs = reference("float32", 1, "adamw", uneven_batch)
    ours = one_step(run_config("float32"), MESHES["fsdp=2,tensor=2,expert=2"], uneven_batch.batch)
    # Loss, counts and gradients; AdamW's first update is the sign of a gradient, which rounding can turn.
    assert_same((ours[0], ours[2], ours[3]), (theirs[0], theirs[2], theirs[3]), 1e-4)
    assert_same(ours[4]["gradient_norm"], theirs[4]["gradient_norm"], 1e-4)


@pytest.mark.parametrize("accumulation", [2, pytest.param(4, marks=SLOW)])
def test_accumulation_changes_nothing(accumulation, uneven_batch):
    with jax.enable_x64(True):
        theirs = reference("float64", 1, "adamw", uneven_batch)
        ours = one_step(run_config("float64", accumulation=accumulation), MeshConfig(), uneven_batch.batch)
    assert_same(ours, theirs, 1e-9)


@pytest.mark.slow
def test_accumulation_on_a_mesh_changes_nothing(uneven_batch):
    with jax.enable_x64(True):
        theirs = reference("float64", 1, "adamw", uneven_batch)
        mesh = MeshConfig(fsdp=2, expert=2, tensor=2)
        ours = one_step(run_config("float64", accumulation=2), mesh, uneven_batch.batch)
    assert_same(ours, theirs, 1e-9)
