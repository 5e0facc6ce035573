"""DeepSeek-V3.2: DeepSeek-V3 whose attention sees the keys that a lightning indexer selects."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmjax.config import IndexerConfig, ModelConfig
from mmjax.models.families import deepseek_v3
from mmjax.models.families.deepseek_v3 import is_left_out, released_tensors
from mmjax.models.families.fields import Fields

__all__ = ["MODEL_TYPES", "is_left_out", "read_config", "released_tensors"]

MODEL_TYPES = ("deepseek_v32",)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """config.json of a DeepSeek-V3.2 -> our settings."""
    fields = Fields(config)
    model = deepseek_v3.read_text(fields)
    full, num_dense = model.full_attention, model.moe.num_dense_layers
    fields.expect("layer_types", None, ["indexed_attention"] * model.num_layers)
    fields.expect("mlp_layer_types", None, ["dense"] * num_dense + ["sparse"] * (model.num_layers - num_dense))
    indexer = IndexerConfig(
        stage="sparse",
        num_heads=fields.take("index_n_heads"),
        head_width=fields.take("index_head_dim"),
        top_k=fields.take("index_topk"),
        # Whatever the epsilon of the other norms.
        key_norm_epsilon=1e-6,
        # The same angles as the attention's, but in the other pairs.
        rotary=dataclasses.replace(full.rotary, pairs="half"),
    )
    fields.finish()
    return dataclasses.replace(model, full_attention=dataclasses.replace(full, indexer=indexer))
