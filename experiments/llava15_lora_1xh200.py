"""Adapters on LLaVA 1.5 7B on one H200: a picture of 336 x 336 pixels and up to 2,048 tokens in each of 8 rows."""

import dataclasses

from mmjax.config import (
    CheckpointConfig,
    DataConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from mmjax.presets.llava import llava_1_5_7b


def run() -> RunConfig:
    """Rank 16 on all projections of the language model; tower, projector, tables and head are frozen.

    python scripts/bench_train.py llava15_lora_1xh200
    Expect: what docs/benchmarks.md lists, from random weights and drawn tokens.
    python -m mmjax.train --experiment llava15_lora_1xh200 --weights CONVERTED --data.source FILE.jsonl
    Weights (a converted llava-hf/llava-1.5-7b-hf), its tokenizer and the conversations are yours; not run with them.
    """
    return RunConfig(
        run_dir="runs/llava15_lora",
        # Of a layer its input is kept, and what attention gives; the rest is computed again, cuDNN's sums too.
        model=dataclasses.replace(llava_1_5_7b(), remat_keep=("attention",), loss_chunk_tokens=2048),
        lora=LoraConfig(rank=16, alpha=32.0, targets=(r"decoder\..*\.(query|key|value|output|gate|up|down)",)),
        data=DataConfig(
            source="corpus/conversations.jsonl",
            tokenizer="corpus/tokenizer.json",
            image_token="<image>",
            end_token="</s>",
            rows=8,
            row_tokens=2048,
            row_patches=577,
            image_max_patches=577,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-4, warmup_steps=30, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=200),
        training=TrainingConfig(steps=1000, eval_every_steps=0, weights_in_place=True),
    )
