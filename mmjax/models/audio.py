"""Whisper's encoder over log-mel spectrograms, and a projector that gives the text width its features.

A row of a batch has C clips of one length. Clip c gives features c * F, ..., c * F + F - 1 of the row, F the clip's
number of features; silence behind a shorter sound is heard as such.

Source: Robust Speech Recognition via Large-Scale Weak Supervision, arXiv:2212.04356.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mmjax.config import AudioConfig
from mmjax.models.encoder import EncoderLayer
from mmjax.models.layers import LayerNorm, add_bias, at_least_float32, normal, parameter, project, use, zeros
from mmjax.models.stack import scan_stack, stacked

# Taps of both convolutions, which pad one frame of zeros at either end.
TAPS = 3


def _sines_and_cosines(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """[values, width]: sin, then cos, of position * 10000^(-i / (width / 2 - 1)), i < width / 2. Nothing is drawn."""
    length, width = shape
    half = (width + 1) // 2
    wide = at_least_float32(dtype)
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=wide) / max(1, half - 1))
    angles = jnp.arange(length, dtype=wide)[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)[:, :width].astype(dtype)


class AudioTower(nnx.Module):
    """Spectrograms to values of the encoder's width, one for two frames. Whole on every device of the tensor axis."""

    def __init__(self, audio: AudioConfig, initializer_range: float, dtype: jax.typing.DTypeLike):
        initializer, width = normal(initializer_range), audio.width
        self.audio = audio
        self.first_convolution = parameter(initializer, (TAPS * audio.mel_bins, width), (None, "model_weight"), dtype)
        self.first_bias = zeros((width,), (None,), dtype)
        self.second_convolution = parameter(initializer, (TAPS * width, width), ("model_weight", None), dtype)
        self.second_bias = zeros((width,), (None,), dtype)
        # Fixed, but a release holds them all the same.
        self.sinusoids = parameter(_sines_and_cosines, (audio.clip_values, width), (None, "model_weight"), dtype)
        self.layers = stacked(EncoderLayer(audio, initializer, dtype, has_key_bias=False), audio.num_layers)
        self.final_norm = LayerNorm(width, audio.norm_epsilon, dtype)

    def __call__(self, spectrograms: jax.Array, is_used: jax.Array) -> jax.Array:
        """`spectrograms` [b, C, frames, bins], `is_used` [b, C] -> [b, C, frames / 2, width] of the same dtype."""
        rows, clips = is_used.shape
        # Numbers of an unused clip must not reach a sum, so even a NaN there does no harm.
        frames = jnp.where(is_used[..., None, None], spectrograms, 0).reshape(rows * clips, *spectrograms.shape[2:])
        frames = add_bias(project("bti,id->btd", windows(frames, 1), self.first_convolution), self.first_bias)
        frames = jax.nn.gelu(frames, approximate=False)
        values = add_bias(project("bti,id->btd", windows(frames, 2), self.second_convolution), self.second_bias)
        values = jax.nn.gelu(values, approximate=False)
        values += jax.lax.stop_gradient(use(self.sinusoids, values.dtype))[None]
        segment_ids = jnp.broadcast_to(is_used.reshape(-1, 1).astype(jnp.int32), values.shape[:2])

        def run_layer(layer: EncoderLayer, hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(hidden, segment_ids), None

        hidden, _ = scan_stack(self.layers, values, run_layer)
        return self.final_norm(hidden).reshape(rows, clips, *hidden.shape[1:])


def windows(frames: jax.Array, stride: int) -> jax.Array:
    """[b, t, D] -> [b, t / stride, D * TAPS]: each `stride`-th frame with its neighbours, of every bin together."""
    padded = jnp.pad(frames, ((0, 0), (1, 1), (0, 0)))
    length = frames.shape[1]
    taps = jnp.stack([padded[:, tap : tap + length : stride] for tap in range(TAPS)], axis=-1)
    return taps.reshape(*taps.shape[:2], -1)


class AudioProjector(nnx.Module):
    """Consecutive values joined, then linear, GELU (erf), linear, to the text width."""

    def __init__(self, audio: AudioConfig, model_width: int, initializer_range: float, dtype: jax.typing.DTypeLike):
        initializer, hidden = normal(initializer_range), audio.projector_width
        self.audio = audio
        self.up = parameter(
            initializer, (audio.values_per_feature * audio.width, hidden), ("model_weight", None), dtype
        )
        self.up_bias = zeros((hidden,), (None,), dtype)
        self.down = parameter(initializer, (hidden, model_width), (None, "model_weight"), dtype)
        self.down_bias = zeros((model_width,), (None,), dtype)

    def __call__(self, values: jax.Array) -> jax.Array:
        """[b, C, values, width] -> [b, C * features of a clip, D]."""
        joined = values.reshape(values.shape[0], values.shape[1] * self.audio.clip_features, -1)
        hidden = jax.nn.gelu(add_bias(project("bfi,ih->bfh", joined, self.up), self.up_bias), approximate=False)
        return add_bias(project("bfh,hd->bfd", hidden, self.down), self.down_bias)


def hear(tower: AudioTower, projector: AudioProjector, spectrograms: jax.Array, feature_index: jax.Array) -> jax.Array:
    """[b, C, frames, bins] -> features [b, C * features of a clip, D]; `feature_index` [b, s] names those needed."""
    clip = jnp.where(feature_index >= 0, feature_index // tower.audio.clip_features, -1)
    numbers = jnp.arange(spectrograms.shape[1], dtype=clip.dtype)
    is_used = jnp.any(clip[:, :, None] == numbers[None, None], axis=1)
    return projector(tower(spectrograms, is_used))
