"""Adapters on a Kimi-Linear of 12 layers (21 B parameters) on one H200: as much of the model as fits in bfloat16."""

import dataclasses

from mmjax.config import (
    CheckpointConfig,
    DataConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from mmjax.presets.kimi_linear import kimi_linear_48b


def run() -> RunConfig:
    """Rank 16 on the projections of both kinds of attention; 2 rows of 4,096 tokens.

    python scripts/bench_train.py kimi_linear_lora_1xh200
    Expect: a step of random weights and drawn tokens; docs/benchmarks.md says what has been measured. The widths are
    those of Kimi-Linear-48B-A3B; with the corpus and the tokenizer it trains, but no release has these 12 layers.
    """
    model = kimi_linear_48b()
    return RunConfig(
        run_dir="runs/kimi_linear_lora",
        model=dataclasses.replace(
            model,
            num_layers=12,
            full_attention_layers=(3, 7, 11),
            parameter_dtype="bfloat16",
            loss_chunk_tokens=2048,
        ),
        lora=LoraConfig(rank=16, alpha=32.0, targets=(r"decoder\..*\.mixer\..*",)),
        data=DataConfig(
            source="corpus/conversations.jsonl",
            tokenizer="corpus/tokenizer.json",
            image_token="",
            rows=2,
            row_tokens=4096,
            row_patches=0,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-4, warmup_steps=30, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=200),
        training=TrainingConfig(steps=1000, eval_every_steps=0, weights_in_place=True),
    )
