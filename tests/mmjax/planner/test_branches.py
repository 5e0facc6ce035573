"""Branches: each option's time by hand, the choice between them, and when they are planned again."""

import dataclasses

import pytest

from mmjax.config import (
    DataConfig,
    GroupedAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.errors import ConfigurationError
from mmjax.planner.branches import BranchPlanner, Mix
from mmjax.planner.compute_time import PEER_SHARES, Rates
from mmjax.planner.cost import golden_cost, vision_training_flops
from mmjax.planner.hardware import Cluster, Gpu, Link
from mmjax.presets.whisper import whisper_base

GPU = Gpu(
    name="toy",
    memory_bytes=1e9,
    flops_per_second=1e9,
    memory_bandwidth=1e12,
    nvlinks=1,
    nvlink_bandwidth=1e6,
    pcie_bandwidth=1e6,
)
MODEL = ModelConfig(
    width=16,
    num_layers=2,
    vocabulary_size=32,
    full_attention_layers=(0, 1),
    full_attention_kind="grouped",
    residual="plain",
    grouped_attention=GroupedAttentionConfig(num_heads=4, num_key_heads=2, head_width=4),
    moe=MoeConfig(num_dense_layers=2, dense_width=24),
    vision=VisionConfig(num_layers=3, width=8, num_heads=2, head_width=4, hidden_width=16, patch_pixels=2, channels=1),
)
RUN = RunConfig(
    model=MODEL,
    mesh=MeshConfig(fsdp=2, tensor=2),
    data=DataConfig(rows=4, row_tokens=10, row_patches=16, image_max_patches=8),
)
MIX = Mix(text_tokens=40, patches=64)


def cluster(bandwidth: float) -> Cluster:
    link = Link(bandwidth=bandwidth, latency_seconds=0.0)
    return Cluster(num_nodes=1, gpus_per_node=4, gpu=GPU, inside=link, between=link)


def test_options_of_a_tower_by_hand():
    (_, vision) = BranchPlanner(RUN, cluster(1e6)).plan(MIX)
    options = {option.share: option for option in vision.options}
    flops = vision_training_flops(MODEL, 8) * 64
    assert vision.flops == flops
    # 32 patches for each of two shards of the rows, 4 pictures of 8.
    whole = flops / 2 / (PEER_SHARES["vision"] * 1e9)
    assert options["whole on each"].compute == pytest.approx(whole) and options["whole on each"].exchange == 0
    # 2 pictures each; 8 features of 16 float32 there and back, of which half come from the other.
    assert options["data parallel"].compute == pytest.approx(whole / 2)
    assert options["data parallel"].exchange == pytest.approx(2 * 8 * 16 * 4 / 2 / 1e6)
    # Keys and values of 32 patches, 8 numbers each, in 3 layers, there and back; and the features.
    keys = 3 * 2 * 2 * 32 * 8 * 4
    assert options["patches split"].exchange == pytest.approx((keys + 2 * 8 * 16 * 4) / 2 / 1e6)
    # Two sums a layer, there and back: each moves its bytes twice, half of them.
    assert options["embedding split"].exchange == pytest.approx(3 * 4 * 2 * 32 * 8 * 4 / 2 / 1e6)
    assert "pipelined" not in options
    assert [option.total for option in vision.options] == sorted(option.total for option in vision.options)


def test_one_picture_cannot_be_shared_as_pictures_but_as_patches():
    one = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, row_patches=16, image_max_patches=16))
    (_, vision) = BranchPlanner(one, cluster(1e9)).plan(Mix(text_tokens=40, patches=32))
    options = {option.share: option for option in vision.options}
    assert options["data parallel"].compute == options["whole on each"].compute
    assert vision.best.share == "patches split"


def test_slow_links_leave_a_tower_whole_and_fast_ones_share_it():
    assert BranchPlanner(RUN, cluster(1e3)).plan(MIX)[1].best.share == "whole on each"
    assert BranchPlanner(RUN, cluster(1e12)).plan(MIX)[1].best.share == "data parallel"


def test_a_decoder_splits_what_makes_it_exchange_less():
    # Few key heads: 2 x 2 x 4 numbers of keys and values a position, against 4 sums of 16 there and back.
    text = BranchPlanner(RUN, cluster(1e6)).plan(MIX)[0]
    by_share = {option.share: option for option in text.options}
    tokens, layers = 20, 2
    assert by_share["positions split"].exchange == pytest.approx(layers * 2 * tokens * 16 * 4 / 2 / 1e6)
    assert by_share["embedding split"].exchange == pytest.approx(layers * 4 * 2 * tokens * 16 * 4 / 2 / 1e6)
    assert text.best.share == "positions split"


def test_a_pipeline_may_take_the_tower_along_and_sound_is_split_by_frames():
    run = dataclasses.replace(
        RUN,
        mesh=MeshConfig(pipe=2, context=2),
        model=dataclasses.replace(MODEL, audio=whisper_base()),
        data=dataclasses.replace(RUN.data, row_clips=1),
    )
    plans = BranchPlanner(run, cluster(1e9)).plan(Mix(text_tokens=40, patches=64, clips=1))
    assert [plan.name for plan in plans] == ["text", "vision", "audio"]
    shares = [{option.share for option in plan.options} for plan in plans]
    assert "pipelined" in shares[1] and "frames split" in shares[2]
    # One clip: whoever is alone with it keeps the others waiting.
    assert plans[2].best.share == "frames split"


def test_a_branch_is_planned_again_when_the_mix_or_what_is_known_changes():
    planner = BranchPlanner(RUN, cluster(1e6), threshold=0.1)
    assert planner.update(MIX) is not None
    assert planner.update(dataclasses.replace(MIX, text_tokens=42)) is None
    # Twice the pictures: their share of all FLOPs moves by more than a tenth.
    changed = dataclasses.replace(MIX, patches=128)
    assert planner.change(MIX, changed) > 0.1
    assert planner.update(changed) is not None and planner.update(changed) is None
    # Measured rates that are half the published ones, as far as they are trusted.
    slow = Rates(shares={part: share / 2 for part, share in PEER_SHARES.items()})
    planner = BranchPlanner(RUN, cluster(1e6), measured=slow)
    before = planner.plan(MIX)[1].options
    assert planner.update(dataclasses.replace(MIX, confidence={"vision": 0.05})) is None
    after = planner.update(dataclasses.replace(MIX, confidence={"vision": 1.0}))
    assert after is not None
    whole = [next(o for o in options if o.share == "whole on each") for options in (before, after[1].options)]
    assert whole[1].compute == pytest.approx(2 * whole[0].compute)


def test_branches_are_terms_of_the_golden_formula():
    planner = BranchPlanner(RUN, cluster(1e6))
    plans = planner.plan(MIX)
    cost = golden_cost(planner.golden_branches(plans))
    for terms, plan in zip(cost.branches, plans, strict=True):
        assert terms.compute == pytest.approx(plan.best.compute)
        assert terms.communication == pytest.approx(plan.best.exchange)
        assert terms.exchange > 0


def test_impossible_mixes_and_thresholds_are_refused():
    with pytest.raises(ConfigurationError, match="not all 0"):
        Mix(text_tokens=0)
    with pytest.raises(ConfigurationError, match="confidences from 0 to 1"):
        Mix(text_tokens=1, confidence={"text": 2.0})
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        BranchPlanner(RUN, cluster(1.0), threshold=0.0)
