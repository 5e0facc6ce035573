"""The text part of a GLM-5.3-Flash against transformers, in float64: KDA, sparse attention, hyper-connections."""

import pytest

from mmjax.errors import ConfigurationError
from mmjax.models.families import glm5_next

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "linear_head_dim": 6,
    "linear_num_heads": 2,
    "linear_conv_kernel_dim": 4,
    "index_topk": 6,
    # Many indexer heads: were all of them silent for two keys, the scores would tie, and torch breaks ties as it likes.
    "index_head_dim": 8,
    "index_n_heads": 16,
    "index_kpool": 1,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-3,
    # Low, so that it cuts.
    "swiglu_limit": 0.4,
    "rms_norm_eps": 1e-4,
    "pad_token_id": 0,
}
TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 24}


def test_the_text_part_equals_transformers(in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.glm5_next import modeling_glm5_next

    in_float64(modeling_glm5_next, modeling_rope_utils)
    config = transformers.Glm5NextConfig(text_config=TEXT, vision_config=TOWER | {"projection_intermediate_size": 8})
    for part in (config, config.text_config):
        part._attn_implementation = part._experts_implementation = "eager"
    theirs = transformers.Glm5NextForConditionalGeneration(config)
    model = text_parity(glm5_next, randomise(theirs, large=("indexer", "_hc.", "gate.weight")))
    assert model.residual == "hyper" and model.full_attention_layers == (1,)


def test_fields_that_are_not_built_are_refused():
    released = TEXT | {"hc_mult": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "norm_topk_prob": True}
    released |= {"swiglu_limit": 10.0, "n_group": 1, "topk_group": 1}
    assert glm5_next.read_config({"text_config": released}).hyper_connections.num_streams == 4
    for change, name in (
        ({"index_kpool": 16}, "index_kpool"),
        ({"indexer_types": ["full", "shared", "full"]}, "indexer_types"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ({"qk_rope_head_dim": 2}, "qk_rope_head_dim"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            glm5_next.read_config({"text_config": released | change})
