"""Llama against transformers, in float64: plain, with biases and stretched rotation, tied and untied heads."""

import pytest

from mmjax.models.families import llama

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "smollm2": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "rope_parameters": LLAMA3},
    "yarn": {"num_hidden_layers": 1, "rope_parameters": YARN | {"beta_fast": 2.0}},
    "linear": {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_llama_equals_transformers(name, in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    in_float64(modeling_llama, modeling_rope_utils)
    settings = CONFIGS[name]
    theirs = randomise(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | settings)))
    model = text_parity(llama, theirs)
    assert model.tied_head == settings.get("tie_word_embeddings", False)
