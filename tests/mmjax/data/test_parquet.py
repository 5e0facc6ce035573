import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from mmjax.config import DataConfig, VisionConfig
from mmjax.data import images
from mmjax.data.batch import digest
from mmjax.data.index_cache import IndexCache
from mmjax.data.loader import Loader
from mmjax.data.sources.conversation import ImageContent, ImageFile
from mmjax.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
source = pytest.importorskip("mmjax.data.sources.parquet")

ANSWER = {"role": "assistant", "content": "so."}


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def open_file(path: Path, root: Path | None = None) -> Any:
    return source.ParquetFile(path, root or path.parent, IndexCache())


def png() -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(np.full((8, 8, 3), (9, 8, 7), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_rows_are_read_in_any_order_over_row_groups(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, ANSWER], "other": n} for n in range(10)]
    file = open_file(write(tmp_path / "a.parquet", rows, row_group_size=3))
    assert len(file) == 10
    for number in (9, 0, 5, 3, 2):
        assert file[number].messages[0].text == f"q{number}"
        assert file[number].where == f"{tmp_path / 'a.parquet'}, row {number}"


def test_conversations_may_be_json_text_and_pictures_paths_bytes_or_structs(tmp_path):
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]
    text = [{"conversations": json.dumps(turns), "image": "a.png"}]
    stored = [{"conversations": turns, "images": [{"bytes": png(), "path": None}]}]
    named = [{"conversations": turns, "images": [{"bytes": None, "path": "a.png"}]}]
    plain = [{"conversations": turns, "image": png()}]
    kinds = []
    for number, rows in enumerate((text, stored, named, plain)):
        picture = next(open_file(write(tmp_path / f"{number}.parquet", rows))[0].pictures)
        kinds.append(type(picture))
        if isinstance(picture, ImageContent):
            assert images.read_pixels(picture, max_pixels=100, channels=3)[0, 0].tolist() == [9, 8, 7]
        else:
            assert isinstance(picture, ImageFile) and picture.path == "a.png"
    assert kinds == [ImageFile, ImageContent, ImageFile, ImageContent]


def test_a_jsonl_and_a_parquet_of_the_same_records_give_the_same_batches(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    records = [
        {
            "messages": [{"role": "user", "content": "<image>" * (n % 3) + f"q{n}"}, ANSWER],
            "images": ["a.png"] * (n % 3),
        }
        for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write(tmp_path / "a.parquet", records)
    settings = {"rows": 2, "row_tokens": 48, "row_patches": 32, "image_max_patches": 16, "packing_window": 4}
    one, other = (
        Loader(DataConfig(source=str(tmp_path / name), **settings), VisionConfig(patch_pixels=4), 0)
        for name in ("a.jsonl", "a.parquet")
    )
    assert [digest(one.batch(step)) for step in range(5)] == [digest(other.batch(step)) for step in range(5)]


BAD_FILES = {
    "empty": b"",
    "HTML": b"<html>not found</html>" * 10,
    "magic alone": b"PAR1" + b"\xff" * 40 + b"PAR1",
    "huge footer": b"PAR1" + b"\0" * 40 + b"\xff\xff\xff\x7fPAR1",
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_parquet_is_refused_by_name(kind, tmp_path):
    (tmp_path / "a.parquet").write_bytes(BAD_FILES[kind])
    with pytest.raises(DataError, match=r"a\.parquet: found no readable Parquet file"):
        open_file(tmp_path / "a.parquet")


def test_a_file_cut_off_or_with_damaged_data_is_refused(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"question {n}" * 20}, ANSWER]} for n in range(200)]
    whole = write(tmp_path / "a.parquet", rows, row_group_size=50, compression="gzip").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.parquet: found no readable"):
        open_file(tmp_path / "cut.parquet")
    (tmp_path / "bad.parquet").write_bytes(whole[:100] + bytes(400) + whole[500:])
    with pytest.raises(DataError, match=r"bad\.parquet, row"):
        open_file(tmp_path / "bad.parquet")[0]


def test_columns_that_hold_no_conversation_are_listed(tmp_path):
    with pytest.raises(DataError, match="columns question, answer"):
        open_file(write(tmp_path / "a.parquet", [{"question": "q", "answer": "a"}]))
    parquet.write_table(pyarrow.table({"messages": pyarrow.array([], pyarrow.string())}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no row"):
        open_file(tmp_path / "b.parquet")


def test_a_bad_row_is_named_and_the_others_are_read(tmp_path):
    rows = [{"messages": json.dumps([ANSWER])}, {"messages": "[{"}, {"messages": json.dumps([ANSWER])}]
    file = open_file(write(tmp_path / "a.parquet", rows))
    assert file[0].messages == file[2].messages or file[2].messages[0].text == "so."
    with pytest.raises(DataError, match=r"a\.parquet, row 1, column 'messages': found broken JSON"):
        file[1]


def test_a_row_group_beyond_the_limit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    rows = [{"messages": [{"role": "user", "content": "q" * 1000}, ANSWER]}] * 100
    file = open_file(write(tmp_path / "a.parquet", rows))
    monkeypatch.setattr(source, "MAX_GROUP_BYTES", 100)
    with pytest.raises(DataError, match=r"row group 0: found .* bytes in one row group"):
        file[0]
