"""What `save_pretrained` of transformers writes comes in and goes out as the same files, whatever its layout."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mmjax.checkpoint.convert import Progress, convert  # noqa: E402
from mmjax.checkpoint.export import converted_arrays, export  # noqa: E402
from mmjax.checkpoint.peft import module_name  # noqa: E402
from mmjax.checkpoint.released_config import read_family  # noqa: E402
from mmjax.checkpoint.released_files import open_released  # noqa: E402
from mmjax.models.lora import projections  # noqa: E402
from tests.mmjax.models.families import (  # noqa: E402
    test_deepseek,
    test_fuyu,
    test_glm5_next,
    test_llava,
    test_peft,
    test_qwen3,
    test_qwen3_vl,
)


def _text(name: str):
    _, network = getattr(test_peft, f"tiny_{name}")(lambda *modules: None)
    return network


def _qwen3_vl_moe():
    settings = {**test_qwen3_vl.TEXT, **test_qwen3_vl.MOE}
    config = transformers.Qwen3VLMoeConfig(
        text_config=settings, vision_config=dict(test_qwen3_vl.VISION), **test_qwen3_vl.TOKENS
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**test_qwen3.TINY))


def _qwen3_moe():
    settings = test_qwen3.TINY | test_qwen3.EXPERTS | {"mlp_only_layers": [0]}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))


def _llava():
    config = transformers.LlavaConfig(text_config=dict(test_llava.TEXT), vision_config=dict(test_llava.VISION))
    config.image_token_id = 36
    return transformers.LlavaForConditionalGeneration(config)


def _deepseek_v32():
    indexer = {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 4}
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**test_deepseek.TINY, **indexer))


def _glm5_next():
    tower = test_glm5_next.TOWER | {"projection_intermediate_size": 8}
    config = transformers.Glm5NextConfig(text_config=test_glm5_next.TEXT, vision_config=tower)
    return transformers.Glm5NextForConditionalGeneration(config)


def _qwen3_vl():
    parts = {"text_config": dict(test_qwen3_vl.TEXT), "vision_config": dict(test_qwen3_vl.VISION)}
    return transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**parts, **test_qwen3_vl.TOKENS))


def _llava_next():
    config = test_llava.config_of(transformers.LlavaNextConfig, **test_llava.NEXT)
    return transformers.LlavaNextForConditionalGeneration(config)


def _fuyu():
    return transformers.FuyuForCausalLM(test_fuyu.config_of())


_OTHERS = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "llava": _llava,
    "deepseek_v32": _deepseek_v32,
    "glm5_next": _glm5_next,
    "qwen3_vl": _qwen3_vl,
    "llava_next": _llava_next,
    "fuyu": _fuyu,
}


@pytest.mark.parametrize("name", ["llama", "kimi_linear", "deepseek", "qwen3_next", "minimax", *_OTHERS])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_files_of_transformers_come_back_byte_for_byte(tmp_path: Path, name: str, num_shards: int) -> None:
    torch.manual_seed(0)
    network = _OTHERS.get(name, lambda: _text(name))()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    source = tmp_path / "source"
    size = sum(parameter.nbytes for parameter in network.parameters())
    network.save_pretrained(source, max_shard_size=f"{size // num_shards // 1000}KB" if num_shards > 1 else "5GB")
    assert (len(list(source.glob("*.safetensors"))) > 1) == (num_shards > 1)
    progress = Progress(lambda size: None, lambda text: None)
    convert(open_released(source), tmp_path / "ours", progress)
    export(tmp_path / "ours", *converted_arrays(tmp_path / "ours"), tmp_path / "back", progress)
    for file in source.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", ["kimi_linear", "minimax", *_OTHERS])
def test_adapters_are_called_as_the_modules_of_transformers(name: str) -> None:
    network = _OTHERS.get(name, lambda: _text(name))()
    family, model = read_family(network.config.to_dict())
    modules = {path for path, _ in network.named_modules()}
    able = {path: projection.num_experts for path, projection in projections(model).items()}
    # Experts are no modules: `test_peft` gives their names to peft.
    adaptable = [
        module_name(tensor.name, network.config.model_type)
        for tensor in family.released_tensors(model)
        if tensor.slots[0].path in able and not able[tensor.slots[0].path]
    ]
    assert len(adaptable) > 3 and not set(adaptable) - modules
