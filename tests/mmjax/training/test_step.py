"""The training step: every mesh and every accumulation gives one device's loss, gradients, norm and update."""

import dataclasses
from functools import cache

import chex
import jax
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
    RouterConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.models.layers import initial_arrays
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import abstract_state, make_update, make_value_and_gradient, place_batch

# Every part of Kimi-K3 and its indexer. Of what is gathered at use, fsdp=2 and expert=2 divide the model's width both,
# the query's rank one by one, the latent and the experts' share of a tensor=2 not at all. Each of the two residual
# blocks is one layer scanned twice, so that few layers are compiled.
MODEL = ModelConfig(
    width=32,
    num_layers=4,
    vocabulary_size=64,
    full_attention_layers=(0, 1),
    residual_block_layers=2,
    initializer_range=0.2,
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=8, value_width=8, decay_rank=8, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=2,
        query_rank=18,
        latent_width=7,
        nope_width=8,
        shared_key_width=4,
        value_width=8,
        query_chunk_tokens=16,
        indexer=IndexerConfig(stage="sparse", num_heads=2, head_width=8, top_k=6, loss_coefficient=0.3),
    ),
    moe=MoeConfig(
        num_experts=8,
        experts_per_token=2,
        expert_width=6,
        latent_width=16,
        num_dense_layers=2,
        dense_width=32,
        router=RouterConfig(balance_coefficient=0.5, balance_over="document", z_coefficient=0.1),
    ),
    vision=VisionConfig(num_layers=2, width=16, num_heads=1, head_width=16, hidden_width=32, patch_pixels=2),
    loss_chunk_tokens=40,
)
TENSOR_EXPERT = MeshConfig(tensor=2, expert=4)
FSDP_TENSOR_EXPERT = MeshConfig(fsdp=2, tensor=2, expert=2)
CONTEXT_EXPERT_TENSOR = MeshConfig(context=2, expert=2, tensor=2)


def run_config(
    *,
    dtype: str = "float64",
    stage: str = "sparse",
    capacity_factor: float = 2.0,
    transport: str = "all_to_all",
    exchange_chunks: int = 1,
    expert_axes: str = "expert",
    accumulation: int = 1,
    optimizer: str = "adamw",
    epsilon: float = 1e-8,
) -> RunConfig:
    full = MODEL.full_attention
    full = dataclasses.replace(full, indexer=dataclasses.replace(full.indexer, stage=stage))
    moe = dataclasses.replace(
        MODEL.moe,
        capacity_factor=capacity_factor,
        transport=transport,
        exchange_chunks=exchange_chunks,
        expert_axes=expert_axes,
    )
    return RunConfig(
        model=dataclasses.replace(MODEL, parameter_dtype=dtype, compute_dtype=dtype, full_attention=full, moe=moe),
        optimizer=OptimizerConfig(name=optimizer, warmup_steps=0, max_gradient_norm=0.5, epsilon=epsilon),
        training=TrainingConfig(accumulation=accumulation),
    )


def one_step(batch, mesh_config: MeshConfig, **settings):
    """(loss, report, counts, gradients), then (metrics, parameters, router biases) after the update; as NumPy."""
    config, mesh = run_config(**settings), make_mesh(mesh_config)
    value_and_gradient, update = make_value_and_gradient(config, mesh), make_update(config)

    @jax.jit
    def step(state, batch):
        found = value_and_gradient(state.parameters, state.router_biases, batch)
        new_state, metrics = update(state, *found)
        return found, (metrics, new_state.parameters, new_state.router_biases)

    (loss, report, *found), (metrics, *changed) = jax.device_get(
        step(random_state(config, mesh), place_batch(batch, mesh))
    )
    # An auxiliary loss that is configured is not 0.
    assert min(metrics[name] for name in ("balance_loss", "router_z_loss", "indexer_loss")) > 0
    # How often the exchange goes round does depend on the mesh.
    assert metrics.pop("exchange_rounds") >= (mesh_config.expert > 1)
    routers = {path: router._replace(rounds=0) for path, router in report.routers.items()}
    return (loss, report._replace(routers=routers), *found), (metrics, *changed)


def random_state(config: RunConfig, mesh):
    """A state before its first step. Every parameter is random: a zero, as some start, would hide gradients."""
    random = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(random.normal(size=leaf.shape, scale=0.2).astype(leaf.dtype), leaf.sharding)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    state = abstract_state(config, mesh)
    parameters = {path: draw(state.parameters[path]) for path in sorted(state.parameters)}
    return dataclasses.replace(jax.tree.map(zeros, state), parameters=parameters)


@pytest.fixture(scope="module")
def batch(make_batch):
    """16 rows of packed, uneven documents with images; half of the rows are nothing but padding."""
    return make_batch(MODEL, rows=16, row_tokens=24, row_patches=16, empty_rows=8)


@pytest.fixture(scope="module")
def one_device(batch):
    """`one_step` on one device, done once for each setting."""
    return cache(lambda **settings: one_step(batch, MeshConfig(), **settings))


