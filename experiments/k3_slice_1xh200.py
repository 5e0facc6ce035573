"""Adapters on a slice of Kimi-K3 on one H200: 8 layers, and of the experts what one of 64 devices holds."""

import dataclasses

from mmjax.config import (
    CheckpointConfig,
    DataConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.presets.kimi_k3 import kimi_k3


def run() -> RunConfig:
    """One row of 8,192 tokens, as on each device of k3_lora; embedding and head are here, the tower is not.

    python scripts/bench_train.py k3_slice_1xh200
    Expect: a step of random weights and drawn tokens; docs/benchmarks.md says what has been measured.

    All widths are those of Kimi-K3. Its 8 residual blocks of 12 layers are cut to one layer each (6 linear, 2 full), so
    that mixes read as many sums as in the whole model. Tokens choose 16 of 896 experts, of which 14 are here, in MXFP4:
    expert e is computed with the weights of e mod 14. So these 14 get 16 rows a token, what one of 64 devices gets from
    all of them, as unevenly as routers choose; what is missing is the exchange.
    """
    model = kimi_k3()
    return RunConfig(
        run_dir="runs/k3_slice",
        model=dataclasses.replace(
            model,
            num_layers=8,
            full_attention_layers=(3, 7),
            residual_block_layers=1,
            parameter_dtype="bfloat16",
            moe=dataclasses.replace(model.moe, num_dense_layers=0, resident_experts=14, expert_storage="mxfp4"),
            full_attention=dataclasses.replace(model.full_attention, query_chunk_tokens=128),
            vision=VisionConfig(num_layers=0),
            loss_chunk_tokens=2048,
            # All 93 layers together keep 5 GiB so, and no expert's last product is computed again.
            remat_keep=("experts",),
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
            image_token="",
            rows=1,
            row_tokens=8192,
            row_patches=0,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-4, warmup_steps=30, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=200),
        training=TrainingConfig(steps=1000, eval_every_steps=0, weights_in_place=True),
    )
