"""Rates that readings give: known ones come back, and the committed file's steps are predicted from each other."""

import dataclasses
from pathlib import Path

import pytest

from mmjax.config import RunConfig, flatten, settings_with
from mmjax.errors import ConfigurationError
from mmjax.planner import step_fit
from mmjax.planner.compute_time import PEER_SHARES, Rates
from mmjax.planner.hardware import Link
from mmjax.planner.readings import KernelReading, Reading, Readings, StepReading, load
from mmjax.planner.step_fit import fit_readings, kernel_shares, scaled
from mmjax.planner.step_time import StepClock
from mmjax.planner.topology import read_cluster
from mmjax.presets.llama import smollm2_135m

COMMITTED = Path(__file__).parents[3] / "docs" / "readings" / "h200.json"


def synthetic(rates: Rates, link: Link | None = None) -> list[StepReading]:
    """Steps of SmolLM2 of several sizes and meshes, as long as `rates` say; `link` is between the GPUs of a node."""
    found, defaults = [], flatten(RunConfig())
    for rows, tokens, width, fsdp in ((8, 64, 1536, 1), (64, 2048, 64, 1), (64, 512, 49_152, 1), (8, 2048, 1536, 8)):
        model = smollm2_135m()
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, dense_width=width))
        settings = {name: value for name, value in flatten(RunConfig(model=model)).items() if value != defaults[name]}
        settings |= {"data.rows": rows, "data.row_tokens": tokens, "data.row_patches": 0, "mesh.fsdp": fsdp}
        config, cluster = settings_with(RunConfig(), settings, "synthetic"), f"1x{fsdp}xh200"
        machine = read_cluster(cluster)
        machine = dataclasses.replace(machine, inside=link or machine.inside)
        seconds = StepClock(config, machine, rates=rates).step(config).total
        name = f"{rows} {tokens} {width} {fsdp}"
        found.append(StepReading(name=name, cluster=cluster, settings=settings, tuning={}, seconds=seconds, source=""))
    return found


def test_known_factors_come_back_with_their_error():
    readings = Readings(hardware="H200", versions={}, steps=tuple(synthetic(scaled(Rates(), 1.4, 2.0, 1.25))))
    fit = fit_readings(readings)
    assert (fit.compute, fit.memory, fit.exchange) == pytest.approx((1.4, 2.0, 1.25), rel=0.03)
    assert fit.worst_error < 0.005
    assert all(abs(step.published / step.seconds - 1) > 0.15 for step in fit.steps)
    assert "4 steps: products x 1.4" in fit.describe() and "error 0." in fit.describe()


def test_links_that_were_read_are_not_read_again_from_steps():
    link = Link(bandwidth=5e10, latency_seconds=2e-5)
    exchanges = [
        Reading(exchange="send", num_devices=2, num_bytes=size, seconds=size / link.bandwidth + link.latency_seconds)
        for size in (1e5, 1e9)
    ]
    steps = tuple(synthetic(Rates(), link))
    fit = fit_readings(Readings(hardware="H200", versions={}, exchanges=tuple(exchanges), steps=steps))
    assert (fit.compute, fit.memory, fit.exchange) == pytest.approx((1, 1, 1), rel=1e-3)
    assert fit_readings(Readings(hardware="H200", versions={}, steps=steps)).exchange > 2


def test_a_step_is_predicted_from_the_others_only_when_somebody_asks(monkeypatch):
    numbers = []
    monkeypatch.setattr(step_fit, "_fit", lambda steps, *_: numbers.append(len(steps)) or (1.0, 1.0, 1.0))
    fit = fit_readings(Readings(hardware="H200", versions={}, steps=tuple(synthetic(Rates())[:3])))
    assert "3 steps" in fit.describe() and numbers == [3]
    assert fit.steps[1].error_from_others == fit.steps[1].error_from_others == pytest.approx(0) and numbers == [3, 2]


def test_what_readings_do_not_tell_stays_as_it_is():
    [one, *_] = synthetic(scaled(Rates(), 1.4, 1.4, 3.0))
    fit = fit_readings(Readings(hardware="H200", versions={}, steps=(one,)))
    # One device exchanges nothing; a single step has no others to predict it from.
    assert fit.exchange == pytest.approx(1.0)
    assert fit.steps[0].from_others == fit.steps[0].published
    assert fit_readings(Readings(hardware="H200", versions={})).rates == Rates()


def test_kernels_give_the_share_of_the_peak_and_its_error():
    kernels = [
        KernelReading(part="head", shape=shape, flops=flops, seconds=1.0) for shape, flops in (("a", 4e12), ("b", 1e12))
    ]
    assert kernel_shares(kernels, 8e12)["head"] == pytest.approx((0.25, 1.0))
    fit = fit_readings(Readings(hardware="NVIDIA H200", versions={}, kernels=tuple(kernels)))
    assert fit.rates.shares["head"] == pytest.approx(2e12 / 989.4e12)
    assert fit.rates.shares["dense MLP"] == PEER_SHARES["dense MLP"]


@pytest.mark.parametrize("change", [{"settings": {"model.widht": 8}}, {"tuning": {"kind": "lora", "rang": 8}}])
def test_a_reading_of_a_step_that_cannot_be_is_refused(change):
    [one, *_] = synthetic(Rates())
    with pytest.raises(ConfigurationError):
        fit_readings(Readings(hardware="H200", versions={}, steps=(dataclasses.replace(one, **change),)))


def test_steps_that_were_read_are_predicted_within_a_fifth():
    readings = load(COMMITTED)
    assert readings.versions["jax"] and all(step.source for step in readings.steps)
    fit = fit_readings(readings)
    assert fit.steps and fit.worst_error < 0.2
    assert all(abs(step.error_from_others) < 0.2 for step in fit.steps)


@pytest.mark.parametrize("model", ["llava15", "kimi_linear", "k3_slice"])
def test_all_steps_of_a_model_left_out_of_the_fit_are_predicted_within_a_fifth(model):
    readings = load(COMMITTED)
    left_out = [step for step in readings.steps if step.name.startswith(model)]
    others = tuple(step for step in readings.steps if step not in left_out)
    rates = fit_readings(dataclasses.replace(readings, steps=others)).rates
    assert left_out and others
    fit = fit_readings(dataclasses.replace(readings, kernels=(), steps=tuple(left_out)), rates)
    assert all(abs(step.published / step.seconds - 1) < 0.2 for step in fit.steps)
