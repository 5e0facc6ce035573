"""Adapters on Kimi-K3.1, 2.8 T parameters, on 128 H200 GPUs. A plan: compiled for them, never run."""

import dataclasses

from mmjax.config import (
    CheckpointConfig,
    DataConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from mmjax.presets.kimi_k3 import kimi_k31


def run() -> RunConfig:
    """Rows of 8,192 tokens, one on each GPU (1.05 M tokens a step); routed experts stay packed in MXFP4.

    python -m mmjax.train --experiment k3_lora --mesh fsdp=2,expert=64 --cluster 16x8xh200 --dry-run
    Expect: what docs/scale.md lists. Nobody has run this. Rank and learning rate are common choices for large mixtures.

    Adapters stand on all projections of both kinds of attention and on the routed experts, which share one A in each
    layer and have a B each. The corpus, the tokenizer and the converted weights are yours: see --data.source,
    --data.tokenizer and --weights.
    """
    model = kimi_k31()
    return RunConfig(
        run_dir="runs/k3_lora",
        mesh=MeshConfig(fsdp=2, expert=64),
        model=dataclasses.replace(
            model,
            parameter_dtype="bfloat16",
            # 7 layers to compile instead of 36.
            layer_loops="whole",
            moe=dataclasses.replace(model.moe, expert_storage="mxfp4", capacity_factor=1.25),
            # Each query gathers its 2,048 keys, in float32 where no kernel does it: 576 MiB for 128 queries.
            full_attention=dataclasses.replace(model.full_attention, query_chunk_tokens=128),
        ),
        lora=LoraConfig(
            rank=32,
            alpha=32.0,
            targets=(
                r".*\.mixer\.(query|key|value|query_down|query_up|latent_down|key_up|value_up|output_gate|output)",
                r".*\.mlp\.(gate|up|down)",
            ),
            experts="shared_down",
            expert_rank=8,
        ),
        data=DataConfig(
            source="corpus/conversations.jsonl",
            tokenizer="corpus/tokenizer.json",
            rows=128,
            row_tokens=8192,
            row_patches=4096,
            image_max_patches=4096,
            bad_sample="skip",
            too_long="drop",
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-4, warmup_steps=100, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=200),
        training=TrainingConfig(steps=2000, eval_every_steps=0),
    )
