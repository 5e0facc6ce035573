"""Towers of all kinds on several devices: the loss and gradients of one; documents of a row stay apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import (
    AudioConfig,
    DataConfig,
    GroupedAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RunConfig,
    VisionConfig,
    describe_mesh,
)
from mmjax.data.batch import Batch
from mmjax.models.multimodal import define, place_features
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import make_value_and_gradient, place_batch

VISION = VisionConfig(
    num_layers=3, width=16, num_heads=2, head_width=8, hidden_width=12, patch_pixels=2, norm_epsilon=1e-5
)
VISIONS = {
    "clip": {"feature_depths": (2, 0), "newline": "learned", "activation": "quick_gelu"},
    "qwen3_vl": {"deep_layers": (0, 1), "frames_per_patch": 2},
    "fuyu": {},
}

SEVERAL = MeshConfig(fsdp=2, expert=2, tensor=2)


def model_of(kind: str) -> ModelConfig:
    sections = (2, 1, 1) if kind == "qwen3_vl" else ()
    return ModelConfig(
        width=16,
        num_layers=3,
        vocabulary_size=32,
        full_attention_layers=(0, 1, 2),
        full_attention_kind="grouped",
        residual="plain",
        norm="layer" if kind == "fuyu" else "rms",
        dense_mlp="relu_squared" if kind == "fuyu" else "gated",
        mlp_bias=kind == "fuyu",
        initializer_range=0.3,
        grouped_attention=GroupedAttentionConfig(
            num_heads=2,
            num_key_heads=2,
            head_width=8,
            projection_bias=True,
            output_bias=True,
            head_norm=True,
            rotary=RotaryConfig(width=8, sections=sections, section_order="interleaved"),
        ),
        moe=MoeConfig(num_dense_layers=3, dense_width=16),
        vision=dataclasses.replace(VISION, kind=kind, **VISIONS[kind]),
        parameter_dtype="float64",
        compute_dtype="float64",
    )


def random_parameters(model: ModelConfig):
    """Biases and scales too are random: at their starts they would hide faults."""
    random = np.random.default_rng(0)
    variables = define(model).parameters
    return {path: 0.3 * random.normal(size=variable.get_value().shape) for path, variable in sorted(variables.items())}


@pytest.mark.parametrize(
    ("kind", "several"),
    [
        ("clip", SEVERAL),
        ("fuyu", SEVERAL),
        # On eight CPU devices XLA starts independent exchanges of this tower in no fixed order, and they wait for ever.
        ("qwen3_vl", MeshConfig(tensor=2)),
        ("qwen3_vl", MeshConfig(context=2)),
        pytest.param("clip", MeshConfig(context=2), marks=pytest.mark.slow),
        pytest.param("fuyu", MeshConfig(context=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else describe_mesh(value),
)
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(kind, several, make_batch):
    with jax.enable_x64(True):
        config = RunConfig(model=model_of(kind))
        parameters, batch = random_parameters(config.model), make_batch(config.model, empty_rows=1)
        if kind == "clip":
            # The learned newline, and slots of class tokens.
            batch.feature_index[0, 1] = batch.patches.shape[1]
            batch.patch_position[:, 0] = (0, -1, -1)
        losses, gradients = [], []
        for mesh_config in (MeshConfig(), several):
            mesh = make_mesh(mesh_config)
            found = jax.jit(make_value_and_gradient(config, mesh))(parameters, {}, place_batch(batch, mesh), {})
            losses.append(float(found[0]))
            gradients.append(jax.device_get(found[-1]))
    assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[0])
    for path, gradient in gradients[0].items():
        # Layers behind the deepest features, and the last norm, are held and not run.
        is_used = kind != "clip" or not path.startswith("vision.final_norm")
        assert gradient.any() == is_used, path
        assert np.abs(gradient - gradients[1][path]).max() <= 1e-11 * max(1e-3, np.abs(gradient).max()), path


def test_a_mesh_hears_what_one_device_hears(make_batch):
    audio = AudioConfig(
        num_layers=2,
        width=16,
        num_heads=2,
        head_width=8,
        hidden_width=12,
        mel_bins=6,
        clip_frames=20,
        values_per_feature=5,
        projector_width=10,
    )
    with jax.enable_x64(True):
        model = dataclasses.replace(model_of("fuyu"), audio=audio)
        parameters, batch = random_parameters(model), make_batch(model)
        random = np.random.default_rng(1)
        index = random.integers(-3, 4, batch.tokens.shape, dtype=np.int32)
        spectrograms = random.normal(size=(8, 2, 20, 6))
        # Rows of one half of the devices have no sound.
        batch = batch._replace(
            spectrograms=np.where(np.arange(8)[:, None, None, None] < 4, spectrograms, np.nan),
            sound_index=np.where(np.arange(8)[:, None] < 4, np.maximum(index, -1), -1),
        )
        found = []
        for mesh_config in (MeshConfig(), MeshConfig(context=2, expert=2, tensor=2)):
            mesh = make_mesh(mesh_config)
            config = RunConfig(model=model, data=DataConfig(rows=8, row_tokens=batch.tokens.shape[1]), mesh=mesh_config)
            run = jax.jit(make_value_and_gradient(config, mesh))
            loss, *_, gradients = run(parameters, {}, place_batch(batch, mesh), {})
            found.append(jax.device_get((loss, gradients)))
    (value, gradients), (other_value, others) = found
    assert abs(value - other_value) <= 1e-12 * abs(value)
    for path, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)) and gradient.any() == (path != "audio.sinusoids"), path
        assert np.abs(gradient - others[path]).max() <= 1e-11 * max(1e-3, np.abs(gradient).max()), path


@pytest.mark.parametrize("kind", ["clip", "moonvit", "qwen3_vl"])
def test_gradients_of_what_all_pictures_share_add_up_unrounded(kind, one_device):
    vision = dataclasses.replace(VISION, kind=kind, num_layers=1, table_rows=2, table_columns=2)
    if kind == "clip":
        vision = dataclasses.replace(vision, table_rows=1, feature_depths=(0,), newline="learned")
    model = dataclasses.replace(model_of("fuyu"), vision=vision, parameter_dtype="float32", compute_dtype="bfloat16")
    definition, random = define(model), np.random.default_rng(1)
    parameters = {path: array.astype(np.float32) for path, array in random_parameters(model).items()}
    patches = random.normal(size=(4, vision.patch_values))
    position = [(0, -1, -1), (0, 0, 0), (0, 0, 1)] if kind == "clip" else [(0, r, c) for r in (0, 1) for c in (0, 1)]
    size = len(position)
    weights = random.normal(size=(size + 1, model.width)).astype(np.float32)

    def gradients(number: int) -> dict:
        """Of `number` equal pictures in a row; those of a tower with newlines end with one."""
        num_features = size if kind == "clip" else 1
        starts = np.arange(number)[:, None] * num_features
        index = np.concatenate([starts + np.arange(num_features), np.full_like(starts, number * size)], axis=1)
        index = index if kind == "clip" else starts
        batch = Batch(*[None] * len(Batch._fields))._replace(
            patches=np.tile(patches[:size], (number, 1))[None],
            patch_segment_ids=np.repeat(np.arange(1, number + 1, dtype=np.int32), size)[None],
            patch_position=np.tile(np.array(position, np.int32), (number, 1))[None],
            patch_grid=np.full((1, number * size, 3), (1, 2 - (kind == "clip"), 2), np.int32),
            patch_feature=np.arange(number, dtype=np.int32)[None],
        )

        def loss(parameters):
            module = definition.assemble(parameters, {})
            nothing = jnp.zeros((1, index.size, model.width), jnp.bfloat16)
            features = module.picture_features(jax.tree.map(jnp.asarray, batch)).features
            placed = place_features(nothing, features, jnp.asarray(index.reshape(1, -1)))
            return jnp.sum(placed.astype(jnp.float32) * np.tile(weights[: index.shape[1]], (number, 1))[None])

        return jax.device_get(jax.jit(one_device(jax.grad(loss)))(parameters))

    one, many = gradients(1), gradients(300)
    shared = ["vision.position_table"] + ["vision.class_embedding", "projector.newline"] * (kind == "clip")
    for path in shared:
        assert np.abs(many[path] / 300 - one[path]).max() <= 4e-3 * np.abs(one[path]).max(), path
