"""What `save_pretrained` of transformers writes comes in and goes out as the same files, whatever its layout."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mmjax.checkpoint.convert import Progress, convert  # noqa: E402
from mmjax.checkpoint.export import converted_arrays, export  # noqa: E402
from mmjax.checkpoint.released_files import open_released  # noqa: E402
from tests.mmjax.models.families import test_llava, test_peft, test_qwen3_vl  # noqa: E402


def _text(name: str):
    _, network = getattr(test_peft, f"tiny_{name}")(lambda *modules: None)
    return network


def _qwen3_vl_moe():
    settings = {**test_qwen3_vl.TEXT, **test_qwen3_vl.MOE}
    config = transformers.Qwen3VLMoeConfig(
        text_config=settings, vision_config=dict(test_qwen3_vl.VISION), **test_qwen3_vl.TOKENS
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _llava():
    config = transformers.LlavaConfig(text_config=dict(test_llava.TEXT), vision_config=dict(test_llava.VISION))
    config.image_token_id = 36
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["llama", "kimi_linear", "deepseek", "qwen3_next", "minimax", "qwen3_vl_moe", "llava"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_files_of_transformers_come_back_byte_for_byte(tmp_path: Path, name: str, num_shards: int) -> None:
    torch.manual_seed(0)
    network = {"qwen3_vl_moe": _qwen3_vl_moe, "llava": _llava}.get(name, lambda: _text(name))()
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
