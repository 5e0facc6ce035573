"""Named models have the sizes that were released."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from mmjax.config import ModelConfig, RunConfig, check
from mmjax.models.multimodal import define
from mmjax.presets.deepseek import deepseek_v3, deepseek_v32
from mmjax.presets.fuyu import fuyu_8b
from mmjax.presets.glm5_next import glm53_flash_text
from mmjax.presets.kimi_k3 import kimi_k3, kimi_k3_tiny, kimi_k31
from mmjax.presets.kimi_linear import kimi_linear_48b
from mmjax.presets.llama import smollm2_135m
from mmjax.presets.llava import llava_1_5_7b, llava_next_vicuna_7b
from mmjax.presets.qwen3 import qwen3_0_6b, qwen3_30b_a3b
from mmjax.presets.qwen3_next import qwen3_next_80b
from mmjax.presets.qwen3_vl import qwen3_vl_4b, qwen3_vl_30b_a3b

GOLDEN = Path(__file__).parents[2] / "golden" / "k3_tiny" / "config.json"


def num_parameters(model: ModelConfig) -> int:
    definition = define(model)
    variables = (definition.parameters | definition.router_biases).values()
    return sum(math.prod(variable.get_value().shape) for variable in variables)


def test_kimi_k3_has_every_parameter_of_the_released_model():
    assert num_parameters(kimi_k3()) == 2_779_931_834_976


def test_kimi_k31_adds_an_indexer_to_each_of_24_layers():
    assert num_parameters(kimi_k31()) - num_parameters(kimi_k3()) == 24 * 7_438_592


def test_kimi_linear_has_the_parameters_of_the_public_implementation():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    linear = {
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
    }
    with torch.device("meta"):
        public = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(linear_attn_config=linear))
    biases = sum(buffer.numel() for name, buffer in public.named_buffers() if "bias" in name)
    assert num_parameters(kimi_linear_48b()) == sum(weight.numel() for weight in public.parameters()) + biases


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        (llava_1_5_7b, 7_063_427_072),
        (llava_next_vicuna_7b, 7_063_427_072 + 4096),
        (qwen3_vl_4b, 4_437_815_808),
        (qwen3_vl_30b_a3b, 31_070_754_032),
        (fuyu_8b, 9_408_238_592),
    ],
)
def test_a_model_that_sees_has_the_parameters_of_the_released_one(preset, count):
    assert num_parameters(preset()) == count


def test_smollm2_has_the_parameters_of_the_released_model():
    assert num_parameters(smollm2_135m()) == 134_515_008


@pytest.mark.parametrize(("preset", "count"), [(qwen3_0_6b, 596_049_920), (qwen3_30b_a3b, 30_532_122_624)])
def test_a_qwen3_has_the_parameters_of_the_released_model(preset, count):
    assert num_parameters(preset()) == count


def test_qwen3_next_has_the_published_number_of_parameters():
    assert num_parameters(qwen3_next_80b()) == 79_674_391_296


@pytest.mark.parametrize(
    ("name", "preset"), [("DeepseekV3", deepseek_v3), ("DeepseekV32", deepseek_v32), ("Qwen3Next", qwen3_next_80b)]
)
def test_a_preset_has_the_parameters_of_the_public_implementation(name, preset):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # Its defaults are the released sizes.
    with torch.device("meta"):
        public = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")())
    biases = sum(buffer.numel() for name, buffer in public.named_buffers() if "e_score_correction_bias" in name)
    assert num_parameters(preset()) == sum(weight.numel() for weight in public.parameters()) + biases


def test_glm53_flash_has_the_text_parameters_of_the_public_implementation():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        public = transformers.Glm5NextTextModel(transformers.Glm5NextTextConfig())
    weights = [*public.named_parameters(), *((n, b) for n, b in public.named_buffers() if "correction_bias" in n)]
    size = sum(weight.numel() for name, weight in weights if "kpool_compress" not in name)
    # The head is no part of the public text model.
    assert num_parameters(glm53_flash_text()) == size + 4096 * 154_880


@pytest.mark.parametrize(
    "preset",
    [
        *(kimi_k3, kimi_k31, kimi_k3_tiny, kimi_linear_48b),
        *(smollm2_135m, deepseek_v3, deepseek_v32, qwen3_next_80b, glm53_flash_text, qwen3_0_6b, qwen3_30b_a3b),
    ],
)
def test_a_preset_is_a_valid_model(preset):
    config = RunConfig(model=preset())
    data = dataclasses.replace(config.data, source="conversations.jsonl", tokenizer="tokenizer.json")
    assert check(dataclasses.replace(config, data=data)) == []


def test_the_tiny_model_is_the_recorded_one():
    recorded, model = json.loads(GOLDEN.read_text()), kimi_k3_tiny()
    text, vision = recorded["text_config"], recorded["vision_config"]
    full, moe = model.full_attention, model.moe
    assert [layer + 1 for layer in model.full_attention_layers] == text["linear_attn_config"]["full_attn_layers"]
    for ours, released in {
        model.vocabulary_size: "vocab_size",
        model.residual_block_layers: "attn_res_block_size",
        full.query_rank: "q_lora_rank",
        full.latent_width: "kv_lora_rank",
        full.nope_width: "qk_nope_head_dim",
        full.value_width: "v_head_dim",
        moe.expert_width: "moe_intermediate_size",
        moe.latent_width: "routed_expert_hidden_size",
        moe.dense_width: "intermediate_size",
        model.width: "hidden_size",
    }.items():
        assert ours == text[released], released
    assert model.vision.num_heads * model.vision.head_width == vision["qkv_hidden_size"]
    assert model.vision.table_rows == vision["init_pos_emb_height"]
    assert model.vision.table_columns == vision["init_pos_emb_width"]
