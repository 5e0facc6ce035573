"""Stops a run whose loss or gradient stays non-finite. The step itself skips the update of each such step."""

from collections.abc import Mapping

from mmjax.errors import NonFiniteError


class GradientGuard:
    """Counts the non-finite steps in a row; `in_a_row` is how many a resumed run had already."""

    def __init__(self, max_nonfinite_steps: int, parameter_names: tuple[str, ...], in_a_row: int = 0):
        self._max_nonfinite_steps = max_nonfinite_steps
        self._parameter_names = sorted(parameter_names)
        self.in_a_row = in_a_row

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to tell about a step whose update was skipped; None for a sound one.

        `metrics` are the step's numbers: `is_finite`, `loss`, `gradient_norm`, and `first_nonfinite_layer` and
        `first_nonfinite_gradient` (the parameter's place among the sorted names), each -1 for none.

        Raises:
          NonFiniteError: `max_nonfinite_steps` in a row were not finite.
        """
        if metrics["is_finite"]:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        found = f"loss {metrics['loss']}, gradient norm {metrics['gradient_norm']}; {self._origin(metrics)}"
        if self.in_a_row < self._max_nonfinite_steps:
            return f"step {step}: {found}; update skipped ({self.in_a_row} of {self._max_nonfinite_steps} in a row)"
        raise NonFiniteError(
            f"step {step}",
            found=f"{found}; {self.in_a_row} such steps in a row",
            expected=f"fewer than {self._max_nonfinite_steps} in a row (training.max_nonfinite_steps)",
            remedy="look at the data of these steps; lower optimizer.learning_rate in another run_dir; or move the"
            " newest folders of checkpoints/ away and start again, to go on from an earlier step",
        )

    def _origin(self, metrics: Mapping[str, float]) -> str:
        layer, gradient = int(metrics["first_nonfinite_layer"]), int(metrics["first_nonfinite_gradient"])
        if layer >= 0:
            return f"decoder layer {layer} was the first whose output was not finite"
        if gradient >= 0:
            return f"all layers' outputs were finite, the gradient of {self._parameter_names[gradient]} was not"
        return "all layers' outputs and all gradients were finite"
