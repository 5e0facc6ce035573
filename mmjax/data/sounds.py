"""Sound files (WAV, FLAC, OGG): opened as safely as pictures, their length capped before decoding, as clips to hear."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import scipy.signal
import soundfile

from mmjax.config import AudioConfig
from mmjax.data.audio import HOP_SAMPLES, SAMPLES_PER_SECOND, SILENCE, clip_shape, log_mel
from mmjax.data.media import opened
from mmjax.data.sources.conversation import Sound
from mmjax.errors import DataError

FORMATS = ("WAV", "FLAC", "OGG")
MAX_RATE = 384_000
MAX_CHANNELS = 32
EXPECTED = f"a whole sound in one of {', '.join(FORMATS)}"


@dataclass(frozen=True)
class SoundShape:
    """What the header says of a sound, and the tower makes of it."""

    num_samples: int
    """At 16 kHz."""
    num_clips: int
    num_features: int
    """Positions it takes in a row."""


def read_shape(sound: Sound, audio: AudioConfig, max_seconds: float) -> SoundShape:
    """The shape of a sound; of the file the header alone is read.

    Raises:
      DataError: as `read_sound`, as far as the header tells.
    """
    with _opened(sound, max_seconds) as file:
        return shape_of(math.ceil(file.frames * SAMPLES_PER_SECOND / file.samplerate), audio)


def shape_of(num_samples: int, audio: AudioConfig) -> SoundShape:
    """Of a sound of so many samples at 16 kHz. A clip has `clip_frames` frames of 10 ms."""
    return SoundShape(num_samples, *clip_shape(num_samples, _clip_samples(audio), audio))


def read_sound(sound: Sound, max_seconds: float) -> np.ndarray:
    """float32 [n] in [-1, 1]: the file at 16 kHz, the mean of its channels.

    Raises:
      DataError: not such a file inside its root, of another format, damaged, longer than `max_seconds`, or of an
        impossible rate.
    """
    with _opened(sound, max_seconds) as file:
        rate, limit = file.samplerate, math.floor(max_seconds * file.samplerate)
        # The header may claim less than the file holds.
        samples = file.read(limit + 1, "float32", always_2d=True)
        if len(samples) > limit:
            raise _too_long(sound, max_seconds)
        if len(samples) < file.frames:
            found = f"{len(samples):,} of {file.frames:,} samples"
            raise _refusal(sound, found, "was the file cut off?")
        if not np.all(np.isfinite(samples)):
            raise _refusal(sound, "samples that are no numbers", "replace it")
    return _at_rate(samples.mean(axis=1), rate)


@contextmanager
def _opened(sound: Sound, max_seconds: float) -> Iterator[soundfile.SoundFile]:
    """The file, its header checked."""
    try:
        with opened(sound, EXPECTED) as stream, soundfile.SoundFile(stream) as file:
            rate, channels = file.samplerate, file.channels
            if file.format not in FORMATS:
                raise _refusal(sound, f"the format {file.format}", "convert it")
            if not 1 <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
                raise _refusal(sound, f"{rate} samples a second in {channels} channels", "convert it")
            if file.frames < 1:
                raise _refusal(sound, "no samples", "replace it")
            if file.frames > math.floor(max_seconds * rate):
                raise _too_long(sound, max_seconds)
            yield file
    except DataError:
        raise
    # libsndfile's own errors, by kind of damage.
    except (soundfile.SoundFileError, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        raise _refusal(sound, f"no sound ({error})", "convert or replace it") from error


def _at_rate(samples: np.ndarray, rate: int) -> np.ndarray:
    divisor = math.gcd(rate, SAMPLES_PER_SECOND)
    resampled = scipy.signal.resample_poly(samples, SAMPLES_PER_SECOND // divisor, rate // divisor)
    return np.clip(resampled, -1, 1).astype(np.float32)


def clips(samples: np.ndarray, audio: AudioConfig) -> np.ndarray:
    """float32 [clips, frames, bins]: log-mel clips of a sound at 16 kHz. `shape_of` counts their features."""
    length = _clip_samples(audio)
    parts = [samples[start : start + length] for start in range(0, max(1, len(samples)), length)]
    return np.stack([log_mel(part, num_bins=audio.mel_bins, num_frames=audio.clip_frames) for part in parts])


def silence(num_clips: int, audio: AudioConfig) -> np.ndarray:
    """`clips` of a sound without any sound in it."""
    return np.full((num_clips, audio.clip_frames, audio.mel_bins), SILENCE, np.float32)


def _clip_samples(audio: AudioConfig) -> int:
    return audio.clip_frames * HOP_SAMPLES


def _name(sound: Sound) -> str:
    return f"{sound.where}, sound {sound.path!r}"


def _too_long(sound: Sound, max_seconds: float) -> DataError:
    return _refusal(sound, f"more than {max_seconds:g} seconds", "cut it into parts, or raise data.sound_max_seconds")


def _refusal(sound: Sound, found: str, remedy: str) -> DataError:
    return DataError(_name(sound), found=found, expected=EXPECTED, remedy=remedy)
