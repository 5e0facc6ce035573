"""Whisper's encoder as the audio tower of another model: its config and tensors, in the layout of transformers.

Its decoder is left where it is: the text model of the model that hears takes its place.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mmjax.config import AudioConfig, ModelConfig
from mmjax.models.audio import TAPS
from mmjax.models.families.encoder_tensors import WHISPER_NAMES, encoder_layers, linear, norm, plain
from mmjax.models.families.fields import Fields
from mmjax.models.families.released import ReleasedTensor
from mmjax.models.multimodal import define

# Fields of the decoder, of training, and of generation.
_NOT_OF_THE_ENCODER = (
    *("activation_dropout", "apply_spec_augment", "begin_suppress_tokens", "classifier_proj_size", "decoder_layers"),
    *("decoder_attention_heads", "decoder_ffn_dim", "decoder_layerdrop", "decoder_start_token_id", "dropout"),
    *("encoder_layerdrop", "forced_decoder_ids", "init_std", "mask_feature_length", "mask_feature_min_masks"),
    *("mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob", "max_length"),
    *("max_target_positions", "median_filter_width", "num_hidden_layers", "scale_embedding", "suppress_tokens"),
    *("tie_word_embeddings", "use_weighted_layer_sum", "vocab_size", "attention_dropout"),
)


def read_encoder(config: Mapping[str, Any], *, values_per_feature: int = 5, projector_width: int = 2048) -> AudioConfig:
    """config.json of a Whisper, and the sizes of our projector, -> the settings of the audio tower.

    Raises:
      ConfigurationError: a field is missing, asks for something that is not built, or is not understood.
    """
    fields = Fields(config)
    fields.expect("model_type", "whisper")
    fields.expect("activation_function", "gelu")
    fields.ignore(*_NOT_OF_THE_ENCODER)
    width, num_heads = fields.take("d_model"), fields.take("encoder_attention_heads")
    audio = AudioConfig(
        num_layers=fields.take("encoder_layers"),
        width=width,
        num_heads=num_heads,
        head_width=width // num_heads,
        hidden_width=fields.take("encoder_ffn_dim"),
        mel_bins=fields.take("num_mel_bins", default=80),
        clip_frames=2 * fields.take("max_source_positions", default=1500),
        values_per_feature=values_per_feature,
        projector_width=projector_width,
    )
    fields.finish()
    return audio


def encoder_tensors(audio: AudioConfig, released: str = "model.encoder") -> Iterator[ReleasedTensor]:
    """Every tensor of the encoder in a checkpoint of a Whisper."""
    width = audio.width
    for name, path, num_inputs in (("conv1", "audio.first", audio.mel_bins), ("conv2", "audio.second", width)):
        taps = (width, num_inputs, TAPS)
        yield from linear(f"{released}.{name}", taps, f"{path}_convolution", bias=f"{path}_bias")
    yield plain(f"{released}.embed_positions.weight", (audio.clip_values, width), "audio.sinusoids")
    yield from encoder_layers(audio, "audio.layers", f"{released}.layers", WHISPER_NAMES, has_key_bias=False)
    yield from norm(f"{released}.layer_norm", width, "audio.final_norm")


def encoder_parameters(model: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters below `audio.` of `model`, from the tensors of a Whisper; those of its decoder are not looked at.

    Raises:
      ValueError: a tensor of the encoder is missing, left over or of another shape.
    """
    described = {path: v.get_value() for path, v in define(model).parameters.items() if path.startswith("audio.")}
    arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in described.items()}
    expected = {tensor.name: tensor for tensor in encoder_tensors(model.audio)}
    found = {name for name in tensors if name.startswith("model.encoder.")}
    if found != expected.keys():
        raise ValueError(
            f"missing: {sorted(expected.keys() - found)}; not understood: {sorted(found - expected.keys())}"
        )
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name}: shape {tensors[name].shape}; expected {tensor.shape}")
        (slot,) = tensor.slots
        part = arrays[slot.path][slot.index]
        part[...] = tensor.layout.to_ours(tensors[name], [part.shape])[0]
    return arrays
