"""Qwen3-Next: gated delta nets with gated grouped-query attention in every fourth layer, softmax routers."""

from mmjax.config import (
    ActivationConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RouterConfig,
    VisionConfig,
)


def qwen3_next_80b() -> ModelConfig:
    """Qwen3-Next-80B-A3B as released, without the layer that guesses further tokens.

    Source: config.json of Qwen/Qwen3-Next-80B-A3B-Instruct.
    """
    return ModelConfig(
        width=2048,
        num_layers=48,
        vocabulary_size=151_936,
        full_attention_layers=tuple(range(3, 48, 4)),
        full_attention_kind="grouped",
        linear_attention_kind="gated_delta_net",
        residual="plain",
        norm_epsilon=1e-6,
        norm_scale="zero_centred",
        gated_delta_net=GatedDeltaNetConfig(num_key_heads=16, num_value_heads=32, key_width=128, value_width=128),
        grouped_attention=GroupedAttentionConfig(
            num_heads=16,
            num_key_heads=2,
            head_width=256,
            head_norm=True,
            output_gate="sigmoid",
            rotary=RotaryConfig(width=64, base=10_000_000.0),
        ),
        moe=MoeConfig(
            num_experts=512,
            experts_per_token=10,
            expert_width=512,
            latent_width=0,
            latent_norm=False,
            num_shared_experts=1,
            shared_width=512,
            shared_gate="sigmoid",
            num_dense_layers=0,
            dense_width=5120,
            router=RouterConfig(scoring="softmax", balancing="none", correction_bias=False),
        ),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )
