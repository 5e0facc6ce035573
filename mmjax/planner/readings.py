"""Readings of exchanges, kernels and steps in a file, and what fits exchanges and branches, with the error left."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.optimize import nnls

from mmjax.errors import ConfigurationError
from mmjax.planner.compute_time import PEER_SHARES
from mmjax.planner.cost import Branch
from mmjax.planner.hardware import Cluster, Link

Exchange = Literal["send", "all_gather", "all_reduce", "all_to_all"]
EXCHANGES: tuple[Exchange, ...] = ("send", "all_gather", "all_reduce", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One exchange among the devices of a node, timed."""

    exchange: Exchange
    num_devices: int
    num_bytes: float
    """send: of the message; all_gather: of the result; all_reduce: of one array; all_to_all: that a device sends."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class KernelReading:
    """One kernel or product, timed by itself."""

    part: str
    """Of `compute_time.PEER_SHARES`."""
    shape: str
    """What it worked on, in words."""
    flops: float
    """As the planner counts them."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepReading:
    """A whole training step, timed."""

    name: str
    cluster: str
    """`1x1xh200`"""
    settings: Mapping[str, Any]
    """Of the run, by their names, where they differ from the defaults."""
    tuning: Mapping[str, Any]
    """What is trained: fields of `adapters.Tuning`."""
    seconds: float
    source: str
    """Where and when it was read."""


@dataclass(frozen=True, kw_only=True)
class GoldenReading:
    """A step that was timed, and the terms of its golden formula as predicted with all factors 1."""

    branches: tuple[Branch, ...]
    alignment_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What was read, on what; at least one reading of any kind."""

    hardware: str
    versions: Mapping[str, str]
    exchanges: tuple[Reading, ...] = ()
    kernels: tuple[KernelReading, ...] = ()
    steps: tuple[StepReading, ...] = ()
    golden: tuple[GoldenReading, ...] = ()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Readings:
    """Readings from a file that `save` wrote.

    Raises:
      ConfigurationError: no such file, or not of that form.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        golden = tuple(
            GoldenReading(**reading | {"branches": tuple(Branch(**branch) for branch in reading["branches"])})
            for reading in values.get("golden", ())
        )
        readings = Readings(
            hardware=str(values["hardware"]),
            versions=dict(values["versions"]),
            exchanges=tuple(Reading(**reading) for reading in values.get("exchanges", ())),
            kernels=tuple(KernelReading(**reading) for reading in values.get("kernels", ())),
            steps=tuple(StepReading(**reading) for reading in values.get("steps", ())),
            golden=golden,
        )
        timed = (*readings.exchanges, *readings.kernels, *readings.steps, *readings.golden)
        if not timed or any(not reading.seconds > 0 for reading in timed):
            raise ValueError("no reading at all, or one without a time")
        if any(r.exchange not in EXCHANGES or r.num_devices < 2 for r in readings.exchanges):
            raise ValueError("an unknown exchange, or fewer than 2 devices")
        if strange := [r.part for r in readings.kernels if r.part not in PEER_SHARES or not r.flops > 0]:
            raise ValueError(f"{strange[0]!r}, no part of a model, or without FLOPs")
        return readings
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            str(path),
            found=" ".join(str(error).split()) or type(error).__name__,
            expected="readings with hardware, versions, and exchanges, kernels, steps or branches",
            remedy="write the file with `python -m mmjax.plan measure`, or mend that entry",
        ) from error


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link that explains readings, and how well."""

    link: Link
    mean_error: float
    """Mean over readings of |predicted - read| / read."""
    worst_error: float
    num_readings: int

    def describe(self) -> str:
        return (
            f"{self.link.bandwidth / 1e9:.1f} GB/s, {self.link.latency_seconds * 1e6:.1f} us from {self.num_readings}"
            f" readings; error {self.mean_error:.1%} on average, {self.worst_error:.1%} at worst"
        )


def fit_link(readings: Sequence[Reading]) -> LinkFit:
    """Bandwidth and latency of the link of least relative error, neither below 0.

        send        latency + B / bandwidth
        all_gather  (n - 1) latency + B (n - 1) / n / bandwidth       all_reduce twice that
        all_to_all  (n - 1) latency + B (n - 1) / n / bandwidth

    Raises:
      ConfigurationError: readings of one size alone, which cannot tell latency from bandwidth, or no sign of either.
    """
    rows = np.array([_steps_and_bytes(reading) for reading in readings], dtype=np.float64).reshape(-1, 2)
    seconds = np.array([reading.seconds for reading in readings])
    factors, mean, worst = _least_relative_error(rows, seconds, ("latency", "1 / bandwidth"))
    if factors[1] <= 0:
        raise _unfit("readings whose time does not grow with their bytes")
    return LinkFit(
        link=Link(bandwidth=float(1 / factors[1]), latency_seconds=float(factors[0])),
        mean_error=mean,
        worst_error=worst,
        num_readings=len(readings),
    )


def with_inside_link(cluster: Cluster, fit: LinkFit) -> Cluster:
    """The cluster with the measured link between the GPUs of a node."""
    return dataclasses.replace(cluster, inside=fit.link)


@dataclass(frozen=True, kw_only=True)
class GoldenFit:
    """What the golden formula's terms must be multiplied by."""

    compute: float
    """Rates B_k are smaller by this factor."""
    exchange: float
    """Bandwidths C_k are smaller by this factor."""
    alpha: float
    beta: float
    mean_error: float
    worst_error: float


