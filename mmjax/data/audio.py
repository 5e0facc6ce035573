"""Sound as Whisper hears it: log-mel spectrograms, in NumPy."""

import functools
import math

import numpy as np

from mmjax.config import AudioConfig

SAMPLES_PER_SECOND = 16_000
WINDOW_SAMPLES = 400
HOP_SAMPLES = 160
MAX_HERTZ = 8000.0
# Log-mel value of no sound at all.
SILENCE = -1.5

# The Slaney scale: linear below 1000 Hz, where 3 mels are 200 Hz, then logarithmic with 27 mels for a factor of 6.4.
_LINEAR_HERTZ = 1000.0
_LINEAR_MELS = 15.0
_MELS_PER_FACTOR = 27.0 / math.log(6.4)


def clip_shape(length: int, clip_length: int, audio: AudioConfig) -> tuple[int, int]:
    """(clips, features) of a stream of `length` values, `clip_length` of which fill a clip.

    Of the last clip only those features count that hold some of the stream, at least one.
    """
    return max(1, -(-length // clip_length)), max(1, -(-length * audio.clip_features // clip_length))


def log_mel(samples: np.ndarray, *, num_bins: int = 80, num_frames: int = 3000) -> np.ndarray:
    """float32 [num_frames, num_bins] of mono `samples` [n] in [-1, 1] at 16 kHz, cut or padded to a clip of so many.

        power = |STFT|^2, window of 400 (Hann), hop of 160, reflected at both ends
        x = log10(max(mel filters . power, 1e-10));  (max(x, max(x) - 8) + 4) / 4

    Source: Whisper, arXiv:2212.04356, section 2.2; equal to transformers' WhisperFeatureExtractor, axes swapped.
    """
    length = num_frames * HOP_SAMPLES
    clip = np.zeros(length)
    clip[: min(length, len(samples))] = samples[:length]
    padded = np.pad(clip, WINDOW_SAMPLES // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES][:num_frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW_SAMPLES) / WINDOW_SAMPLES)
    power = np.square(np.abs(np.fft.rfft(frames * hann)))
    loudness = np.log10(np.maximum(power @ mel_filters(num_bins), 1e-10))
    return ((np.maximum(loudness, loudness.max() - 8) + 4) / 4).astype(np.float32)


@functools.cache
def mel_filters(num_bins: int) -> np.ndarray:
    """float64 [201, num_bins]: triangles that meet at equal distances on the Slaney scale, each of area 1 in hertz."""
    corners = _to_hertz(np.linspace(0.0, float(_to_mels(MAX_HERTZ)), num_bins + 2))
    hertz = np.linspace(0.0, SAMPLES_PER_SECOND / 2, 1 + WINDOW_SAMPLES // 2)
    rising = (hertz[:, None] - corners[None, :-2]) / (corners[1:-1] - corners[:-2])[None]
    falling = (corners[None, 2:] - hertz[:, None]) / (corners[2:] - corners[1:-1])[None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (corners[2:] - corners[:-2]))[None]


def _to_mels(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return 3 * hertz / 200
    return _LINEAR_MELS + math.log(hertz / _LINEAR_HERTZ) * _MELS_PER_FACTOR


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    logarithmic = _LINEAR_HERTZ * np.exp((mels - _LINEAR_MELS) / _MELS_PER_FACTOR)
    return np.where(mels < _LINEAR_MELS, 200 * mels / 3, logarithmic)
