"""Verification after a conversion: pictures go through transformers and ours alike."""

import json

import numpy as np
import pytest

from mmjax.checkpoint import verify
from mmjax.checkpoint.verify import compare
from mmjax.convert import main
from mmjax.errors import ConfigurationError

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CLIP = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP |= {"model_type": "clip_vision_model", "image_size": 12, "patch_size": 4}


def llava_next():
    text = {"model_type": "llama", **TEXT}
    sizes = [[12, 24], [24, 12], [24, 24]]
    config = transformers.LlavaNextConfig(
        text_config=text, vision_config=dict(CLIP), image_token_index=39, image_grid_pinpoints=sizes
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def fuyu():
    text = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    text |= {"model_type": "persimmon", "num_attention_heads": 3}
    return transformers.FuyuForCausalLM(transformers.FuyuConfig(text_config=text, patch_size=4, image_token_id=39))


def qwen3_vl():
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36}
    text = {**TEXT, "head_dim": 6, "rope_parameters": rotary}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava_next, fuyu, qwen3_vl], ids=lambda make: make.__name__)
def test_pictures_are_compared_too(make, tmp_path):
    make().save_pretrained(tmp_path / "released")
    assert main([str(tmp_path / "released"), str(tmp_path / "ours")]) == 0
    table = compare(tmp_path / "released", tmp_path / "ours")
    names, *found = ([str(cell) for cell in column.cells] for column in table.columns)
    assert [column.header for column in table.columns[1:]] == ["3 rows of text", "2 rows with a picture"]
    for cells in found:
        values = dict(zip(names, map(float, cells), strict=True))
        assert values["relative to the largest logit"] < 1e-4 and values["same likeliest token"] == 1


def test_a_kimi_k3_which_transformers_lacks_is_converted_and_the_comparison_refused(tmp_path, releases, capsys):
    assert main([str(releases.golden), str(tmp_path / "ours"), "--verify"]) == 2
    assert "which no class of transformers is" in capsys.readouterr().err
    assert main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (releases.golden / name).read_bytes()


def test_a_table_of_text_alone_says_so_where_the_model_has_a_tower(tmp_path, monkeypatch):
    config = {"model_type": "llama", **TEXT, "rms_norm_eps": 1e-6}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(tmp_path / "released")
    assert main([str(tmp_path / "released"), str(tmp_path / "ours")]) == 0
    for name in ("_their_logits", "_our_logits"):
        monkeypatch.setattr(verify, name, lambda *_: [np.ones((3, 48, 40), np.float32)])
    assert compare(tmp_path / "released", tmp_path / "ours").caption is None
    monkeypatch.setattr(verify, "read_json", lambda file: {"vision_config": {}})
    assert compare(tmp_path / "released", tmp_path / "ours").caption.startswith("Text alone")


def test_code_that_came_with_weights_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    """A person at a terminal would be asked, and might say yes."""
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    pytest.importorskip("torch")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "auto_map": classes}))
    (tmp_path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\n")
    with pytest.raises(ConfigurationError, match="custom code which must be executed"):
        verify._their_logits(tmp_path, [])
    assert not (tmp_path / "canary").exists()
