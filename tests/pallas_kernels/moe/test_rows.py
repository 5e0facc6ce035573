"""Rows taken and added up by their numbers: the plain form against NumPy, the kernels against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.moe.api import add_rows, take_rows

needs_simulation = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 does not end these simulations")


def draw(num_rows, width, num_tokens, num_choices, dtype):
    """Rows, the numbers of rows to take, slots and weights to add by; some numbers are beyond the rows."""
    random = np.random.default_rng(0)
    values = jnp.asarray(random.normal(size=(num_rows, width)), dtype)
    token = jnp.asarray(random.integers(0, num_rows + 3, (16,), np.int32))
    slot = jnp.asarray(random.integers(0, num_rows + 3, (num_tokens, num_choices), np.int32))
    weight = jnp.asarray(random.random((num_tokens, num_choices)), np.promote_types(dtype, np.float32))
    return values, token, slot, weight


def test_rows_are_taken_and_added_up_as_numpy_does():
    with jax.enable_x64(True):
        values, token, slot, weight = draw(11, 5, 4, 3, jnp.float64)
        with_zeros = np.concatenate([values, np.zeros((3, 5))])
        np.testing.assert_array_equal(take_rows(values, token), with_zeros[token])
        np.testing.assert_allclose(add_rows(values, slot, dtype=jnp.float64), with_zeros[slot].sum(1), rtol=1e-14)
        weighted = (np.asarray(weight)[:, :, None] * with_zeros[slot]).sum(1)
        np.testing.assert_allclose(add_rows(values, slot, weight, dtype=jnp.float64), weighted, rtol=1e-14)


def assert_kernels_agree(num_rows, width, num_tokens, num_choices):
    values, token, slot, weight = draw(num_rows, width, num_tokens, num_choices, jnp.bfloat16)
    taken = [take_rows(values, token, implementation=name) for name in ("pallas", "xla")]
    np.testing.assert_array_equal(*(np.asarray(array, np.float32) for array in taken))
    for given in (None, weight):
        for dtype in (jnp.float32, jnp.bfloat16):
            ours, theirs = (
                np.asarray(add_rows(values, slot, given, dtype=dtype, implementation=name), np.float32)
                for name in ("pallas", "xla")
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-6 if dtype == jnp.float32 else 1e-2, atol=1e-6)


@needs_simulation
@pytest.mark.parametrize(("width", "num_choices"), [(128, 2), (384, 9)])
def test_simulated_kernels_take_and_add_up_the_same_rows(width, num_choices):
    with launcher.simulated():
        assert_kernels_agree(11, width, 4, num_choices)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "num_choices"), [(3584, 16), (2304, 8), (128, 1)])
def test_on_a_gpu_kernels_take_and_add_up_the_same_rows(width, num_choices):
    assert_kernels_agree(5000, width, 1000, num_choices)


def test_what_the_kernels_cannot_take_is_said():
    values, token, slot, _ = draw(11, 128, 4, 2, jnp.bfloat16)
    with launcher.simulated():
        with pytest.raises(ValueError, match="multiples of 8 rows, got 15"):
            take_rows(values, token[:15], implementation="pallas")
        with pytest.raises(ValueError, match="multiple of 128, got 100"):
            add_rows(values[:, :100], slot, dtype=jnp.float32, implementation="pallas")
        with pytest.raises(ValueError, match="needs bfloat16 rows, got float32"):
            take_rows(values.astype(jnp.float32), token, implementation="pallas")
