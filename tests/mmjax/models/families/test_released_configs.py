"""The config.json files of released models give their presets."""

import dataclasses
from collections.abc import Iterator

import pytest

from mmjax.config import ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.models.families import deepseek_v3, deepseek_v32, family_of, glm5_next, llama, qwen3, qwen3_moe, qwen3_next
from mmjax.presets.deepseek import deepseek_v3 as deepseek_v3_preset
from mmjax.presets.deepseek import deepseek_v32 as deepseek_v32_preset
from mmjax.presets.glm5_next import glm53_flash_text
from mmjax.presets.llama import smollm2_135m
from mmjax.presets.qwen3 import qwen3_0_6b, qwen3_30b_a3b
from mmjax.presets.qwen3_next import qwen3_next_80b

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
DEEPSEEK_V32 = DEEPSEEK_V3 | INDEXER | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}


def read(family, config: dict) -> ModelConfig:
    assert family_of(config) is family
    return dataclasses.replace(family.read_config(config), compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "config", "preset"),
    [
        (llama, SMOLLM2, smollm2_135m),
        (deepseek_v3, DEEPSEEK_V3, deepseek_v3_preset),
        (deepseek_v32, DEEPSEEK_V32, deepseek_v32_preset),
        (qwen3_next, QWEN3_NEXT, qwen3_next_80b),
        (qwen3, QWEN3, qwen3_0_6b),
        (qwen3_moe, QWEN3_MOE, qwen3_30b_a3b),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_released_configuration_gives_its_preset(family, config, preset):
    assert read(family, config) == preset()


# What older versions of transformers wrote beside a model's own fields; found in Kimi-K2.5's config.json.
BOILERPLATE = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": None,
    "is_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "prefix": None,
    "pruned_heads": {},
    "sep_token_id": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "torchscript": False,
    "use_bfloat16": False,
}


def test_what_transformers_once_wrote_into_every_config_says_nothing_as_it_stands():
    assert llama.read_config(SMOLLM2 | BOILERPLATE) == llama.read_config(SMOLLM2)
    for change in ({"is_decoder": True}, {"pruned_heads": {"0": [1]}}, {"top_k": 8}):
        with pytest.raises(ConfigurationError, match=next(iter(change))):
            llama.read_config(SMOLLM2 | BOILERPLATE | change)


def test_the_text_part_of_a_glm53_flash_gives_its_preset():
    transformers = pytest.importorskip("transformers")
    # Its defaults are the released sizes.
    text = transformers.Glm5NextTextConfig(index_kpool=1).to_dict()
    assert read(glm5_next, {"model_type": "glm5_next", "text_config": text}) == glm53_flash_text()


def test_further_layers_of_a_release_are_left_out():
    assert qwen3_next.is_left_out(qwen3_next_80b(), "mtp.layers.0.self_attn.q_proj.weight")
    assert deepseek_v3.is_left_out(deepseek_v3_preset(), "model.layers.61.embed_tokens.weight")
    assert glm5_next.is_left_out(glm53_flash_text(), "model.language_model.layers.45.eh_proj.weight")
    assert glm5_next.is_left_out(glm53_flash_text(), "model.visual.blocks.0.norm1.weight")
    names = {
        tensor.name for tensor in glm5_next.released_tensors(dataclasses.replace(glm53_flash_text(), num_layers=4))
    }
    assert not any(glm5_next.is_left_out(glm53_flash_text(), name) for name in names)


LINEAR_ATTENTION = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 2}
LINEAR_ATTENTION |= {"short_conv_kernel_size": 4}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}}


def without_each(fields: dict) -> Iterator[tuple[str, dict]]:
    """(name, the fields without it) for every field, those of the parts too."""
    for name, value in fields.items():
        if name != "model_type":
            yield name, {other: kept for other, kept in fields.items() if other != name}
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            for inner, part in without_each(value):
                yield f"{name}.{inner}", fields | {name: part}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("DeepseekV3", {}),
        ("DeepseekV32", {}),
        ("Qwen3Next", {}),
        ("Qwen3", {}),
        ("Qwen3Moe", {}),
        ("MiniMaxM2", {}),
        ("KimiLinear", {"linear_attn_config": LINEAR_ATTENTION, "num_hidden_layers": 4}),
        ("Glm5Next", {"text_config": {"index_kpool": 1}}),
        ("Qwen3VL", {"text_config": MROPE, "vision_config": {"out_hidden_size": 4096}}),
        (
            "Qwen3VLMoe",
            {"text_config": MROPE | {"hidden_size": 4096, "head_dim": 128}, "vision_config": {"out_hidden_size": 4096}},
        ),
        ("Llava", {}),
        ("Llava", {"text_config": {"model_type": "mistral", "sliding_window": None}}),
        ("LlavaNext", {}),
    ],
)
def test_a_field_that_a_config_leaves_out_is_an_error_or_what_transformers_takes(kind, changes):
    transformers = pytest.importorskip("transformers")
    make = getattr(transformers, f"{kind}Config")
    config = make(**changes).to_dict()
    family = family_of(config)
    whole, silent = family.read_config(config), []
    for name, fields in without_each(config):
        try:
            read = family.read_config(fields)
        except ConfigurationError:
            continue
        if read != whole and read != family.read_config(make(**fields).to_dict()):
            silent.append(name)
    assert not silent
