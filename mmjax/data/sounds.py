"""Sound files (WAV, FLAC, OGG): opened as safely as pictures, their length capped before decoding, as clips to hear."""

import math
from pathlib import Path

import numpy as np
import scipy.signal
import soundfile

from mmjax.config import AudioConfig
from mmjax.data import images
from mmjax.data.audio import CLIP_SECONDS, SAMPLES_PER_SECOND, log_mel
from mmjax.data.files import open_regular, reason
from mmjax.data.sources.conversation import ImageFile
from mmjax.errors import DataError

FORMATS = ("WAV", "FLAC", "OGG")
MAX_RATE = 384_000
MAX_CHANNELS = 32
EXPECTED = f"a whole sound in one of {', '.join(FORMATS)}"


def read_sound(path: str, *, root: Path, where: str, max_seconds: float) -> np.ndarray:
    """float32 [n] in [-1, 1]: the file at 16 kHz, the mean of its channels.

    `path` is relative to `root` and stays inside it; `where` names the record in messages.

    Raises:
      DataError: not such a file, of another format, damaged, longer than `max_seconds`, or of an impossible rate.
    """
    named = f"{where}, sound {path!r}"
    real_path = images.confined(ImageFile(where=where, root=root, path=path), named)
    try:
        with open_regular(real_path) as stream, soundfile.SoundFile(stream) as sound:
            rate, channels = sound.samplerate, sound.channels
            if sound.format not in FORMATS:
                raise _refusal(named, f"the format {sound.format}", "convert it")
            if not 1 <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
                raise _refusal(named, f"{rate} samples a second in {channels} channels", "convert it")
            limit = math.floor(max_seconds * rate)
            # The header may claim less than the file holds.
            samples = np.zeros((0, 1)) if sound.frames > limit else sound.read(limit + 1, "float32", always_2d=True)
            if max(sound.frames, len(samples)) > limit:
                raise _refusal(named, f"more than {max_seconds:g} seconds", "cut it into parts")
            if len(samples) < sound.frames:
                raise _refusal(named, f"{len(samples):,} of {sound.frames:,} samples", "was the file cut off?")
    except DataError:
        raise
    except OSError as error:
        raise _refusal(named, f"no readable file ({reason(error)})", "check the path and the file") from error
    # libsndfile's own errors, by kind of damage.
    except (soundfile.SoundFileError, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        raise _refusal(named, f"no sound ({error})", "convert or replace it") from error
    if not len(samples) or not np.all(np.isfinite(samples)):
        raise _refusal(named, "no samples" if not len(samples) else "samples that are no numbers", "replace it")
    return _at_rate(samples.mean(axis=1), rate)


def _at_rate(samples: np.ndarray, rate: int) -> np.ndarray:
    divisor = math.gcd(rate, SAMPLES_PER_SECOND)
    resampled = scipy.signal.resample_poly(samples, SAMPLES_PER_SECOND // divisor, rate // divisor)
    return np.clip(resampled, -1, 1).astype(np.float32)


def clips(samples: np.ndarray, audio: AudioConfig) -> tuple[np.ndarray, int]:
    """(float32 [clips, frames, bins], features): log-mel clips of a sound, and how many features stand for it.

    A clip of `clip_frames` frames of 10 ms becomes `clip_features` features; of the last clip only those count that
    hold some of the sound, at least one.
    """
    seconds = audio.clip_frames * CLIP_SECONDS // 3000
    length = seconds * SAMPLES_PER_SECOND
    parts = [samples[start : start + length] for start in range(0, max(1, len(samples)), length)]
    spectrograms = [log_mel(part, num_bins=audio.mel_bins, clip_seconds=seconds) for part in parts]
    last = math.ceil(len(parts[-1]) / length * audio.clip_features)
    return np.stack(spectrograms), (len(parts) - 1) * audio.clip_features + max(1, last)


def _refusal(where: str, found: str, remedy: str) -> DataError:
    return DataError(where, found=found, expected=EXPECTED, remedy=remedy)
