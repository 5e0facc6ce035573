"""Kimi-Linear: KDA with the softplus decay, mixture of experts at the model width, plain residuals, text only."""

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    RouterConfig,
    VisionConfig,
)


def kimi_linear_48b() -> ModelConfig:
    """Kimi-Linear-48B-A3B as released.

    Source: config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct; Kimi Linear report, arXiv:2510.26692.
    """
    return ModelConfig(
        width=2304,
        num_layers=27,
        vocabulary_size=163_840,
        full_attention_layers=(*range(3, 24, 4), 26),
        residual="plain",
        linear_attention=LinearAttentionConfig(
            num_heads=32,
            key_width=128,
            value_width=128,
            decay="softplus",
            decay_rank=128,
            output_gate="low_rank",
            output_gate_rank=128,
        ),
        full_attention=FullAttentionConfig(
            num_heads=32,
            query_rank=0,
            latent_width=512,
            nope_width=128,
            shared_key_width=64,
            value_width=128,
            output_gate="none",
        ),
        moe=MoeConfig(
            num_experts=256,
            experts_per_token=8,
            expert_width=1024,
            latent_width=0,
            latent_norm=False,
            num_shared_experts=1,
            num_dense_layers=1,
            dense_width=9216,
            router=RouterConfig(scale=2.446, balancing="sign"),
        ),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )
