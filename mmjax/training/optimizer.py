"""AdamW and Muon with warm-up and cosine; which parameters are matrices, and which of them heads."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmjax.axes import holds_experts
from mmjax.config import OptimizerConfig

# Last words of the paths of parameters with several axes that are no matrices: tables and elementwise factors.
TABLES = ("embedding", "head", "position_table")
ELEMENTWISE = (
    "sinusoids",
    *("decay_bias", "query_bias", "key_bias", "value_bias", "query_norm", "key_norm"),
    *("query_convolution", "key_convolution", "value_convolution"),
)
# Projections whose heads are orthogonalised one by one in per-head Muon: queries, keys and values.
PER_HEAD = ("query", "key", "value", "query_up", "key_up", "value_up", "query_key_value")

# a, b, c of one step of Newton-Schulz: they lift small singular values fastest, and bring all near 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MatrixAxes(NamedTuple):
    """Axes of an array whose product is the rows of a matrix, and those of its columns; all others count matrices."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear over the first `warmup_steps` updates, then a cosine down to `final_learning_rate_fraction` at `steps`.

    The first update already moves: update k (from 0) has the rate at k + 1.
    """
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )
    return lambda num_updates: rate(num_updates + 1)


def num_updates(state: optax.OptState) -> jax.Array:
    """int32: updates that an optimizer of `make_optimizer` has made, which is where its learning rate stands."""
    states = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))
    return jnp.asarray(next(node.count for node in states if isinstance(node, optax.ScaleByScheduleState)))


def make_optimizer(
    config: OptimizerConfig, steps: int, parameters: Mapping[str, nnx.Variable]
) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW, or Muon for matrices with AdamW for the rest.

        M <- momentum M + G
        W <- W - learning_rate (0.2 sqrt(max(rows, columns)) orthogonalise(momentum M + G) + weight_decay W)

    `parameters` are the model's abstract variables by path: their `array_axes` tell matrices, heads and stacked axes.
    Gradients must be global arrays (outside `shard_map`), so that norm and orthogonalisation see whole ones.
    Weight decay touches matrices and tables only, and no layer that is held and never run.

    Source: AdamW, arXiv:1711.05101; Muon with the RMS of AdamW's updates, arXiv:2502.16982; per-head Muon, Kimi K3
    technical report, arXiv:2607.24653, section 2.5.
    """
    schedule = learning_rate(config, steps)
    matrices = {path: matrix_axes(path, variable, config) for path, variable in parameters.items()}
    update = optax.adamw(
        schedule,
        config.beta1,
        config.beta2,
        config.epsilon,
        weight_decay=config.weight_decay,
        mask={path: axes is not None or _is(path, TABLES) for path, axes in matrices.items()},
    )
    if config.name == "muon":
        muon = optax.chain(
            optax.trace(config.muon_momentum, nesterov=True),
            _orthogonalise_each(matrices, config),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
        names = {path: "adamw" if axes is None else "muon" for path, axes in matrices.items()}
        update = optax.partition({"muon": muon, "adamw": update}, names)
    clip = optax.clip_by_global_norm(config.max_gradient_norm) if config.max_gradient_norm else optax.identity()
    num_used = {path: n for path, v in parameters.items() if (n := v.get_metadata().get("num_used")) is not None}
    return optax.chain(clip, update, *([_leave_unused(num_used)] if num_used else []))


def _leave_unused(num_used: Mapping[str, int]) -> optax.GradientTransformation:
    """No update for the layers of a stack behind its first `num_used`."""

    def apply(update: jax.Array, number: int) -> jax.Array:
        is_used = jnp.arange(len(update)).reshape(-1, *[1] * (update.ndim - 1)) < number
        return jnp.where(is_used, update, jnp.zeros_like(update))

    def apply_to_all(updates: Any, _: Any) -> Any:
        return {path: apply(u, num_used[path]) if path in num_used else u for path, u in updates.items()}

    return optax.stateless(apply_to_all)


def matrix_axes(path: str, variable: nnx.Variable, config: OptimizerConfig) -> MatrixAxes | None:
    """Which axes of a parameter are the rows and columns of its matrices; None when it holds none.

    All other axes (stacked layers, experts, and heads in per-head Muon) count matrices.
    """
    array_axes = variable.get_metadata()["array_axes"]
    if len(array_axes) < 2 or _is(path, (*TABLES, *ELEMENTWISE)):
        return None
    num_stacked = variable.get_value().ndim - len(array_axes)
    first, *rest = (num_stacked + axis for axis, name in enumerate(array_axes) if not holds_experts([name]))
    if _is(path, PER_HEAD) and len(rest) > 1:
        return MatrixAxes((first,), tuple(rest[-1:] if config.muon_heads == "per_head" else rest[-2:]))
    # The first factor of an adapter ends in `down` too, and may have several axes of inputs.
    if _is(path, ("output", "down")):
        return MatrixAxes((first, *rest[:-1]), (rest[-1],))
    return MatrixAxes((first,), tuple(rest))


def orthogonalise(matrices: jax.Array, steps: int, epsilon: float) -> jax.Array:
    """Nearly the closest orthogonal matrix to each of `matrices` [..., rows, columns], in their own dtype.

    X <- X / (|X| + epsilon)                          Frobenius norm
    X <- a X + (b X X^T + c (X X^T)^2) X              `steps` times
    """
    # Products of the shorter side are smaller; the iteration commutes with transposition.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + epsilon)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _orthogonalise_each(
    matrices: Mapping[str, MatrixAxes | None], config: OptimizerConfig
) -> optax.GradientTransformation:
    """Orthogonalise every matrix of the updates, and scale it to a root mean square of 0.2."""

    def apply(update: jax.Array, axes: MatrixAxes) -> jax.Array:
        counted = tuple(axis for axis in range(update.ndim) if axis not in (*axes.rows, *axes.columns))
        order = (*counted, *axes.rows, *axes.columns)
        # Axes that count matrices stay apart, so that those split over devices stay split.
        moved = update.transpose(order)
        num_rows, num_columns = (math.prod(update.shape[axis] for axis in part) for part in axes)
        flat = moved.reshape(*moved.shape[: len(counted)], num_rows, num_columns)
        flat = orthogonalise(flat, config.muon_steps, config.epsilon) * (0.2 * max(num_rows, num_columns) ** 0.5)
        return flat.reshape(moved.shape).transpose(sorted(range(update.ndim), key=order.__getitem__))

    def apply_to_all(updates: Any, _: Any) -> Any:
        # Parameters that Muon leaves to AdamW have an empty node here.
        return {path: apply(u, axes) if (axes := matrices[path]) else u for path, u in updates.items()}

    return optax.stateless(apply_to_all)


def _is(path: str, names: tuple[str, ...]) -> bool:
    return path.rsplit(".", 1)[-1] in names
