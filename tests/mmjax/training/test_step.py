"""The training step: every mesh and every accumulation gives one device's loss, gradients, norm and update."""

import dataclasses
from collections import Counter, defaultdict
from functools import cache

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.axes import GATHERED_AT_USE, MESH_AXES, MESH_AXES_OF_EXPERTS
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
    layer_kinds,
)
from mmjax.data.batch import Batch
from mmjax.models.layers import initial_arrays
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import rests_on
from mmjax.planner.topology import read_cluster
from mmjax.training.compiled_program import read_program
from mmjax.training.exchanges import ExchangeReader
from mmjax.training.step import abstract_state, batch_specs, make_update, make_value_and_gradient, place_batch

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
    node_devices: int = 8,
    expert_axes: str = "expert",
    accumulation: int = 1,
    optimizer: str = "adamw",
    epsilon: float = 1e-8,
    num_heads: int = 2,
    expert_width: int = 6,
) -> RunConfig:
    full = MODEL.full_attention
    indexer = dataclasses.replace(full.indexer, stage=stage, num_heads=num_heads)
    full = dataclasses.replace(full, indexer=indexer, num_heads=num_heads)
    linear = dataclasses.replace(MODEL.linear_attention, num_heads=num_heads)
    moe = dataclasses.replace(
        MODEL.moe,
        expert_width=expert_width,
        capacity_factor=capacity_factor,
        transport=transport,
        exchange_chunks=exchange_chunks,
        node_devices=node_devices,
        expert_axes=expert_axes,
    )
    return RunConfig(
        model=dataclasses.replace(
            MODEL,
            parameter_dtype=dtype,
            compute_dtype=dtype,
            full_attention=full,
            linear_attention=linear,
            moe=moe,
        ),
        optimizer=OptimizerConfig(name=optimizer, warmup_steps=0, max_gradient_norm=0.5, epsilon=epsilon),
        training=TrainingConfig(accumulation=accumulation),
    )


@cache
def compiled_step(mesh_config: MeshConfig, shapes: tuple, **settings):
    """`(state, batch) -> what it found, what the update changed`, compiled for batches of these shapes."""
    config, mesh = run_config(**settings), make_mesh(mesh_config)
    value_and_gradient, update = make_value_and_gradient(config, mesh), make_update(config)

    def step(state, batch):
        found = value_and_gradient(state.parameters, state.router_biases, batch)
        new_state, metrics = update(state, *found)
        return found, (metrics, new_state.parameters, new_state.router_biases)

    def describe(shape: tuple, array_spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, array_spec))

    batch = Batch(*map(describe, shapes, batch_specs()))
    return jax.jit(step).lower(abstract_state(config, mesh), batch).compile()


def program_of(batch, mesh_config: MeshConfig, **settings):
    shapes = tuple((array.shape, array.dtype) for array in batch)
    return compiled_step(mesh_config, shapes, **settings)


def one_step(batch, mesh_config: MeshConfig, change=lambda state: state, **settings):
    """(loss, report, counts, gradients), then (metrics, parameters, router biases) after the update; as NumPy.

    `change` makes another state of the one at the start.
    """
    config, mesh = run_config(**settings), make_mesh(mesh_config)
    state = change(random_state(config, mesh))
    (loss, report, *found), (metrics, *changed) = jax.device_get(
        program_of(batch, mesh_config, **settings)(state, place_batch(batch, mesh))
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


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        # Buffers so small that the exchange takes several rounds.
        pytest.param(TENSOR_EXPERT, {"capacity_factor": 0.6, "exchange_chunks": 2}, id="tensor=2,expert=4"),
        pytest.param(FSDP_TENSOR_EXPERT, {"transport": "ring"}, id="fsdp=2,tensor=2,expert=2"),
        pytest.param(CONTEXT_EXPERT_TENSOR, {"capacity_factor": 0.6}, id="context=2,expert=2,tensor=2"),
        pytest.param(MeshConfig(replica=8), {}, id="replica=8", marks=pytest.mark.slow),
        pytest.param(MeshConfig(fsdp=4, tensor=2), {}, id="fsdp=4,tensor=2", marks=pytest.mark.slow),
        pytest.param(MeshConfig(replica=2, expert=4), {}, id="replica=2,expert=4", marks=pytest.mark.slow),
        pytest.param(
            MeshConfig(replica=2, context=2, tensor=2), {}, id="replica=2,context=2,tensor=2", marks=pytest.mark.slow
        ),
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
            TENSOR_EXPERT,
            {"capacity_factor": 0.6, "transport": "by_node", "node_devices": 4},
            id="tensor=2,expert=4 by node",
            marks=pytest.mark.slow,
        ),
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
        exchange = ("capacity_factor", "transport", "exchange_chunks", "node_devices", "expert_axes")
        alike = {name: value for name, value in settings.items() if name not in exchange}
        theirs, ours = one_device(**alike), one_step(batch, mesh, **settings)
        program, whole = program_of(batch, mesh, **settings), program_of(batch, MeshConfig(), **alike)
    assert_same(ours, theirs, 1e-9)
    if jax.default_backend() != "cpu":
        # Compilers for GPUs join exchanges and take memory of their own.
        return
    assert device_bytes(program) < device_bytes(whole)
    # Muon makes matrices whole by itself.
    if settings.get("optimizer") != "muon":
        assert_exchanges_are_those_meant(program, mesh, **settings)


@pytest.mark.mesh
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_eight_devices_of_an_axis_that_needs_wider_sizes_give_one_devices_step(make_batch, axis):
    batch = make_batch(MODEL, rows=2, row_tokens=64, row_patches=16, empty_rows=1)
    wide = {"num_heads": 8, "expert_width": 8}
    with jax.enable_x64(True):
        theirs, ours = one_step(batch, MeshConfig(), **wide), one_step(batch, MeshConfig(**{axis: 8}), **wide)
        program = program_of(batch, MeshConfig(**{axis: 8}), **wide)
    assert_same(ours, theirs, 1e-9)
    if jax.default_backend() == "cpu":
        assert_exchanges_are_those_meant(program, MeshConfig(**{axis: 8}), **wide)


def device_bytes(program) -> int:
    """Arguments and temporaries of one device."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def assert_exchanges_are_those_meant(program, mesh: MeshConfig, **settings) -> None:
    """The compiled text holds each exchange as often as it is meant, further rounds aside, and none else."""
    model = run_config(**settings).model
    reader = ExchangeReader(read_program(program.as_text()), mesh, read_cluster("1x8xh200"))
    found: dict[str, dict[tuple, float]] = defaultdict(dict)
    for exchange in reader.exchanges():
        if not exchange.is_conditional:
            found[exchange.kind][exchange.mesh_axes] = exchange.count
    over_context = [found[kind].pop(("context",), 0) for kind in ("all-gather", "reduce-scatter")]
    assert all(count > 0 for count in over_context) == (mesh.context > 1)

    # Each weight is gathered where it is used, and again in the backward pass of what is computed again; its gradient
    # is scattered once.
    weights, once = gathered_weights(model, mesh)
    assert found["reduce-scatter"] == weights
    assert found["all-gather"] == {axes: 2 * number - once[axes] for axes, number in weights.items()}

    # Rows of tokens go to experts and back, in the forward pass, again, and as gradients; once each time also which
    # experts they are for, with their weights, whose gradients come back.
    axes_of_experts = MESH_AXES_OF_EXPERTS[model.moe.expert_axes]
    exchanging = tuple(axis for axis in axes_of_experts if mesh.sizes[axis] > 1)
    num_linear, num_moe = (sum(word in kind for kind in layer_kinds(model)) for word in ("linear", "moe"))
    is_ring, is_by_node = (model.moe.transport == transport for transport in ("ring", "by_node"))
    # Between nodes rows and sums pass, and which token each row is of.
    num_nodes = mesh.expert * mesh.tensor // model.moe.node_devices if is_by_node else 1
    chunks = num_nodes if is_by_node else model.moe.exchange_chunks
    swaps = num_moe * (2 * (1 + is_by_node + 2 * chunks) + 1 + 2 * chunks)
    assert found["all-to-all"] == ({exchanging: swaps} if exchanging and not is_ring else {})
    # Each linear attention looks back over two edges between chunks; a ring passes rows, indices, weights and sums.
    sent = {("context",): 6 * num_linear} if mesh.context > 1 else {}
    sent |= {exchanging: 6 * num_moe * (num_nodes - 1)} if is_by_node else {}
    assert found["collective-permute"].keys() == sent.keys() | ({exchanging} if exchanging and is_ring else set())
    assert sent.items() <= found["collective-permute"].items()

    # Sums of data-parallel gradients and counts are taken once a step, whatever the number of layers. Apart from them
    # devices that exchange agree on the number of rounds, in the forward pass and again.
    rounds = 2 * num_moe if exchanging and not is_ring else 0
    assert sum(count for axes, count in found["all-reduce"].items() if "tensor" not in axes) - rounds <= 9
    assert found.keys() <= {"reduce-scatter", "all-gather", "all-to-all", "collective-permute", "all-reduce"}


def gathered_weights(model: ModelConfig, mesh: MeshConfig) -> tuple[dict[tuple, int], Counter]:
    """How many layers' weights rest split over which axes to be gathered, and how many of them outside of layers."""
    weights, once = Counter(), Counter()
    for variable in define(model).parameters.values():
        metadata, array = variable.get_metadata(), variable.get_value()
        for name, size in zip(metadata["array_axes"], metadata["whole_shape"], strict=True):
            if name not in GATHERED_AT_USE:
                continue
            resting = rests_on(name, size, mesh.sizes)
            mesh_axes = tuple(axis for axis in MESH_AXES if axis in resting and axis in GATHERED_AT_USE[name])
            mesh_axes = tuple(axis for axis in mesh_axes if mesh.sizes[axis] > 1)
            is_stacked = array.ndim > len(metadata["array_axes"])
            weights[mesh_axes] += array.shape[0] if is_stacked else 1
            once[mesh_axes] += not is_stacked
    return {axes: number for axes, number in weights.items() if axes}, once


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replica", "fsdp", "expert", "context"])
def test_memory_falls_as_an_axis_grows(batch, axis):
    sizes = (1, 2, 4)
    with jax.enable_x64(True):
        programs = [program_of(batch, MeshConfig(**{axis: size})) for size in sizes]
    arguments, temporaries = (
        [getattr(program.memory_analysis(), f"{name}_size_in_bytes") for program in programs]
        for name in ("argument", "temp")
    )
    # Activations fall with every axis that splits tokens, what rests with those that split it.
    assert temporaries == sorted(temporaries, reverse=True) and temporaries[-1] < 0.6 * temporaries[0]
    bound = {"fsdp": 0.4, "expert": 0.4}.get(axis, 1.0)
    assert arguments[-1] <= bound * arguments[0]


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


