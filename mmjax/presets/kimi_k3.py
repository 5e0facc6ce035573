"""Kimi-K3, Kimi-K3.1 and a tiny model of the same architecture."""

import dataclasses

from mmjax.config import (
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)


def kimi_k3() -> ModelConfig:
    """Kimi-K3 as released: 2.78 T parameters, 104 B of them at work for a token.

    Source: config.json of moonshotai/Kimi-K3; Kimi K3 technical report, arXiv:2607.24653.
    """
    return ModelConfig(
        width=7168,
        num_layers=93,
        vocabulary_size=163_840,
        full_attention_layers=(*range(3, 92, 4), 92),
        residual="attention",
        residual_block_layers=12,
        linear_attention=LinearAttentionConfig(
            num_heads=96,
            key_width=128,
            value_width=128,
            decay="bounded",
            decay_rank=128,
            output_gate="full",
        ),
        full_attention=FullAttentionConfig(
            num_heads=96,
            query_rank=1536,
            latent_width=512,
            nope_width=128,
            shared_key_width=64,
            value_width=128,
        ),
        moe=MoeConfig(
            num_experts=896,
            experts_per_token=16,
            expert_width=3072,
            latent_width=3584,
            num_shared_experts=2,
            num_dense_layers=1,
            dense_width=33_792,
        ),
        vision=VisionConfig(
            num_layers=27,
            width=1024,
            num_heads=12,
            head_width=128,
            hidden_width=4096,
            patch_pixels=14,
            table_rows=64,
            table_columns=64,
        ),
        compute_dtype="bfloat16",
    )


def kimi_k31() -> ModelConfig:
    """Kimi-K3.1: Kimi-K3 whose full attention sees the 2,048 keys that a lightning indexer selects.

    The shapes of the indexer's arrays and the bias of its key norm are inferred: see docs/design.md, open points.
    """
    model = kimi_k3()
    indexer = IndexerConfig(stage="sparse", num_heads=32, head_width=128, top_k=2048)
    return dataclasses.replace(model, full_attention=dataclasses.replace(model.full_attention, indexer=indexer))


def kimi_k3_tiny() -> ModelConfig:
    """Every part of Kimi-K3 in 9 layers of width 64: the model of tests/golden/k3_tiny."""
    return ModelConfig(
        width=64,
        num_layers=9,
        vocabulary_size=192,
        full_attention_layers=(3, 7, 8),
        residual="attention",
        residual_block_layers=4,
        linear_attention=LinearAttentionConfig(num_heads=4, key_width=16, value_width=16, decay_rank=16),
        full_attention=FullAttentionConfig(
            num_heads=4,
            query_rank=24,
            latent_width=20,
            nope_width=12,
            shared_key_width=4,
            value_width=8,
        ),
        moe=MoeConfig(
            num_experts=16,
            experts_per_token=4,
            expert_width=16,
            latent_width=32,
            num_shared_experts=2,
            num_dense_layers=1,
            dense_width=96,
        ),
        vision=VisionConfig(
            num_layers=2,
            width=32,
            num_heads=3,
            head_width=16,
            hidden_width=72,
            patch_pixels=6,
            table_rows=6,
            table_columns=4,
        ),
    )
