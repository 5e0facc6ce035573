"""Steps that train adapters: on every mesh the merged model's logits, one device's gradients and update; no more."""

import dataclasses
import itertools
from functools import cache
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mmjax.checkpoint.adapters import define_run, matched_projections
from mmjax.config import (
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.models.lora import merge
from mmjax.models.multimodal import define
from mmjax.parallel.context import join_positions
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec
from mmjax.training.step import (
    abstract_state,
    batch_specs,
    make_train_step,
    make_update,
    make_value_and_gradient,
    place_batch,
    specs_of,
)

# Every part of Kimi-K3 and its indexer; each block is one layer scanned twice. Experts fit MXFP4's groups of 32.
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
        query_rank=16,
        latent_width=8,
        nope_width=8,
        shared_key_width=4,
        value_width=8,
        query_chunk_tokens=16,
        indexer=IndexerConfig(stage="sparse", num_heads=2, head_width=8, top_k=6, loss_coefficient=0.3),
    ),
    moe=MoeConfig(
        num_experts=8, experts_per_token=2, expert_width=128, latent_width=32, num_dense_layers=2, dense_width=32
    ),
    vision=VisionConfig(num_layers=2, width=16, num_heads=1, head_width=16, hidden_width=32, patch_pixels=2),
    parameter_dtype="float64",
    compute_dtype="float64",
    loss_chunk_tokens=40,
)
FSDP_EXPERT = MeshConfig(fsdp=2, expert=4)
TENSOR_EXPERT = MeshConfig(tensor=2, expert=4)
FSDP_TENSOR_EXPERT = MeshConfig(fsdp=2, tensor=2, expert=2)
slow = pytest.mark.slow


def run_config(
    *,
    storage: str = "mxfp4",
    experts: Literal["per_expert", "shared_down"] = "per_expert",
    stage: str = "sparse",
    capacity_factor: float = 2.0,
    transport: str = "all_to_all",
    exchange_chunks: int = 1,
    node_devices: int = 8,
    accumulation: int = 1,
    optimizer: str = "adamw",
    rank: int = 4,
) -> RunConfig:
    full = MODEL.full_attention
    full = dataclasses.replace(full, indexer=dataclasses.replace(full.indexer, stage=stage))
    moe = dataclasses.replace(
        MODEL.moe,
        expert_storage=storage,
        capacity_factor=capacity_factor,
        transport=transport,
        exchange_chunks=exchange_chunks,
        node_devices=node_devices,
    )
    return RunConfig(
        model=dataclasses.replace(MODEL, full_attention=full, moe=moe),
        lora=LoraConfig(rank=rank, alpha=6.0, experts=experts, expert_rank=2),
        optimizer=OptimizerConfig(name=optimizer, warmup_steps=0, max_gradient_norm=0.5),
        training=TrainingConfig(accumulation=accumulation),
    )


def random_state(config: RunConfig, mesh):
    """A state before its first step. Every array is random, B of the adapters too: a zero would hide gradients."""
    random = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == np.uint8:
            # Scales around 2^-4, so that experts matter; as codes these bytes are as good as any.
            return jax.device_put(random.integers(121, 125, leaf.shape, np.uint8), leaf.sharding)
        return jax.device_put(random.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), leaf.sharding)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    state = abstract_state(config, mesh)
    groups = {
        name: {path: draw(getattr(state, name)[path]) for path in sorted(getattr(state, name))}
        for name in ("parameters", "frozen", "router_biases")
    }
    # Small ones, so that every expert is taken.
    groups["router_biases"] = {path: 0.1 * bias for path, bias in groups["router_biases"].items()}
    return dataclasses.replace(jax.tree.map(zeros, state), **groups)


