"""DeepSeek-V3 and V3.2 against transformers, in float64: groups of experts, yarn, an indexer that turns."""

from pathlib import Path

import numpy as np
import pytest

from mmjax.checkpoint.matching import match
from mmjax.checkpoint.safetensors_files import StoredTensor
from mmjax.errors import ConfigurationError
from mmjax.models.families import deepseek_v3, deepseek_v32

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("name", ["plain", "yarn, no query latent"])
def test_a_deepseek_v3_equals_transformers(name, in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    in_float64(modeling_deepseek_v3, modeling_rope_utils)
    settings = TINY | ({} if name == "plain" else {"rope_parameters": YARN, "q_lora_rank": None, "n_shared_experts": 2})
    config = transformers.DeepseekV3Config(**settings)
    model = text_parity(deepseek_v3, randomise(transformers.DeepseekV3ForCausalLM(config), large=("gate.weight",)))
    assert model.full_attention.score_factor == pytest.approx(1.0 if name == "plain" else 1.1386294361**2)


def test_a_deepseek_v32_equals_transformers(in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    in_float64(modeling_deepseek_v32, modeling_rope_utils)
    # Many indexer heads: were all of them silent for two keys, the scores would tie, and torch breaks ties as it likes.
    indexer = {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 16}
    config = transformers.DeepseekV32Config(**TINY, **indexer, rope_parameters=YARN, rms_norm_eps=1e-3)
    model = text_parity(deepseek_v32, randomise(transformers.DeepseekV32ForCausalLM(config), large=("indexer",)))
    assert model.full_attention.indexer.top_k == 6


def test_layers_that_guess_further_tokens_are_kept_beside_the_arrays():
    config = {name: value for name, value in TINY.items() if not name.endswith("implementation")}
    config |= {"model_type": "deepseek_v3", "rms_norm_eps": 1e-6, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
    names = {tensor.name: tensor.shape for tensor in deepseek_v3.released_tensors(deepseek_v3.read_config(config))}
    further = {"model.layers.3.eh_proj.weight": (24, 48), "model.layers.3.enorm.weight": (24,)}
    stored = {
        name: StoredTensor(name, Path("model.safetensors"), np.dtype(np.float32), shape, 0)
        for name, shape in (names | further).items()
    }
    found = match("folder", config, stored, keeps_packed=False)
    assert set(found.buffers) == set(further) and len(found.matches) == len(names)


def test_released_fields_are_read_and_unknown_ones_refused():
    released = {name: value for name, value in TINY.items() if not name.endswith("implementation")} | {
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "rope_scaling": {"type": "yarn"} | {name: YARN[name] for name in list(YARN)[2:]},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8"},
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    }
    model = deepseek_v3.read_config(released)
    assert model.full_attention.rotary.scaling == "yarn" and model.moe.router.scale == 2.5
    assert deepseek_v3.is_left_out(model, "model.layers.3.eh_proj.weight")
    assert not deepseek_v3.is_left_out(model, "model.layers.2.input_layernorm.weight")
    for change, name in (
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"attention_bias": True}, "attention_bias"),
        ({"something_new": 1}, "something_new"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type"),
        ({"rope_scaling": YARN | {"rope_theta": 10_000, "beta_new": 1}}, "beta_new"),
        ({"rope_scaling": YARN}, "rope_theta"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            deepseek_v3.read_config(released | change)
