"""The audio tower against Whisper's encoder in float64, and what its features do in a decoder."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import ModelConfig, MoeConfig, VisionConfig
from mmjax.data.batch import Batch
from mmjax.errors import ConfigurationError
from mmjax.models.families.whisper import encoder_parameters, encoder_tensors, read_encoder
from mmjax.models.layers import initial_arrays
from mmjax.models.multimodal import define
from mmjax.presets.whisper import whisper_base, whisper_large_v3, whisper_tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = {
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
def whisper(tmp_path):
    """A tiny Whisper in float64, its config and the tensors that it saves."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    torch.manual_seed(0)
    theirs = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**TINY)).eval().double()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, dtype=torch.float64))
    theirs.save_pretrained(tmp_path)
    return theirs, theirs.config.to_dict(), load_file(tmp_path / "model.safetensors")


def model_of(config) -> ModelConfig:
    return ModelConfig(
        width=12,
        num_layers=1,
        full_attention_layers=(0,),
        residual="plain",
        moe=MoeConfig(num_dense_layers=1, dense_width=16),
        vision=VisionConfig(num_layers=0),
        audio=read_encoder(config, values_per_feature=5, projector_width=20),
        parameter_dtype="float64",
        compute_dtype="float64",
    )


def test_the_tower_equals_whispers_encoder_and_its_tensors_come_back(whisper, one_device):
    theirs, config, tensors = whisper
    with jax.enable_x64(True):
        model = model_of(config)
        definition = define(model)
        arrays = {p: np.zeros(v.get_value().shape) for p, v in definition.parameters.items()}
        arrays |= encoder_parameters(model, tensors)
        for tensor in encoder_tensors(model.audio):
            (slot,) = tensor.slots
            back = tensor.layout.to_released([arrays[slot.path][slot.index]], tensor.shape)
            assert np.array_equal(back, tensors[tensor.name]), tensor.name

        random = np.random.default_rng(0)
        spectrograms, cotangent = random.normal(size=(2, 3, 20, 6)), random.normal(size=(2, 3, 10, 16))
        is_used = np.ones((2, 3), bool)
        is_used[1, 2] = False
        spectrograms[1, 2] = np.nan
        cotangent[1, 2] = 0

        def run(parameters, spectrograms):
            values, pull = jax.vjp(lambda p, s: definition.assemble(p, {}).audio(s, is_used), parameters, spectrograms)
            return values, pull(jnp.asarray(cotangent))

        values, (gradients, input_gradient) = jax.device_get(jax.jit(one_device(run))(arrays, spectrograms))

    inputs = torch.tensor(spectrograms[is_used].swapaxes(1, 2), requires_grad=True)
    expected = theirs.model.encoder(inputs).last_hidden_state
    expected.backward(torch.tensor(cotangent[is_used]))
    expected = expected.detach().numpy()
    assert np.abs(values[is_used] - expected).max() <= 1e-12 * np.abs(expected).max()
    theirs_gradient = inputs.grad.numpy().swapaxes(1, 2)
    assert np.abs(input_gradient[is_used] - theirs_gradient).max() <= 1e-11 * np.abs(theirs_gradient).max()
    named = dict(theirs.model.encoder.named_parameters())
    for tensor in encoder_tensors(model.audio, "x"):
        (slot,) = tensor.slots
        gradient = tensor.layout.to_released([np.asarray(gradients[slot.path])[slot.index]], tensor.shape)
        weight = named[tensor.name.removeprefix("x.")]
        # Positions are fixed.
        known = np.zeros(tensor.shape) if weight.grad is None else weight.grad.numpy()
        assert np.abs(gradient - known).max() <= 1e-10, tensor.name


def test_a_tower_without_released_weights_starts_with_whispers_sines_and_cosines(whisper):
    _, config, _ = whisper
    expected = transformers.models.whisper.modeling_whisper.sinusoids(10, 16)
    with jax.enable_x64(True):
        variables = {"audio.sinusoids": define(model_of(config)).parameters["audio.sinusoids"]}
        [drawn] = initial_arrays(variables, jax.random.key(0)).values()
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-6)


def test_a_sound_changes_what_comes_after_its_features_in_its_document_only(whisper, one_device):
    _, config, tensors = whisper
    model = dataclasses.replace(model_of(config), parameter_dtype="float32", compute_dtype="float32")
    definition = define(model)
    arrays = initial_arrays(definition.parameters, jax.random.key(0)) | encoder_parameters(model, tensors)
    tokens = np.arange(9, dtype=np.int32)[None] % 7
    none, no_places = np.zeros((1, 0, 3), np.int32), np.zeros((1, 0), np.int32)
    batch = Batch(
        tokens=tokens,
        targets=tokens,
        loss_weight=np.ones((1, 9), np.float32),
        segment_ids=np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2]], np.int32),
        positions=np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3]], np.int32),
        feature_index=np.full((1, 9), -1, np.int32),
        patches=np.zeros((1, 0, 48), np.float32),
        patch_segment_ids=no_places,
        patch_position=none,
        patch_grid=none,
        patch_feature=no_places,
        spectrograms=np.random.default_rng(0).normal(size=(1, 2, 20, 6)).astype(np.float32),
        sound_index=np.array([[-1, 0, 1, -1, -1, 2, 3, -1, -1]], np.int32),
    )
    run = jax.jit(one_device(lambda p, b: definition.assemble(p, {})(b)[0]))
    one = run(arrays, batch)
    batch.spectrograms[0, 1] += 1
    other = run(arrays, batch)
    assert np.array_equal(one[0, :5], other[0, :5]) and (np.abs(one - other).max(axis=-1)[0, 5:] > 1e-6).all()


def test_a_config_that_is_not_understood_is_refused(whisper):
    _, config, tensors = whisper
    with pytest.raises(ConfigurationError, match="new_field"):
        read_encoder(config | {"new_field": 1})
    with pytest.raises(ConfigurationError, match="activation_function"):
        read_encoder(config | {"activation_function": "relu"})
    del tensors["model.encoder.conv1.bias"]
    with pytest.raises(ValueError, match=r"conv1\.bias"):
        encoder_parameters(model_of(config), tensors)


@pytest.mark.parametrize(
    ("preset", "width", "layers", "mel_bins"),
    [(whisper_tiny, 384, 4, 80), (whisper_base, 512, 6, 80), (whisper_large_v3, 1280, 32, 128)],
)
def test_presets_are_what_released_configs_say(preset, width, layers, mel_bins):
    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        encoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        num_mel_bins=mel_bins,
    )
    assert read_encoder(config.to_dict()) == preset()
