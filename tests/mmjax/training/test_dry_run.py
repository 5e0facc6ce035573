import dataclasses

import jax
import numpy as np
import pytest

from mmjax import axes
from mmjax.config import (
    AudioConfig,
    DataConfig,
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.cost import audio_forward_flops
from mmjax.training import dry_run
from mmjax.training.step import abstract_state

# Kimi-K3, from its released configuration.
K3 = ModelConfig(
    width=7168,
    num_layers=93,
    vocabulary_size=163840,
    full_attention_layers=(*range(3, 92, 4), 92),
    residual_block_layers=12,
    linear_attention=LinearAttentionConfig(
        num_heads=96, key_width=128, value_width=128, decay_rank=128, chunk_tokens=64
    ),
    full_attention=FullAttentionConfig(
        num_heads=96, query_rank=1536, latent_width=512, nope_width=128, shared_key_width=64, value_width=128
    ),
    moe=MoeConfig(
        num_experts=896,
        experts_per_token=16,
        expert_width=3072,
        latent_width=3584,
        num_shared_experts=2,
        dense_width=33792,
    ),
    vision=VisionConfig(num_layers=27, width=1024, num_heads=12, head_width=128, hidden_width=4096, patch_pixels=14),
)


def test_forward_flops_of_kimi_k3_are_twice_its_known_active_weights() -> None:
    flops = dry_run.forward_flops(K3, row_tokens=8192)
    # Published counts a layer, less what no matrix holds: A_log, decay bias, norms, correction bias.
    assert flops["linear attention projections"] == 2 * 69 * (443_740_384 - 96 - 12_288 - 128)
    assert flops["full attention projections"] == 2 * 24 * (232_196_096 - 1536 - 512)
    non_routed = flops["router"] + flops["latent projections"] + flops["shared experts"]
    assert non_routed == 2 * 92 * (189_927_808 - 896 - 3584)
    assert flops["routed experts"] == 2 * 92 * 16 * 33_030_144
    without_weights = ("linear attention recurrence", "full attention scores", "attention residuals")
    weights = sum(value for part, value in flops.items() if part not in without_weights) / 2
    assert weights == pytest.approx(104.19e9, rel=2e-4)


def test_attention_flops_of_kimi_k3_by_hand() -> None:
    flops = dry_run.forward_flops(K3, row_tokens=4095)
    assert flops["linear attention recurrence"] == 69 * 96 * (6 * 128**2 + 3 * 64 * 128 + 64**2)
    assert flops["full attention scores"] == 24 * 96 * 2 * (192 + 128) * 2048
    # Two mixes for each of 93 layers and one at the end, over 2 to 9 sources, the first mix of all over 1.
    sources = sum((block + 1) + (block + 2) + 11 * 2 * (block + 2) for block in range(7)) + 8 + 9 + 8 * 2 * 9 + 9
    assert flops["attention residuals"] == 6 * 7168 * sources


def test_a_sparse_indexer_bounds_the_keys_of_full_attention() -> None:
    indexer = IndexerConfig(stage="sparse", num_heads=32, head_width=128, top_k=2048)
    sparse = dataclasses.replace(K3, full_attention=dataclasses.replace(K3.full_attention, indexer=indexer))
    flops = dry_run.forward_flops(sparse, row_tokens=1 << 20)
    keys = (2048 * 2049 / 2 + ((1 << 20) - 2048) * 2048) / (1 << 20)
    assert flops["full attention scores"] == pytest.approx(24 * 96 * 2 * (2 * 512 + 64) * keys)
    assert flops["indexer"] == 24 * 2 * (7_438_592 - 2 * 128 + 32 * 128 * ((1 << 20) + 1) / 2)


def test_vision_flops_of_kimi_k3_are_twice_its_weights_and_its_attention() -> None:
    data = DataConfig(image_max_patches=4096)
    tower = 401_214_464 - 64 * 64 * 1024 - (2 * 27 + 1) * 1024
    projector = (46_144_512 - 7168) / 4
    assert dry_run.vision_forward_flops(K3, data) == 2 * (tower + projector) + 27 * 4 * 1536 * 4096


def test_a_step_counts_its_clips_of_sound() -> None:
    model = ModelConfig(num_layers=2, full_attention_layers=(1,), audio=AudioConfig(num_layers=1, clip_frames=100))
    silent, config = (RunConfig(model=model, data=DataConfig(row_clips=clips, rows=4)) for clips in (0, 3))
    mesh = jax.sharding.AbstractMesh(tuple(config.mesh.sizes.values()), axes.MESH_AXES)
    state = abstract_state(config, mesh)
    silent, heard = (dry_run.estimate(one, state) for one in (silent, config))
    assert heard.training_clip_flops == 3 * audio_forward_flops(model) > 0
    assert heard.training_step_flops - silent.training_step_flops == 4 * 3 * heard.training_clip_flops
    assert "training FLOPs of a clip" in dict(heard.rows())
    # Towers that are frozen go forward alone.
    frozen = dataclasses.replace(config, trained=("decoder",))
    frozen = dry_run.estimate(frozen, abstract_state(frozen, mesh))
    assert frozen.training_clip_flops == audio_forward_flops(model)
    assert frozen.training_patch_flops == frozen.vision_forward_flops > 0


def test_bytes_of_a_device_are_those_that_a_device_holds() -> None:
    mesh_config = MeshConfig(fsdp=2, expert=2, tensor=2)
    config = RunConfig(mesh=mesh_config, model=ModelConfig(num_layers=2, full_attention_layers=(1,)))
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        abstract_state(config, make_mesh(mesh_config)),
    )
    estimate = dry_run.estimate(config, state)

    def held(tree: object) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    assert estimate.parameter_bytes == held((state.parameters, state.router_biases))
    assert estimate.gradient_bytes == held(state.parameters)
    assert estimate.optimizer_bytes == held(state.optimizer)
    # The same without devices, as rows to print.
    assert dry_run.report(config) == estimate.rows()
