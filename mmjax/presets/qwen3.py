"""Qwen3: a small dense model, and one with experts."""

from mmjax.config import (
    ActivationConfig,
    GroupedAttentionConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RouterConfig,
    VisionConfig,
)


def _qwen3(width: int, num_layers: int, num_heads: int, num_key_heads: int, moe: MoeConfig, tied: bool) -> ModelConfig:
    return ModelConfig(
        width=width,
        num_layers=num_layers,
        vocabulary_size=151_936,
        full_attention_layers=tuple(range(num_layers)),
        full_attention_kind="grouped",
        residual="plain",
        norm_epsilon=1e-6,
        tied_head=tied,
        grouped_attention=GroupedAttentionConfig(
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            head_width=128,
            head_norm=True,
            rotary=RotaryConfig(width=128, base=1_000_000.0),
        ),
        moe=moe,
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )


def qwen3_0_6b() -> ModelConfig:
    """Qwen3-0.6B as released.

    Source: config.json of Qwen/Qwen3-0.6B; Qwen3, arXiv:2505.09388.
    """
    return _qwen3(1024, 28, 16, 8, MoeConfig(num_dense_layers=28, dense_width=3072), tied=True)


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B as released: 128 experts, 8 for each token.

    Source: config.json of Qwen/Qwen3-30B-A3B; Qwen3, arXiv:2505.09388.
    """
    moe = MoeConfig(
        num_experts=128,
        experts_per_token=8,
        expert_width=768,
        latent_width=0,
        latent_norm=False,
        num_shared_experts=0,
        num_dense_layers=0,
        dense_width=6144,
        router=RouterConfig(scoring="softmax", balancing="none", correction_bias=False),
    )
    return _qwen3(2048, 48, 32, 4, moe, tied=False)
