import hashlib
import json
import os
from pathlib import Path

import pytest

from mmjax.config import DataConfig
from mmjax.data.index_cache import IndexCache
from mmjax.data.sources import jsonl
from mmjax.data.sources.conversation import ImageFile
from mmjax.data.sources.mixture import Mixture
from mmjax.data.sources.open_source import Split, open_sources
from mmjax.errors import ConfigurationError, DataError

ASK = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "so."}
GOOD = {"messages": [ASK, ANSWER]}


def open_source(data: DataConfig, seed: int, split: Split) -> Mixture:
    return open_sources(data, seed, split, IndexCache(), {})


def messages(*turns):
    return {"messages": list(turns)}


BAD_LINES = {
    "cut off": (json.dumps(GOOD).encode()[:-7], "broken JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "byte order mark"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), "UTF-16"),
    "invalid UTF-8": (b'{"messages": "\xff"}', "valid UTF-8"),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid text"),
    "NUL": (b'{"messages"\x00: []}', "broken JSON"),
    "deep": (b"[" * 200_000, "nested too deep"),
    "huge number": (b'{"messages": ' + b"9" * 5000 + b"}", "broken JSON"),
    "duplicate key": (b'{"messages": [], "messages": []}', "duplicate key 'messages'"),
    "a list": ([], 'an object with a list "messages"'),
    "no messages": ({}, 'an object with a list "messages"'),
    "messages of another type": ({"messages": "hello"}, 'an object with a list "messages"'),
    "empty conversation": (messages(), "an empty conversation"),
    "message of another type": (messages("hello"), "message 1"),
    "missing role": (messages({"content": "x"}, ANSWER), "no role"),
    "unknown role": (messages(ASK, {"role": "bot", "content": "x"}), "role 'bot'"),
    "role of another type": (messages({"role": ["user"], "content": "x"}), "role ['user']"),
    "missing content": (messages({"role": "user"}, ANSWER), "content None"),
    "unknown part": (messages({"role": "user", "content": [{"type": "video"}]}, ANSWER), "part {'type': 'video'}"),
    "unknown key": (messages(ASK, {**ANSWER, "tool_calls": []}), "tool_calls"),
    "bad weight": (messages(ASK, {**ANSWER, "weight": 0.5}), "weight 0.5"),
    "only a system turn": (messages({"role": "system", "content": "x"}), "no supervised token"),
    "no answer": (messages(ASK), "no supervised token"),
    "answers of weight 0": (messages(ASK, {**ANSWER, "weight": 0}), "no supervised token"),
    "marker without image": (messages({"role": "user", "content": "<image>?"}, ANSWER), "1 image markers and 0 images"),
    "image without marker": ({**GOOD, "images": ["a.png", "b.png"]}, "0 image markers and 2 images"),
    "images of another type": ({**GOOD, "images": [{"bytes": ""}]}, "a list of paths"),
    "videos": ({**GOOD, "videos": ["a.mp4"]}, '"videos"'),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_an_error_that_names_file_and_line(kind, write_records, tmp_path):
    line, words = BAD_LINES[kind]
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    # UTF-16 holds line ends of its own: it stands last.
    path = write_records(GOOD, b"", raw)
    before = hashlib.sha256(Path(path).read_bytes()).digest()
    source = jsonl.ConversationFile(Path(path), tmp_path, IndexCache())
    assert source[0].messages[1].text == "so."
    with pytest.raises(DataError) as caught:
        source[1]
    assert f"{path}, line 3" in str(caught.value) and words in str(caught.value)
    assert os.listdir(tmp_path) == ["records.jsonl"]
    assert hashlib.sha256(Path(path).read_bytes()).digest() == before


def test_a_line_over_the_size_limit_is_refused_without_reading_it(write_records, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 200)
    source = jsonl.ConversationFile(Path(write_records(GOOD, b"x" * 1000, GOOD)), tmp_path, IndexCache())
    assert len(source) == 3 and source[2].where.endswith("line 3")
    with pytest.raises(DataError, match="line 2: found 1,001 bytes"):
        source[1]


def test_a_source_that_is_no_file_with_records_is_refused(tmp_path):
    (tmp_path / "empty").write_bytes(b"\n \n")
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "empty", "pipe", "", "nul\0"):
        with pytest.raises(DataError) as caught:
            open_source(DataConfig(source=str(tmp_path / name)), seed=0, split="train")
        assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_changes_during_the_run_is_refused(write_records, tmp_path):
    source = jsonl.ConversationFile(Path(write_records(GOOD)), tmp_path, IndexCache())
    write_records(GOOD, GOOD)
    with pytest.raises(DataError, match="changed since the run started"):
        source[0]


def test_a_jsonl_without_eval_source_has_nothing_held_out(write_records):
    with pytest.raises(ConfigurationError, match=r"data\.eval_source"):
        open_source(DataConfig(source=write_records(GOOD)), seed=0, split="held_out")


def test_records_are_read_in_any_order_and_both_styles_mean_the_same(write_records, tmp_path):
    image = {"type": "image"}
    parts = [{"type": "text", "text": "a"}, {**image, "image": "1.png"}, {**image, "path": "2.png"}]
    marked = {**messages({"role": "user", "content": "a<image><image>b"}, ANSWER), "images": ["1.png", "2.png"]}
    listed = messages({"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}, ANSWER)
    column = {**messages({"role": "user", "content": [image, {"type": "text", "text": "<image>"}]}, ANSWER)}
    lines = [json.dumps(marked).encode() + b"\r", b"  ", json.dumps(listed).encode(), {**column, "images": ["3.png"]}]
    source = jsonl.ConversationFile(Path(write_records(*lines)), tmp_path, IndexCache())

    def shape(number):
        return [part.path if isinstance(part, ImageFile) else part for part in source[number].messages[0].parts if part]

    assert shape(2) == ["3.png", "<image>"]
    assert [part for part in shape(1) if part] == shape(0) == ["a", "1.png", "2.png", "b"]
    assert source[1].where.endswith("line 3")


def test_an_answer_of_weight_0_is_not_supervised(write_records, tmp_path):
    source = jsonl.ConversationFile(
        Path(write_records(messages(ASK, {**ANSWER, "weight": 0}, ASK, ANSWER))), tmp_path, IndexCache()
    )
    assert [message.is_supervised for message in source[0].messages] == [False, False, False, True]
