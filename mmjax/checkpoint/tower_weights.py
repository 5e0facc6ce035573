"""The audio tower of a model from a released Whisper, whose decoder is left where it is."""

import dataclasses
from pathlib import Path

import numpy as np

from mmjax.checkpoint.released_files import ReleasedFiles, open_released
from mmjax.config import AudioConfig, ModelConfig
from mmjax.errors import CheckpointError
from mmjax.models.families.whisper import encoder_parameters, encoder_tensors, read_encoder

TOWER = "audio."
PROJECTOR = "audio_projector."
POSITIONS = "model.encoder.embed_positions.weight"


def read_audio(folder: str | Path, audio: AudioConfig) -> AudioConfig:
    """The sizes of a released Whisper's encoder; those of the projector, which is ours, from `audio`.

    Clips may be shorter than the release's, as `audio` says: they take the first of its positions.

    Raises:
      CheckpointError: the folder is no released checkpoint.
      ConfigurationError: it is no Whisper, or one that asks for something that is not built.
    """
    return _sizes(open_released(Path(folder)), audio)


def load_audio(folder: str | Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """The encoder's arrays by path, whole, in the dtypes that `model` holds them in.

    Raises:
      CheckpointError: the folder holds no Whisper of the sizes of `model`, or is damaged.
      ConfigurationError: it is no Whisper, or one that asks for something that is not built.
    """
    released = open_released(Path(folder))
    theirs, ours = (dataclasses.asdict(audio) for audio in (_sizes(released, model.audio), model.audio))
    if name := next((name for name in ours if theirs[name] != ours[name]), None):
        raise CheckpointError(
            str(folder),
            found=f"model.audio.{name} {theirs[name]!r}",
            expected=repr(ours[name]),
            remedy="take the sizes of these weights, or the weights of these sizes",
        )
    names = [tensor.name for tensor in encoder_tensors(model.audio)]
    try:
        # What is read is good until the next tensor is.
        tensors = {n: released.read(n).copy() for n in names if n in released.tensors}
        if POSITIONS in tensors:
            tensors[POSITIONS] = tensors[POSITIONS][: model.audio.clip_values]
        return encoder_parameters(model, tensors)
    except ValueError as error:
        raise CheckpointError(
            str(folder), found=str(error), expected="every tensor of the encoder", remedy="download it again"
        ) from None


def _sizes(released: ReleasedFiles, audio: AudioConfig) -> AudioConfig:
    sizes = {"values_per_feature": audio.values_per_feature, "projector_width": audio.projector_width}
    theirs = read_encoder(released.config, **sizes)
    return dataclasses.replace(theirs, clip_frames=min(audio.clip_frames, theirs.clip_frames))
