"""Predicted bytes of a device beside those of the step compiled for GPUs without having any."""

import importlib.util

import pytest

from mmjax.config import (
    DataConfig,
    GroupedAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.parallel import described
from mmjax.planner.memory import device_bytes
from mmjax.planner.stages import with_stages
from mmjax.planner.topology import read_cluster

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


@pytest.mark.slow
@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in described._PLUGINS), reason="needs the extra deviceless"
)
@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        (MeshConfig(), 1),
        (MeshConfig(fsdp=8), 1),
        (MeshConfig(replica=2, fsdp=4), 1),
        (MeshConfig(tensor=8), 1),
        (MeshConfig(fsdp=4, tensor=2), 2),
        (MeshConfig(fsdp=4, context=2), 1),
        (MeshConfig(pipe=2, fsdp=4), 4),
    ],
    ids=lambda value: "-".join(map(str, value.sizes.values())) if isinstance(value, MeshConfig) else str(value),
)
def test_arguments_are_within_5_and_the_peak_within_15_per_cent(mesh, accumulation):
    from mmjax.training.compiled_step import compile_step

    rows = 2 * accumulation * mesh.num_row_shards
    data = DataConfig(source="a.jsonl", tokenizer="t.json", image_token="", rows=rows, row_tokens=4096, row_patches=0)
    config = with_stages(
        RunConfig(model=DENSE, mesh=mesh, data=data, training=TrainingConfig(accumulation=accumulation))
    )
    compiled, predicted = compile_step(config, read_cluster("1x8xh200")).device_memory, device_bytes(config)
    assert predicted.arguments == pytest.approx(compiled["arguments"], rel=0.05)
    assert predicted.total == pytest.approx(compiled["peak"], rel=0.15)
