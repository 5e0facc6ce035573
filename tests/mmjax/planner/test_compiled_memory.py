"""Predicted bytes of a device beside those of the step compiled for GPUs without having any."""

import dataclasses

import pytest

from mmjax.config import (
    DataConfig,
    GroupedAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.planner.memory import device_bytes
from mmjax.planner.stages import with_stages
from mmjax.planner.topology import read_cluster
from mmjax.presets.kimi_k3 import kimi_k3
from mmjax.presets.kimi_linear import kimi_linear_48b
from mmjax.presets.llava import llava_1_5_7b

# Large enough that activations outweigh what is at rest.
DENSE = ModelConfig(
    width=2048,
    num_layers=4,
    vocabulary_size=32_768,
    full_attention_layers=(0, 1, 2, 3),
    full_attention_kind="grouped",
    residual="plain",
    grouped_attention=GroupedAttentionConfig(num_heads=16, num_key_heads=8, head_width=128),
    moe=MoeConfig(num_dense_layers=4, dense_width=6144),
    vision=VisionConfig(num_layers=0),
    compute_dtype="bfloat16",
)


EXPERTS = dataclasses.replace(
    DENSE,
    num_layers=2,
    full_attention_layers=(0, 1),
    grouped_attention=GroupedAttentionConfig(num_heads=16, num_key_heads=4, head_width=128),
    moe=MoeConfig(
        num_experts=64,
        experts_per_token=8,
        expert_width=768,
        latent_width=0,
        num_dense_layers=0,
        num_shared_experts=0,
        capacity_factor=1.25,
    ),
)
# Kimi-Linear's widths: a dense layer and two with experts, the last with latent attention.
LINEAR = kimi_linear_48b()
HYBRID = dataclasses.replace(
    LINEAR,
    num_layers=3,
    full_attention_layers=(2,),
    vocabulary_size=32_768,
    moe=dataclasses.replace(LINEAR.moe, num_experts=64, capacity_factor=1.25),
    parameter_dtype="float32",
)
# Kimi-K3's widths: a linear layer and one with latent attention, packed experts with adapters.
K3 = kimi_k3()
PACKED = dataclasses.replace(
    K3,
    num_layers=2,
    full_attention_layers=(1,),
    residual_block_layers=1,
    parameter_dtype="bfloat16",
    vocabulary_size=32_768,
    moe=dataclasses.replace(K3.moe, num_experts=64, num_dense_layers=0, expert_storage="mxfp4", capacity_factor=1.25),
    vision=VisionConfig(num_layers=0),
)
TOWER = dataclasses.replace(PACKED, vision=dataclasses.replace(K3.vision, num_layers=3))
LLAVA = llava_1_5_7b()
PICTURES = dataclasses.replace(
    LLAVA,
    num_layers=2,
    full_attention_layers=(0, 1),
    vision=dataclasses.replace(LLAVA.vision, num_layers=3, feature_depths=(2,)),
    moe=dataclasses.replace(LLAVA.moe, num_dense_layers=2),
)
ADAPTERS = LoraConfig(
    rank=32,
    targets=(
        r".*\.mixer\.(query|key|value|query_down|query_up|latent_down|key_up|value_up|output_gate|output)",
        r".*\.mlp\.(gate|up|down)",
    ),
    experts="shared_down",
    expert_rank=8,
)


def run(
    model: ModelConfig,
    mesh: MeshConfig,
    accumulation: int = 1,
    *,
    rows: int = 2,
    tokens: int = 4096,
    patches: int = 0,
    lora: LoraConfig | None = None,
) -> RunConfig:
    """So many rows a device and micro-batch."""
    data = DataConfig(
        source="a.jsonl",
        tokenizer="t.json",
        image_token="<image>" if patches else "",
        rows=rows * accumulation * mesh.num_row_shards,
        row_tokens=tokens,
        row_patches=patches,
        image_max_patches=min(patches, 4096) or 4,
    )
    training = TrainingConfig(accumulation=accumulation)
    return with_stages(RunConfig(model=model, mesh=mesh, data=data, training=training, lora=lora or LoraConfig()))


CASES = {
    "dense": run(DENSE, MeshConfig()),
    "dense fsdp=8": run(DENSE, MeshConfig(fsdp=8)),
    "dense replica=2 fsdp=4": run(DENSE, MeshConfig(replica=2, fsdp=4)),
    "dense tensor=8": run(DENSE, MeshConfig(tensor=8)),
    "dense fsdp=4 tensor=2": run(DENSE, MeshConfig(fsdp=4, tensor=2), 2),
    "dense fsdp=4 context=2": run(DENSE, MeshConfig(fsdp=4, context=2)),
    "dense pipe=2 fsdp=4": run(DENSE, MeshConfig(pipe=2, fsdp=4), 4),
    "experts expert=8": run(EXPERTS, MeshConfig(expert=8)),
    "experts fsdp=2 expert=4": run(EXPERTS, MeshConfig(fsdp=2, expert=4), 2),
    "experts expert=4 tensor=2": run(EXPERTS, MeshConfig(expert=4, tensor=2)),
    "experts pipe=2 expert=4": run(EXPERTS, MeshConfig(pipe=2, expert=4), 4),
    "hybrid fsdp=8": run(HYBRID, MeshConfig(fsdp=8)),
    "hybrid expert=8": run(HYBRID, MeshConfig(expert=8)),
    "hybrid context=2 expert=4": run(HYBRID, MeshConfig(context=2, expert=4)),
    "packed fsdp=2 expert=4": run(PACKED, MeshConfig(fsdp=2, expert=4), rows=1, tokens=8192, lora=ADAPTERS),
    "packed and tower fsdp=2 expert=4": run(
        TOWER, MeshConfig(fsdp=2, expert=4), rows=1, tokens=8192, patches=16_384, lora=ADAPTERS
    ),
    "pictures fsdp=8": run(PICTURES, MeshConfig(fsdp=8), rows=4, tokens=2048, patches=4096),
}


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("name", CASES)
def test_arguments_are_within_5_and_the_peak_within_15_per_cent(name):
    from mmjax.training.compiled_step import compile_step
    from mmjax.training.dry_run import tuning_of

    config = CASES[name]
    predicted = device_bytes(config, tuning_of(config))
    compiled = compile_step(config, read_cluster("1x8xh200")).device_memory
    assert predicted.arguments == pytest.approx(compiled["arguments"], rel=0.05)
    assert predicted.total == pytest.approx(compiled["peak"], rel=0.15)