def make_logits(definition, mesh):
    """`(parameters, router_biases, batch, frozen) -> logits [B, S, V], loads of the routers`."""

    def on_device(parameters, router_biases, batch, frozen):
        model = definition.assemble(parameters, router_biases, frozen)
        hidden, records = model(batch)
        loads = [record.router.load for segment in records for record in segment if record.router is not None]
        logits = jnp.einsum("bsd,dv->bsv", hidden, model.decoder.head_weights(hidden.dtype))
        return logits, [jax.lax.psum(load, ("replica", "fsdp", "expert", "context")) for load in loads]

    specs = (
        specs_of(definition.parameters, mesh),
        PartitionSpec(),
        batch_specs(),
        specs_of(definition.frozen, mesh),
    )
    out = (spec("batch", "position", "vocabulary"), PartitionSpec())
    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=out))


def one_step(batch, mesh_config: MeshConfig, **settings):
    """Logits; (loss, counts, gradients); (metrics, parameters, router biases) after the update; as NumPy."""
    config, mesh = run_config(**settings), make_mesh(mesh_config)
    value_and_gradient, update = make_value_and_gradient(config, mesh), make_update(config)
    logits = make_logits(define_run(config), mesh)

    @jax.jit
    def step(state, batch):
        found = value_and_gradient(state.parameters, state.router_biases, batch, state.frozen)
        new_state, metrics = update(state, *found)
        loss, _, counts, gradients = found
        values, loads = logits(state.parameters, state.router_biases, batch, state.frozen)
        return values, loads, (loss, counts, gradients), (metrics, new_state.parameters, new_state.router_biases)

    logits_split, *found, (metrics, *changed) = jax.device_get(
        step(random_state(config, mesh), place_batch(batch, mesh))
    )
    # How often the exchange goes round does depend on the mesh.
    assert metrics.pop("exchange_rounds") >= (mesh_config.expert > 1)
    return join_positions(logits_split, mesh_config.context), *found, (metrics, *changed)


def merged_logits(batch, **settings):
    """Logits of the merged model on one device."""
    config, mesh = run_config(**settings), make_mesh(MeshConfig())
    state = random_state(config, mesh)
    matched = matched_projections(config.model, config.lora, "")
    arrays = merge(config.model, config.lora, matched, state.parameters, state.frozen)
    changed = sum(not np.array_equal(arrays[path], state.frozen[path]) for path in arrays if path in state.frozen)
    assert changed == sum(not projection.is_packed for projection in matched)
    moe = dataclasses.replace(config.model.moe, expert_storage="dense")
    definition = define(dataclasses.replace(config.model, moe=moe))
    return np.asarray(make_logits(definition, mesh)(arrays, state.router_biases, place_batch(batch, mesh), {})[0])


@pytest.fixture(scope="module")
def batch(make_batch):
    """16 rows of packed, uneven documents with images; half of the rows are nothing but padding."""
    return make_batch(MODEL, rows=16, row_tokens=20, row_patches=16, empty_rows=8)


