"""Devices for experts and buffers of their exchange: by rule, by search, by hand."""

import dataclasses

import pytest

from mmjax.config import DataConfig, RunConfig
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import Tuning
from mmjax.planner.expert_size import exchange_buffer, expert_size_by_rule, expert_sizes_by_search
from mmjax.planner.hardware import Link
from mmjax.planner.search import search
from mmjax.planner.topology import read_cluster
from mmjax.presets.kimi_k3 import kimi_k31
from mmjax.presets.kimi_linear import kimi_linear_48b
from mmjax.presets.llama import smollm2_135m

PACKED = Tuning(kind="lora", experts_at_rest="mxfp4")


def test_the_rule_takes_the_fewest_devices_that_hold_the_experts():
    frozen = dataclasses.replace(kimi_k31(), parameter_dtype="bfloat16")
    # 2.72 T entries of 17/32 bytes are 1,447 GB; half of 138.7 GB usable: 32 devices have too much each at 16.
    assert expert_size_by_rule(frozen, read_cluster("16x8xh200"), tuning=PACKED) == 32
    assert expert_size_by_rule(smollm2_135m(), read_cluster("8xh200")) == 1
    # Trained in full: 16 bytes an entry.
    with pytest.raises(ConfigurationError, match="take more GPUs"):
        expert_size_by_rule(kimi_k31(), read_cluster("16x8xh200"))


def test_the_search_gives_the_fastest_plan_of_each_size():
    data = DataConfig(source="a.jsonl", tokenizer="t.json", image_token="", rows=8, row_tokens=4096)
    plans = search(RunConfig(model=kimi_linear_48b(), data=data), read_cluster("8xh200")).plans
    found = expert_sizes_by_search(plans)
    assert plans[0] in found.values() and len(found) > 1
    for size, plan in found.items():
        same = [one for one in plans if one.config.mesh.expert == size and one.config.model.moe.expert_axes == "expert"]
        assert plan.time.total <= min(one.time.total for one in same)


def test_a_buffer_by_hand():
    # The fullest pair has 3 times the mean. One round of 3: 0.1 + 3 x 8 x 3/4 / 6 = 3.1 s; two of 1.5: 3.2 s.
    link = Link(bandwidth=6.0, latency_seconds=0.1 / 3)
    buffer = exchange_buffer(3.0, mean_bytes=8.0, link=link, num_devices=4)
    assert (buffer.capacity_factor, buffer.rounds) == (3.0, 1) and buffer.seconds == pytest.approx(3.1)
    # With room for 12 bytes it takes two rounds of half the size.
    small = exchange_buffer(3.0, mean_bytes=8.0, link=link, num_devices=4, memory_bytes=12.0)
    assert (small.capacity_factor, small.rounds) == (1.5, 2) and small.seconds == pytest.approx(3.2)
    with pytest.raises(ConfigurationError, match="more micro-batches"):
        exchange_buffer(3.0, mean_bytes=8.0, link=link, num_devices=4, memory_bytes=0.5)
    with pytest.raises(ConfigurationError, match="at least 1 time the mean"):
        exchange_buffer(0.5, mean_bytes=8.0, link=link, num_devices=4)
