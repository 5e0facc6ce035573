"""Raw signals of several channels: aligned by a rule, in batches as sounds are, refused before they are read."""

import io
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mmjax.config import AudioConfig, DataConfig, LengthConfig, ModelConfig, VisionConfig
from mmjax.data import signals
from mmjax.data.loader import Loader, check_fingerprint
from mmjax.data.sources.conversation import SoundFile
from mmjax.errors import DataError

# Clips of 32 frames of 3 channels give 4 features.
AUDIO = AudioConfig(
    hears="signals",
    num_layers=1,
    width=8,
    num_heads=1,
    head_width=8,
    hidden_width=8,
    mel_bins=3,
    clip_frames=32,
    values_per_feature=4,
    projector_width=8,
)
MODEL = ModelConfig(vision=VisionConfig(num_layers=0), audio=AUDIO)
DATA = DataConfig(rows=2, row_tokens=64, row_patches=0, row_clips=4, balance_rows=1, signal=LengthConfig(length=64))
EEG = np.random.default_rng(0).normal(size=(3, 2560)) * np.array([[1.0], [50.0], [1e-3]]) + 7


def signal(folder: Path, name: str = "a.npy") -> SoundFile:
    return SoundFile(where="x.jsonl, line 7", root=folder, path=name, kind="signal")


def saved(array: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def load(folder: Path, *names: str, **settings) -> Loader:
    lines = []
    for number, name in enumerate(names):
        question = {"role": "user", "content": f"<signal>{number}?"}
        record = {"messages": [question, {"role": "assistant", "content": "x"}], "signal": name}
        lines.append(json.dumps(record) + "\n")
    (folder / "d.jsonl").write_text("".join(lines))
    given = {**vars(DATA), "source": str(folder / "d.jsonl"), **settings}
    return Loader(DataConfig(**given), MODEL.vision, 0, model=MODEL, say=lambda _: None)


def test_2560_values_become_64_means_of_40_of_each_channel_alone(tmp_path):
    (tmp_path / "a.npy").write_bytes(saved(EEG))
    clips, num_features = signals.read_clips(signal(tmp_path), AUDIO, DATA)
    means = EEG.reshape(3, 64, 40).mean(axis=2).T
    expected = (means - means.mean(axis=0)) / means.std(axis=0)
    assert clips.shape == (2, 32, 3) and num_features == 8
    np.testing.assert_allclose(clips.reshape(64, 3), expected, atol=1e-5)
    kept = DataConfig(**{**vars(DATA), "signal_scale": "keep"})
    np.testing.assert_allclose(signals.read_clips(signal(tmp_path), AUDIO, kept)[0].reshape(64, 3), means, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2", "<i2", "|u1"])
def test_every_kind_of_number_order_and_file_gives_the_same_signal(dtype, tmp_path):
    numbers = np.random.default_rng(1).integers(0, 100, (3, 50))
    (tmp_path / "a.npy").write_bytes(saved(np.asfortranarray(numbers.astype(dtype))))
    data = DataConfig(**{**vars(DATA), "signal": LengthConfig(length=0)})
    clips, num_features = signals.read_clips(signal(tmp_path), AUDIO, data)
    expected = ((numbers - numbers.mean(1, keepdims=True)) / numbers.std(1, keepdims=True)).T
    np.testing.assert_allclose(clips.reshape(-1, 3)[:50], expected, atol=1e-4)
    # Behind its end there are zeros, of which the features that hold nothing else are no tokens.
    assert not clips.reshape(-1, 3)[50:].any() and num_features == 4 + 3
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.wav", numbers.T / 128, 256, subtype="FLOAT")
    heard, _ = signals.read_clips(signal(tmp_path, "a.wav"), AUDIO, data)
    np.testing.assert_allclose(heard, clips, atol=1e-3)


def test_a_batch_holds_the_real_frames_of_each_signal_where_its_tokens_stand(tmp_path):
    for name, length in (("a.npy", 2560), ("b.npy", 20), ("c.npy", 33)):
        (tmp_path / name).write_bytes(saved(EEG[:, :length]))
    loader = load(tmp_path, "a.npy", "b.npy", "c.npy")
    batch = loader.batch(0)
    assert batch.spectrograms.shape == (2, 4, 32, 3)
    counts = sorted(int(np.sum(batch.sound_index[batch.segment_ids == n] >= 0)) for n in range(1, 4))
    # 64 frames are 8 features, 20 are 3, 33 are 5; a channel's mean is 0, so a whole clip's is too.
    assert (batch.sound_index >= 0).sum() == 8 + 3 + 5 and sum(counts) == 16
    assert not load(tmp_path, "a.npy", sounds="blank").batch(0).spectrograms[0, 0].any()
    with pytest.raises(DataError, match="signal"):
        check_fingerprint(
            loader.fingerprint(),
            load(tmp_path, "a.npy", "b.npy", "c.npy", signal=LengthConfig(length=60)).fingerprint(),
        )


BAD = {
    "empty": b"",
    "HTML": b"<html>not found</html>" * 9,
    "cut header": saved(EEG)[:40],
    "cut data": saved(EEG)[:-7],
    "more than its header says": saved(EEG) + b"\0",
    "objects": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 60)
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (3, 4), }  \n",
    "a trillion values": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 70)
    + b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 333333333333), } \n",
    "code for a header": b"\x93NUMPY\x01\x00" + struct.pack("<H", 40) + b"__import__('os').system('touch canary')\n",
    "complex": saved(EEG.astype(complex)),
    "text": saved(np.array([["a"]])),
    "three axes": saved(np.zeros((3, 4, 5))),
    "channels missing": saved(EEG[:2]),
    "turned round": saved(EEG[:, :9].T),
    "no values": saved(EEG[:, :0]),
    "not finite": saved(np.where(np.arange(2560) == 99, np.nan, EEG)),
    "an archive": b"PK\x03\x04" + bytes(60),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_signal_is_an_error_that_names_record_and_file(kind, tmp_path):
    (tmp_path / "a.npy").write_bytes(BAD[kind])
    with pytest.raises(DataError, match=r"x\.jsonl, line 7, signal 'a\.npy'"):
        signals.read_clips(signal(tmp_path), AUDIO, DATA)
    assert os.listdir(tmp_path) == ["a.npy"] and (tmp_path / "a.npy").read_bytes() == BAD[kind]


