"""The routers' losses against NumPy, and over documents that lie on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mmjax.config import MeshConfig
from mmjax.models.router_losses import document_counts, load_balance_loss, z_loss
from mmjax.parallel.context import join_positions, split_positions
from mmjax.parallel.mesh import make_mesh

ROWS, POSITIONS, EXPERTS, TAKEN = 3, 16, 5, 2
# Documents that begin and end inside a chunk of two positions, at its edges, and cover several; padding.
SEGMENT_IDS = np.array([[1] * 3 + [2] + [3] * 9 + [0] * 3, [1] * 16, [1, 2, 2, 3, 3, 3] + [4] * 2 + [5] * 8], np.int32)


def draw():
    random = np.random.default_rng(0)
    logits = random.normal(size=(ROWS, POSITIONS, EXPERTS))
    return logits, np.argsort(-logits, axis=-1)[:, :, :TAKEN].astype(np.int32)


@pytest.mark.parametrize("over", ["batch", "document"])
def test_the_losses_follow_their_formulas_and_skip_padding(one_device, over):
    with jax.enable_x64(True):
        logits, index = draw()
        is_real = SEGMENT_IDS > 0
        groups = [is_real]
        if over == "document":
            groups = [
                (np.arange(ROWS)[:, None] == row) & (document == SEGMENT_IDS)
                for row in range(ROWS)
                for document in range(1, SEGMENT_IDS[row].max() + 1)
            ]
        scores = 1 / (1 + np.exp(-logits))
        probability = scores / scores.sum(axis=-1, keepdims=True)
        expected, coefficient = 0.0, np.zeros_like(logits)
        for group in groups:
            fraction = np.bincount(index[group].reshape(-1), minlength=EXPERTS) / (group.sum() * TAKEN)
            expected += group.sum() * EXPERTS * np.sum(fraction * probability[group].mean(axis=0))
            coefficient[group] = EXPERTS * fraction

        @one_device
        def losses(logits, index, segment_ids):
            def balance(logits):
                return load_balance_loss(jax.nn.sigmoid(logits), index, segment_ids, over)

            return *jax.value_and_grad(balance)(logits), z_loss(logits, segment_ids)

        found, gradient, z = losses(jnp.asarray(logits), jnp.asarray(index), jnp.asarray(SEGMENT_IDS))
        np.testing.assert_allclose(found, expected, rtol=1e-13)
        np.testing.assert_allclose(z, np.sum(np.log(np.exp(logits).sum(axis=-1))[is_real] ** 2), rtol=1e-13)
        through_scores = coefficient - np.sum(coefficient * probability, axis=-1, keepdims=True)
        expected_gradient = through_scores * probability * (1 - scores) * is_real[:, :, None]
        np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-13)


def test_a_document_on_several_devices_is_counted_whole():
    random = np.random.default_rng(0)
    taken = random.integers(0, 9, (ROWS, POSITIONS, EXPERTS), np.int32) * (SEGMENT_IDS > 0)[:, :, None]
    tokens = PartitionSpec(None, "context")
    count = jax.jit(
        jax.shard_map(
            document_counts, mesh=make_mesh(MeshConfig(context=4)), in_specs=(tokens, tokens), out_specs=tokens
        )
    )
    found = join_positions(np.asarray(count(split_positions(taken, 4), split_positions(SEGMENT_IDS, 4))), 4)
    for row, position in np.argwhere(SEGMENT_IDS > 0):
        is_same = SEGMENT_IDS[row] == SEGMENT_IDS[row, position]
        np.testing.assert_array_equal(found[row, position], taken[row, is_same].sum(axis=0))
