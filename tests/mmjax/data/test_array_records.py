import json
from pathlib import Path

import pytest
from array_record.python import array_record_module

from mmjax.data.index_cache import IndexCache
from mmjax.data.sources.array_records import ArrayRecordFile
from mmjax.errors import DataError


def write(path: Path, records: list[bytes]) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def question(text: str) -> bytes:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "a"}]
    return json.dumps({"conversations": turns, "image": ["a.png"] * text.count("<image>")}).encode()


def test_records_are_read_in_any_order_and_a_bad_one_is_named(tmp_path):
    records = [question(f"<image>q{n}" + "x" * 1000) for n in range(100)]
    records[7] = b'{"messages'
    file = ArrayRecordFile(write(tmp_path / "a.array_record", records), tmp_path, IndexCache())
    assert len(file) == 100
    for number in (99, 0, 42):
        assert file[number].messages[0].text.startswith(f"q{number}x") and len(list(file[number].pictures)) == 1
    with pytest.raises(DataError, match=r"a\.array_record, record 7: found broken JSON"):
        file[7]


def test_a_file_that_is_damaged_or_of_another_kind_is_refused_by_name(tmp_path):
    whole = write(tmp_path / "a.array_record", [question("q" * 3000) for _ in range(100)]).read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2], "html": b"<html>" * 20_000, "empty": b""}.items():
        path = tmp_path / f"{name}.array_record"
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.array_record"):
            ArrayRecordFile(path, tmp_path, IndexCache())[0]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    (tmp_path / "flipped.array_record").write_bytes(flipped)
    with pytest.raises(DataError, match=r"flipped\.array_record"):
        [*ArrayRecordFile(tmp_path / "flipped.array_record", tmp_path, IndexCache())]  # type: ignore[misc]