@pytest.fixture(scope="module")
def one_device(batch):
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
    "settings",
    [
        pytest.param({}, id="packed experts"),
        pytest.param({"storage": "dense", "experts": "shared_down", "stage": "dense"}, id="shared A", marks=slow),
    ],
)
def test_adapters_give_the_logits_of_the_merged_model(batch, one_device, settings):
    with jax.enable_x64(True):
        logits, loads, *_ = one_device(**settings)
        assert_same(logits, merged_logits(batch, **settings), 1e-12)
    assert all((load > 0).all() for load in loads), "an expert took no token"


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        # Buffers so small that the exchange takes several rounds.
        pytest.param(FSDP_EXPERT, {"capacity_factor": 0.6, "exchange_chunks": 3}, id="fsdp=2,expert=4"),
        pytest.param(FSDP_EXPERT, {"capacity_factor": 0.6, "transport": "ring"}, id="ring", marks=slow),
        pytest.param(
            FSDP_EXPERT,
            {"capacity_factor": 0.6, "transport": "by_node", "node_devices": 2},
            id="by node",
            marks=slow,
        ),
        pytest.param(
            FSDP_TENSOR_EXPERT,
            {"storage": "dense", "experts": "shared_down", "stage": "dense"},
            id="shared A",
            marks=slow,
        ),
        pytest.param(TENSOR_EXPERT, {"capacity_factor": 0.6}, id="tensor=2,expert=4", marks=slow),
        pytest.param(FSDP_TENSOR_EXPERT, {"storage": "dense"}, id="fsdp=2,tensor=2,expert=2", marks=slow),
        pytest.param(MeshConfig(fsdp=8), {"storage": "dense"}, id="fsdp=8", marks=slow),
        pytest.param(MeshConfig(expert=8), {"capacity_factor": 0.6}, id="expert=8", marks=slow),
        pytest.param(MeshConfig(context=2, fsdp=2, expert=2), {"capacity_factor": 0.6}, id="context=2", marks=slow),
        pytest.param(MeshConfig(replica=2, fsdp=2, expert=2), {"accumulation": 2}, id="replica=2", marks=slow),
        pytest.param(FSDP_EXPERT, {"optimizer": "muon"}, id="muon", marks=slow),
    ],
)
def test_every_mesh_gives_one_devices_logits_gradients_and_update(batch, one_device, mesh, settings):
    with jax.enable_x64(True):
        unlike = ("capacity_factor", "transport", "exchange_chunks", "node_devices", "accumulation")
        theirs = one_device(**{name: value for name, value in settings.items() if name not in unlike})
        ours = one_step(batch, mesh, **settings)
    assert_same(ours, theirs, 1e-9)


def test_frozen_routers_keep_their_biases_and_every_factor_has_a_gradient(one_device):
    with jax.enable_x64(True):
        _, _, (_, _, gradients), (_, parameters, router_biases) = one_device()
        state = jax.device_get(random_state(run_config(), make_mesh(MeshConfig())))
    chex.assert_trees_all_equal(router_biases, state.router_biases)
    # Indexers read detached inputs and learn from their own loss: their adapters too.
    still = [path for path, gradient in gradients.items() if not np.abs(gradient).max() > 0]
    assert not still
    assert all(np.abs(parameters[path] - state.parameters[path]).max() > 0 for path in parameters)


@pytest.mark.parametrize(
    ("mesh_config", "accumulation"),
    [
        pytest.param(FSDP_TENSOR_EXPERT, 1, id="fsdp=2,tensor=2,expert=2"),
        pytest.param(FSDP_EXPERT, 1, id="fsdp=2,expert=4", marks=slow),
        pytest.param(TENSOR_EXPERT, 1, id="tensor=2,expert=4", marks=slow),
        pytest.param(MeshConfig(fsdp=8), 1, id="fsdp=8", marks=slow),
        pytest.param(MeshConfig(expert=8), 1, id="expert=8", marks=slow),
        pytest.param(MeshConfig(replica=8), 1, id="replica=8", marks=slow),
        pytest.param(MeshConfig(replica=2, fsdp=2, expert=2), 2, id="replica=2,fsdp=2,expert=2", marks=slow),
        pytest.param(MeshConfig(replica=2, tensor=2, expert=2), 1, id="replica=2,tensor=2,expert=2", marks=slow),
        pytest.param(MeshConfig(context=2, fsdp=2, expert=2), 1, id="context=2,fsdp=2,expert=2", marks=slow),
        pytest.param(MeshConfig(context=2, replica=2, tensor=2), 1, id="context=2,replica=2,tensor=2", marks=slow),
        pytest.param(MeshConfig(pipe=2, fsdp=2, expert=2), 2, id="pipe=2,fsdp=2,expert=2", marks=slow),
        pytest.param(MeshConfig(pipe=2, replica=2, tensor=2), 2, id="pipe=2,replica=2,tensor=2", marks=slow),
    ],
)
def test_replicas_of_factors_stay_bitwise_equal_and_nothing_else_moves(make_batch, mesh_config, accumulation):
    """float32, where sums in another order would differ; six steps of a small model, all of it split."""
    moe = dataclasses.replace(MODEL.moe, num_dense_layers=0, expert_storage="mxfp4")
    model = dataclasses.replace(
        MODEL,
        num_layers=mesh_config.pipe,
        full_attention_layers=(),
        residual="plain",
        vision=VisionConfig(num_layers=0),
        parameter_dtype="float32",
        compute_dtype="float32",
        moe=moe,
    )
    if mesh_config.pipe > 1:
        model = dataclasses.replace(model, pipeline_stages=(1,) * mesh_config.pipe)
    config = RunConfig(
        model=model,
        lora=LoraConfig(rank=2, alpha=6.0, experts="shared_down"),
        mesh=mesh_config,
        training=TrainingConfig(accumulation=accumulation),
    )
    rows = accumulation * max(4, mesh_config.num_row_shards)
    mesh, batch = make_mesh(mesh_config), make_batch(model, rows=rows, row_tokens=12)
    state = random_state(config, mesh)
    frozen, biases, before = jax.device_get((state.frozen, state.router_biases, state.parameters))
    step, placed = make_train_step(config, mesh), place_batch(batch, mesh)
    for _ in range(6):
        state, metrics = step(state, placed)
    assert bool(metrics["is_finite"])
    chex.assert_trees_all_equal(jax.device_get((state.frozen, state.router_biases)), (frozen, biases))
    num_replicated = 0
    for path, array in state.parameters.items():
        shards: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            value = np.asarray(shard.data)
            other = shards.setdefault(str(shard.index), value)
            num_replicated += other is not value
            np.testing.assert_array_equal(value, other, err_msg=path)
        assert np.abs(np.asarray(array) - before[path]).max() > 0
    assert num_replicated > len(state.parameters)


