"""Adapters on the whole of Kimi-Linear (48 B parameters) on one H200: its experts rest packed in MXFP4."""

import dataclasses

from experiments import kimi_linear_lora_1xh200
from mmjax.config import RunConfig
from mmjax.presets.kimi_linear import kimi_linear_48b


def run() -> RunConfig:
    """Rank 16 on the projections of both kinds of attention; 2 rows of 4,096 tokens.

    python scripts/bench_train.py kimi_linear_mxfp4_lora_1xh200
    Expect: a step of random weights and drawn tokens; docs/benchmarks.md says what has been measured.
    python -m mmjax.train --experiment kimi_linear_mxfp4_lora_1xh200 --weights CONVERTED --data.source FILE.jsonl
    Weights (a converted Kimi-Linear-48B-A3B), its tokenizer and the conversations are yours; not run with them.
    """
    config, model = kimi_linear_lora_1xh200.run(), kimi_linear_48b()
    return dataclasses.replace(
        config,
        run_dir="runs/kimi_linear_mxfp4_lora",
        model=dataclasses.replace(
            model,
            parameter_dtype="bfloat16",
            loss_chunk_tokens=config.model.loss_chunk_tokens,
            moe=dataclasses.replace(model.moe, expert_storage="mxfp4"),
        ),
    )
