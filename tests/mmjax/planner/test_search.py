"""The search sees every mesh, keeps what can run, and says why not of the rest."""

import dataclasses
import math
import time

import numpy as np
import pytest

from mmjax.config import DataConfig, OptimizerConfig, RunConfig, check
from mmjax.planner.adapters import Tuning
from mmjax.planner.device_order import order_seconds
from mmjax.planner.memory import device_bytes
from mmjax.planner.search import check_without_mesh, describe_kept, factorisations, fits, remedies, search, with_links
from mmjax.planner.step_time import StepClock
from mmjax.planner.topology import read_cluster
from mmjax.presets.kimi_k3 import kimi_k31
from mmjax.presets.kimi_linear import kimi_linear_48b
from mmjax.presets.llama import smollm2_135m

DATA = DataConfig(
    source="a.jsonl", tokenizer="tokenizer.json", rows=128, row_tokens=8192, row_patches=4096, image_max_patches=4096
)
K31 = RunConfig(model=kimi_k31(), data=DATA)
FROZEN = dataclasses.replace(K31, model=dataclasses.replace(kimi_k31(), parameter_dtype="bfloat16"))
LORA = Tuning(kind="lora", experts_at_rest="mxfp4")


def linear(rows: int, cluster: str, **more):
    data = dataclasses.replace(DATA, rows=rows, row_patches=4, image_max_patches=4)
    return search(RunConfig(model=kimi_linear_48b(), data=data), read_cluster(cluster), **more)


def test_factorisations_are_all_and_each_once():
    assert list(factorisations(8, 2)) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    # 7 factors of 2 into 6 axes.
    assert len(set(factorisations(128, 6))) == math.comb(7 + 5, 5)


def test_every_mesh_is_kept_or_rejected_with_a_reason():
    result = linear(16, "8xh200")
    meshes = {plan.config.mesh for plan in result.plans}
    named = {name.split(",")[0] for name in (rejection.name for rejection in result.rejections)}
    assert len(set(factorisations(8, 6))) <= len(meshes) + len(named)
    assert all(rejection.reason for rejection in result.rejections)


def test_every_plan_can_run_and_fits_and_the_first_is_the_fastest():
    result = linear(16, "8xh200")
    cluster = read_cluster("8xh200")
    assert result.plans
    for plan in result.plans:
        assert check(plan.config) == []
        assert plan.memory.total <= cluster.usable_bytes
        assert plan.config.mesh.num_devices == 8
    # What is worked out once for a mesh and varied is what a config costs by itself.
    for plan in [plan for plan in result.plans if not plan.config.model.remat_keep][:: max(1, len(result.plans) // 20)]:
        assert dataclasses.asdict(device_bytes(plan.config)) == pytest.approx(dataclasses.asdict(plan.memory))
        alone = StepClock(plan.config, cluster).step(plan.config)
        assert alone.terms == pytest.approx(plan.time.terms)
    times = [plan.time.total for plan in result.plans]
    assert times == sorted(times)
    front = result.front()
    assert front[0] is result.plans[0]
    for plan in result.plans:
        assert any(best.time.total <= plan.time.total and best.memory.total <= plan.memory.total for best in front)


def test_a_slower_plan_names_the_terms_that_cost_it():
    result = linear(16, "8xh200")
    assert result.reasons_against(result.plans[0]) == "the fastest that fits"
    slowest = result.plans[-1]
    assert "x the time: " in result.reasons_against(slowest)


def test_more_rows_for_a_device_raise_utilisation():
    few, many = (
        # With results kept they need not: gradients of several micro-batches take the room for them.
        max(plan.utilisation for plan in linear(rows, "8xh200").plans if describe_kept(plan.config) == "remat layer")
        for rows in (8, 64)
    )
    assert many > few


def test_when_nothing_fits_the_remedies_fit():
    cluster, config = read_cluster("4x8xh200"), dataclasses.replace(FROZEN, data=dataclasses.replace(DATA, rows=32))
    plain = Tuning(kind="lora")
    result = search(config, cluster, tuning=plain)
    assert not result.plans and result.tightest and "parameters" in result.tightest.reason
    found = remedies(config, cluster, tuning=plain)
    assert any("mxfp4" in remedy for remedy in found) and any("8x8xh200" in remedy for remedy in found)
    assert fits(config, cluster, LORA) and not fits(config, cluster, plain)
    assert fits(dataclasses.replace(config, data=dataclasses.replace(DATA, rows=64)), read_cluster("8x8xh200"), plain)


@pytest.mark.parametrize(
    ("cluster", "rows", "tuning"),
    [("16x8xh200", 256, LORA), pytest.param("128x8xh200", 1024, Tuning(), marks=pytest.mark.slow)],
)
def test_large_searches_end_in_half_a_minute(cluster, rows, tuning):
    started = time.process_time()
    config = dataclasses.replace(
        FROZEN if tuning is LORA else K31,
        data=dataclasses.replace(DATA, rows=rows),
        optimizer=OptimizerConfig(name="muon"),
    )
    assert search(config, read_cluster(cluster), tuning=tuning).plans
    assert time.process_time() - started < 30


def test_uneven_links_put_devices_in_another_order():
    data = dataclasses.replace(DATA, rows=8, row_tokens=512, row_patches=4, image_max_patches=4)
    config, cluster = RunConfig(model=smollm2_135m(), data=data), read_cluster("4xh200")
    result, clock = search(config, cluster), StepClock(config, cluster)
    even, uneven = np.full((4, 4), 1e11), np.full((4, 4), 1e9)
    # 0 and 2, 1 and 3 are joined by fast links.
    for one, other in ((0, 2), (2, 0), (1, 3), (3, 1)):
        uneven[one, other] = 1e11
    ordered = with_links(result, clock, uneven).plans
    assert any(plan.config.mesh.device_order for plan in ordered)
    assert [plan.time for plan in ordered] == [plan.time for plan in result.plans]
    for plan in ordered:
        if order := plan.config.mesh.device_order:
            orders = np.array([range(4), order])
            exchanged = clock.exchanged_bytes(plan.config, plan.time)
            own, chosen = order_seconds(plan.config.mesh, orders, uneven, exchanged)
            assert chosen < own
    assert not any(plan.config.mesh.device_order for plan in with_links(result, clock, even).plans)


def test_faults_that_no_mesh_mends_are_found():
    broken = dataclasses.replace(K31, data=dataclasses.replace(DATA, row_patches=6))
    assert [fault.path for fault in check_without_mesh(broken)] == ["data.row_patches"] * 2
    assert check_without_mesh(K31) == []
