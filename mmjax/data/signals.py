"""Raw signals of several channels, such as EEG: NumPy arrays or WAV files, their size capped before they are read.

A .npy holds numbers [channels, time], or [time] of one channel; a WAV is taken as it stands, its channels apart. A
signal is brought to a length by the rule of `data.signal`, and each channel to mean 0 and deviation 1
(`data.signal_scale`). What is then real becomes frames, one number for each channel, in clips of
`model.audio.clip_frames`.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np

from mmjax.config import AudioConfig, DataConfig
from mmjax.data.audio import clip_shape
from mmjax.data.lengths import fit_length, fitted_length
from mmjax.data.media import Stream, opened
from mmjax.data.sources.conversation import Sound
from mmjax.errors import DataError

MAX_RATE = 384_000
EXPECTED = "numbers [channels, time] in a .npy, or a WAV"
_NPY = b"\x93NUMPY"


class SignalHeader(NamedTuple):
    """What a file says before its numbers."""

    num_channels: int
    num_steps: int


def read_shape(signal: Sound, audio: AudioConfig, data: DataConfig) -> tuple[int, int]:
    """(clips, positions in a row); of the file the header alone is read.

    Raises:
      DataError: no such file inside its root, of another kind or number of channels, damaged, or longer than
        `data.signal_max_steps`.
    """
    with opened(signal, EXPECTED) as stream, _header(signal, stream, audio, data) as (header, _):
        _, num_real = fitted_length(header.num_steps, data.signal)
        return clip_shape(num_real, audio.clip_frames, audio)


def read_clips(signal: Sound, audio: AudioConfig, data: DataConfig) -> tuple[np.ndarray, int]:
    """(float32 [clips, frames, channels], positions in a row) of the whole signal; zeros behind its end.

    Raises:
      DataError: as `read_shape`, or numbers that are missing or not finite.
    """
    with opened(signal, EXPECTED) as stream, _header(signal, stream, audio, data) as (_, read):
        values = read()
    if not np.all(np.isfinite(values)):
        raise _refusal(signal, "values that are no finite numbers", "replace or mend them")
    is_scaled = data.signal_scale == "standard"
    if is_scaled:
        # Before they are rounded: what matters may be small beside an offset.
        values = values - values.mean(axis=0, keepdims=True)
    fitted, is_real = fit_length(values, data.signal)
    frames = fitted[is_real]
    if is_scaled:
        frames = frames - frames.mean(axis=0, keepdims=True)
        deviation = frames.std(axis=0, keepdims=True)
        # A channel that never changes says nothing.
        frames = frames / np.where(deviation > 0, deviation, 1)
    num_clips, num_features = clip_shape(len(frames), audio.clip_frames, audio)
    clips = np.zeros((num_clips * audio.clip_frames, audio.mel_bins), np.float32)
    clips[: len(frames)] = frames
    return clips.reshape(num_clips, audio.clip_frames, -1), num_features


@contextmanager
def _header(signal: Sound, stream: Stream, audio: AudioConfig, data: DataConfig) -> Iterator[tuple]:
    """The checked header, and a function that reads float64 [time, channels]."""
    start = stream.read(len(_NPY))
    stream.seek(0)
    header, read = _npy(signal, stream) if start == _NPY else _wav(signal, stream)
    if header.num_channels != audio.mel_bins:
        is_turned = header.num_steps == audio.mel_bins
        raise _refusal(
            signal,
            f"{header.num_channels:,} channels of {header.num_steps:,} values",
            f"give files of {audio.mel_bins} channels, or set model.audio.mel_bins"
            + (": is the array turned round?" if is_turned else ""),
        )
    if header.num_steps < 1:
        raise _refusal(signal, "no values", "replace it")
    if header.num_steps > data.signal_max_steps:
        found = f"more than {data.signal_max_steps:,} values of a channel"
        raise _refusal(signal, found, "cut it into parts, or raise data.signal_max_steps")
    yield header, read


def _npy(signal: Sound, stream: BinaryIO) -> tuple:
    try:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, is_fortran, dtype = readers[version](stream)
    # The header is a Python literal: parsing it fails in many ways, running it in none.
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, EOFError) as error:
        raise _refusal(signal, f"no readable .npy ({error})", "write it again with numpy.save") from error
    if dtype.kind not in "fiu" or dtype.itemsize > 8 or len(shape) not in (1, 2):
        found = f"an array {list(shape)} of {dtype}"
        raise _refusal(signal, found, "save real numbers [channels, time]; no objects are ever loaded")
    place = stream.tell()
    num_bytes = stream.seek(0, io.SEEK_END) - place
    if num_bytes != (expected := math.prod(shape) * dtype.itemsize):
        raise _refusal(signal, f"{num_bytes:,} of {expected:,} bytes", "was the file cut off?")

    def read() -> np.ndarray:
        stream.seek(place)
        array = np.frombuffer(stream.read(num_bytes), dtype).reshape(shape, order="F" if is_fortran else "C")
        return np.atleast_2d(array).T.astype(np.float64)

    return SignalHeader(*((1, *shape) if len(shape) == 1 else shape)), read


def _wav(signal: Sound, stream: BinaryIO) -> tuple:
    try:
        import soundfile
    except ImportError as error:
        raise _refusal(signal, f"no .npy, and no package {error.name}", "pip install -e '.[audio]'") from error
    try:
        file = soundfile.SoundFile(stream)
        if file.format != "WAV" or not 1 <= file.samplerate <= MAX_RATE:
            raise _refusal(signal, f"the format {file.format}, {file.samplerate} values a second", "convert it")
    # libsndfile's own errors, by kind of damage.
    except (soundfile.SoundFileError, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        raise _refusal(signal, f"no signal ({error})", "convert or replace it") from error

    def read() -> np.ndarray:
        values = file.read(file.frames, "float64", always_2d=True)
        if len(values) < file.frames:
            raise _refusal(signal, f"{len(values):,} of {file.frames:,} values", "was the file cut off?")
        return values

    return SignalHeader(file.channels, file.frames), read


def _refusal(signal: Sound, found: str, remedy: str) -> DataError:
    return DataError(f"{signal.where}, signal {signal.path!r}", found=found, expected=EXPECTED, remedy=remedy)
