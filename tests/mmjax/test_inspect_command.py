"""The page and the terminal show what the model sees: each token once, coloured as the loss mask says."""

import html
import json
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mmjax import inspect
from mmjax.config import DataConfig, ModelConfig, VisionConfig
from mmjax.data.align import align
from mmjax.data.sources.conversation import Message, Sample
from mmjax.data.tokenizer import ByteTokenizer


@pytest.fixture
def records(tmp_path: Path) -> Path:
    PIL.Image.fromarray(np.full((8, 16, 3), (200, 10, 10), np.uint8)).save(tmp_path / "red.png")
    turns = [{"from": "human", "value": "<image>colour & <b>?"}, {"from": "gpt", "value": "red"}]
    question = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "two"}]
    lines = [{"image": "red.png", "conversations": turns}, {"messages": question}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"broken\n')
    return path


def test_the_terminal_and_the_page_show_tokens_pictures_fill_cost_and_bad_records(
    records: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    written = records.parent / "page.html"
    assert inspect.main([str(records), "--html", str(written), "--data.row-tokens", "100", "--rows", "99"]) == 0
    shown = capsys.readouterr().out
    assert "picture 16x8, 8 patches, 2 tokens" in shown and "colour & <b>?" in shown and "x mean" in shown
    assert f"{records}, line 3" in shown and "broken JSON" in shown
    text = written.read_text()
    assert "<b>" not in text and html.escape("<") in text and text.count("data:image/png;base64,") >= 1
    parts = re.findall(r"class=learned>(<span>.*?</span>)</span>", text, re.DOTALL)
    learned = ["".join(re.findall(r"<span>([^<]*)", part)) for part in parts]
    assert {part.replace("⏎end\n", "") for part in learned} == {"red", "two"}
    assert "<script" not in text and "http" not in text


def test_pictures_are_cut_as_the_weights_model_cuts_them(
    records: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "read_model", lambda folder: ModelConfig(vision=VisionConfig(patch_pixels=2)))
    assert inspect.main([str(records), "--weights", "converted"]) == 0
    assert "picture 16x8, 32 patches, 8 tokens" in " ".join(capsys.readouterr().out.split())


def test_every_token_is_shown_once_and_its_colour_is_its_loss_mask() -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    messages = (
        Message(role="user", parts=("ab", picture, picture, "c"), is_supervised=False),
        Message(role="assistant", parts=("yes",), is_supervised=True),
        Message(role="assistant", parts=("no",), is_supervised=False),
    )
    tokenizer = ByteTokenizer()
    document = align(Sample(where="here", messages=messages), tokenizer, DataConfig(), VisionConfig(patch_pixels=4))
    found = list(inspect.runs(document, tokenizer))
    assert [run.number for run in found if run.kind == "picture"] == [0, 1]
    num_features = sum(placed.num_features for placed in document.pictures)
    assert sum(len(run.texts) for run in found) + num_features == len(document.tokens)
    learned = [text for run in found if run.kind == "learned" for text in run.texts]
    assert "".join(learned) == "yes⏎end\n" and len(learned) == document.sizes.supervised


def test_a_file_that_cannot_be_used_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert inspect.main([str(tmp_path / "absent.jsonl")]) == 3
    error = capsys.readouterr().err
    assert "absent.jsonl" in error and "Traceback" not in error
    assert inspect.main([str(tmp_path / "absent.jsonl"), "--data.rows", "0"]) == 2
