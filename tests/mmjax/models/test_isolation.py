"""Documents of a packed row do not see each other: the whole model, with every mixer, decaying slowly."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import (
    FullAttentionConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    VisionConfig,
)
from mmjax.data.batch import Batch
from mmjax.models.layers import initial_arrays, use
from mmjax.models.multimodal import define

# Documents of 17 and 19 tokens, then padding; the first ends just behind the edge of a chunk.
LENGTHS, ROW_TOKENS, PATCHES = (17, 19), 40, 8
VOCABULARY = 64


def model(*, mixer: str, mlp: str, decay: str = "bounded", indexer: str = "none") -> ModelConfig:
    return ModelConfig(
        width=16,
        num_layers=1,
        vocabulary_size=VOCABULARY,
        full_attention_layers=(0,) if mixer == "full" else (),
        residual_block_layers=1,
        initializer_range=0.3,
        linear_attention=LinearAttentionConfig(
            num_heads=2, key_width=4, value_width=4, decay_rank=4, decay=decay, chunk_tokens=16
        ),
        full_attention=FullAttentionConfig(
            num_heads=2,
            query_rank=8,
            latent_width=8,
            nope_width=4,
            shared_key_width=4,
            value_width=4,
            query_chunk_tokens=16,
            indexer=IndexerConfig(stage=indexer, head_width=4, top_k=6),
        ),
        moe=MoeConfig(
            num_experts=4,
            experts_per_token=2,
            expert_width=8,
            latent_width=8,
            num_dense_layers=0 if mlp == "moe" else 1,
            dense_width=16,
        ),
        vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16, patch_pixels=2),
        parameter_dtype="float64",
        compute_dtype="float64",
        remat="none",
    )


GROUPED = dataclasses.replace(
    model(mixer="full", mlp="dense"),
    full_attention_kind="grouped",
    grouped_attention=GroupedAttentionConfig(
        num_heads=2, num_key_heads=1, head_width=8, rotary=RotaryConfig(width=8), query_chunk_tokens=16
    ),
)
GATED_NET = dataclasses.replace(
    model(mixer="linear", mlp="dense"),
    linear_attention_kind="gated_delta_net",
    gated_delta_net=GatedDeltaNetConfig(
        num_key_heads=1, num_value_heads=2, key_width=4, value_width=4, chunk_tokens=16
    ),
)
MODELS = {
    "grouped attention": GROUPED,
    "gated delta net": GATED_NET,
    "linear attention": model(mixer="linear", mlp="dense"),
    "full attention": model(mixer="full", mlp="dense"),
    "sparse attention": model(mixer="full", mlp="dense", indexer="sparse"),
    "mixture of experts": model(mixer="linear", mlp="moe", decay="softplus"),
}


def two_documents() -> Batch:
    """One row: two documents over tokens of their own, each with a picture of 2 x 4 patches behind its second token."""
    random = np.random.default_rng(0)
    batch = Batch(
        tokens=np.zeros((1, ROW_TOKENS), np.int32),
        targets=random.integers(0, VOCABULARY, (1, ROW_TOKENS), dtype=np.int32),
        loss_weight=np.zeros((1, ROW_TOKENS), np.float32),
        segment_ids=np.zeros((1, ROW_TOKENS), np.int32),
        positions=np.zeros((1, ROW_TOKENS), np.int32),
        feature_index=np.full((1, ROW_TOKENS), -1, np.int32),
        patches=random.normal(size=(1, 2 * PATCHES, 12)),
        patch_segment_ids=np.repeat(np.array([[1, 2]], np.int32), PATCHES, axis=1),
        patch_position=np.tile(
            np.array([(0, r, c + w) for w in (0, 2) for r in (0, 1) for c in (0, 1)], np.int32), (2, 1)
        )[None],
        patch_grid=np.tile(np.array([1, 2, 4], np.int32), (1, 2 * PATCHES, 1)),
        patch_feature=np.arange(4, dtype=np.int32)[None],
        spectrograms=np.zeros((1, 0, 0, 0), np.float32),
        sound_index=np.full((1, ROW_TOKENS), -1, np.int32),
    )
    start = 0
    for document, length in enumerate(LENGTHS):
        here = slice(start, start + length)
        batch.tokens[0, here] = random.integers(0, 30, length) + 30 * document
        batch.segment_ids[0, here] = document + 1
        batch.positions[0, here] = np.arange(length)
        batch.feature_index[0, start + 2 : start + 4] = 2 * document, 2 * document + 1
        start += length
    return batch


def changed(batch: Batch, document: int) -> Batch:
    """Other tokens (from the same part of the vocabulary) and another picture in document 0 or 1."""
    tokens = np.where(batch.segment_ids == document + 1, (batch.tokens + 7) % 30 + 30 * document, batch.tokens)
    is_there = (batch.patch_segment_ids == document + 1)[..., None]
    return batch._replace(tokens=tokens.astype(np.int32), patches=np.where(is_there, -3 * batch.patches, batch.patches))


def make_program(config: ModelConfig, one_device: Callable) -> Callable:
    """`(parameters, batch, document) -> (logits, gradients of that document's loss)`, wrt parameters and patches."""
    definition = define(config)
    biases = initial_arrays(definition.router_biases, jax.random.key(1))

    def loss(parameters: Any, patches: jax.Array, batch: Batch, document: jax.Array) -> tuple[jax.Array, jax.Array]:
        network = definition.assemble(parameters, biases)
        hidden, _ = network(batch._replace(patches=patches))
        logits = jnp.einsum("bsd,dw->bsw", hidden, use(network.decoder.head, hidden.dtype))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(batch.segment_ids == document + 1, picked, 0)), logits

    def run(parameters: Any, batch: Batch, document: jax.Array) -> tuple[jax.Array, Any]:
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        gradients, logits = gradient(parameters, batch.patches, batch, document)
        return logits, gradients

    return jax.jit(one_device(run))


def slow_parameters(config: ModelConfig) -> dict[str, jax.Array]:
    """Random parameters whose log decays are about -1e-3: a state that leaked would be seen to the end of a row."""
    parameters = initial_arrays(define(config).parameters, jax.random.key(0))
    # bounded: -5 sigmoid(-8.5); softplus: -softplus(-6.9)
    is_bounded = config.linear_attention_kind == "kimi_delta" and config.linear_attention.decay == "bounded"
    bias = -8.5 if is_bounded else -6.9
    values = {"log_rate": 0.0, "decay_bias": bias}
    for path, array in parameters.items():
        name = path.rsplit(".", 1)[-1]
        if name in values:
            parameters[path] = jnp.full_like(array, values[name])
        elif name in ("decay_up", "decay"):
            parameters[path] = 0.1 * array
        elif name == "query" and "residual" in path:
            # Zero at the start, which hides half of the gradients.
            parameters[path] = jnp.cos(jnp.arange(array.size, dtype=array.dtype)).reshape(array.shape)
    return parameters


@pytest.mark.parametrize("name", MODELS)
def test_changing_one_document_moves_nothing_of_the_other(name: str, one_device: Callable) -> None:
    with jax.enable_x64(True):
        config = MODELS[name]
        program, parameters = make_program(config, one_device), slow_parameters(config)
        batch = two_documents()
        for document in (0, 1):
            is_kept = batch.segment_ids[0] == document + 1
            is_changed = batch.segment_ids[0] == 2 - document
            logits, gradients = jax.device_get(program(parameters, batch, document))
            other = changed(batch, 1 - document)
            moved_logits, moved_gradients = jax.device_get(program(parameters, other, document))
            assert np.abs(moved_logits - logits)[0, is_changed].min(axis=-1).max() > 1e-3
            assert np.abs(moved_logits - logits)[0, is_kept].max() <= 1e-12
            jax.tree.map(assert_close, moved_gradients[0], gradients[0])
            # The other document's own part in the loss is nothing at all.
            parameter_gradients, patch_gradients = gradients
            there = slice(PATCHES * (1 - document), PATCHES * (2 - document))
            rows = parameter_gradients["decoder.embedding"]
            own, others = (rows[30 * number : 30 * number + 30] for number in (document, 1 - document))
            assert np.abs(others).max() == 0 < np.abs(own).max()
            assert np.abs(patch_gradients[0, there]).max() == 0 < np.abs(patch_gradients).max()

        # The same row taken for one document: the change is seen, so these documents could have been.
        joined = batch._replace(segment_ids=(batch.segment_ids > 0).astype(np.int32))
        both = [
            program(parameters, one, 0)[0]
            for one in (joined, changed(batch, 0)._replace(segment_ids=joined.segment_ids))
        ]
        assert np.abs(both[0] - both[1])[0, batch.segment_ids[0] == 2].max(axis=-1).min() > 1e-3


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() <= 1e-12 * max(1.0, np.abs(theirs).max())
