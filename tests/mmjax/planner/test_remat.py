import dataclasses

import pytest

from mmjax.config import DataConfig, MeshConfig, RunConfig
from mmjax.planner.compute_time import Rates, share_again
from mmjax.planner.cost import forward_flops
from mmjax.planner.remat import KeptResult, choose_results, kept_results
from mmjax.planner.topology import read_cluster
from mmjax.presets.kimi_k3 import kimi_k31
from mmjax.presets.kimi_linear import kimi_linear_48b

RESULTS = [
    KeptResult(name="projections", num_bytes=60, seconds=6.0),
    KeptResult(name="attention", num_bytes=10, seconds=0.5),
    KeptResult(name="experts", num_bytes=20, seconds=4.0),
]


def choose(**changes):
    limits = {"device_bytes": 25.0, "host_bytes": 100.0, "host_bandwidth": 100.0, "overlap": 0.0}
    return choose_results(RESULTS, **(limits | changes))


def test_what_saves_most_time_for_its_bytes_stays_on_the_device_and_the_rest_goes_to_the_host():
    plan = choose()
    assert plan.keep == ("experts",) and plan.offload == ("projections", "attention")
    assert (plan.device_bytes, plan.host_bytes, plan.saved_seconds) == (20, 70, 10.5)


def test_nothing_goes_to_a_host_that_is_farther_away_than_computing_it_again():
    # 2 x 60 bytes take 12 s, 2 x 10 take 2 s.
    assert choose(host_bandwidth=10.0).offload == ()
    # Three quarters of both ways are hidden: 3 s < 6 s, and 0.5 s is not less than 0.5 s.
    assert choose(host_bandwidth=10.0, overlap=0.75).offload == ("projections",)


def test_nothing_is_kept_where_there_is_no_room():
    plan = choose(device_bytes=0.0, host_bytes=0.0)
    assert plan.keep == plan.offload == () and plan.saved_seconds == 0


def test_results_of_a_large_model_shrink_with_the_tensor_axis_and_with_rows_of_a_device():
    config = RunConfig(
        model=dataclasses.replace(kimi_k31(), parameter_dtype="bfloat16"),
        mesh=MeshConfig(fsdp=2, expert=64),
        data=DataConfig(rows=128, row_tokens=8192),
    )
    cluster = read_cluster("16x8xh200")
    whole = {result.name: result for result in kept_results(config, cluster)}
    halved = dataclasses.replace(
        config, mesh=MeshConfig(fsdp=2, expert=32, tensor=2), data=DataConfig(rows=64, row_tokens=8192)
    )
    split = {result.name: result for result in kept_results(halved, cluster)}
    # Attention: 93 layers of 96 heads of 128 values, 8,192 tokens, 2 bytes.
    assert whole["attention"].num_bytes == 93 * 96 * 128 * 8192 * 2
    assert split["attention"].num_bytes == whole["attention"].num_bytes / 2
    # Experts: 92 layers of 3,584 values in bfloat16, which the tensor axis does not split.
    assert whole["experts"].num_bytes == split["experts"].num_bytes == 92 * 3584 * 8192 * 2
    assert split["projections"].seconds == pytest.approx(whole["projections"].seconds / 2)
    # Where rows are exchanged their weights' gradients take experts' results; attention's kernels run again for what
    # their backward passes take besides.
    assert whole["experts"].seconds == 0
    alone = dataclasses.replace(config, mesh=MeshConfig(), data=DataConfig(rows=1, row_tokens=8192))
    of_experts = next(result for result in kept_results(alone, cluster) if result.name == "experts")
    routed, rates = forward_flops(config.model, 8192)["routed experts"], Rates()
    # The last of an expert's three products.
    expected = 8192 * routed / 3 / (rates.shares["routed experts"] * cluster.gpu.flops_per_second)
    assert of_experts.seconds == pytest.approx(expected)
    assert whole["attention"].seconds == 0


def test_the_last_product_of_experts_is_left_out_where_nothing_follows_it():
    model = kimi_linear_48b()
    alone = RunConfig(model=model)
    spread, large = RunConfig(model=model, mesh=MeshConfig(expert=2)), RunConfig(model=kimi_k31())
    for config, again, kept in ((alone, 2 / 3, 2 / 3), (spread, 1, 1), (large, 1, 2 / 3)):
        assert share_again(config, "routed experts", ()) == again
        assert share_again(config, "routed experts", ("experts",)) == kept
    assert share_again(alone, "shared experts", ()) == 2 / 3
    assert share_again(alone, "shared experts", ("projections",)) == 0
