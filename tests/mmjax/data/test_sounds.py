import dataclasses
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mmjax.config import AudioConfig
from mmjax.data.sources.conversation import SoundFile
from mmjax.errors import DataError

AUDIO = AudioConfig(clip_frames=300, mel_bins=20, values_per_feature=5)
soundfile = pytest.importorskip("soundfile")
sounds = pytest.importorskip("mmjax.data.sounds")


def read(folder: Path, name: str, max_seconds: float = 10.0) -> np.ndarray:
    sound = SoundFile(where="x.jsonl, line 7", root=folder, path=name)
    samples = sounds.read_sound(sound, max_seconds)
    # What the header tells is what is decoded.
    assert sounds.read_shape(sound, AUDIO, max_seconds).num_samples == len(samples)
    return samples


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (8_000, 2), (44_100, 1)])
def test_every_format_rate_and_number_of_channels_becomes_the_same_sound(ending, rate, channels, tmp_path):
    samples = np.repeat(tone(1.0, rate)[:, None], channels, axis=1)
    soundfile.write(tmp_path / f"a.{ending}", samples, rate)
    found = read(tmp_path, f"a.{ending}")
    assert found.dtype == np.float32 and len(found) == 16_000
    inner = slice(800, -800)
    np.testing.assert_allclose(found[inner], tone(1.0, 16_000)[inner], atol=0.06 if ending == "ogg" else 5e-3)


def header(rate: int, channels: int, data_bytes: int = 8) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2 % 2**32, max(1, channels * 2 % 2**16), 16)
    return b"RIFF" + struct.pack("<I", 36 + data_bytes) + b"WAVEfmt " + struct.pack("<I", 16) + form + b"data"


BAD = {
    "empty": b"",
    "HTML": b"<html>not found</html>" * 9,
    "garbage MP3": b"\xff\xfb\x90\x00" + bytes(range(256)) * 4,
    "rate 0": header(0, 1) + struct.pack("<I", 8) + bytes(8),
    "no channels": header(16_000, 0) + struct.pack("<I", 8) + bytes(8),
    "a million channels": header(16_000, 60_000) + struct.pack("<I", 8) + bytes(8),
    "header alone": header(16_000, 1)[:30],
    "no samples": header(16_000, 1, 0) + struct.pack("<I", 0),
    "a rate of billions": header(4_000_000_000 % 2**31, 1) + struct.pack("<I", 8) + bytes(8),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sound_is_an_error_that_names_record_and_file(kind, tmp_path):
    (tmp_path / "a.wav").write_bytes(BAD[kind])
    with pytest.raises(DataError, match=r"x\.jsonl, line 7, sound 'a\.wav'"):
        read(tmp_path, "a.wav")
    assert os.listdir(tmp_path) == ["a.wav"]


def test_a_sound_that_is_cut_off_damaged_or_of_another_format_is_refused(tmp_path):
    for ending in ("wav", "flac", "ogg"):
        soundfile.write(tmp_path / f"a.{ending}", np.random.default_rng(0).normal(size=64_000, scale=0.1), 16_000)
        whole = (tmp_path / f"a.{ending}").read_bytes()
        (tmp_path / f"cut.{ending}").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(DataError, match=r"sound 'cut\.flac'"):
        read(tmp_path, "cut.flac")
    soundfile.write(tmp_path / "a.aiff", tone(0.1, 16_000), 16_000)
    with pytest.raises(DataError, match="the format AIFF"):
        read(tmp_path, "a.aiff")
    floats = np.array([0.0, np.nan, 0.1], np.float32)
    soundfile.write(tmp_path / "nan.wav", floats, 16_000, subtype="FLOAT")
    with pytest.raises(DataError, match="no numbers"):
        read(tmp_path, "nan.wav")


def test_a_sound_longer_than_the_cap_is_refused_before_it_is_decoded(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.zeros(16_000 * 60), 16_000)
    with pytest.raises(DataError, match="more than 10 seconds"):
        read(tmp_path, "a.flac")
    assert len(read(tmp_path, "a.flac", max_seconds=60)) == 16_000 * 60


def test_nothing_outside_the_media_root_and_no_special_file_is_opened(tmp_path):
    root = tmp_path / "media"
    root.mkdir()
    soundfile.write(tmp_path / "secret.wav", tone(0.1, 16_000), 16_000)
    (root / "link.wav").symlink_to(tmp_path / "secret.wav")
    os.mkfifo(root / "pipe.wav")
    for path in ("../secret.wav", str(tmp_path / "secret.wav"), "link.wav", "pipe.wav", "http://localhost/a.wav", ""):
        with pytest.raises(DataError, match="line 7"):
            read(root, path)


def test_clips_and_features_follow_the_length_of_the_sound():
    assert AUDIO.clip_features == 30
    for seconds, num_clips, num_features in ((0.01, 1, 1), (1.0, 1, 10), (3.0, 1, 30), (3.1, 2, 31), (7.5, 3, 75)):
        spectrograms = sounds.clips(tone(seconds, 16_000), AUDIO)
        shape = sounds.shape_of(round(16_000 * seconds), AUDIO)
        assert spectrograms.shape == (num_clips, 300, 20) == (shape.num_clips, 300, 20)
        assert shape.num_features == num_features
    one = sounds.clips(tone(3.0, 16_000), AUDIO)
    two = sounds.clips(np.concatenate([tone(3.0, 16_000), tone(1.0, 16_000)]), AUDIO)
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(sounds.silence(2, AUDIO), sounds.clips(np.zeros(3 * 16_000 + 1), AUDIO))
    # Whole features of clips of 30 s, which a quotient of floats makes a little more of.
    assert [sounds.shape_of(1600 * count, AudioConfig()).num_features for count in (21, 51, 321)] == [21, 51, 321]
    odd = dataclasses.replace(AUDIO, clip_frames=130)
    assert sounds.clips(tone(1.3, 16_000), odd).shape == (1, 130, 20)
