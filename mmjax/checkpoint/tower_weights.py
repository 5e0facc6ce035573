"""The audio tower of a model from a released Whisper, whose decoder is left where it is."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax

from mmjax.checkpoint.released_files import open_released
from mmjax.config import AudioConfig, ModelConfig
from mmjax.errors import CheckpointError
from mmjax.models.families.whisper import encoder_parameters, encoder_tensors, read_encoder

TOWER = "audio."
PROJECTOR = "audio_projector."


def read_audio(folder: str | Path, audio: AudioConfig) -> AudioConfig:
    """The sizes of a released Whisper's encoder; those of the projector, which is ours, from `audio`.

    Raises:
      CheckpointError: the folder is no released checkpoint.
      ConfigurationError: it is no Whisper, or one that asks for something that is not built.
    """
    sizes = {"values_per_feature": audio.values_per_feature, "projector_width": audio.projector_width}
    return read_encoder(open_released(Path(folder)).config, **sizes)


def load_audio(
    folder: str | Path, model: ModelConfig, abstract_arrays: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The encoder's arrays by path, with the shardings and in the dtypes of `abstract_arrays`.

    Raises:
      CheckpointError: the folder holds no Whisper of the sizes of `model`, or is damaged.
    """
    released, theirs = open_released(Path(folder)), read_audio(folder, model.audio)
    fields = [field.name for field in dataclasses.fields(AudioConfig)]
    if differing := [name for name in fields if getattr(theirs, name) != getattr(model.audio, name)]:
        name = differing[0]
        raise CheckpointError(
            str(folder),
            found=f"model.audio.{name} {getattr(theirs, name)!r}",
            expected=repr(getattr(model.audio, name)),
            remedy="take the sizes of these weights, or the weights of these sizes",
        )
    names = [tensor.name for tensor in encoder_tensors(model.audio)]
    try:
        # What is read is good until the next tensor is.
        arrays = encoder_parameters(model, {n: released.read(n).copy() for n in names if n in released.tensors})
    except ValueError as error:
        raise CheckpointError(
            str(folder), found=str(error), expected="every tensor of the encoder", remedy="download it again"
        ) from None
    return {
        path: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda i, a=arrays[path], d=leaf.dtype: a[i].astype(d)
        )
        for path, leaf in abstract_arrays.items()
        if path.startswith(TOWER)
    }
