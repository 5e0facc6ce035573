import math

import pytest

from mmjax.errors import NonFiniteError
from mmjax.resilience.gradient_guard import GradientGuard

SOUND = {
    "is_finite": 1.0,
    "loss": 1.0,
    "gradient_norm": 1.0,
    "first_nonfinite_layer": -1.0,
    "first_nonfinite_gradient": -1.0,
}
BROKEN = {**SOUND, "is_finite": 0.0, "loss": math.nan}


def test_only_steps_in_a_row_stop_the_run_and_the_layer_is_named() -> None:
    guard = GradientGuard(3, ("a",))
    for step in range(4):
        assert "update skipped" in (guard.check(2 * step, BROKEN) or "")
        assert guard.check(2 * step + 1, SOUND) is None
    guard.check(8, BROKEN)
    guard.check(9, BROKEN)
    with pytest.raises(NonFiniteError, match=r"step 10: .*decoder layer 7 was the first"):
        guard.check(10, {**BROKEN, "first_nonfinite_layer": 7.0})


def test_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    warning = GradientGuard(3, ("b", "a")).check(1, {**BROKEN, "first_nonfinite_gradient": 1.0})
    assert warning is not None and "the gradient of b was not" in warning


def test_a_resumed_run_counts_on() -> None:
    with pytest.raises(NonFiniteError):
        GradientGuard(3, ("a",), in_a_row=2).check(1, BROKEN)
