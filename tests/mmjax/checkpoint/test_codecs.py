import math

import ml_dtypes
import numpy as np
import pytest

from mmjax.checkpoint.codecs import (
    FP8,
    INT4,
    MXFP4,
    codec_of,
    decode_fp8,
    decode_int4,
    decode_mxfp4,
    encode_mxfp4,
)
from mmjax.errors import CheckpointError

MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _value(nibble: int, scale: int) -> float:
    return math.copysign(MAGNITUDES[nibble & 7], -1 if nibble & 8 else 1) * 2.0 ** (scale - 127)


def _all_pairs(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every byte of two codes under every scale: codes [scales, 256], scales [scales, 16]."""
    return np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1)), np.repeat(scales[:, None], 16, axis=1)


def test_every_pair_of_codes_under_every_scale_is_exact_and_its_sign_is_kept():
    # 2^125 times 6 is the largest power that bfloat16 holds.
    codes, scales = _all_pairs(np.arange(252, dtype=np.uint8))
    values = decode_mxfp4(codes, scales).astype(np.float64)
    for scale in range(252):
        expected = [_value(nibble, scale) for byte in range(256) for nibble in (byte & 15, byte >> 4)]
        assert values[scale].tolist() == expected
        assert np.signbit(values[scale]).tolist() == np.signbit(expected).tolist()


def test_what_was_decoded_is_encoded_to_the_same_numbers():
    codes, scales = _all_pairs(np.arange(252, dtype=np.uint8))
    values = decode_mxfp4(codes, scales)
    assert np.array_equal(decode_mxfp4(*encode_mxfp4(values)).view(np.uint16), values.view(np.uint16))


def test_groups_whose_largest_number_has_a_large_code_keep_codes_and_scales():
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (64, 64)).astype(np.uint8)
    codes[:, ::16] = codes[:, ::16] & 0xF0 | 6 | random.integers(0, 2, (64, 4)).astype(np.uint8)
    scales = random.integers(3, 250, (64, 4)).astype(np.uint8)
    encoded = encode_mxfp4(decode_mxfp4(codes, scales))
    assert np.array_equal(encoded[0], codes) and np.array_equal(encoded[1], scales)


def test_numbers_between_two_codes_go_to_the_nearest_and_ties_to_the_even_one():
    values = np.zeros((1, 32), np.float32)
    values[0, :14] = [4, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 7, -0.75, -0.2, 0.74]
    expected = [4, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -1, 0, 0.5]
    codes, scales = encode_mxfp4(values)
    assert scales.tolist() == [[127]]
    assert decode_mxfp4(codes, scales).astype(np.float32)[0, :14].tolist() == expected


@pytest.mark.parametrize(("scale", "message"), [(255, "1 scales are NaN"), (254, "exceed bfloat16")])
def test_scales_that_give_no_number_are_refused(scale, message):
    scales = np.full((1, 16), 127, np.uint8)
    scales[0, 3] = scale
    with pytest.raises(ValueError, match=message):
        decode_mxfp4(np.full((1, 256), 0x77, np.uint8), scales)


def test_fp8_blocks_that_the_edge_cuts_take_their_own_scale():
    random = np.random.default_rng(0)
    values = random.normal(size=(130, 260)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.random((2, 3)).astype(np.float32)
    decoded = decode_fp8(values, scales)
    for row, column in ((0, 0), (127, 127), (128, 128), (129, 255), (129, 256), (5, 259)):
        expected = np.float32(values[row, column]) * scales[row // 128, column // 128]
        assert decoded[row, column] == expected.astype(ml_dtypes.bfloat16)


def test_int4_holds_eight_numbers_a_word_lowest_first_offset_by_eight():
    random = np.random.default_rng(0)
    whole = random.integers(-8, 8, (5, 64))
    packed = np.zeros((5, 8), np.uint32)
    for column in range(64):
        packed[:, column // 8] |= (whole[:, column] + 8).astype(np.uint32) << np.uint32(4 * (column % 8))
    scales = random.random((5, 2)).astype(ml_dtypes.bfloat16)
    decoded = decode_int4(packed.view(np.int32), scales, 60)
    expected = (whole * np.repeat(scales.astype(np.float64), 32, axis=1))[:, :60]
    assert np.array_equal(decoded, expected.astype(np.float32).astype(ml_dtypes.bfloat16))


def _compressed(form: str, **weights: object) -> dict:
    plain = {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "float" if "mxfp4" in form else "int"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"a": {"weights": plain | weights}},
    }
    return {"quantization_config": settings}


@pytest.mark.parametrize(
    ("config", "codec"),
    [
        ({}, None),
        (_compressed("mxfp4-pack-quantized"), MXFP4),
        ({"text_config": _compressed("pack-quantized")}, INT4),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, FP8),
    ],
)
def test_the_configuration_names_the_packing(config, codec):
    assert codec_of(config) is codec


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": "fp8"}, "a str"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}, r"\[64, 128\]"),
        (_compressed("nvfp4-pack-quantized"), "nvfp4"),
        (_compressed("pack-quantized", num_bits=8), "num_bits: found 8"),
        (_compressed("pack-quantized", symmetric=False), "symmetric: found False"),
        (_compressed("pack-quantized", group_size=128), "group_size: found 128"),
        (_compressed("mxfp4-pack-quantized", type="int"), "type: found 'int'"),
    ],
)
def test_an_unknown_packing_is_refused_by_name(config, message):
    with pytest.raises(CheckpointError, match=message):
        codec_of(config)
