"""The kernels of the short convolution against the plain form: interpreted, compiled without a GPU, and on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.linear_attention import convolution
from pallas_kernels.linear_attention.api import short_convolution

SETTINGS = convolution.Settings(interpret=True, tokens=16)


def draw(length, width, channels=32, seed=0):
    """(inputs, taps, tail), the gradient of the output, and segments: one document, and several."""
    random = np.random.default_rng(seed)
    inputs, gradient = (jnp.asarray(random.normal(size=(2, length, 2, channels)), jnp.bfloat16) for _ in range(2))
    taps = jnp.asarray(random.normal(size=(width, 2, channels)), jnp.float32)
    tail = jnp.asarray(random.normal(size=(2, width - 1, 2, channels)), jnp.bfloat16)
    segments = np.ones((2, length), np.int32)
    segments[1] = np.searchsorted([1, 3, 18, 40], np.arange(length), side="right")
    return (inputs, taps, tail), gradient, jnp.asarray(segments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def results(convolve, norm_scale, has_tail, arrays, gradient, segments):
    """Output and gradients of inputs and taps, and of the tail if there is one."""

    def apply(inputs, taps, tail):
        tail = tail if has_tail else None
        return convolve(inputs, taps, segments, initial_tail=tail, norm_scale=norm_scale)

    output, transpose = jax.vjp(apply, *arrays)
    return output, *transpose(gradient.astype(output.dtype))[: 2 + has_tail]


kernels = functools.partial(convolution.short_convolution, settings=SETTINGS)
plain = functools.partial(short_convolution, implementation="xla")


def assert_near_float64(found, norm_scale, has_tail, arrays, gradient, segments):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: jnp.asarray(np.asarray(array, np.float64)), (arrays, gradient))
        expected = jax.tree.map(np.asarray, results(plain, norm_scale, has_tail, *wide, segments))
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one, np.float64)
        assert np.linalg.norm(one - other) < 4e-3 * np.linalg.norm(other)


@pytest.mark.parametrize(
    ("length", "width", "norm_scale", "has_tail"),
    [(48, 4, None, False), (45, 4, 0.5, True), (7, 3, 0.5, True), (33, 2, None, True)],
)
def test_interpreted_kernels_are_near_float64_in_output_and_gradients(length, width, norm_scale, has_tail):
    arguments = draw(length, width)
    assert_near_float64(results(kernels, norm_scale, has_tail, *arguments), norm_scale, has_tail, *arguments)


def test_no_bit_of_a_document_depends_on_another():
    (inputs, taps, tail), gradient, segments = draw(48, 4)
    inside = np.asarray(segments == 2)[:, :, None, None]
    changed = [jnp.where(inside, 5 * array, array) for array in (inputs, gradient)]
    before = results(kernels, 0.5, True, (inputs, taps, tail), gradient, segments)
    after = results(kernels, 0.5, True, (changed[0], taps, tail), changed[1], segments)
    for place in range(2):
        is_moved = np.asarray(before[place]) != np.asarray(after[place])
        assert not is_moved[~np.broadcast_to(inside, is_moved.shape)].any()
        assert is_moved.any()


def test_what_the_kernels_cannot_take_is_said():
    (inputs, taps, _), _, segments = draw(16, 4)
    assert convolution.reason_against(inputs, taps) == "needs a Hopper GPU (compute capability 9.0)"
    with pytest.raises(ValueError, match="'pallas' of short_convolution needs a Hopper GPU"):
        short_convolution(inputs, taps, segments, implementation="pallas")


def test_refusals_on_a_hopper_gpu_name_what_is_wrong(monkeypatch):
    monkeypatch.setattr(launcher, "is_hopper", lambda: True)
    (inputs, taps, _), _, _ = draw(16, 4)
    assert convolution.reason_against(inputs, taps) is None
    assert "bfloat16 inputs [B, S, H, K], got 4 axes of float32" in convolution.reason_against(
        inputs.astype(jnp.float32), taps
    )
    assert "got 4 and 20" in convolution.reason_against(inputs[..., :20], taps)
    assert "got 1 and 32" in convolution.reason_against(inputs, taps[:1])
    reasons, huge = [], jax.ShapeDtypeStruct((1, 2**20, 32, 128), jnp.bfloat16)
    jax.eval_shape(lambda array: reasons.append(convolution.reason_against(array, taps)), huge)
    assert "31 bits" in reasons[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("has_tail", [False, True])
@pytest.mark.parametrize("norm_scale", [None, 0.1])
def test_results_on_a_gpu_are_near_float64_and_bitwise_repeatable(norm_scale, has_tail):
    arguments = draw(1000, 4, channels=128)
    rule = functools.partial(short_convolution, implementation="pallas")
    found, again = (results(rule, norm_scale, has_tail, *arguments) for _ in range(2))
    assert_near_float64(found, norm_scale, has_tail, *arguments)
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
