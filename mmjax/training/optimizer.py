"""AdamW and Muon with warm-up and cosine, from optax; which parameters are matrices, and which of them heads."""

from collections.abc import Mapping

import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from mmjax.config import OptimizerConfig

# Last words of the paths of parameters with several axes that are no matrices: tables and elementwise factors.
TABLES = ("embedding", "head", "position_table")
ELEMENTWISE = ("decay_bias", "query_convolution", "key_convolution", "value_convolution")
# Projections whose heads are orthogonalised one by one in per-head Muon: queries, keys and values.
PER_HEAD = ("query", "key", "value", "query_up", "key_up", "value_up", "query_key_value")


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 over `warmup_steps`, then a cosine down to `final_learning_rate_fraction` at `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, steps: int, parameters: Mapping[str, nnx.Variable]
) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW, or Muon for matrices with AdamW for the rest.

    `parameters` are the model's abstract variables by path: their `array_axes` tell matrices, heads and stacked axes.
    Gradients must be global arrays (outside `shard_map`), so that norm and orthogonalisation see whole ones.
    Weight decay touches matrices and tables only.

    Source: AdamW, arXiv:1711.05101; Muon with update RMS 0.2 sqrt(max(rows, columns)), arXiv:2502.16982; per-head
    Muon, Kimi K3 technical report, arXiv:2607.24653.
    """
    schedule = learning_rate(config, steps)
    dimensions = {path: matrix_dimensions(path, variable, config) for path, variable in parameters.items()}
    is_decayed = {path: numbers is not None or _is(path, TABLES) for path, numbers in dimensions.items()}
    if config.name == "adamw":
        update = optax.adamw(
            schedule, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=is_decayed
        )
    else:
        update = optax.contrib.muon(
            schedule,
            ns_steps=config.muon_steps,
            beta=config.muon_momentum,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            weight_decay_mask=is_decayed,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=dimensions,
            consistent_rms=0.2,
        )
    clip = optax.clip_by_global_norm(config.max_gradient_norm) if config.max_gradient_norm else optax.identity()
    return optax.chain(clip, update)


def matrix_dimensions(path: str, variable: nnx.Variable, config: OptimizerConfig) -> MuonDimensionNumbers | None:
    """Which axes of a parameter are the rows and columns of its matrices; None when it holds none.

    All other axes (stacked layers, experts, and heads in per-head Muon) count matrices.
    """
    array_axes = variable.get_metadata()["array_axes"]
    if len(array_axes) < 2 or _is(path, (*TABLES, *ELEMENTWISE)):
        return None
    num_stacked = variable.get_value().ndim - len(array_axes)
    first, *rest = (num_stacked + axis for axis, name in enumerate(array_axes) if name != "experts")
    if _is(path, PER_HEAD) and len(rest) > 1:
        return MuonDimensionNumbers(first, rest[-1] if config.muon_heads == "per_head" else tuple(rest[-2:]))
    if _is(path, ("output",)):
        return MuonDimensionNumbers((first, *rest[:-1]), rest[-1])
    return MuonDimensionNumbers(first, tuple(rest))


def _is(path: str, names: tuple[str, ...]) -> bool:
    return path.rsplit(".", 1)[-1] in names
