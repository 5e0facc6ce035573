"""The text part of GLM-5.3-Flash: KDA, latent attention without rotation, hyper-connections."""

from mmjax.config import (
    ActivationConfig,
    FullAttentionConfig,
    HyperConnectionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    RouterConfig,
    VisionConfig,
)


def glm53_flash_text() -> ModelConfig:
    """GLM-5.3-Flash in its released sizes, with an indexer that scores single keys (as released: pools of keys).

    Without the tower and the layer that guesses further tokens.

    Source: config.json of zai-org/GLM-5.3-Flash.
    """
    return ModelConfig(
        width=4096,
        num_layers=45,
        vocabulary_size=154_880,
        full_attention_layers=tuple(range(3, 45, 4)),
        residual="hyper",
        hyper_connections=HyperConnectionConfig(num_streams=4, sinkhorn_steps=20, epsilon=1e-6),
        linear_attention=LinearAttentionConfig(
            num_heads=64,
            key_width=128,
            value_width=128,
            decay="bounded",
            decay_rank=128,
            output_gate="low_rank",
            output_gate_rank=128,
        ),
        full_attention=FullAttentionConfig(
            num_heads=64,
            query_rank=1536,
            latent_width=512,
            nope_width=256,
            shared_key_width=0,
            value_width=256,
            latent_norm_epsilon=1e-5,
            output_gate="none",
            indexer=IndexerConfig(stage="sparse", num_heads=32, head_width=128, top_k=2048, key_norm_epsilon=1e-6),
        ),
        moe=MoeConfig(
            num_experts=288,
            experts_per_token=8,
            expert_width=2048,
            latent_width=0,
            latent_norm=False,
            num_shared_experts=1,
            num_dense_layers=3,
            dense_width=12_288,
            router=RouterConfig(scale=2.5, balancing="sign"),
        ),
        activation=ActivationConfig(kind="clipped_silu", linear_beta=10.0),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )
