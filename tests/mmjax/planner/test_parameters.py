"""What the planner says of a model's arrays is what the model has."""

import dataclasses
import math
from collections import Counter

import jax
import pytest

from mmjax import axes
from mmjax.config import (
    GroupedAttentionConfig,
    IndexerConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.models.layout import slots_of_kinds
from mmjax.models.multimodal import define
from mmjax.planner.adapters import Tuning, trained_arrays
from mmjax.planner.memory import device_bytes, device_slots, kept_weight_bytes
from mmjax.planner.parameters import num_parameters, parameter_arrays, shards
from mmjax.presets.deepseek import deepseek_v32
from mmjax.presets.fuyu import fuyu_8b
from mmjax.presets.glm5_next import glm53_flash_text
from mmjax.presets.kimi_k3 import kimi_k3, kimi_k3_tiny, kimi_k31
from mmjax.presets.kimi_linear import kimi_linear_48b
from mmjax.presets.llama import smollm2_135m
from mmjax.presets.llava import llava_1_5_7b, llava_next_vicuna_7b
from mmjax.presets.qwen3 import qwen3_0_6b, qwen3_30b_a3b
from mmjax.presets.qwen3_next import qwen3_next_80b
from mmjax.presets.qwen3_vl import qwen3_vl_4b, qwen3_vl_30b_a3b
from mmjax.presets.whisper import whisper_base
from mmjax.training import dry_run
from mmjax.training.step import abstract_state, batch_specs

DIRECT_QUERIES = dataclasses.replace(
    kimi_k3_tiny(),
    residual="plain",
    vision=VisionConfig(num_layers=0),
    parameter_dtype="bfloat16",
    full_attention=dataclasses.replace(
        kimi_k3_tiny().full_attention, query_rank=0, indexer=IndexerConfig(stage="dense", key_norm_bias=False)
    ),
)
GROUPED = dataclasses.replace(
    smollm2_135m(),
    tied_head=False,
    mlp_bias=True,
    grouped_attention=GroupedAttentionConfig(
        projection_bias=True, output_bias=True, head_norm=True, output_gate="sigmoid"
    ),
)
MESHES = [
    MeshConfig(),
    MeshConfig(replica=2, fsdp=4),
    MeshConfig(fsdp=8),
    MeshConfig(fsdp=2, expert=4),
    MeshConfig(expert=8),
    MeshConfig(expert=4, tensor=2),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(fsdp=4, tensor=2),
    MeshConfig(tensor=4),
    MeshConfig(replica=2, expert=2, tensor=2),
    MeshConfig(replica=4, tensor=2),
    MeshConfig(fsdp=2, tensor=4),
]


def arrays_of_model(model: ModelConfig) -> Counter:
    """How many layers hold an array of this name, shape, split and dtype."""
    definition, found = define(model), Counter()
    for path, variable in (definition.parameters | definition.router_biases).items():
        value, array_axes = variable.get_value(), variable.get_metadata()["array_axes"]
        num_stacked = len(value.shape) - len(array_axes)
        words = [word for word in path.split(".") if not word.isdigit()]
        name = ".".join(word for word in words if word not in ("segments", "layers", "decoder", "vision"))
        found[name, value.shape[num_stacked:], array_axes, str(value.dtype)] += math.prod(value.shape[:num_stacked])
    return found


@pytest.mark.parametrize(
    "model",
    [
        *(kimi_k3(), kimi_k31(), kimi_k3_tiny(), kimi_linear_48b(), DIRECT_QUERIES),
        *(llava_1_5_7b(), llava_next_vicuna_7b(), qwen3_vl_4b(), qwen3_vl_30b_a3b(), fuyu_8b()),
        dataclasses.replace(smollm2_135m(), audio=whisper_base()),
        *(smollm2_135m(), GROUPED, deepseek_v32(), qwen3_next_80b(), glm53_flash_text()),
        *(qwen3_0_6b(), qwen3_30b_a3b()),
    ],
)
def test_the_planner_lists_every_array_of_the_model(model):
    listed = Counter()
    for array in parameter_arrays(model):
        name = array.path.removeprefix("decoder.").removeprefix("vision.")
        listed[name, array.shape, array.array_axes, array.dtype] += array.count
    assert listed == arrays_of_model(model)


def test_kimi_k3_counts_its_published_parameters():
    assert num_parameters(kimi_k3()) == 2_779_931_834_976
    assert num_parameters(kimi_k31()) - num_parameters(kimi_k3()) == 24 * 7_438_592


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(map(str, mesh.sizes.values())))
def test_bytes_at_rest_are_those_of_the_train_state(mesh, optimizer):
    # Its latent width of 20 and query rank of 24 are divided by some of the meshes only.
    config = RunConfig(mesh=mesh, model=kimi_k3_tiny(), optimizer=OptimizerConfig(name=optimizer))
    state = abstract_state(config, jax.sharding.AbstractMesh(tuple(mesh.sizes.values()), axes.MESH_AXES))

    def held(tree) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    predicted = device_bytes(config)
    assert predicted.parameters == held((state.parameters, state.router_biases))
    counters = held(state.optimizer) - predicted.optimizer
    assert 0 <= counters <= 64
    assert predicted.gradients == held(state.parameters)