def fit_golden(readings: Sequence[GoldenReading], most_rounds: int = 50) -> GoldenFit:
    """Factors of compute and exchange, alpha and beta, of least relative error, none below 0.

    The slowest branch of each step depends on the factors: it is chosen again after each fit, until none changes.

    Raises:
      ConfigurationError: readings that do not tell the four apart.
    """
    factors, mean, worst = np.ones(4), 0.0, 0.0
    seconds = np.array([reading.seconds for reading in readings])
    chosen: list[int] = []
    for _ in range(most_rounds):
        terms = [[_branch_terms(branch) for branch in reading.branches] for reading in readings]
        slowest = [int(np.argmax([np.dot(row, factors[:3]) for row in rows])) for rows in terms]
        if slowest == chosen:
            break
        chosen = slowest
        rows = [
            [*branches[index], reading.alignment_seconds]
            for branches, index, reading in zip(terms, slowest, readings, strict=True)
        ]
        factors, mean, worst = _least_relative_error(
            np.array(rows).reshape(-1, 4), seconds, ("compute", "exchange", "alpha", "beta")
        )
    return GoldenFit(
        compute=float(factors[0]),
        exchange=float(factors[1]),
        alpha=float(factors[2]),
        beta=float(factors[3]),
        mean_error=mean,
        worst_error=worst,
    )


def _branch_terms(branch: Branch) -> tuple[float, float, float]:
    exchange = branch.exchanged_bytes / branch.bandwidth if branch.exchanged_bytes else 0.0
    return branch.forward_flops / branch.flops_per_second, exchange, branch.communication_seconds


def _steps_and_bytes(reading: Reading) -> tuple[float, float]:
    """How often a reading pays the latency, and the bytes it moves one after the other."""
    if reading.exchange == "send":
        return 1.0, reading.num_bytes
    steps = reading.num_devices - 1
    times = 2 if reading.exchange == "all_reduce" else 1
    return float(times * steps), times * reading.num_bytes * steps / reading.num_devices


def _least_relative_error(
    rows: np.ndarray, seconds: np.ndarray, names: Sequence[str]
) -> tuple[np.ndarray, float, float]:
    """Factors >= 0 of least sum of squares of (rows @ factors - seconds) / seconds; mean and worst relative error."""
    scale = np.maximum(np.abs(rows).max(axis=0, initial=0.0), np.finfo(float).tiny)
    scaled = rows / seconds[:, None] / scale[None, :]
    if np.linalg.matrix_rank(scaled) < len(names):
        raise _unfit(f"{len(seconds)} readings that do not tell {', '.join(names)} apart")
    factors = nnls(scaled, np.ones(len(seconds)))[0] / scale
    errors = np.abs(rows @ factors - seconds) / seconds
    return factors, float(errors.mean()), float(errors.max())


def _unfit(found: str) -> ConfigurationError:
    return ConfigurationError(
        "fit", found=found, expected="readings that differ in every term", remedy="read more sizes and more shapes"
    )
