"""Rotation depends on distances alone, and turns pairs by the position their section says."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from mmjax.config import RotaryConfig
from mmjax.models.rotary import frequencies, rotate, rotation, section_of_pair

POSITIONS = np.array([[0, 1, 2, 5, 9, 70]], np.int32)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone_and_unturned_entries_stay(pairs):
    config = RotaryConfig(width=6, base=50.0, pairs=pairs)
    random = np.random.default_rng(0)
    query, key = (random.normal(size=(1, 6, 2, 8)) for _ in range(2))
    # The same vectors at every place.
    query, key = query[:, :1].repeat(6, axis=1), key[:, :1].repeat(6, axis=1)
    with jax.enable_x64(True):
        scores = []
        for shift in (0, 1000):
            turned = rotation(config, POSITIONS + shift, np.float64)
            q, k = (np.asarray(rotate(value, turned, config)) for value in (query, key))
            assert np.array_equal(q[..., 6:], query[..., 6:])
            scores.append(np.einsum("bshk,bthk->bhst", q, k))
    assert np.abs(scores[0] - scores[1]).max() < 1e-11
    assert np.abs(scores[0][0, 0, 0] - scores[0][0, 0, 0, 0]).min(initial=9, where=np.arange(6) > 0) > 1e-3
    # By hand: the first pair turns by the position itself.
    first, second = (0, 3) if pairs == "half" else (0, 1)
    expected = query[0, 0, 0, first] * math.cos(1) - query[0, 0, 0, second] * math.sin(1)
    with jax.enable_x64(True):
        turned = rotate(query, rotation(config, POSITIONS, np.float64), config)
    assert float(turned[0, 1, 0, first]) == pytest.approx(expected, abs=1e-14)


def test_bfloat16_keeps_its_dtype_and_turns_in_float32():
    config = RotaryConfig(width=4, base=10.0)
    turned = rotation(config, np.array([[100_003]], np.int32), np.dtype("bfloat16"))
    assert turned.cosine.dtype == np.float32
    assert float(turned.cosine[0, 0, 0]) == pytest.approx(math.cos(100_003), abs=1e-6)
    assert rotate(np.ones((1, 1, 1, 4), "bfloat16"), turned, config).dtype == np.dtype("bfloat16")


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    config = RotaryConfig(
        width=64, base=10_000.0, scaling="yarn", factor=40.0, original_positions=4096, attention_factor=1.0
    )
    plain = frequencies(dataclasses.replace(config, scaling="none"))
    stretched = frequencies(config)
    assert stretched[0] == plain[0] and stretched[-1] == plain[-1] / 40
    assert np.all(np.diff(stretched / plain) <= 1e-15)


@pytest.mark.parametrize("order", ["interleaved", "blocks"])
def test_sections_turn_as_in_the_vision_language_models(order):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    parameters = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
    if order == "interleaved":
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding as Theirs

        kind = transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLTextConfig
    else:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding as Theirs

        kind = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig
    theirs = Theirs(kind(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=parameters))
    positions = np.random.default_rng(0).integers(0, 50, (3, 2, 7), np.int32)
    cosine, sine = theirs(torch.zeros(1), torch.tensor(positions, dtype=torch.long))
    config = RotaryConfig(width=16, base=100.0, sections=(4, 2, 2), section_order=order)
    assert sorted(section_of_pair(config)) == [0, 0, 0, 0, 1, 1, 2, 2]
    turned = rotation(config, positions, np.float32)
    assert np.abs(cosine.numpy()[..., :8] - turned.cosine).max() < 1e-5
    assert np.abs(sine.numpy()[..., :8] - turned.sine).max() < 1e-5
    # One position for all three: the rotation of text.
    text = rotation(config, positions[0], np.float32)
    same = rotation(config, np.broadcast_to(positions[:1], positions.shape), np.float32)
    assert np.array_equal(text.cosine, same.cosine)