def test_bytes_of_a_row_are_those_of_a_batch(make_batch):
    model = kimi_k3_tiny()
    config = RunConfig(model=model, mesh=MeshConfig(fsdp=2))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, rows=8, row_tokens=24, row_patches=24))
    batch = make_batch(model, rows=8, row_tokens=24, row_patches=24)
    assert len(batch) == len(batch_specs())
    assert device_bytes(config).batch == sum(array.nbytes for array in batch) / 2


def test_adapters_of_kimi_k3_have_the_known_sizes():
    """Rank 1 on every routed expert: 3 x 6,656 x 92 x 896 entries; the rest of the arrays is frozen."""
    arrays = trained_arrays(kimi_k3(), Tuning(kind="lora", rank=0, expert_rank=1))
    trained = [array for array in arrays if array.is_trained]
    assert sum(array.size for array in trained) == 3 * 6656 * 92 * 896
    assert {array.part for array in trained} == {"adapters"}


def test_an_adapter_has_rank_times_inputs_plus_outputs():
    model = kimi_k3_tiny()
    arrays = {array.path: array for array in trained_arrays(model, Tuning(kind="lora", rank=3))}
    # Queries of linear attention: 64 inputs, 4 heads of 16; output: 64 values to width 64.
    assert arrays["mixer.query.down"].shape == (64, 3) and arrays["mixer.query.up"].shape[0] == 3
    assert arrays["mixer.output.down"].shape[-1] == 3 and arrays["mixer.output.up"].shape == (3, 64)
    assert "mlp.gate.down" not in {path for path, array in arrays.items() if "experts" in array.array_axes}


def test_packed_experts_take_four_and_a_quarter_bits():
    model = kimi_k3()
    config = RunConfig(model=model, mesh=MeshConfig(fsdp=2, expert=64))
    packed = device_bytes(config, Tuning(kind="lora", experts_at_rest="mxfp4"))
    plain = device_bytes(config, Tuning(kind="lora"))
    experts = 92 * 896 * 33_030_144 / 128
    assert plain.parameters - packed.parameters == pytest.approx(experts * (4 - 17 / 32))
    # Published: about 11.3 GB of packed experts on each of 128 devices.
    assert experts * 17 / 32 == pytest.approx(11.3e9, rel=0.01)
    assert plain.gradients == packed.gradients < 1e9


