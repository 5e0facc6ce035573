"""What the backward pass keeps, and where, changes no number."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mmjax import train
from mmjax.config import (
    DataConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
    check,
)
from mmjax.monitor.metrics import read_lines
from mmjax.parallel.mesh import make_mesh
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.step import abstract_state, init_state, make_value_and_gradient, place_batch

MODEL = ModelConfig(
    width=16,
    num_layers=4,
    vocabulary_size=32,
    # Two layers, twice.
    full_attention_layers=(1, 3),
    residual="plain",
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=8, value_width=8, decay_rank=4, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=2, query_rank=8, latent_width=8, nope_width=8, shared_key_width=4, value_width=8
    ),
    moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, num_dense_layers=0),
    vision=VisionConfig(num_layers=0),
    parameter_dtype="float64",
    compute_dtype="float64",
)
RUN = RunConfig(model=MODEL, mesh=MeshConfig(fsdp=2), data=DataConfig(rows=2, row_tokens=12))


def gradient(**changes):
    """Loss and gradients of one batch under these settings of remat."""
    config = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, **changes))
    mesh = make_mesh(config.mesh)
    state, random = init_state(config, mesh), np.random.default_rng(0)
    batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_batch(config, mesh))
    tokens = random.integers(0, 32, (2, 13), np.int32)
    batch = batch._replace(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_weight=np.ones((2, 12), np.float32),
        segment_ids=np.repeat(np.array([[1, 2, 0]], np.int32), [5, 5, 2], axis=1).repeat(2, axis=0),
        feature_index=np.full((2, 12), -1, np.int32),
    )
    step = jax.jit(make_value_and_gradient(config, mesh))
    loss, _, _, gradients = step(state.parameters, state.router_biases, place_batch(batch, mesh))
    return loss, gradients


@pytest.fixture(scope="module")
def expected():
    with jax.enable_x64(True):
        return gradient(remat="none")


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "layer"},
        {"remat": "layer", "remat_keep": ("projections", "attention", "experts")},
        {"remat": "layer", "remat_keep": ("experts",), "remat_offload": ("projections", "attention")},
    ],
    ids=["nothing", "on the device", "on the host"],
)
def test_loss_and_gradients_do_not_depend_on_what_is_kept(changes, expected):
    with jax.enable_x64(True):
        loss, gradients = gradient(**changes)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-13)
    for path, leaf in expected[1].items():
        scale = float(np.abs(np.asarray(leaf)).max()) or 1.0
        np.testing.assert_allclose(
            np.asarray(gradients[path]), np.asarray(leaf), rtol=0, atol=1e-11 * scale, err_msg=path
        )


def test_experts_results_are_kept_as_wide_as_activations_and_change_no_more_than_rounding():
    narrow = {"parameter_dtype": "float32", "compute_dtype": "bfloat16", "remat": "layer"}
    loss, gradients = gradient(**narrow)
    kept_loss, kept_gradients = gradient(**narrow, remat_keep=("experts",))
    np.testing.assert_allclose(kept_loss, loss, rtol=1e-3)
    for path, leaf in gradients.items():
        scale = float(np.abs(np.asarray(leaf)).max()) or 1.0
        np.testing.assert_allclose(kept_gradients[path], leaf, rtol=0, atol=2e-2 * scale, err_msg=path)

    config = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, **narrow))
    mesh = make_mesh(config.mesh)
    state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
    traced = jax.make_jaxpr(make_value_and_gradient(config, mesh))(state.parameters, state.router_biases, batch)
    named = [e for e in equations(traced.jaxpr) if e.params.get("name") == "experts"]
    assert named and all(equation.outvars[0].aval.dtype == jnp.bfloat16 for equation in named)


def equations(jaxpr):
    """All equations of a jaxpr, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


RUN_SETTINGS = """
mesh: {fsdp: 2, expert: 2}
model:
  width: 16
  num_layers: 2
  vocabulary_size: 264
  full_attention_layers: [1]
  residual_block_layers: 1
  linear_attention: {num_heads: 2, key_width: 4, value_width: 4, decay_rank: 4, chunk_tokens: 16}
  full_attention: {num_heads: 2, query_rank: 8, latent_width: 8, nope_width: 4, shared_key_width: 4, value_width: 4}
  moe: {num_experts: 4, experts_per_token: 2, expert_width: 8, latent_width: 8, dense_width: 16}
  vision: {num_layers: 1, width: 8, num_heads: 1, head_width: 8, hidden_width: 16}
data: {rows: 8, row_tokens: 48, row_patches: 32, image_max_patches: 16, packing_window: 4, eval_samples: 8}
optimizer: {warmup_steps: 2}
checkpoint: {every_steps: 0}
training: {steps: 20, eval_every_steps: 0}
"""


@pytest.mark.slow
def test_twenty_steps_of_a_run_lose_the_same_with_results_on_the_host(tmp_path: Path):
    def losses(name: str, *options: str) -> list[float]:
        settings, run_dir = tmp_path / "tiny.yaml", tmp_path / name
        settings.write_text(RUN_SETTINGS)
        assert train.main(["--config", str(settings), "--run-dir", str(run_dir), *options]) == 0
        return [record["loss"] for record in read_lines(run_dir / "metrics.jsonl")]

    again = losses("again")
    on_host = losses("host", "--model.remat-keep", "experts", "--model.remat-offload", "projections", "attention")
    assert len(again) == 20 and again[-1] < again[0]
    assert on_host == pytest.approx(again, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "path", "remedy"),
    [
        ({"remat_keep": ("matmuls",)}, "model.remat_keep", "projections, attention, experts"),
        ({"remat_offload": ("experts",), "remat": "none"}, "model.remat_offload", "everything is kept"),
        ({"remat_keep": ("experts",), "remat_offload": ("experts",)}, "model.remat_offload", "one place"),
    ],
)
def test_what_cannot_be_kept_is_one_fault(changes, path, remedy):
    faults = check(RunConfig(model=ModelConfig(**changes)))
    assert [fault.path for fault in faults] == [path] and remedy in faults[0].remedy
