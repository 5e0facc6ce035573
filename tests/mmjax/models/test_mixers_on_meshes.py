"""Mixers split over devices equal one device, with every option on."""

import dataclasses

import jax
import numpy as np
import pytest

from mmjax.config import (
    ActivationConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    HyperConnectionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RouterConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.models.layers import initial_arrays
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import abstract_state, make_value_and_gradient, place_batch

GROUPED = ModelConfig(
    width=8,
    num_layers=2,
    vocabulary_size=32,
    full_attention_layers=(0, 1),
    full_attention_kind="grouped",
    residual="plain",
    norm_scale="zero_centred",
    mlp_bias=True,
    tied_head=True,
    initializer_range=0.3,
    grouped_attention=GroupedAttentionConfig(
        num_heads=4,
        num_key_heads=2,
        head_width=6,
        projection_bias=True,
        output_bias=True,
        head_norm=True,
        output_gate="sigmoid",
        rotary=RotaryConfig(width=4, base=20.0),
    ),
    moe=MoeConfig(num_dense_layers=2, dense_width=12),
    activation=ActivationConfig(kind="silu"),
    vision=VisionConfig(num_layers=0),
    parameter_dtype="float64",
    compute_dtype="float64",
)


GATED_NET = dataclasses.replace(
    GROUPED,
    num_layers=1,
    full_attention_layers=(),
    linear_attention_kind="gated_delta_net",
    tied_head=False,
    gated_delta_net=GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_width=4, value_width=6),
    moe=MoeConfig(
        num_experts=4,
        experts_per_token=2,
        expert_width=6,
        latent_width=0,
        shared_width=10,
        shared_gate="sigmoid",
        num_dense_layers=0,
        router=RouterConfig(scoring="softmax", balancing="none", correction_bias=False),
    ),
)
HYPER = dataclasses.replace(
    GROUPED,
    num_layers=1,
    full_attention_layers=(0,),
    residual="hyper",
    hyper_connections=HyperConnectionConfig(num_streams=2, sinkhorn_steps=3),
    moe=MoeConfig(num_dense_layers=1, dense_width=12),
    activation=ActivationConfig(kind="clipped_silu", linear_beta=0.3),
)
MODELS = {"grouped attention": GROUPED, "gated delta net": GATED_NET, "hyper-connections": HYPER}


def loss_and_gradients(model: ModelConfig, mesh_config: MeshConfig, batch) -> tuple[float, dict[str, np.ndarray]]:
    config = RunConfig(model=model, mesh=mesh_config)
    mesh = make_mesh(mesh_config)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh)).parameters
    parameters = initial_arrays(define(model).parameters, jax.random.key(0))
    for number, (path, array) in enumerate(parameters.items()):
        # Biases and centred norms start at zero, which would hide them.
        noise = 0.1 * jax.random.normal(jax.random.key(number), array.shape, array.dtype)
        parameters[path] = jax.device_put(array + noise, shardings[path])
    step = jax.jit(make_value_and_gradient(config, mesh))
    loss, _, _, gradients = step(parameters, {}, place_batch(batch, mesh))
    return float(loss), jax.device_get(gradients)


@pytest.mark.parametrize("mesh", [MeshConfig(tensor=2), MeshConfig(fsdp=2)], ids=["tensor", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_two_devices_give_the_loss_and_gradients_of_one(name, mesh, make_batch):
    model = MODELS[name]
    batch = make_batch(model, rows=2, row_tokens=20, row_patches=8)
    batch.feature_index[...], batch.patch_segment_ids[...], batch.patch_feature[...] = -1, 0, -1
    with jax.enable_x64(True):
        loss, gradients = loss_and_gradients(model, MeshConfig(), batch)
        split_loss, split_gradients = loss_and_gradients(model, mesh, batch)
    assert split_loss == pytest.approx(loss, rel=1e-12)
    for path, gradient in gradients.items():
        assert np.abs(gradient).max() > 0, path
        assert np.abs(split_gradients[path] - gradient).max() <= 1e-11 * np.abs(gradient).max(), path
