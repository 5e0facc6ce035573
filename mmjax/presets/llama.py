"""SmolLM2, a small Llama."""

from mmjax.config import (
    ActivationConfig,
    GroupedAttentionConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    VisionConfig,
)


def smollm2_135m() -> ModelConfig:
    """SmolLM2-135M as released.

    Source: config.json of HuggingFaceTB/SmolLM2-135M-Instruct; SmolLM2, arXiv:2502.02737.
    """
    return ModelConfig(
        width=576,
        num_layers=30,
        vocabulary_size=49_152,
        full_attention_layers=tuple(range(30)),
        full_attention_kind="grouped",
        residual="plain",
        tied_head=True,
        initializer_range=576**-0.5,
        grouped_attention=GroupedAttentionConfig(
            num_heads=9, num_key_heads=3, head_width=64, rotary=RotaryConfig(width=64, base=100_000.0)
        ),
        moe=MoeConfig(num_dense_layers=30, dense_width=1536),
        activation=ActivationConfig(kind="silu"),
        vision=VisionConfig(num_layers=0),
        compute_dtype="bfloat16",
    )
