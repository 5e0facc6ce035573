"""The indexer of a small Kimi-K3 learns which keys attention looks at, before attention sees only those, on a CPU."""

import dataclasses

from experiments.digits_cpu import run as digits
from mmjax.config import CheckpointConfig, IndexerConfig, OptimizerConfig, RunConfig, TrainingConfig


def run() -> RunConfig:
    """The first of DeepSeek-V3.2's two stages: attention is dense, the indexer alone is trained.

    python -m mmjax.train --experiment indexer_warmup
    Expect: the indexer's KL, of both layers together, falls from 1.44 to 0.69 a token in 2 minutes on 2 cores.

    On released weights without an indexer, here the recorded tiny Kimi-K3, and on to the second stage:

    python scripts/add_indexer.py tests/golden/k3_tiny downloads/k31 --num-heads 4 --head-width 16 --top-k 64 \\
        --vocabulary 320
    python -m mmjax.convert downloads/k31 weights/k31
    python -m mmjax.train --experiment indexer_warmup --weights weights/k31
    python -m mmjax.convert runs/indexer_warmup exported/warmed
    python -m mmjax.convert exported/warmed weights/warmed
    python -m mmjax.train --experiment indexer_sparse --weights weights/warmed
    """
    config = digits()
    indexer = IndexerConfig(stage="dense", num_heads=4, head_width=16, top_k=64)
    full = dataclasses.replace(config.model.full_attention, indexer=indexer)
    return dataclasses.replace(
        config,
        run_dir="runs/indexer_warmup",
        trained=("*.indexer",),
        # Numbers large enough that attention prefers some keys, as trained weights do.
        model=dataclasses.replace(config.model, full_attention=full, initializer_range=0.2),
        data=dataclasses.replace(config.data, rows=4, eval_samples=16),
        optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3, warmup_steps=5, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=1000),
        training=TrainingConfig(steps=30, eval_every_steps=0),
    )
