"""The small Kimi-K3 after `indexer_warmup`: everything learns while attention sees only what the indexer selects."""

import dataclasses

from experiments.indexer_warmup import run as warmup
from mmjax.config import RunConfig


def run() -> RunConfig:
    """The second of DeepSeek-V3.2's two stages. Give it the weights of the first:

    python -m mmjax.train --experiment indexer_sparse --weights weights/warmed
    """
    config = warmup()
    full = config.model.full_attention
    full = dataclasses.replace(full, indexer=dataclasses.replace(full.indexer, stage="sparse"))
    return dataclasses.replace(
        config,
        run_dir="runs/indexer_sparse",
        trained=(),
        model=dataclasses.replace(config.model, full_attention=full),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=5e-4),
    )
