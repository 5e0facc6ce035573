import numpy as np
import pytest

from mmjax.config import LengthConfig
from mmjax.data.lengths import fit_length, fitted_length

torch = pytest.importorskip("torch")


def test_video_of_32_frames_becomes_64_by_bilinear_and_a_shorter_one_is_stretched_and_then_padded_with_zeros():
    rule = LengthConfig(length=64, shorter="bilinear", largest_stretch=2.0)
    frames = np.random.default_rng(0).normal(size=(32, 3, 5)).astype(np.float32)
    values, is_real = fit_length(frames, rule)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(frames.reshape(32, 15).T[None]), size=64, mode="linear", align_corners=False
    )
    np.testing.assert_allclose(values.reshape(64, 15), expected[0].numpy().T, atol=1e-6)
    assert is_real.all()
    values, is_real = fit_length(frames[:20], rule)
    assert values.shape == (64, 3, 5) and is_real.sum() == 40 and is_real[:40].all()
    assert not values[40:].any() and values[39].any()


def test_text_of_47_tokens_is_padded_at_the_right_to_64_with_its_own_value():
    tokens = np.arange(47)
    values, is_real = fit_length(tokens, LengthConfig(length=64, shorter="pad", pad_value=256))
    assert values[:47].tolist() == tokens.tolist() and np.all(values[47:] == 256)
    assert is_real.tolist() == [True] * 47 + [False] * 17


def test_a_signal_of_2560_values_becomes_64_means_of_40():
    signal = np.random.default_rng(0).normal(size=(2560, 8))
    values, is_real = fit_length(signal, LengthConfig(length=64, longer="mean"))
    np.testing.assert_allclose(values, signal.reshape(64, 40, 8).mean(axis=1), atol=1e-6)
    assert is_real.all()


@pytest.mark.parametrize("length", [65, 100, 127, 191])
def test_means_of_lengths_that_do_not_divide_are_those_of_adaptive_pooling(length):
    signal = np.random.default_rng(0).normal(size=(length, 2)).astype(np.float32)
    values, _ = fit_length(signal, LengthConfig(length=64, longer="mean"))
    expected = torch.nn.functional.adaptive_avg_pool1d(torch.from_numpy(signal.T[None]), 64)
    np.testing.assert_allclose(values, expected[0].numpy().T, atol=1e-6)


@pytest.mark.parametrize("longer", ["truncate", "mean", "bilinear"])
@pytest.mark.parametrize("shorter", ["keep", "pad", "bilinear"])
def test_every_length_comes_out_as_announced_and_constants_stay_what_they_are(longer, shorter):
    rule = LengthConfig(length=10, longer=longer, shorter=shorter, largest_stretch=1.5, pad_value=-1)
    for length in range(1, 25):
        values, is_real = fit_length(np.full((length, 2), 7, np.uint8), rule)
        assert (len(values), is_real.sum()) == fitted_length(length, rule)
        assert np.all(values[is_real] == 7) and np.all(values[~is_real] == -1) and is_real.any()
    assert fitted_length(5, LengthConfig(length=0)) == (5, 5)