def products(jaxpr) -> list[tuple[str, tuple[int, ...]]]:
    """(primitive, shape of its output) of everything in a jaxpr that could be a gradient of a weight."""
    found = []
    for equation in jaxpr.eqns:
        inner = [
            getattr(value, "jaxpr", value)
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, (tuple, list)) else (parameter,))
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        found += itertools.chain.from_iterable(map(products, inner))
        if not inner and equation.primitive.name in ("dot_general", "scatter-add", "reduce_scatter", "psum", "add_any"):
            found += [(equation.primitive.name, tuple(sorted(out.aval.shape))) for out in equation.outvars]
    return found


def test_no_gradient_of_a_frozen_weight_is_ever_made(make_batch):
    """Sizes are chosen so that no other product has the shape of an expert's or a projection's weight."""
    moe = dataclasses.replace(MODEL.moe, num_experts=6, expert_width=96, latent_width=160, dense_width=56)
    attention = dataclasses.replace(MODEL.linear_attention, num_heads=5, key_width=13, value_width=11)
    small = dataclasses.replace(MODEL, width=44, moe=moe, linear_attention=attention, vision=VisionConfig(num_layers=0))
    small = dataclasses.replace(small, parameter_dtype="float32", compute_dtype="float32")
    batch = make_batch(small, rows=2, row_tokens=20)
    # Projections are products of two matrices: 5 heads x 13, and x 11.
    weights = {(44, 160): "latent", (44, 56): "dense MLP", (65, 44): "query", (55, 44): "output"}
    weights |= {(6, 96, 160): "experts", (96, 160): "one expert"}

    def made(config: RunConfig) -> set[str]:
        mesh = make_mesh(MeshConfig())
        state = abstract_state(config, mesh)
        jaxpr = jax.make_jaxpr(make_value_and_gradient(config, mesh))(
            state.parameters, state.router_biases, batch, state.frozen
        )
        shapes = {shape for _, shape in products(jaxpr.jaxpr)}
        return {
            name for shape, name in weights.items() if any(tuple(sorted(shape)) == s[-len(shape) :] for s in shapes)
        }

    assert made(RunConfig(model=small)) >= {"latent", "dense MLP", "query", "output"}
    assert not made(RunConfig(model=small, lora=LoraConfig(rank=3)))