def test_a_signal_is_refused_by_its_header_where_it_is_too_long_lies_elsewhere_or_nobody_hears_it(tmp_path):
    (tmp_path / "a.npy").write_bytes(saved(EEG))
    short = DataConfig(**{**vars(DATA), "signal_max_steps": 2559})
    with pytest.raises(DataError, match="more than 2,559 values"):
        signals.read_shape(signal(tmp_path), AUDIO, short)
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link.npy").symlink_to(tmp_path / "a.npy")
    os.mkfifo(tmp_path / "root/pipe.npy")
    for name in ("../a.npy", "link.npy", "pipe.npy", "http://localhost/a.npy", "none.npy"):
        with pytest.raises(DataError, match="line 7"):
            signals.read_shape(signal(tmp_path / "root", name), AUDIO, DATA)
    record = {"messages": [{"role": "user", "content": "<audio>"}, {"role": "assistant", "content": "x"}]}
    (tmp_path / "d.jsonl").write_text(json.dumps(record | {"audio": "a.npy"}))
    data = DataConfig(**{**vars(DATA), "source": str(tmp_path / "d.jsonl")})
    with pytest.raises(DataError, match=r"found a sound.*signals alone \(model\.audio\.hears\)"):
        Loader(data, MODEL.vision, 0, model=MODEL)


def test_a_damaged_signal_goes_into_quarantine_and_the_others_train_on(tmp_path):
    (tmp_path / "a.npy").write_bytes(saved(EEG))
    (tmp_path / "b.npy").write_bytes(BAD["not finite"])
    (tmp_path / "c.npy").write_bytes(BAD["cut data"])
    loader = load(tmp_path, "a.npy", "b.npy", "c.npy", bad_sample="skip", rows=1)
    batch = loader.batch(0)
    assert (batch.sound_index >= 0).sum() == 8
    assert sorted(record.stage for record in loader.rejected) == ["picture", "record"]
