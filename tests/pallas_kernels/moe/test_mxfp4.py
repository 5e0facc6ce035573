"""MXFP4: unpacking is exact for every byte and every scale; packing rounds to nearest, ties to even."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.moe.api import expert_mlp
from pallas_kernels.moe.copying import arrange
from pallas_kernels.moe.mxfp4 import dequantize, quantize

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def every_byte_with_every_scale() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Packed [256 scales, 256 bytes * 2], and its values in float64 by table and ldexp."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 512 // 32))
    pairs = np.stack([VALUES[np.arange(256) % 16], VALUES[np.arange(256) // 16]], axis=-1).reshape(-1)
    values = np.ldexp(pairs[None], np.arange(256)[:, None] - 127)
    values[255] = np.nan
    return {"codes": codes, "scales": scales}, values


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32, np.float64])
def test_every_byte_and_scale_unpacks_exactly(dtype):
    packed, values = every_byte_with_every_scale()
    with jax.enable_x64(dtype == np.float64):
        ours = np.asarray(jax.jit(dequantize, static_argnums=1)(packed, dtype))
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    # In bits: the sign of zero and subnormal numbers count. Only NaN may have any payload.
    unsigned = f"uint{8 * expected.dtype.itemsize}"
    is_nan = np.isnan(values)
    assert np.isnan(ours[is_nan].astype(np.float64)).all()
    np.testing.assert_array_equal(ours.view(unsigned)[~is_nan], expected.view(unsigned)[~is_nan])
    assert np.isfinite(ours[:253].astype(np.float64)).all()


def test_what_was_unpacked_packs_to_the_same_values():
    packed, values = every_byte_with_every_scale()
    finite = {name: array[:255] for name, array in packed.items()}
    with jax.enable_x64(True):
        again = np.asarray(dequantize(quantize(values[:255]), np.float64))
    np.testing.assert_array_equal(again, np.asarray(values[:255]))
    # Where the largest value of a group has the largest exponent, bytes come back too.
    canonical = quantize(values[:255])
    has_largest = np.abs(values[:255].reshape(255, -1, 32)).max(-1) == np.ldexp(6.0, np.arange(255)[:, None] - 127)
    np.testing.assert_array_equal(canonical["scales"][has_largest], finite["scales"][has_largest])
    codes = canonical["codes"].reshape(255, -1, 16)
    np.testing.assert_array_equal(codes[has_largest], finite["codes"].reshape(255, -1, 16)[has_largest])


def test_packing_rounds_to_nearest_and_ties_to_even():
    row = np.zeros((1, 32))
    #                0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4, above 6 -> 6
    row[0, :9] = [4, 0.25, 0.75, -1.25, 1.75, 2.5, 3.5, 5, 7.9]
    again = np.asarray(dequantize(quantize(row), np.float32))
    np.testing.assert_array_equal(again[0, :9], [4, 0, 1, -1, 2, 2, 4, 4, 6])
    assert np.asarray(quantize(row * 2.0**-20)["scales"]) == 127 - 20


def test_leading_axes_are_kept_and_the_even_input_is_the_low_half():
    weight = np.asarray(np.random.default_rng(0).normal(size=(3, 2, 64)), ml_dtypes.bfloat16)
    packed = quantize(weight)
    assert packed["codes"].shape == (3, 2, 32) and packed["scales"].shape == (3, 2, 2)
    unpacked = np.asarray(dequantize(packed, jnp.bfloat16), np.float32)
    scale = np.repeat(np.ldexp(1.0, packed["scales"].astype(int) - 127), 32, axis=-1)
    np.testing.assert_array_equal(unpacked[..., ::2], VALUES[packed["codes"] % 16] * scale[..., ::2])
    # 6 stands for everything below 8.
    assert (np.abs(unpacked - weight.astype(np.float32)) <= 2 * scale).all()


def test_arrays_of_different_weights_and_values_that_no_code_has_are_refused():
    codes, scales = np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8)
    with pytest.raises(ValueError, match="not of one packed weight"):
        dequantize({"codes": codes, "scales": scales}, np.float32)
    with pytest.raises(ValueError, match="expected bfloat16, float32 or float64"):
        dequantize({"codes": codes[:, :16], "scales": scales}, np.float16)
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(np.zeros((2, 33)))
    with pytest.raises(ValueError, match="not finite"):
        quantize(np.full((1, 32), np.inf))


def test_experts_of_packed_weights_are_those_of_the_unpacked_ones_values_and_gradients():
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        packed = [
            jax.tree.map(jnp.asarray, quantize(random.normal(size=(3, *shape))))
            for shape in ((32, 64), (32, 64), (64, 32))
        ]
        dense = [jnp.swapaxes(dequantize(weight, np.float64), 1, 2) for weight in packed]
        rows, expert = jnp.asarray(random.normal(size=(40, 64))), jnp.asarray(random.integers(-1, 3, 40), jnp.int32)

        def run(weights, implementation):
            value, pull = jax.vjp(
                lambda rows: expert_mlp(rows, expert, *weights, activation="situ", implementation=implementation), rows
            )
            return value, *pull(jnp.cos(value))

        expected = run(dense, "reference")
        for result in (run(packed, "reference"), jax.jit(run, static_argnums=1)(packed, "xla")):
            for one, other in zip(result, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def test_arranged_scales_lie_by_64_inputs_then_output():
    scales = np.arange(2 * 4 * 6, dtype=np.uint8).reshape(2, 4, 6)
    packed = {"codes": jnp.zeros((2, 4, 96), jnp.uint8), "scales": jnp.asarray(scales)}
    arranged = arrange(packed)
    assert arranged.shape == (2, 4, 192) and arranged.scales.shape == (2, 3, 2)
    as_bytes = np.ascontiguousarray(np.asarray(arranged.scales)).view(np.uint8).reshape(2, 3, 4, 2)
    np.testing.assert_array_equal(as_bytes, scales.reshape(2, 4, 3, 2).swapaxes(1, 2))
