"""Adapters as files of peft, for the families that `test_peft.py` leaves out: those that read pictures, and others."""

import pytest

from mmjax.config import LoraConfig
from mmjax.models.families import (
    deepseek_v32,
    fuyu,
    glm5_next,
    llava,
    llava_next,
    qwen3,
    qwen3_vl,
    qwen3_vl_moe,
)
from tests.mmjax.models.families import test_deepseek, test_fuyu, test_glm5_next, test_llava, test_qwen3, test_qwen3_vl
from tests.mmjax.models.families.test_peft import batch_of, pytestmark  # noqa: F401  (warnings of peft)

torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))


def eager(config):
    """The plain programs of a model and its parts, which compute in the dtype that they are given."""
    for part in (config, config.get_text_config()):
        part._attn_implementation = part._experts_implementation = "eager"
    return config


def tiny_deepseek_v32(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    in_float64(modeling_deepseek_v32, modeling_rope_utils)
    indexer = {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 16}
    config = transformers.DeepseekV32Config(**test_deepseek.TINY, **indexer, rope_parameters=test_deepseek.YARN)
    return deepseek_v32, transformers.DeepseekV32ForCausalLM(config), None


def tiny_glm5_next(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.glm5_next import modeling_glm5_next

    in_float64(modeling_glm5_next, modeling_rope_utils)
    tower = test_glm5_next.TOWER | {"projection_intermediate_size": 8}
    config = eager(transformers.Glm5NextConfig(text_config=test_glm5_next.TEXT, vision_config=tower))
    return glm5_next, transformers.Glm5NextForConditionalGeneration(config), None


def tiny_qwen3(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.qwen3 import modeling_qwen3

    in_float64(modeling_qwen3, modeling_rope_utils)
    return qwen3, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**test_qwen3.TINY)), None


def tiny_qwen3_vl(in_float64):
    from transformers import modeling_rope_utils, vision_utils
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    in_float64(modeling_qwen3_vl, modeling_rope_utils, vision_utils)
    parts = {"text_config": dict(test_qwen3_vl.TEXT), "vision_config": dict(test_qwen3_vl.VISION)}
    config = transformers.Qwen3VLConfig(**parts, **test_qwen3_vl.TOKENS)
    return qwen3_vl, transformers.Qwen3VLForConditionalGeneration(config), test_qwen3_vl.qwen_case()


def tiny_qwen3_vl_moe(in_float64):
    from transformers import modeling_rope_utils, vision_utils
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

    in_float64(modeling_qwen3_vl_moe, modeling_rope_utils, vision_utils)
    parts = {"text_config": test_qwen3_vl.TEXT | test_qwen3_vl.MOE, "vision_config": dict(test_qwen3_vl.VISION)}
    config = eager(transformers.Qwen3VLMoeConfig(**parts, **test_qwen3_vl.TOKENS))
    return qwen3_vl_moe, transformers.Qwen3VLMoeForConditionalGeneration(config), test_qwen3_vl.qwen_case()


def tiny_llava(in_float64):
    test_llava.widened(in_float64)
    theirs = transformers.LlavaForConditionalGeneration(test_llava.config_of(transformers.LlavaConfig))
    return llava, theirs, test_llava.llava_case(keep_class=False)


def tiny_llava_next(in_float64):
    test_llava.widened(in_float64)
    config = test_llava.config_of(transformers.LlavaNextConfig, **test_llava.NEXT)
    return llava_next, transformers.LlavaNextForConditionalGeneration(config), test_llava.llava_next_case(config)


def tiny_fuyu(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.persimmon import modeling_persimmon

    in_float64(modeling_persimmon, modeling_rope_utils)
    return fuyu, transformers.FuyuForCausalLM(test_fuyu.config_of()), test_fuyu.fuyu_case()


SLOW = (tiny_deepseek_v32, tiny_glm5_next, tiny_qwen3_vl, tiny_qwen3_vl_moe, tiny_llava_next)


@pytest.mark.parametrize(
    "make",
    [tiny_qwen3, tiny_llava, tiny_fuyu, *(pytest.param(make, marks=pytest.mark.slow) for make in SLOW)],
    ids=lambda make: make.__name__.removeprefix("tiny_"),
)
def test_stock_peft_gives_our_logits_with_pictures_and_comes_back(make, in_float64, randomise, peft_parity):
    family, theirs, case = make(in_float64)
    theirs = randomise(theirs, large=("indexer", "gate.weight"))
    batch, inputs = case[:2] if case else (batch_of(40), {})
    options = {"vendor": test_qwen3_vl.in_vendors_layout} if family is qwen3_vl_moe else {}
    matched = peft_parity(family, theirs, LoraConfig(rank=3), batch, inputs, **options)
    # Of a tower and its projector too; Fuyu has none.
    is_tower = any(not projection.path.startswith("decoder") for projection in matched)
    assert is_tower == (case is not None and family is not fuyu)
