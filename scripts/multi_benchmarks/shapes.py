"""The experiments of one GPU as they are spread over several, and in shapes for a CPU."""

import dataclasses
import importlib
from typing import Any

from mmjax.config import MeshConfig, RunConfig, check
from mmjax.planner.stages import with_stages

# Micro-batches of a pipeline, at the least: with fewer its devices wait for each other most of the time.
PIPELINE_MICRO_BATCHES = 8
# Room of the experts' exchange over what even routers fill, as in experiments/k3_lora.py.
CAPACITY_FACTOR = 1.25


def spread(config: RunConfig, mesh: MeshConfig, num_devices: int) -> RunConfig:
    """A run of one device on a mesh: the same layers, and as many experts and tokens for each device.

    A micro-batch holds as many tokens for each device, too. In a pipeline it is one row, and there are at least
    `PIPELINE_MICRO_BATCHES`, so that a device may have more tokens a step. One device that stands for one of several
    (`resident_experts`) does so for one of `num_devices`.
    """
    rows, accumulation = config.data.rows, config.training.accumulation * mesh.tensor
    if mesh.pipe > 1:
        accumulation = max(PIPELINE_MICRO_BATCHES, rows * mesh.pipe * mesh.tensor)
        rows = accumulation * mesh.num_row_shards
    else:
        rows *= mesh.num_devices
    moe = config.model.moe
    if mesh.expert > 1:
        moe = dataclasses.replace(
            moe,
            num_experts=moe.num_resident_experts * mesh.expert,
            resident_experts=0,
            capacity_factor=CAPACITY_FACTOR,
        )
    elif moe.resident_experts and num_devices > 1:
        moe = dataclasses.replace(moe, num_experts=moe.resident_experts * num_devices)
    return dataclasses.replace(
        config,
        mesh=mesh,
        model=dataclasses.replace(config.model, moe=moe),
        data=dataclasses.replace(config.data, rows=rows),
        training=dataclasses.replace(config.training, accumulation=accumulation),
    )


def changed(
    config: RunConfig,
    *,
    moe: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
) -> RunConfig:
    """With other settings of the mixture of experts, of the model, or of training."""
    mixture = dataclasses.replace(config.model.moe, **(moe or {}))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, moe=mixture, **(model or {})),
        training=dataclasses.replace(config.training, **(training or {})),
    )


def experiment(name: str, *, is_tiny: bool) -> RunConfig:
    """The experiment without pictures."""
    config = importlib.import_module(f"experiments.{name}").run()
    model = dataclasses.replace(config.model, vision=dataclasses.replace(config.model.vision, num_layers=0))
    config = dataclasses.replace(config, model=model)
    return tiny(config) if is_tiny else config


def settled(config: RunConfig) -> RunConfig:
    """With the layers of each stage.

    Raises:
      SystemExit: settings that are refused, with the first reason.
    """
    if faults := check(config):
        raise SystemExit(f"refused: {faults[0].path}: {faults[0].found}; {faults[0].remedy}")
    return with_stages(config)


def tiny(config: RunConfig) -> RunConfig:
    """The same kinds of parts in two layers that a CPU compiles within seconds."""
    model = config.model
    linear = dataclasses.replace(
        model.linear_attention,
        num_heads=2,
        key_width=8,
        value_width=8,
        decay_rank=8,
        output_gate_rank=8,
        chunk_tokens=16,
    )
    full = dataclasses.replace(
        model.full_attention,
        num_heads=2,
        latent_width=8,
        nope_width=8,
        shared_key_width=4,
        value_width=8,
        query_rank=8 if model.full_attention.query_rank else 0,
        query_chunk_tokens=16,
    )
    moe = dataclasses.replace(
        model.moe,
        experts_per_token=2,
        expert_width=16,
        dense_width=32,
        expert_storage="dense",
        num_experts=8 if model.moe.resident_experts else 2,
        resident_experts=2 if model.moe.resident_experts else 0,
        latent_width=32 if model.moe.latent_width else 0,
        num_dense_layers=min(1, model.moe.num_dense_layers),
    )
    model = dataclasses.replace(
        model,
        width=32,
        num_layers=2,
        vocabulary_size=64,
        full_attention_layers=(1,),
        residual_block_layers=2,
        loss_chunk_tokens=32,
        compute_dtype="float32",
        linear_attention=linear,
        full_attention=full,
        moe=moe,
    )
    data = dataclasses.replace(config.data, rows=1, row_tokens=16)
    return dataclasses.replace(config, model=model, data=data)
