"""Padding is nothing: rows, tokens and patches of it change no loss, gradient or statistic of a router."""

from collections.abc import Callable

import jax
import numpy as np

from mmjax.config import (
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.data.batch import Batch
from mmjax.models.multimodal import Arrays
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import abstract_state, make_value_and_gradient, place_batch

MODEL = ModelConfig(
    width=16,
    num_layers=2,
    vocabulary_size=64,
    full_attention_layers=(1,),
    residual_block_layers=1,
    initializer_range=0.3,
    linear_attention=LinearAttentionConfig(num_heads=1, key_width=4, value_width=4, decay_rank=4, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=1,
        query_rank=8,
        latent_width=8,
        nope_width=4,
        shared_key_width=4,
        value_width=4,
        query_chunk_tokens=16,
        indexer=IndexerConfig(stage="sparse", head_width=4, top_k=6),
    ),
    moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, num_dense_layers=0),
    vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16, patch_pixels=2),
    parameter_dtype="float64",
    compute_dtype="float64",
    remat="none",
)


def doubled(batch: Batch) -> Batch:
    """Every row twice."""
    return Batch(*(np.concatenate([array, array]) for array in batch))


def half_padding(batch: Batch) -> Batch:
    """The rows, then as many of padding; all padding holds arbitrary tokens, and patches that are no numbers."""
    random, twice = np.random.default_rng(1), doubled(batch)
    is_padding = np.concatenate([batch.segment_ids, np.zeros_like(batch.segment_ids)]) == 0
    is_patch_padding = np.concatenate([batch.patch_segment_ids, np.zeros_like(batch.patch_segment_ids)]) == 0
    arbitrary = random.integers(0, MODEL.vocabulary_size, is_padding.shape, dtype=np.int32)
    return twice._replace(
        tokens=np.where(is_padding, arbitrary, twice.tokens),
        targets=np.where(is_padding, arbitrary[::-1], twice.targets),
        positions=np.where(is_padding, arbitrary, twice.positions),
        loss_weight=np.where(is_padding, 0, twice.loss_weight),
        segment_ids=np.where(is_padding, 0, twice.segment_ids),
        feature_index=np.where(is_padding, -1, twice.feature_index),
        patches=np.where(is_patch_padding[..., None], np.float32(np.nan), twice.patches),
        patch_segment_ids=np.where(is_patch_padding, 0, twice.patch_segment_ids),
        patch_feature=np.where(is_patch_padding[:, ::4], -1, twice.patch_feature),
    )


def random_arrays(config: RunConfig, mesh: jax.sharding.Mesh) -> tuple[Arrays, Arrays]:
    """Parameters and router biases, none of them at a value that hides a gradient."""
    random, state = np.random.default_rng(0), abstract_state(config, mesh)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(random.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(draw, (state.parameters, state.router_biases))


def test_half_a_batch_of_padding_changes_no_loss_no_gradient_and_no_statistic_of_a_router(
    make_batch: Callable[..., Batch],
) -> None:
    # Over two devices, one of which gets nothing but padding.
    mesh_config = MeshConfig(expert=2)
    mesh = make_mesh(mesh_config)
    batch = make_batch(MODEL, rows=4, row_tokens=20, row_patches=16)
    with jax.enable_x64(True):
        config = RunConfig(model=MODEL, mesh=mesh_config)
        parameters, biases = random_arrays(config, mesh)
        program = jax.jit(make_value_and_gradient(config, mesh))

        def run(batch: Batch):
            return jax.device_get(program(parameters, biases, place_batch(batch, mesh)))

        loss, report, counts, gradients = run(doubled(batch))
        padded_loss, padded_report, padded_counts, padded_gradients = run(half_padding(batch))
    num_tokens = np.sum(batch.segment_ids > 0)
    assert counts == {name: 2 * count for name, count in padded_counts.items()}
    assert padded_counts["real_tokens"] == num_tokens
    for name, router in padded_report.routers.items():
        assert router.load.sum() == 2 * num_tokens and (router.histogram.sum(axis=-1) == num_tokens).all()
        twice = jax.tree.map(lambda count: 2 * count, router)
        # All but the rounds of the exchange, which tokens share.
        twice = twice._replace(rounds=report.routers[name].rounds)
        jax.tree.map(np.testing.assert_array_equal, report.routers[name], twice)
    assert abs(padded_loss - loss) <= 1e-12 * abs(loss)
    assert abs(2 * padded_report.indexer_loss - report.indexer_loss) <= 1e-12 * report.indexer_loss
    for name, gradient in gradients.items():
        assert np.abs(padded_gradients[name] - gradient).max() <= 1e-11 * np.abs(gradient).max(), name