def test_packed_experts_are_used_packed():
    """Gathered over fsdp as they rest, and once more in the order of the kernels; on one device only the latter."""
    model = dataclasses.replace(kimi_k3(), parameter_dtype="bfloat16", compute_dtype="bfloat16")
    layer = 896 * 33_030_144 * 17 / 32
    packed = Tuning(kind="lora", rank=1, experts_at_rest="mxfp4")
    for mesh, held in ((MeshConfig(fsdp=2, expert=8), 2 * layer / 8), (MeshConfig(expert=4), layer / 4)):
        config = RunConfig(model=model, mesh=mesh)
        # What else a layer gathers: 0.19 + 0.44 B numbers of 2 bytes, and the router's 4.
        rest = device_bytes(config, packed).gathered_weights - held
        assert rest == pytest.approx(2 * 0.64e9, rel=0.02)
    # Kept for the backward pass: gathered once in each of 92 layers, and the dense weights of all.
    kept = dataclasses.replace(config, mesh=MeshConfig(fsdp=2, expert=64))
    none = dataclasses.replace(kept, model=dataclasses.replace(model, remat="none"))
    held = kept_weight_bytes(none, shards(trained_arrays(model, packed), kept.mesh))
    assert held - 92 * layer / 64 == pytest.approx(2 * 93 * 0.64e9, rel=0.1)


@pytest.mark.parametrize(
    ("storage", "lora", "fsdp"),
    [
        ("mxfp4", LoraConfig(rank=8), 2),
        # Rows of 3,072 codes in pairs are split, their 96 scales are not.
        ("mxfp4", LoraConfig(rank=8), 64),
        ("dense", LoraConfig(rank=8, experts="shared_down", targets=("query", "mlp.gate", "mlp.down")), 2),
        ("dense", LoraConfig(rank=32, experts="none", targets=(r".*\.mixer\..*",)), 2),
    ],
    ids=["all-linear", "all-linear, scales whole", "shared A", "mixers"],
)
def test_the_planner_counts_what_an_adapted_model_holds(lora, storage, fsdp):
    model, mesh = kimi_k31(), MeshConfig(fsdp=fsdp, expert=64)
    moe = dataclasses.replace(model.moe, expert_storage=storage)
    config = RunConfig(model=dataclasses.replace(model, moe=moe, parameter_dtype="bfloat16"), mesh=mesh, lora=lora)
    state = abstract_state(config, jax.sharding.AbstractMesh(tuple(mesh.sizes.values()), axes.MESH_AXES))
    estimate, tuning = dry_run.estimate(config, state), dry_run.tuning_of(config)
    arrays = trained_arrays(config.model, tuning)
    assert estimate.num_parameters == sum(array.size for array in arrays)
    assert estimate.num_trained == sum(array.size for array in arrays if array.is_trained)
    predicted = device_bytes(config, tuning)
    assert predicted.parameters == estimate.parameter_bytes
    assert 0 <= estimate.optimizer_bytes - predicted.optimizer <= 64
    assert predicted.gradients == estimate.gradient_bytes


@pytest.mark.parametrize(("pipe", "stages"), [(4, ()), (4, (5, 2, 3, 2)), (2, (3, 3, 3, 3))])
def test_places_of_a_pipeline_s_layers_are_those_of_the_model(pipe, stages):
    moe = MoeConfig(num_dense_layers=1)
    even = stages or (3, 3, 3, 3)
    model = ModelConfig(num_layers=12, full_attention_layers=(3, 7, 11), moe=moe, pipeline_stages=even)
    model = dataclasses.replace(model, pipeline_chunks=len(even) // pipe)
    planned = dataclasses.replace(model, pipeline_stages=stages)
    slots = device_slots(RunConfig(model=planned, mesh=MeshConfig(pipe=pipe)))
    held = slots_of_kinds(model)
    assert slots["all"] == sum(held.values())
    for part in ("linear", "full", "moe", "dense"):
        assert slots[part] == sum(number for kind, number in held.items() if part in kind)
    assert device_slots(RunConfig(model=planned)) == {}
