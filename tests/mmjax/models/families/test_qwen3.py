"""Qwen3, dense and with experts, against transformers in float64."""

import pytest

from mmjax.errors import ConfigurationError
from mmjax.models.families import qwen3, qwen3_moe

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {
    "num_experts": 13,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "experts_implementation": "eager",
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"attention_bias": True, "rope_parameters": YARN}, id="biases and yarn"),
    ],
)
def test_a_qwen3_equals_transformers(changes, in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.qwen3 import modeling_qwen3

    in_float64(modeling_qwen3, modeling_rope_utils)
    theirs = randomise(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY | changes)))
    model = text_parity(qwen3, theirs)
    assert model.tied_head == changes.get("tie_word_embeddings", False)


@pytest.mark.parametrize(
    ("changes", "num_dense"),
    [
        pytest.param({}, 0, id="experts in all layers"),
        pytest.param({"mlp_only_layers": [0], "norm_topk_prob": False}, 1, id="a dense layer, shares as they are"),
        pytest.param({"decoder_sparse_step": 3, "num_experts_per_tok": 1}, 2, id="experts in the last layer"),
    ],
)
def test_a_qwen3_moe_equals_transformers(changes, num_dense, in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    in_float64(modeling_qwen3_moe, modeling_rope_utils)
    config = transformers.Qwen3MoeConfig(**TINY | EXPERTS | changes)
    theirs = randomise(transformers.Qwen3MoeForCausalLM(config), large=("gate.weight",))
    model = text_parity(qwen3_moe, theirs)
    assert model.moe.num_dense_layers == num_dense


DENSE_FIELDS = {name: value for name, value in TINY.items() if not name.endswith("implementation")}
MOE_FIELDS = DENSE_FIELDS | {name: value for name, value in EXPERTS.items() if not name.endswith("implementation")}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "type"),
        ({"partial_rotary_factor": 0.5}, "4 of 8 entries"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "mrope_section"),
        ({"num_key_values_heads": 2}, "like num_key_value_heads"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
@pytest.mark.parametrize(("family", "fields"), [(qwen3, DENSE_FIELDS), (qwen3_moe, MOE_FIELDS)])
def test_fields_that_are_not_built_are_refused(family, fields, change, name):
    family.read_config(fields)
    with pytest.raises(ConfigurationError, match=name):
        family.read_config(fields | change)


def test_layers_and_experts_that_are_not_built_are_refused():
    for kinds in (["sliding_attention"] * 3, ["full_attention"] * 2):
        with pytest.raises(ConfigurationError, match="layer_types"):
            qwen3.read_config(DENSE_FIELDS | {"layer_types": kinds})
    for change, name in (
        ({"mlp_only_layers": [2]}, r"dense MLPs in layers \[2\]"),
        ({"decoder_sparse_step": 2}, r"dense MLPs in layers \[0, 2\]"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"num_local_experts": 12}, "num_local_experts"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            qwen3_moe.read_config(MOE_FIELDS | change)
