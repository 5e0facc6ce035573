"""Kimi-Linear against transformers, in float64; its released configuration."""

import pytest

from mmjax.errors import ConfigurationError
from mmjax.models.families import kimi_linear
from mmjax.models.families.kimi_linear import read_config
from mmjax.presets.kimi_linear import kimi_linear_48b


def test_a_whole_kimi_linear_equals_transformers(in_float64, randomise, text_parity):
    transformers = pytest.importorskip("transformers")
    from transformers.models.kimi_linear import modeling_kimi_linear

    in_float64(modeling_kimi_linear)
    config = transformers.KimiLinearConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=5,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_experts=13,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.446,
        # Layers count from 1, as in released configurations.
        linear_attn_config={
            "head_dim": 8,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
        },
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = text_parity(kimi_linear, randomise(transformers.KimiLinearForCausalLM(config)))
    assert model.full_attention_layers == (3,) and model.linear_attention.decay == "softplus"


def test_a_released_configuration_gives_the_preset():
    preset = kimi_linear_48b()
    assert read_config(RELEASED) == type(preset)(**{**vars(preset), "compute_dtype": "float32"})


def test_a_field_that_is_not_understood_is_named():
    with pytest.raises(ConfigurationError, match="sliding_window"):
        read_config(RELEASED | {"sliding_window": 4096})
    with pytest.raises(ConfigurationError, match="mla_use_nope"):
        read_config(RELEASED | {"mla_use_nope": False})


def test_a_layer_list_that_counts_from_zero_is_refused():
    layers = {"full_attn_layers": [3, 7], "kda_layers": [0, 1, 2, 4, 5, 6]}
    linear = RELEASED["linear_attn_config"] | layers
    with pytest.raises(ConfigurationError, match="count from 1"):
        read_config(RELEASED | {"num_hidden_layers": 8, "linear_attn_config": linear})


RELEASED = {
    "model_type": "kimi_linear",
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "intermediate_size": 9216,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "num_expert_group": 1,
    "topk_group": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
    },
}
