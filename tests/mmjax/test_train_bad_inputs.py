"""Inputs that cannot be used: the command says so once, with its exit code, before it trains, and changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmjax import train
from mmjax.data.sources import digits

SMALL = ["--data.rows", "8", "--data.row-tokens", "64", "--data.row-patches", "32", "--data.image-max-patches", "16"]


@pytest.fixture(autouse=True)
def small_source_and_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "EPOCH_SAMPLES", 96)
    monkeypatch.setenv("COLUMNS", "400")


def contents(folder: Path) -> dict[str, Any]:
    """All that a folder holds."""
    return {path.name: contents(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def assert_refused(code: int, parts: list[str], options: list[str], folder: Path, capfd: pytest.CaptureFixture) -> None:
    """The command ends with this code and one message that holds these parts, and nothing is left behind."""
    before = contents(folder)
    assert train.main(["--run-dir", str(folder / "run"), *SMALL, *options]) == code
    error = capfd.readouterr().err
    assert all(part in error for part in parts) and "Traceback" not in error, error
    assert contents(folder) == before


def answer(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "4"}]}


RECORDS = {
    "broken JSON": (b'{"messages": [{"role": "us', ["line 2", "broken JSON"]),
    "a marker without a picture": (json.dumps(answer("<image>?")).encode(), ["line 2", "1 image markers and 0 images"]),
    "no such picture": (json.dumps({**answer("<image>?"), "images": ["x.png"]}).encode(), ["line 2, image 'x.png'"]),
    "longer than a row": (json.dumps(answer("?" * 60)).encode(), ["line 2", "65 tokens", "raise data.row_tokens"]),
    "no conversation": (b"{}", ["line 2", '"messages"']),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("setting", ["--data.source", "--data.eval-source"])
def test_a_record_that_cannot_be_used_is_named(
    name: str, setting: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    record, parts = RECORDS[name]
    file = tmp_path / "records.jsonl"
    file.write_bytes(json.dumps(answer("?")).encode() + b"\n" + record + b"\n")
    assert_refused(3, [str(file), *parts], [setting, str(file)], tmp_path, capfd)


COMMANDS = {
    "no such data": (3, ["absent.jsonl", "No such file"], ["--data.source", "absent.jsonl"]),
    "no such held-out data": (3, ["absent.jsonl", "No such file"], ["--data.eval-source", "absent.jsonl"]),
    "no such tokenizer": (3, ["absent.json", "No such file"], ["--data.tokenizer", "absent.json"]),
    "no folder for the run": (4, ["/dev/null/run", "Not a directory"], ["--run-dir", "/dev/null/run"]),
    "a mesh that does not divide": (2, ["data.rows", "num_experts", "multiple of 3"], ["--mesh", "expert=3"]),
    "too few devices": (2, ["needs 16 devices", "8 are there", "--dry-run"], ["--mesh", "replica=16"]),
    "a row too small for a picture": (2, ["data.row_patches", "image_max_patches"], ["--data.row-patches", "12"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_work_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert_refused(*COMMANDS[name], tmp_path, capfd)


def test_an_unknown_setting_of_a_file_is_named_with_its_line(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\nmodel:\n  widht: 16\n")
    assert_refused(2, ["model.widht", "line 3", "did you mean 'width'"], ["--config", str(file)], tmp_path, capfd)
