"""SmolLM2-135M-Instruct learns to sort emoji names into their groups, by LoRA, on a CPU."""

from mmjax.config import (
    CheckpointConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)


def run() -> RunConfig:
    """Real weights from a GGUF file, a real text task: 1,773 emoji names in 100 groups, 150 more held out.

    bash scripts/smollm2.sh
    python -m mmjax.train --experiment smollm2_lora
    Expect: 0.37 held-out exact match (0.00 before, majority guess 0.10; more steps, more) in 5 to 6 CPU minutes.
    """
    return RunConfig(
        run_dir="runs/smollm2_lora",
        weights="data/smollm2/model",
        # The rest of the model comes with its weights.
        model=ModelConfig(remat="none", loss_chunk_tokens=128, vision=VisionConfig(num_layers=0)),
        lora=LoraConfig(rank=16, alpha=32.0, targets=("all-linear",)),
        data=DataConfig(
            source="data/smollm2/train.jsonl",
            eval_source="data/smollm2/held_out.jsonl",
            tokenizer="data/smollm2/model/released/tokenizer.json",
            image_token="",
            start_token="<|im_start|>",
            end_token="<|im_end|>",
            rows=2,
            row_tokens=256,
            row_patches=0,
            packing_window=64,
            eval_samples=150,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1.5e-3, warmup_steps=4, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=50),
        training=TrainingConfig(steps=32, eval_every_steps=0),
    )
