"""Qwen3-Next against transformers, in float64: gated delta nets, gated attention, softmax routers, a shared expert."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.config import ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import qwen3_next
from mmjax.models.layers import norm_weight, scaled_norm

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 14,
    "mlp_only_layers": [0],
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def test_a_qwen3_next_equals_transformers(in_float64, randomise, text_parity):
    from transformers import modeling_rope_utils
    from transformers.models.qwen3_next import modeling_qwen3_next

    in_float64(modeling_qwen3_next, modeling_rope_utils)
    config = transformers.Qwen3NextConfig(**TINY)
    theirs = randomise(transformers.Qwen3NextForCausalLM(config), large=("gate.weight", "in_proj_ba"))
    model = text_parity(qwen3_next, theirs)
    assert model.full_attention_layers == (2,) and model.grouped_attention.rotary.width == 8


def test_fields_that_are_not_built_are_refused():
    released = {name: value for name, value in TINY.items() if not name.endswith("implementation")}
    older = released | {"layer_types": None, "full_attention_interval": 2, "num_hidden_layers": 5}
    assert qwen3_next.read_config(older).full_attention_layers == (1, 3)
    for change, name in (
        ({"mlp_only_layers": [2]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            qwen3_next.read_config(released | change)


def test_norms_in_half_precision_round_once(one_device):
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    random = np.random.default_rng(0)
    inputs, weight = (random.normal(size=shape).astype(np.float32) for shape in ((64, 96), (96,)))
    theirs = Qwen3NextRMSNorm(96)
    theirs.weight.data = torch.tensor(weight)
    expected = theirs(torch.tensor(inputs).bfloat16()).float().detach().numpy()
    model = ModelConfig(norm_scale="zero_centred", norm_epsilon=1e-6)
    scale = norm_weight(model, 96)
    assert isinstance(scale, nnx.Variable)

    def norm(inputs, weight):
        return scaled_norm(inputs, scale.replace(weight), model).astype(jnp.float32)

    found = one_device(norm)(jnp.asarray(inputs, jnp.bfloat16), jnp.asarray(weight))
    assert np.mean(np.asarray(found) != expected) < 1e-3