def one_expert_and_slow_decay(state):
    """Routers that send every token to experts 0 and 1, and linear attention that forgets next to nothing."""

    def move(path: str, array: jax.Array) -> jax.Array:
        return array - 12 if path.endswith("decay_bias") else array

    def prefer(bias: jax.Array) -> jax.Array:
        return jax.device_put(np.zeros(bias.shape) + 50.0 * (np.arange(bias.shape[-1]) < 2)[None], bias.sharding)

    return dataclasses.replace(
        state,
        parameters={path: move(path, array) for path, array in state.parameters.items()},
        router_biases={path: prefer(bias) for path, bias in state.router_biases.items()},
    )


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param(CONTEXT_EXPERT_TENSOR, {"capacity_factor": 0.6}, id="context=2,expert=2,tensor=2"),
        pytest.param(TENSOR_EXPERT, {"capacity_factor": 0.6, "exchange_chunks": 2}, id="tensor=2,expert=4"),
        pytest.param(FSDP_TENSOR_EXPERT, {"transport": "ring"}, id="fsdp=2,tensor=2,expert=2"),
    ],
)
def test_one_expert_for_all_and_a_document_over_the_whole_row_change_nothing(batch, mesh, settings):
    """The programs are those of the first test."""
    row = int(np.argmax((batch.segment_ids > 0).sum(axis=1)))
    segment_ids, positions = batch.segment_ids.copy(), batch.positions.copy()
    # One document across all edges of the context axis; its neighbours keep theirs.
    segment_ids[row], positions[row] = 1, np.arange(segment_ids.shape[1])
    changed = batch._replace(segment_ids=segment_ids, positions=positions)
    with jax.enable_x64(True):
        theirs = one_step(changed, MeshConfig(), one_expert_and_slow_decay)
        ours = one_step(changed, mesh, one_expert_and_slow_decay, **settings)
    loads = [router.load for router in theirs[0][1].routers.values()]
    assert all((load[..., :2].sum() == load.sum()) and load.sum() > 0 for load in loads)
    assert_same(ours, theirs, 1e-9)


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
