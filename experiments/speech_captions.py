"""A small Kimi-K3 hears telephone prompts through Whisper's encoder and says them in English, on a CPU."""

import dataclasses

from mmjax.config import (
    CheckpointConfig,
    DataConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.presets.whisper import whisper_base


def run() -> RunConfig:
    """Four voices in four languages to learn from, three others held out. The encoder stays as it was released.

    bash scripts/speech_captions.sh
    python -m mmjax.train --experiment speech_captions
    Expect: held-out exact match 0.51, majority guess 0.01; 7 to 8 CPU minutes. It hears words that it has learnt, in
    new voices; it is no transcription of any speech.
    """
    return RunConfig(
        run_dir="runs/speech_captions",
        audio_weights="data/speech_captions/whisper_base",
        trained=("decoder", "audio_projector"),
        model=ModelConfig(
            width=128,
            num_layers=4,
            vocabulary_size=192,
            full_attention_layers=(3,),
            residual_block_layers=4,
            linear_attention=LinearAttentionConfig(num_heads=4, key_width=16, value_width=16),
            full_attention=FullAttentionConfig(num_heads=4, query_rank=32, latent_width=32),
            moe=MoeConfig(
                num_experts=16,
                experts_per_token=2,
                expert_width=64,
                latent_width=48,
                dense_width=256,
            ),
            vision=VisionConfig(num_layers=0),
            # 1.2 seconds, for 12 tokens.
            audio=dataclasses.replace(whisper_base(), clip_frames=120, projector_width=256),
            remat="none",
        ),
        data=DataConfig(
            source="data/speech_captions/train.tar",
            eval_source="data/speech_captions/held_out.tar",
            tokenizer="data/speech_captions/tokenizer.json",
            image_token="",
            audio_token="<|audio|>",
            rows=4,
            row_tokens=256,
            row_patches=0,
            row_clips=16,
            packing_window=256,
            eval_samples=512,
        ),
        optimizer=OptimizerConfig(name="muon", learning_rate=8e-3, warmup_steps=10),
        checkpoint=CheckpointConfig(every_steps=50),
        training=TrainingConfig(steps=80, eval_every_steps=0),
    )
