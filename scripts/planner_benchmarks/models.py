"""Models that published systems trained and that no preset describes, and what a step of theirs holds."""

import dataclasses

from mmjax.config import DataConfig, ModelConfig, MoeConfig, VisionConfig
from mmjax.presets.llava import llava_1_5_7b


def llava_1_5_13b() -> ModelConfig:
    """LLaVA 1.5 on Vicuna 13B: 13.3 B parameters. Source: LLaVA-1.5, arXiv:2310.03744; Llama 13B, arXiv:2302.13971."""
    model = llava_1_5_7b()
    return dataclasses.replace(
        model,
        width=5120,
        num_layers=40,
        full_attention_layers=tuple(range(40)),
        grouped_attention=dataclasses.replace(model.grouped_attention, num_heads=40, num_key_heads=40),
        moe=MoeConfig(num_dense_layers=40, dense_width=13_824),
    )


def qwen_vl_7b() -> ModelConfig:
    """Qwen-VL on Qwen-7B with a tower of ViT-bigG's size: about 9.6 B parameters.

    Its adapter of cross-attention, which makes 256 features of 1,024 patches, is described by the merge of four patches
    into one that the planner knows. Source: Qwen-VL, arXiv:2308.12966.
    """
    model = llava_1_5_7b()
    return dataclasses.replace(
        model,
        vocabulary_size=151_936,
        vision=VisionConfig(
            kind="moonvit",
            num_layers=48,
            width=1664,
            num_heads=16,
            head_width=104,
            hidden_width=8192,
            patch_pixels=14,
            table_rows=32,
            table_columns=32,
        ),
    )


def pictures(rows: int, row_tokens: int, row_patches: int, image_max_patches: int) -> DataConfig:
    """Rows that hold pictures of one size."""
    return DataConfig(
        source="conversations.jsonl",
        tokenizer="tokenizer.json",
        rows=rows,
        row_tokens=row_tokens,
        row_patches=row_patches,
        image_max_patches=image_max_patches,
    )
