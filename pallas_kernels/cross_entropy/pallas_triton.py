"""The softmax of a chunk's logits and its gradient on NVIDIA GPUs, each in one pass over the logits.

A program takes one row. With 1,024 threads a multiprocessor has room for one or two, whose rows stay in the
second-level cache from one pass to the next.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import launcher

LOWEST = -1e30
"""What a column behind the last counts as: its exponential is 0 beside any logit's."""


class Settings(NamedTuple):
    """How the kernels are launched."""

    interpret: bool = False
    block: int = 16384
    warps: int = 32


def reason_against(hidden: jax.Array, head: jax.Array, chunk_tokens: int) -> str | None:
    """Why the kernels cannot take such arrays; None if they can."""
    if not launcher.is_hopper() or launcher.is_simulated():
        return "needs a Hopper GPU (compute capability 9.0)"
    if hidden.dtype != jnp.bfloat16 or head.dtype != jnp.bfloat16:
        return f"needs bfloat16 hidden values and head, got {hidden.dtype} and {head.dtype}"
    if (places := min(chunk_tokens, hidden.shape[0]) * head.shape[1]) >= 2**31:
        return f"numbers the places of a chunk's logits in 31 bits, too few for {places}"
    return None


def measure(
    logits: jax.Array,
    targets: jax.Array,
    soft_cap: float | None,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `xla.measure`."""
    logits, targets = launcher.vary_together(logits, targets)
    call = _Call(settings, logits)
    return tuple(
        call(
            _measure,
            [call.row, call.number],
            [call.number] * 3,
            [call.shape((logits.shape[0],), jnp.float32)] * 3,
            soft_cap=soft_cap,
        )(logits, targets)
    )


def differentiate(
    logits: jax.Array,
    targets: jax.Array,
    log_total: jax.Array,
    of_total: jax.Array,
    of_target: jax.Array,
    dtype: jax.typing.DTypeLike,
    soft_cap: float | None,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> jax.Array:
    """See `xla.differentiate`. In the memory of the logits where they are of the same dtype."""
    logits, *numbers = launcher.vary_together(logits, targets, log_total, of_total, of_target)
    call = _Call(settings, logits)
    return call(
        _differentiate,
        [call.row, *[call.number] * 4],
        call.row,
        call.shape(logits.shape, dtype),
        aliases={0: 0} if logits.dtype == dtype else {},
        soft_cap=soft_cap,
    )(logits, *numbers)


def measure_and_differentiate(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    dtype: jax.typing.DTypeLike,
    soft_cap: float | None,
    z_loss: float,
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gradient, logarithm of the sum of exponentials, the target's logit) of logits that are the whole vocabulary's.

    The second pass over a row finds it in the cache.
    """
    logits, targets, weights = launcher.vary_together(logits, targets, weights)
    call = _Call(settings, logits)
    return tuple(
        call(
            _measure_and_differentiate,
            [call.row, call.number, call.number],
            [call.row, call.number, call.number],
            [call.shape(logits.shape, dtype), *[call.shape((logits.shape[0],), jnp.float32)] * 2],
            aliases={0: 0} if logits.dtype == dtype else {},
            soft_cap=soft_cap,
            z_loss=z_loss,
        )(logits, targets, weights)
    )


class _Call:
    """Launches of kernels with a program for each row of the logits."""

    def __init__(self, settings: Settings, logits: jax.Array):
        self.settings, (self.rows, width) = settings, logits.shape
        self.block = min(settings.block, max(16, pl.next_power_of_2(width)))
        self.manual_axis_type = jax.typeof(logits).manual_axis_type
        self.row = pl.BlockSpec((None, width), lambda row: (row, 0))
        self.number = pl.BlockSpec((None,), lambda row: (row,))

    def shape(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=self.manual_axis_type)

    def __call__(self, kernel, in_specs, out_specs, out_shape, *, aliases=None, **options):
        return pl.pallas_call(
            functools.partial(kernel, block=self.block, **options),
            grid=(self.rows,),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            input_output_aliases=aliases or {},
            compiler_params=plt.CompilerParams(num_warps=self.settings.warps, num_stages=1),
            interpret=self.settings.interpret,
            name=f"cross_entropy{kernel.__name__}",
        )


def _load(ref, start, block: int):
    """Places and float32 values of `block` columns from `start` on, `LOWEST` behind the last."""
    place = start + lax.broadcasted_iota(jnp.int32, (block,), 0)
    # All columns are there where they are a multiple of the block.
    mask = None if ref.shape[0] % block == 0 else place < ref.shape[0]
    values = plt.load(ref.at[pl.ds(start, block)], mask=mask, other=None if mask is None else LOWEST)
    return place, mask, values.astype(jnp.float32)


def _cap(logits, soft_cap: float | None):
    """The logits as they count, and their derivative by those given or None."""
    if soft_cap is None:
        return logits, None
    # tanh(x) = 1 - 2 / (1 + exp(2 x)); beyond the clamp it is 1 in float32.
    bent = 1 - 2 / (1 + jnp.exp(jnp.clip(logits * (2 / soft_cap), -40.0, 40.0)))
    return soft_cap * bent, 1 - bent * bent


def _measure_row(logits_ref, target, block: int, soft_cap: float | None):
    """The largest logit, the sum of exponentials relative to it, the target's logit or 0."""
    width = logits_ref.shape[0]
    # A thread's own columns: one rescaling for all of them.
    lanes, own = block // 8, 8

    def add_block(number, carry):
        largest, total = carry
        _, mask, values = _load(logits_ref, number * block, block)
        values, _ = _cap(values, soft_cap)
        if mask is not None and soft_cap is not None:
            values = jnp.where(mask, values, LOWEST)
        values = values.reshape(lanes, own)
        new_largest = jnp.maximum(largest, jnp.max(values, axis=1))
        total = total * jnp.exp(largest - new_largest) + jnp.sum(jnp.exp(values - new_largest[:, None]), axis=1)
        return new_largest, total

    start = jnp.full((lanes,), LOWEST, jnp.float32), jnp.zeros((lanes,), jnp.float32)
    largest, total = lax.fori_loop(0, pl.cdiv(width, block), add_block, start)
    target_logit, _ = _cap(logits_ref[jnp.clip(target, 0, width - 1)].astype(jnp.float32), soft_cap)
    target_logit = jnp.where((target >= 0) & (target < width), target_logit, 0.0)
    largest_of_all = jnp.max(largest)
    return largest_of_all, jnp.sum(total * jnp.exp(largest - largest_of_all)), target_logit


def _differentiate_row(logits_ref, gradient_ref, target, log_total, of_total, of_target, block, soft_cap):
    def write_block(number, carry):
        place, mask, values = _load(logits_ref, number * block, block)
        values, slope = _cap(values, soft_cap)
        gradient = of_total * jnp.exp(values - log_total) - jnp.where(place == target, of_target, 0.0)
        gradient = gradient if slope is None else gradient * slope
        here = gradient_ref.at[pl.ds(number * block, block)]
        plt.store(here, gradient.astype(gradient_ref.dtype), mask=mask)
        return carry

    lax.fori_loop(0, pl.cdiv(logits_ref.shape[0], block), write_block, 0)


def _measure(logits_ref, target_ref, largest_ref, total_ref, target_logit_ref, *, block: int, soft_cap: float | None):
    results = _measure_row(logits_ref, target_ref[...], block, soft_cap)
    for ref, result in zip((largest_ref, total_ref, target_logit_ref), results, strict=True):
        ref[...] = result


def _differentiate(
    logits_ref, target_ref, log_total_ref, of_total_ref, of_target_ref, gradient_ref, *, block, soft_cap
):
    _differentiate_row(
        logits_ref,
        gradient_ref,
        target_ref[...],
        log_total_ref[...],
        of_total_ref[...],
        of_target_ref[...],
        block,
        soft_cap,
    )


def _measure_and_differentiate(
    logits_ref, target_ref, weight_ref, gradient_ref, log_total_ref, target_logit_ref, *, block, soft_cap, z_loss
):
    target, weight = target_ref[...], weight_ref[...]
    largest, total, target_logit = _measure_row(logits_ref, target, block, soft_cap)
    log_total = largest + jnp.log(total)
    log_total_ref[...], target_logit_ref[...] = log_total, target_logit
    of_total = weight * (1 + 2 * z_loss * log_total)
    _differentiate_row(logits_ref, gradient_ref, target, log_total, of_total, weight, block, soft_cap)
