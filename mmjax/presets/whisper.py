"""Whisper's encoders as audio towers: sizes of the released ones."""

from mmjax.config import AudioConfig


def _encoder(width: int, num_layers: int, mel_bins: int = 80) -> AudioConfig:
    return AudioConfig(
        num_layers=num_layers,
        width=width,
        num_heads=width // 64,
        head_width=64,
        hidden_width=4 * width,
        mel_bins=mel_bins,
        projector_width=2048,
    )


def whisper_tiny() -> AudioConfig:
    """Source: config.json of openai/whisper-tiny."""
    return _encoder(384, 4)


def whisper_base() -> AudioConfig:
    """Source: config.json of openai/whisper-base."""
    return _encoder(512, 6)


def whisper_small() -> AudioConfig:
    """Source: config.json of openai/whisper-small."""
    return _encoder(768, 12)


def whisper_large_v3() -> AudioConfig:
    """Source: config.json of openai/whisper-large-v3."""
    return _encoder(1280, 32, mel_bins=128)
