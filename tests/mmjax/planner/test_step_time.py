"""Terms of a step's time, each worked by hand on a tiny model."""

import dataclasses

import pytest

from mmjax.config import (
    DataConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.planner.adapters import Tuning
from mmjax.planner.compute_time import PEER_SHARES, Rates
from mmjax.planner.cost import forward_flops
from mmjax.planner.hardware import Cluster, Gpu, Link
from mmjax.planner.step_time import StepClock, bubble_fraction

GPU = Gpu(
    name="toy",
    memory_bytes=1e9,
    flops_per_second=1e9,
    memory_bandwidth=1e12,
    nvlinks=1,
    nvlink_bandwidth=1e6,
    pcie_bandwidth=1e6,
)
TOY = Cluster(
    num_nodes=4,
    gpus_per_node=2,
    gpu=GPU,
    inside=Link(bandwidth=1e6, latency_seconds=0.0),
    between=Link(bandwidth=1e5, latency_seconds=0.0),
)
# One linear layer with a dense MLP, one full layer with 8 experts of which a token takes 2.
MODEL = ModelConfig(
    width=16,
    num_layers=2,
    vocabulary_size=32,
    full_attention_layers=(1,),
    residual="plain",
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=4, value_width=4, decay_rank=2, chunk_tokens=8),
    full_attention=FullAttentionConfig(num_heads=2, query_rank=0, latent_width=8, nope_width=4, value_width=4),
    moe=MoeConfig(num_experts=8, experts_per_token=2, expert_width=8, latent_width=8, dense_width=24),
    vision=VisionConfig(num_layers=0),
)
CONFIG = RunConfig(model=MODEL, data=DataConfig(rows=8, row_tokens=10))
# Memory so fast that what lies between products takes no time.
EVEN = Rates(shares=dict.fromkeys(PEER_SHARES, 0.5), memory=1e12)


def step(config: RunConfig = CONFIG, *, tuning: Tuning | None = None, rates: Rates = EVEN, **mesh: int):
    config = dataclasses.replace(config, mesh=MeshConfig(**mesh))
    return StepClock(config, TOY, tuning=tuning or Tuning(), rates=rates).step(config)


def test_one_device_computes_and_exchanges_nothing():
    time = step()
    flops = forward_flops(MODEL, 10)
    # 80 tokens at half of 1e9 FLOP/s.
    assert time.forward == pytest.approx(80 * sum(flops.values()) / 0.5e9)
    assert time.backward == pytest.approx(2 * time.forward)
    # Of an MLP's three products, and of two between widths, the last is not done again.
    skipped = flops["head"] + (flops["dense MLP"] + flops["shared experts"]) / 3 + flops["latent projections"] / 2
    assert time.recompute == pytest.approx(80 * (sum(flops.values()) - skipped) / 0.5e9)
    assert time.communication_share == time.bubble == 0


def test_a_tensor_axis_halves_what_is_split_and_repeats_what_is_not():
    whole, split = step(), step(tensor=2)
    flops = forward_flops(MODEL, 10)
    # Router, latent projections, the decay's narrow projection (16 x 2), the latent's (16 x (8 + 8)).
    repeated = (
        flops["router"]
        + flops["latent projections"]
        + 2 * 16 * 2
        + 2 * 16 * (8 + MODEL.full_attention.shared_key_width)
    )
    assert whole.forward - split.forward == pytest.approx(80 * (sum(flops.values()) - repeated) / 2 / 0.5e9)


def test_sums_over_a_tensor_axis_by_hand():
    # An all-reduce among 2 of n bytes takes 2 x n / 2 / 1e6 s. Streams are 80 x 16 x 4 = 5,120 bytes: mixer and MLP of
    # both layers, and 80 x 8 x 4 = 2,560 of the experts, three times (forward, remat, backward); the embedding once.
    assert step(tensor=2).tensor_exchange == pytest.approx((3 * (4 * 5120 + 2560) + 5120) / 1e6)


def test_exchange_of_experts_by_hand():
    # 40 tokens a device, 2 choices: 80; buffers of ceil(2 x 80 / 2) = 80 rows for each of 2 devices, 8 values of 4
    # bytes: 5,120 bytes of which half leaves. There and back, three times.
    assert step(expert=2).expert_exchange == pytest.approx(3 * 2 * 5120 / 2 / 1e6)
    # Over 8 devices on 4 nodes: 20 choices, 8 x ceil(2 x 20 / 8) = 40 rows of 32 bytes, 6/8 of them over the network.
    assert step(expert=8).expert_exchange == pytest.approx(3 * 2 * 40 * 32 * 6 / 8 / 1e5)

    def moe(**settings):
        return dataclasses.replace(
            CONFIG, model=dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, **settings))
        )

    # Without gaps: the 80 choices alone.
    assert step(moe(transport="ragged"), expert=2).expert_exchange == pytest.approx(3 * 2 * 80 * 32 / 2 / 1e6)
    # By node, 8 devices on 4 nodes: the 10 rows to 3 other nodes, and in each of 4 nodes 2 x ceil(2 x 20 / 8) rows of
    # 32 bytes of which half leaves the device; there and back, three times.
    by_node = 3 * 2 * (3 * 10 * 32 / 1e5 + 4 * 10 * 32 / 2 / 1e6)
    assert step(moe(transport="by_node", node_devices=2), expert=8).expert_exchange == pytest.approx(by_node)
    # Half as many members in a node of as many devices where tensor shards lie between them.
    shards = step(moe(transport="by_node", node_devices=4), expert=4, tensor=2)
    assert shards.expert_exchange == step(moe(transport="by_node", node_devices=5), expert=4, tensor=2).expert_exchange
    assert shards.expert_exchange != step(moe(transport="by_node", node_devices=2), expert=4, tensor=2).expert_exchange
    # Round a ring of 2: the 40 rows once, the sums of their results twice.
    assert step(moe(transport="ring"), expert=2).expert_exchange == pytest.approx(3 * (1 + 2) * 40 * 32 / 1e6)
    # Over context and expert: 4 devices on 2 nodes, 20 tokens each, as over 4 devices of `expert` alone.
    spread = step(moe(expert_axes="context_and_expert"), context=2, expert=2)
    assert spread.expert_exchange == pytest.approx(step(expert=4).expert_exchange)


