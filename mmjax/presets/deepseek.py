"""DeepSeek-V3 and V3.2: latent attention with rotation, experts in groups, sigmoid routers."""

import dataclasses

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    IndexerConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RouterConfig,
    VisionConfig,
)


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3 as released, without the layer that guesses further tokens: 671 B parameters, 37 B at work.

    Source: config.json of deepseek-ai/DeepSeek-V3; DeepSeek-V3, arXiv:2412.19437.
    """
    rotary = RotaryConfig(
        width=64, pairs="interleaved", scaling="yarn", factor=40.0, original_positions=4096, attention_factor=1.0
    )
    return ModelConfig(
        width=7168,
        num_layers=61,
        vocabulary_size=129_280,
        full_attention_layers=tuple(range(61)),
        residual="plain",
        norm_epsilon=1e-6,
        full_attention=FullAttentionConfig(
            num_heads=128,
            query_rank=1536,
            latent_width=512,
            nope_width=128,
            shared_key_width=64,
            value_width=128,
            output_gate="none",
            rotary=rotary,
            # (0.1 ln 40 + 1)^2
            score_factor=1.3688879454113936**2,
        ),
        moe=MoeConfig(
            num_experts=256,
            experts_per_token=8,
            expert_width=2048,
            latent_width=0,
            latent_norm=False,
            num_shared_experts=1,
            num_dense_layers=3,
            dense_width=18_432,
            router=RouterConfig(num_groups=8, top_groups=4, scale=2.5, balancing="sign"),
        ),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )


def deepseek_v32() -> ModelConfig:
    """DeepSeek-V3.2 as released: DeepSeek-V3 whose attention sees the 2,048 keys that an indexer selects.

    Source: config.json of deepseek-ai/DeepSeek-V3.2-Exp and its report.
    """
    model = deepseek_v3()
    full = model.full_attention
    indexer = IndexerConfig(
        stage="sparse",
        num_heads=64,
        head_width=128,
        top_k=2048,
        key_norm_epsilon=1e-6,
        rotary=dataclasses.replace(full.rotary, pairs="half"),
    )
    return dataclasses.replace(model, full_attention=dataclasses.replace(full, indexer=indexer))
