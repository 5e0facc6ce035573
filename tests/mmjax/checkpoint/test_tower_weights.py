"""A run that hears with a released Whisper's encoder: its numbers on any mesh, its sizes, and what does not fit."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mmjax.checkpoint.tower_weights import load_audio, read_audio
from mmjax.config import (
    AudioConfig,
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
    check,
)
from mmjax.errors import CheckpointError, ConfigurationError
from mmjax.models.families.whisper import encoder_parameters
from mmjax.parallel.mesh import make_mesh
from mmjax.train import read_command
from mmjax.training.step import init_state

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 6,
    "max_source_positions": 10,
    "pad_token_id": 0,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES)).half().save_pretrained(tmp_path)
    return tmp_path


def config_of(folder, **changes) -> RunConfig:
    audio = AudioConfig(
        num_layers=2,
        width=16,
        num_heads=2,
        head_width=8,
        hidden_width=24,
        mel_bins=6,
        clip_frames=20,
        projector_width=20,
        **changes,
    )
    model = ModelConfig(
        width=16,
        num_layers=1,
        full_attention_layers=(0,),
        residual="plain",
        moe=MoeConfig(num_dense_layers=1, dense_width=16),
        vision=VisionConfig(num_layers=0),
        audio=audio,
    )
    return RunConfig(model=model, audio_weights=str(folder), data=DataConfig(source="x.jsonl", rows=8))


def test_a_run_starts_from_the_released_encoder_on_any_mesh(folder):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    for mesh in (MeshConfig(), MeshConfig(fsdp=2, expert=4)):
        config = dataclasses.replace(config_of(folder), mesh=mesh)
        assert not check(config)
        parameters = jax.device_get(init_state(config, make_mesh(mesh)).parameters)
        expected = encoder_parameters(config.model, load_file(folder / "model.safetensors"))
        heard = {path for path in parameters if path.startswith("audio.")}
        assert heard == expected.keys() and len(heard) > 20
        for path in heard:
            assert parameters[path].dtype == np.float32
            np.testing.assert_array_equal(parameters[path], expected[path].astype(np.float16).astype(np.float32))
        plain = jax.device_get(init_state(dataclasses.replace(config, audio_weights=""), make_mesh(mesh)).parameters)
        for path in parameters.keys() - heard:
            np.testing.assert_array_equal(parameters[path], plain[path], err_msg=path)


def test_the_command_takes_the_sizes_of_the_release(folder):
    settings = read_command(["--audio-weights", str(folder), "--model.audio.projector-width", "24"]).settings
    assert settings.audio_weights == str(folder)
    audio = settings.model.audio
    assert (audio.num_layers, audio.width, audio.mel_bins, audio.clip_frames) == (2, 16, 6, 20)
    assert audio.projector_width == 24


def test_clips_may_be_shorter_than_those_of_the_release_and_take_its_first_positions(folder):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    audio = read_audio(folder, AudioConfig(clip_frames=10))
    assert (audio.clip_frames, audio.width) == (10, 16)
    config = config_of(folder)
    theirs = load_file(folder / "model.safetensors")["model.encoder.embed_positions.weight"]
    model = dataclasses.replace(config.model, audio=dataclasses.replace(config.model.audio, clip_frames=10))
    np.testing.assert_array_equal(load_audio(folder, model)["audio.sinusoids"], theirs[:5])


def test_weights_of_other_sizes_or_without_a_tensor_and_frozen_projectors_are_refused(folder, tmp_path):
    mesh = make_mesh(MeshConfig())
    with pytest.raises(CheckpointError, match=r"found model\.audio\.values_per_feature|model\.audio\.activation"):
        init_state(config_of(folder, activation="gelu_tanh"), mesh)
    adapted = dataclasses.replace(config_of(folder), lora=LoraConfig(rank=2, targets=("all-linear",)))
    assert "audio_weights" in [fault.path for fault in check(adapted)]
    deaf = dataclasses.replace(config_of(folder), model=ModelConfig())
    assert "audio_weights" in [fault.path for fault in check(deaf)]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(ConfigurationError, match="model_type"):
        init_state(config_of(folder), mesh)
    with pytest.raises(CheckpointError, match="nothing"):
        init_state(config_of(tmp_path / "missing"), mesh)