def test_exchange_of_split_rows_by_hand():
    # 8 rows. The linear layer: 2 chunks a device, 2 heads, 4 x (4 + 4) numbers of 4 bytes, of which half come from the
    # other one of 2 devices. The full layer: rows of 12 positions, 8 + 8 numbers. Three times.
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, row_tokens=12))
    states, latents = 8 * 4 * 2 * 32 * 4, 8 * 12 * (8 + MODEL.full_attention.shared_key_width) * 4
    assert step(config, context=2).context_exchange == pytest.approx(3 * (states + latents) / 2 / 1e6)


def test_gathers_of_weights_hide_under_computing():
    exposed = step(fsdp=2).weight_exchange
    hidden = step(fsdp=2, rates=dataclasses.replace(EVEN, overlap=1.0))
    compute = hidden.forward + hidden.backward + hidden.recompute
    assert hidden.weight_exchange == pytest.approx(max(0.0, exposed - compute))
    # Entries split over fsdp, 4 bytes each. Once each: tables 2 x 512. The linear layer: q, k, v, gate, beta, decay
    # down, output. The full layer: q, latent, keys, values, gate, output. MLPs; router; latent projections;
    # shared and routed experts.
    tables = 2 * 16 * 32
    linear = 3 * 16 * 8 + 16 * 8 + 16 * 2 + 16 * 2 + 8 * 16
    full = 16 * 2 * 12 + 16 * 16 + 8 * 8 + 8 * 8 + 16 * 8 + 8 * 16
    mlps = 3 * 16 * 24 + 16 * 8 + 2 * 16 * 8 + 3 * 16 * 8 + 8 * 3 * 8 * 8
    # Gathered and scattered: tables twice, layers (again under remat) three times; half of each moves at 1e6 bytes/s.
    assert exposed == pytest.approx((2 * tables + 3 * (linear + full + mlps)) * 4 / 2 / 1e6)


def test_results_on_the_host_cost_their_way_there_and_back():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, remat_offload=("experts",)))
    rates = dataclasses.replace(EVEN, overlap=0.25)
    time, split = step(config, rates=rates), step(config, rates=rates, fsdp=2)
    # Of 80 tokens, 8 numbers of 4 bytes in the one layer with experts, at 1e6 bytes/s; a quarter lies under computing.
    assert time.offload == pytest.approx(2 * 80 * 8 * 4 / 1e6 * 0.75)
    assert split.offload == pytest.approx(time.offload / 2)
    assert time.recompute < step().recompute
    assert step().offload == 0


def test_frozen_weights_are_gathered_but_their_gradients_never_scattered():
    full, lora = step(fsdp=2), step(fsdp=2, tuning=Tuning(kind="lora", rank=0))
    assert 0.5 < lora.weight_exchange / full.weight_exchange < 0.7
    assert lora.gradient_sum == 0 < full.gradient_sum
    assert step(replica=2).gradient_sum > full.gradient_sum


def test_bubble_fractions_by_hand():
    assert bubble_fraction(4, 8) == 3 / 11
    assert bubble_fraction(1, 8) == 0
    # Two full layers and a table so small that the head is nothing: even stages.
    even = dataclasses.replace(MODEL, full_attention_layers=(0, 1), vocabulary_size=1)
    even = dataclasses.replace(even, moe=dataclasses.replace(even.moe, num_dense_layers=2))
    config = dataclasses.replace(CONFIG, model=even, training=TrainingConfig(accumulation=8))
    time = step(config, pipe=2)
    compute = time.forward + time.backward + time.recompute
    assert time.bubble / (compute + time.bubble) == pytest.approx(bubble_fraction(2, 8), rel=0.03)
    # The layers of the model as it is are not equally dear: the slower stage sets the pace.
    assert step(dataclasses.replace(config, model=MODEL), pipe=2).bubble > time.bubble


def test_what_travels_in_the_next_tick_counts_only_beyond_it():
    config = dataclasses.replace(CONFIG, training=TrainingConfig(accumulation=4, pipeline_transfer="direct"))
    # 2 (4 + 1) ticks of 20 tokens of 16 float32 values, inside a node.
    assert step(config, pipe=2).pipe_exchange == pytest.approx(2 * 5 * 20 * 16 * 4 / 1e6)
    hidden = dataclasses.replace(CONFIG, training=TrainingConfig(accumulation=4))
    time, message = step(hidden, pipe=2), 20 * 16 * 4 / 1e6
    forward, backward = time.forward / 4, (time.backward + time.recompute) / 4
    assert time.pipe_exchange == pytest.approx(5 * (max(0, message - forward) + max(0, message - backward)))


def test_muon_pays_for_its_products():
    muon = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, name="muon"))
    assert step(muon).optimizer > 10 * step().optimizer
