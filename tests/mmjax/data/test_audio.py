"""Log-mel spectrograms against transformers' WhisperFeatureExtractor."""

import numpy as np
import pytest

from mmjax.data.audio import log_mel, mel_filters

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("num_bins", "seconds"), [(80, 2.5), (128, 5.0), (80, 7.3)])
def test_a_spectrogram_is_that_of_whisper(num_bins, seconds):
    random = np.random.default_rng(0)
    time = np.arange(int(16_000 * seconds)) / 16_000
    samples = 0.4 * np.sin(2 * np.pi * (200 + 300 * time) * time) + 0.05 * random.normal(size=len(time))
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_bins, chunk_length=5)
    theirs = extractor(samples.astype(np.float32), sampling_rate=16_000, return_tensors="np").input_features[0]
    ours = log_mel(samples.astype(np.float32), num_bins=num_bins, num_frames=500)
    assert ours.shape == (500, num_bins) and ours.dtype == np.float32
    # Theirs is computed in float32.
    assert np.abs(ours - theirs.T).max() < 2e-4
    assert np.abs(mel_filters(num_bins) - extractor.mel_filters).max() < 1e-9


def test_silence_is_a_finite_floor():
    assert np.allclose(log_mel(np.zeros(0), num_frames=100), (-10 + 4) / 4)
