"""Rates that readings of kernels and whole steps give, with the error left, and each step predicted from the others."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from mmjax.config import RunConfig, settings_with
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import Tuning
from mmjax.planner.compute_time import Rates
from mmjax.planner.hardware import find_gpu
from mmjax.planner.readings import KernelReading, LinkFit, Readings, StepReading, fit_link, with_inside_link
from mmjax.planner.step_time import StepClock
from mmjax.planner.topology import read_cluster

# How much a factor e away from 1 weighs, as a relative error of a step: what readings do not tell stays as it is.
_PRIOR = 0.02


@dataclass(frozen=True, kw_only=True)
class StepError:
    """One step: read, and as predicted in three ways, in seconds."""

    name: str
    seconds: float
    published: float
    """From the rates before the fit of steps."""
    fitted: float
    predict_from_others: Callable[[], float]

    @functools.cached_property
    def from_others(self) -> float:
        """From a fit of all other steps, made when it is first asked for; as published where there is no other."""
        return self.predict_from_others()

    @property
    def error_from_others(self) -> float:
        return self.from_others / self.seconds - 1


@dataclass(frozen=True, kw_only=True)
class StepFit:
    """Rates that explain readings, and how well."""

    rates: Rates
    kernel_shares: dict[str, tuple[float, float]]
    """Of each part with readings: share of the peak, and the worst relative error of a reading's time with it."""
    compute: float
    """All products and kernels take so many times as long as by themselves."""
    memory: float
    """What moves bytes takes so many times as long as its bytes at the memory's rate."""
    exchange: float
    steps: tuple[StepError, ...]

    @property
    def mean_error(self) -> float:
        return float(np.mean([abs(step.fitted / step.seconds - 1) for step in self.steps])) if self.steps else 0.0

    @property
    def worst_error(self) -> float:
        return max((abs(step.fitted / step.seconds - 1) for step in self.steps), default=0.0)

    def describe(self) -> str:
        return (
            f"rates of {len(self.kernel_shares)} parts from kernels; {len(self.steps)} steps: products x"
            f" {self.compute:.2f}, bytes between them x {self.memory:.2f}, exchanges x {self.exchange:.2f};"
            f" error {self.mean_error:.1%} on average, {self.worst_error:.1%} at worst"
        )


def fit_readings(readings: Readings, base: Rates | None = None) -> StepFit:
    """Shares of the peak from kernels, then factors of all products, of bytes and of exchanges from whole steps.

        minimise  sum over steps of (predicted / read - 1)^2 + sum over factors of (0.02 log factor)^2

    Raises:
      ConfigurationError: a step's settings or cluster that cannot be.
    """
    base = base or Rates()
    shares = kernel_shares(readings.kernels, find_gpu(readings.hardware).flops_per_second) if readings.kernels else {}
    rates = dataclasses.replace(base, shares={**base.shares, **{part: share for part, (share, _) in shares.items()}})
    # What links do by themselves is no factor of exchanges in steps.
    link = fit_link(readings.exchanges) if readings.exchanges else None
    steps = [_Step(step, link) for step in readings.steps]
    factors = _fit(steps, rates)
    fitted = scaled(rates, *factors)

    def from_others(step: _Step) -> float:
        others = [other for other in steps if other is not step]
        return step.predict(scaled(rates, *_fit(others, rates, factors)))

    errors = tuple(
        StepError(
            name=step.reading.name,
            seconds=step.reading.seconds,
            published=step.predict(rates),
            fitted=step.predict(fitted),
            predict_from_others=functools.partial(from_others, step),
        )
        for step in steps
    )
    compute, memory, exchange = factors
    return StepFit(rates=fitted, kernel_shares=shares, compute=compute, memory=memory, exchange=exchange, steps=errors)


def kernel_shares(kernels: Sequence[KernelReading], peak: float) -> dict[str, tuple[float, float]]:
    """(share of the peak, worst relative error) of each part: the geometric mean over its readings."""
    found = {}
    for part in {kernel.part: None for kernel in kernels}:
        shares = np.array([k.flops / k.seconds / peak for k in kernels if k.part == part])
        share = float(np.exp(np.log(shares).mean()))
        found[part] = share, float(np.abs(shares / share - 1).max())
    return found


def scaled(rates: Rates, compute: float, memory: float, exchange: float) -> Rates:
    """Rates with which products, bytes and exchanges take so many times as long."""
    return dataclasses.replace(
        rates,
        shares={part: share / compute for part, share in rates.shares.items()},
        memory=rates.memory / memory,
        exchange=rates.exchange * exchange,
    )


class _Step:
    """A reading with what predicting it again and again needs."""

    def __init__(self, reading: StepReading, link: LinkFit | None):
        self.reading = reading
        self.config = settings_with(RunConfig(), reading.settings, reading.name)
        self.tuning = _tuning(reading)
        cluster = read_cluster(reading.cluster)
        self.cluster = with_inside_link(cluster, link) if link else cluster

    def predict(self, rates: Rates) -> float:
        return StepClock(self.config, self.cluster, tuning=self.tuning, rates=rates).step(self.config).total


def _tuning(reading: StepReading) -> Tuning:
    try:
        values = dict(reading.tuning)
        if values.get("adapted") is not None:
            values["adapted"] = tuple((part, path, int(layers)) for part, path, layers in values["adapted"])
        return Tuning(**values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            reading.name,
            found=str(error),
            expected="fields of a tuning",
            remedy="write it with scripts/step_reading.py",
        ) from error


def _fit(
    steps: Sequence[_Step], rates: Rates, start: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> tuple[float, float, float]:
    if not steps:
        return 1.0, 1.0, 1.0

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        tried = scaled(rates, *np.exp(logarithms))
        errors = [step.predict(tried) / step.reading.seconds - 1 for step in steps]
        return np.array([*errors, *(_PRIOR * logarithms)])

    # Readings are good to a percent; a tenth of one is near enough.
    compute, memory, exchange = np.exp(least_squares(residuals, np.log(start), xtol=1e-3, ftol=1e-4).x)
    return float(compute), float(memory), float(exchange)
