"""Sounds and signals inside archives and tables give the batches of the same files in a folder."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mmjax.config import AudioConfig, DataConfig, ModelConfig, VisionConfig
from mmjax.data.batch import digest
from mmjax.data.index_cache import IndexCache
from mmjax.data.loader import Loader
from mmjax.data.sources import webdataset
from mmjax.errors import DataError

soundfile = pytest.importorskip("soundfile")

SIZES = {"num_layers": 1, "width": 8, "num_heads": 1, "head_width": 8, "hidden_width": 8, "clip_frames": 20}
HEARING = ModelConfig(vision=VisionConfig(num_layers=0), audio=AudioConfig(mel_bins=6, **SIZES))
READING = ModelConfig(vision=VisionConfig(num_layers=0), audio=AudioConfig(mel_bins=2, hears="signals", **SIZES))
ENDINGS = ("wav", "flac", "ogg")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three sounds and three signals, and the records that name them, each in a JSONL."""
    random = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"audio": [], "signal": []}
    for number, ending in enumerate(ENDINGS):
        soundfile.write(tmp_path / f"{number}.{ending}", 0.2 * random.normal(size=4000 + 900 * number), 16_000)
        np.save(tmp_path / f"{number}.npy", random.normal(size=(2, 30 + number)))
        for kind, name in (("audio", f"{number}.{ending}"), ("signal", f"{number}.npy")):
            lines[kind].append(json.dumps(record(kind, number) | {kind: name}) + "\n")
    for kind, texts in lines.items():
        (tmp_path / f"{kind}.jsonl").write_text("".join(texts))
    return tmp_path


def record(kind: str, number: int) -> dict:
    turns = [{"role": "user", "content": f"<{kind}>{number}?"}, {"role": "assistant", "content": "so."}]
    return {"messages": turns}


def digests(source: Path, model: ModelConfig) -> list[str]:
    data = DataConfig(source=str(source), rows=1, row_tokens=32, row_patches=0, row_clips=4, balance_rows=1)
    loader = Loader(data, model.vision, 0, model=model, say=lambda _: None)
    return [digest(loader.batch(step)) for step in range(4)]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(("kind", "model"), [("audio", HEARING), ("signal", READING)])
def test_a_tar_and_a_parquet_give_the_batches_of_a_folder(kind, model, folder):
    files = [f"{number}.{ending if kind == 'audio' else 'npy'}" for number, ending in enumerate(ENDINGS)]
    expected = digests(folder / f"{kind}.jsonl", model)
    unnamed, named = {}, {}
    for number, file in enumerate(files):
        content, ending = (folder / file).read_bytes(), file.split(".")[1]
        unnamed |= {f"{number}.json": json.dumps(record(kind, number)).encode(), f"{number}.{ending}": content}
        naming = record(kind, number) | {f"{kind}s": [f"{number}.Sound.{ending}"]}
        named |= {f"{number}.json": json.dumps(naming).encode(), f"{number}.sound.{ending}": content}
    assert digests(write_tar(folder / "a.tar", unnamed), model) == expected
    assert digests(write_tar(folder / "b.tar", named), model) == expected
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {
        "paths": [record(kind, number) | {kind: file} for number, file in enumerate(files)],
        "bytes": [record(kind, n) | {kind: (folder / file).read_bytes()} for n, file in enumerate(files)],
        "structs": [
            record(kind, n) | {f"{kind}s": [{"bytes": (folder / file).read_bytes(), "path": None}]}
            for n, file in enumerate(files)
        ],
    }
    for name, table in rows.items():
        parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{name}.parquet")
        assert digests(folder / f"{name}.parquet", model) == expected, name


def test_a_caption_may_stand_beside_a_sound_and_a_wav_may_be_a_signal(folder):
    sound = (folder / "0.wav").read_bytes()
    captioned = webdataset.WebDataset(write_tar(folder / "a.tar", {"x.txt": b"so.", "x.wav": sound}), IndexCache())
    (heard,) = captioned[0].messages[0].parts
    assert heard.kind == "sound" and heard.read() == sound and captioned[0].messages[1].text == "so."
    as_signal = json.dumps(record("signal", 0) | {"signals": ["wav"]}).encode()
    archive = webdataset.WebDataset(write_tar(folder / "b.tar", {"x.json": as_signal, "x.wav": sound}), IndexCache())
    assert archive[0].messages[0].parts[1].kind == "signal"


def test_what_an_archive_lacks_or_holds_damaged_is_named(folder, monkeypatch):
    missing = json.dumps(record("audio", 0) | {"audio": "../0.wav"}).encode()
    archive = webdataset.WebDataset(write_tar(folder / "a.tar", {"x.json": missing, "x.wav": b"RIFF"}), IndexCache())
    with pytest.raises(DataError, match=r"sample 'x': found no member for the sound '\.\./0\.wav'"):
        archive[0]
    with pytest.raises(DataError, match=r"b\.tar, sample 'x', sound 'wav': found no sound"):
        digests(
            write_tar(folder / "b.tar", {"x.json": json.dumps(record("audio", 0)).encode(), "x.wav": b"RIFF"}), HEARING
        )
    monkeypatch.setattr(webdataset, "MAX_MEDIUM_BYTES", 100)
    members = {"x.json": json.dumps(record("audio", 0)).encode(), "x.wav": (folder / "0.wav").read_bytes()}
    path = write_tar(folder / "c.tar", members)
    with pytest.raises(DataError, match=r"sample 'x': found [\d,]+ bytes in \.wav"):
        digests(path, HEARING)