def assert_same(ours, theirs, bound: float) -> None:
    """Every leaf of `ours` within `bound` of `theirs`, relative to that leaf's own largest value."""
    chex.assert_trees_all_equal_structs(ours, theirs)
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, mine), other in leaves:
        scale = np.abs(other).max(initial=0)
        difference = np.abs(np.asarray(mine, np.float64) - np.asarray(other, np.float64)).max(initial=0)
        assert difference <= bound * scale + 1e-300, f"{jax.tree_util.keystr(path)}: {difference} against {scale}"


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        # Buffers so small that the exchange takes several rounds.
        pytest.param(TENSOR_EXPERT, {"capacity_factor": 0.6, "exchange_chunks": 2}, id="tensor=2,expert=4"),
        pytest.param(FSDP_TENSOR_EXPERT, {"transport": "ring"}, id="fsdp=2,tensor=2,expert=2"),
        pytest.param(CONTEXT_EXPERT_TENSOR, {"capacity_factor": 0.6}, id="context=2,expert=2,tensor=2"),
        pytest.param(MeshConfig(context=2), {}, id="context=2", marks=pytest.mark.slow),
        pytest.param(MeshConfig(context=4, fsdp=2), {}, id="context=4,fsdp=2", marks=pytest.mark.slow),
        pytest.param(MeshConfig(context=4, expert=2), {}, id="context=4,expert=2", marks=pytest.mark.slow),
        pytest.param(
            MeshConfig(context=2, fsdp=2, tensor=2),
            {"stage": "dense"},
            id="context=2,fsdp=2,tensor=2,dense",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MeshConfig(context=4, expert=2),
            {"expert_axes": "context_and_expert", "capacity_factor": 0.6, "exchange_chunks": 2},
            id="context=4,expert=2, experts over both",
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshConfig(fsdp=8), {}, id="fsdp=8", marks=pytest.mark.slow),
        pytest.param(MeshConfig(expert=8), {"capacity_factor": 0.6}, id="expert=8", marks=pytest.mark.slow),
        pytest.param(
            MeshConfig(replica=2, fsdp=2, expert=2),
            {"capacity_factor": 0.6, "stage": "dense"},
            id="replica=2,fsdp=2,expert=2,dense",
            marks=pytest.mark.slow,
        ),
        pytest.param(FSDP_TENSOR_EXPERT, {"optimizer": "muon"}, id="muon", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_gives_one_devices_loss_gradients_and_update(batch, one_device, mesh, settings):
    with jax.enable_x64(True):
        # One device exchanges nothing, whatever the size of its buffers.
        exchange = ("capacity_factor", "transport", "exchange_chunks", "expert_axes")
        theirs = one_device(**{name: value for name, value in settings.items() if name not in exchange})
        ours = one_step(batch, mesh, **settings)
    assert_same(ours, theirs, 1e-9)


def test_devices_of_the_context_axis_without_targets_or_pictures_change_nothing(batch):
    """All targets lie on one device, all pictures in one row; the program is that of the test before."""
    loss_weight, feature_index = batch.loss_weight.copy(), batch.feature_index.copy()
    patch_segment_ids, patch_feature = batch.patch_segment_ids.copy(), batch.patch_feature.copy()
    # With context=2 one device holds the middle half of a row.
    loss_weight[:, 6:18] = 0
    row = int(np.argmax((feature_index >= 0).sum(axis=1)))
    is_other = np.arange(len(feature_index)) != row
    feature_index[is_other], patch_segment_ids[is_other], patch_feature[is_other] = -1, 0, -1
    assert loss_weight.any() and (feature_index[row] >= 0).any()
    changed = batch._replace(
        loss_weight=loss_weight,
        feature_index=feature_index,
        patch_segment_ids=patch_segment_ids,
        patch_feature=patch_feature,
    )
    with jax.enable_x64(True):
        ours = one_step(changed, CONTEXT_EXPERT_TENSOR, capacity_factor=0.6)
        assert_same(ours, one_step(changed, MeshConfig()), 1e-9)


@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        (MeshConfig(), 2),
        pytest.param(MeshConfig(), 4, marks=pytest.mark.slow),
        pytest.param(FSDP_TENSOR_EXPERT, 2, marks=pytest.mark.slow),
    ],
    ids=["one device, 2", "one device, 4", "fsdp=2,tensor=2,expert=2, 2"],
)
def test_accumulation_changes_nothing(batch, one_device, mesh, accumulation):
    with jax.enable_x64(True):
        ours = one_step(batch, mesh, accumulation=accumulation)
        assert_same(ours, one_device(), 1e-9)


@pytest.mark.slow
def test_a_float32_mesh_stays_within_rounding_of_one_device(batch, one_device):
    # With a small epsilon AdamW's first update is the sign of a gradient, which rounding can turn.
    settings = {"dtype": "float32", "epsilon": 0.1}
    (loss, _, counts, gradients), (metrics, parameters, _) = one_step(batch, FSDP_TENSOR_EXPERT, **settings)
    (their_loss, _, their_counts, their_gradients), (their_metrics, their_parameters, _) = one_device(**settings)
    assert_same(
        (loss, counts, gradients, parameters), (their_loss, their_counts, their_gradients, their_parameters), 1e-4
    )
    assert_same(metrics["gradient_norm"], their_metrics["gradient_norm"], 1e-4)


@pytest.mark.multigpu
@pytest.mark.parametrize("axis", ["fsdp", "expert", "tensor"])
def test_two_gpus_give_one_gpus_loss_gradients_and_update(batch, one_device, axis):
    with jax.enable_x64(True):
        assert_same(one_step(batch, MeshConfig(**{axis: 2}), capacity_factor=0.6), one_device(), 1e-9)


def test_the_initial_state_does_not_depend_on_the_mesh():
    config = run_config(dtype="float32")
    names = ("decoder.segments.0.layers.0.mixer.query_up", "decoder.segments.1.layers.0.mlp.down", "projector.norm")
    variables = {name: define(config.model).parameters[name] for name in names}
    state = abstract_state(config, make_mesh(FSDP_TENSOR_EXPERT))
    split = initial_arrays(variables, jax.random.key(3), {name: state.parameters[name].sharding for name in names})
    chex.assert_trees_all_equal(jax.device_get(split), jax.device_get(initial_arrays(variables, jax.random.key(3))))
    assert len({str(shard.index) for shard in split[names[1]].addressable_shards}) == 4
