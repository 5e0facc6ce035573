"""Fits give back what readings were made from, and say how far off they are."""

import itertools

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.planner.cost import Branch, golden_cost
from mmjax.planner.readings import (
    EXCHANGES,
    GoldenReading,
    Reading,
    Readings,
    fit_golden,
    fit_link,
    load,
    with_inside_link,
)
from mmjax.planner.topology import read_cluster


def reading(exchange, num_bytes: float, seconds: float) -> Reading:
    return Reading(exchange=exchange, num_devices=8, num_bytes=num_bytes, seconds=seconds)


def synthetic(noise: float = 0.0) -> list[Reading]:
    """200 GB/s and 5 us among 8 devices."""
    random, found = np.random.default_rng(0), []
    for exchange, num_bytes in itertools.product(EXCHANGES, (1e4, 1e6, 1e8, 1e9)):
        steps, moved = {
            "send": (1, num_bytes),
            "all_gather": (7, num_bytes * 7 / 8),
            "all_reduce": (14, num_bytes * 14 / 8),
            "all_to_all": (7, num_bytes * 7 / 8),
        }[exchange]
        seconds = (steps * 5e-6 + moved / 200e9) * (1 + noise * random.uniform(-1, 1))
        found.append(reading(exchange, num_bytes, seconds))
    return found


def test_a_link_is_given_back_and_its_error_said():
    exact, noisy = fit_link(synthetic()), fit_link(synthetic(noise=0.1))
    assert exact.link.bandwidth == pytest.approx(200e9) and exact.link.latency_seconds == pytest.approx(5e-6)
    assert exact.worst_error < 1e-9
    assert noisy.link.bandwidth == pytest.approx(200e9, rel=0.1)
    assert 0.01 < noisy.mean_error < noisy.worst_error < 0.2
    assert "16 readings; error" in noisy.describe()
    assert with_inside_link(read_cluster("8xh200"), exact).inside == exact.link


def test_readings_of_one_size_are_refused():
    with pytest.raises(ConfigurationError, match="latency, 1 / bandwidth apart"):
        fit_link([reading("send", 1e6, 1e-3), reading("send", 1e6, 2e-3)])
    with pytest.raises(ConfigurationError, match="does not grow"):
        fit_link([reading("send", 1e6, 1e-3), reading("send", 1e8, 1e-3), reading("send", 1e9, 0.9e-3)])


def test_factors_of_the_golden_formula_are_given_back():
    random, readings = np.random.default_rng(1), []
    for _ in range(30):
        branches = [
            Branch(
                name=name,
                forward_flops=float(random.uniform(1, 10)),
                flops_per_second=1.0,
                exchanged_bytes=float(random.uniform(0, 5)),
                bandwidth=1.0,
                communication_seconds=float(random.uniform(0, 2)),
            )
            for name in ("text", "image")
        ]
        offset = float(random.uniform(0, 3))
        slower = [
            Branch(
                name=branch.name,
                forward_flops=1.6 * branch.forward_flops,
                flops_per_second=1.0,
                exchanged_bytes=1.25 * branch.exchanged_bytes,
                bandwidth=1.0,
                communication_seconds=branch.communication_seconds,
            )
            for branch in branches
        ]
        seconds = golden_cost(slower, alpha=0.7, beta=0.4, alignment_seconds=offset).total
        readings.append(GoldenReading(branches=tuple(branches), alignment_seconds=offset, seconds=seconds))
    fit = fit_golden(readings)
    assert (fit.compute, fit.exchange, fit.alpha, fit.beta) == pytest.approx((1.6, 1.25, 0.7, 0.4))
    assert fit.worst_error < 1e-9


def test_a_file_of_readings_comes_back_and_a_broken_one_is_refused(tmp_path):
    path = tmp_path / "readings.json"
    readings = Readings(hardware="8 x toy", versions={"jax": "0"}, exchanges=tuple(synthetic()))
    readings.save(path)
    assert load(path) == readings
    for text in ("{", '{"exchanges": []}', "[1]", path.read_text().replace("send", "sent")):
        broken = tmp_path / "broken.json"
        broken.write_text(text)
        with pytest.raises(ConfigurationError, match="plan measure"):
            load(broken)
