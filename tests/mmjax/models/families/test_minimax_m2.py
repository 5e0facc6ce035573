"""MiniMax-M2 against transformers, in float64."""

import pytest

from mmjax.models.families import minimax_m2

transformers = pytest.importorskip("transformers")


def test_a_minimax_m2_equals_transformers(in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.minimax_m2 import modeling_minimax_m2

    in_float64(modeling_minimax_m2, modeling_rope_utils)
    config = transformers.MiniMaxM2Config(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        num_local_experts=13,
        num_experts_per_tok=3,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
        experts_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    theirs = randomise(transformers.MiniMaxM2ForCausalLM(config))
    model = text_parity(minimax_m2, theirs)
    assert model.grouped_attention.rotary.width == 4
