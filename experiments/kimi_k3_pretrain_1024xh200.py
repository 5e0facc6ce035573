"""Kimi-K3 at its released size, trained from random weights on 1,024 H200 GPUs. A plan: it was never run."""

import dataclasses

from mmjax.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainingConfig
from mmjax.presets.kimi_k3 import kimi_k3


def run() -> RunConfig:
    """Rows of 8,192 tokens, 2,048 of them a step (16.8 M tokens), in four micro-batches.

    python -m mmjax.train --experiment kimi_k3_pretrain_1024xh200 --dry-run
    Expect: unknown. Nobody has run this; --dry-run shows what each device would hold. Learning rate and batch size are
    not published and are guesses; schedule, weight decay, Muon by head and the first row length follow the report.

    The corpus and the tokenizer are yours: see --data.source and --data.tokenizer.
    """
    return RunConfig(
        run_dir="runs/kimi_k3_pretrain",
        # expert x tensor fill 16 nodes; fsdp x expert = 512 is the most that the latent width of 512 divides into.
        mesh=MeshConfig(fsdp=8, expert=64, tensor=2),
        model=dataclasses.replace(kimi_k3(), loss_chunk_tokens=2048),
        data=DataConfig(
            source="corpus/conversations.jsonl",
            tokenizer="corpus/tokenizer.json",
            rows=2048,
            row_tokens=8192,
            row_patches=16_384,
            image_max_patches=16_384,
            bad_sample="skip",
            too_long="drop",
            packing_window=4096,
        ),
        optimizer=OptimizerConfig(name="muon", learning_rate=2e-4, warmup_steps=5000),
        checkpoint=CheckpointConfig(every_steps=500, keep_last=2),
        training=TrainingConfig(steps=500_000, accumulation=4, eval_every_steps=5000, log_every_steps=1),
    )
