"""A run that trains parts of its model: their gradients are those of the whole, and nothing else moves."""

import dataclasses

import jax
import numpy as np
import pytest

from mmjax.config import (
    DataConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RunConfig,
    VisionConfig,
    check,
)
from mmjax.data.loader import Loader
from mmjax.data.sources import digits
from mmjax.errors import ConfigurationError
from mmjax.models.multimodal import begins, define
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import init_state, make_train_step, make_value_and_gradient, place_batch

CONFIG = RunConfig(
    model=ModelConfig(
        width=16,
        num_layers=1,
        full_attention_layers=(0,),
        linear_attention=LinearAttentionConfig(num_heads=1, key_width=4, value_width=4, decay_rank=4, chunk_tokens=16),
        full_attention=FullAttentionConfig(num_heads=1, query_rank=8, latent_width=8, nope_width=4, shared_key_width=4),
        moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, num_dense_layers=0),
        vision=VisionConfig(num_layers=1, width=8, num_heads=1, head_width=8, hidden_width=16, patch_pixels=4),
        residual="plain",
        remat="none",
    ),
    data=DataConfig(rows=2, row_tokens=48, row_patches=32, image_max_patches=16),
    optimizer=OptimizerConfig(warmup_steps=0, max_gradient_norm=0.0, weight_decay=0.0),
)


def test_only_the_named_parts_move_with_the_gradients_that_the_whole_model_gives_them(monkeypatch):
    monkeypatch.setattr(digits, "EPOCH_SAMPLES", 32)
    config = dataclasses.replace(CONFIG, trained=("projector", "decoder.head"))
    mesh = make_mesh(config.mesh)
    batch = place_batch(Loader(config.data, config.model.vision, 0, model=config.model).batch(0), mesh)
    # The step gives its state away.
    whole, state = init_state(CONFIG, mesh), init_state(config, mesh)
    before = jax.device_get(whole.parameters)
    assert set(state.parameters) == {path for path in before if path.startswith("projector.") or path == "decoder.head"}
    for path, array in jax.device_get(state.parameters | state.frozen).items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)
    gradient_of = jax.jit(make_value_and_gradient(CONFIG, mesh))
    _, _, _, gradients = jax.device_get(gradient_of(whole.parameters, whole.router_biases, batch))
    biases = jax.device_get(state.router_biases)
    after, _ = make_train_step(config, mesh)(state, batch)
    for path, array in jax.device_get(after.parameters).items():
        # AdamW's first step has the size of the learning rate and the sign of the gradient.
        is_clear = np.abs(gradients[path]) > 1e-6
        step = (before[path] - array) / 3e-3
        assert is_clear.any()
        np.testing.assert_allclose(step[is_clear], np.sign(gradients[path][is_clear]), atol=0.05, err_msg=path)
    for path, array in jax.device_get(after.frozen).items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)
    for path, array in jax.device_get(after.router_biases).items():
        np.testing.assert_array_equal(array, biases[path], err_msg=path)


def test_one_trained_weight_of_experts_has_its_gradient_from_every_round_of_the_exchange(monkeypatch):
    monkeypatch.setattr(digits, "EPOCH_SAMPLES", 32)
    moe = dataclasses.replace(CONFIG.model.moe, capacity_factor=0.3)
    model = dataclasses.replace(CONFIG.model, moe=moe)
    found, rounds = [], []
    for sizes in (MeshConfig(), MeshConfig(expert=2)):
        config = dataclasses.replace(CONFIG, model=model, mesh=sizes, trained=("*.mlp.down",))
        mesh = make_mesh(sizes)
        batch = place_batch(Loader(config.data, config.model.vision, 0, model=config.model).batch(0), mesh)
        state = init_state(config, mesh)
        gradient_of = jax.jit(make_value_and_gradient(config, mesh))
        _, report, _, gradients = gradient_of(state.parameters, state.router_biases, batch, state.frozen)
        ((_, gradient),) = jax.device_get(gradients).items()
        found.append(gradient)
        rounds += [int(router.rounds.sum()) for router in report.routers.values()]
    assert rounds[1] > 2  # on two devices
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4 * np.abs(found[0]).max())


@pytest.mark.parametrize(("trained", "moves"), [("*.router", True), ("*.mlp.down", False)])
def test_a_correction_bias_moves_with_the_weights_of_its_router_and_with_nothing_else(monkeypatch, trained, moves):
    monkeypatch.setattr(digits, "EPOCH_SAMPLES", 32)
    config = dataclasses.replace(CONFIG, trained=(trained,))
    mesh = make_mesh(config.mesh)
    batch = place_batch(Loader(config.data, config.model.vision, 0, model=config.model).batch(0), mesh)
    state = init_state(config, mesh)
    before = jax.device_get(state.router_biases)
    after, metrics = make_train_step(config, mesh)(state, batch)
    assert metrics["is_finite"] and before
    for path, bias in jax.device_get(after.router_biases).items():
        assert bool(np.any(bias != before[path])) == moves, path


def test_a_name_of_no_part_and_parts_beside_adapters_are_refused():
    with pytest.raises(ConfigurationError, match=r"'projecter'.*decoder\.head.*projector"):
        define(CONFIG.model, ("projecter",))
    with pytest.raises(ConfigurationError, match="'proj'"):
        define(CONFIG.model, ("proj",))
    both = dataclasses.replace(CONFIG, trained=("projector",), lora=LoraConfig(rank=2))
    assert "trained" in [fault.path for fault in check(both)]


def test_a_part_is_named_by_the_first_words_of_its_path_or_by_words_anywhere_in_it():
    path = "decoder.segments.0.layers.1.mixer.indexer.key"
    for names in (("vision", "decoder"), ("*.indexer",), ("*.mixer.indexer.key",)):
        assert begins(path, names)
    for names in (("decode",), ("indexer",), ("*.index",)):
        assert not begins(path, names)
