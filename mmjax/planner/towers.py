"""Arrays of the towers that read pictures and sound, and of their projectors, from settings alone."""

from collections.abc import Iterator
from typing import Literal

from mmjax.config import AudioConfig, ModelConfig, VisionConfig

TowerPart = Literal["vision", "audio", "projector"]
TowerArray = tuple[TowerPart, str, tuple[int, ...], tuple[str | None, ...], int]
"""(part, path, shape, array axes, in how many layers)."""


def tower_arrays(model: ModelConfig) -> Iterator[TowerArray]:
    """All arrays of the model's towers."""
    if model.vision.is_present:
        match model.vision.kind:
            case "moonvit":
                yield from _moonvit(model)
            case "clip":
                yield from _clip(model)
            case "qwen3_vl":
                yield from _qwen(model)
            case "fuyu":
                yield "vision", "vision.patch_embedding", (model.vision.patch_values, model.width), _OUT, 1
                yield "vision", "vision.patch_bias", (model.width,), (None,), 1
    if model.audio.is_present:
        yield from _whisper(model)


_IN, _OUT = ("model_weight", None), (None, "model_weight")


def _moonvit(model: ModelConfig) -> Iterator[TowerArray]:
    vision = model.vision
    heads, merged, layers = (vision.num_heads, vision.head_width), vision.merged_width, vision.num_layers
    table = (vision.table_rows, vision.table_columns, vision.width)
    yield "vision", "vision.patch_embedding", (vision.patch_values, vision.width), _OUT, 1
    yield "vision", "vision.position_table", table, (None, None, "model_weight"), 1
    yield "vision", "vision.final_norm", (vision.width,), (None,), 1
    yield "vision", "attention_norm", (vision.width,), (None,), layers
    yield "vision", "query_key_value", (vision.width, 3, *heads), ("model_weight", None, None, None), layers
    yield "vision", "output", (*heads, vision.width), (None, None, "model_weight"), layers
    yield "vision", "mlp_norm", (vision.width,), (None,), layers
    yield "vision", "up", (vision.width, vision.hidden_width), _IN, layers
    yield "vision", "down", (vision.hidden_width, vision.width), _OUT, layers
    yield "projector", "projector.up", (merged, merged), _IN, 1
    yield "projector", "projector.down", (merged, model.width), _IN, 1
    yield "projector", "projector.norm", (model.width,), (None,), 1


def _clip(model: ModelConfig) -> Iterator[TowerArray]:
    vision, width = model.vision, model.width
    positions = (1 + vision.table_rows * vision.table_columns, vision.width)
    yield "vision", "vision.class_embedding", (vision.width,), (None,), 1
    yield "vision", "vision.patch_embedding", (vision.patch_values, vision.width), _OUT, 1
    yield "vision", "vision.position_table", positions, _OUT, 1
    yield from _norm("vision", "vision.input_norm", vision.width, 1)
    yield from _norm("vision", "vision.final_norm", vision.width, 1)
    yield from _encoder_layers("vision", vision)
    joined = len(vision.feature_depths) * vision.width
    for name, num_inputs in (("up", joined), ("down", width)):
        yield "projector", f"projector.{name}", (num_inputs, width), _IN, 1
        if vision.projector_bias:
            yield "projector", f"projector.{name}_bias", (width,), (None,), 1
    if vision.newline == "learned":
        yield "projector", "projector.newline", (width,), (None,), 1


def _qwen(model: ModelConfig) -> Iterator[TowerArray]:
    vision, merged = model.vision, model.vision.merged_width
    table = (vision.table_rows, vision.table_columns, vision.width)
    yield "vision", "vision.patch_embedding", (vision.patch_values, vision.width), _OUT, 1
    yield "vision", "vision.patch_bias", (vision.width,), (None,), 1
    yield "vision", "vision.position_table", table, (None, None, "model_weight"), 1
    yield from _encoder_layers("vision", vision)
    for path, normed, count in (("merger", vision.width, 1), ("deep", merged, len(vision.deep_layers))):
        if count:
            yield from _norm("projector", f"projector.{path}.norm", normed, count)
            for name, num_outputs in (("up", merged), ("down", model.width)):
                yield "projector", f"projector.{path}.{name}", (merged, num_outputs), _IN, count
                yield "projector", f"projector.{path}.{name}_bias", (num_outputs,), (None,), count


def _whisper(model: ModelConfig) -> Iterator[TowerArray]:
    audio = model.audio
    for path, num_inputs, axis in (("first", 3 * audio.mel_bins, None), ("second", 3 * audio.width, "model_weight")):
        array_axes = (axis, None if axis else "model_weight")
        yield "audio", f"audio.{path}_convolution", (num_inputs, audio.width), array_axes, 1
        yield "audio", f"audio.{path}_bias", (audio.width,), (None,), 1
    yield "audio", "audio.sinusoids", (audio.clip_values, audio.width), _OUT, 1
    yield from _norm("audio", "audio.final_norm", audio.width, 1)
    for part, path, shape, array_axes, count in _encoder_layers("audio", audio, has_key_bias=False):
        yield part, f"audio.{path}", shape, array_axes, count
    joined = audio.values_per_feature * audio.width
    for name, shape, array_axes in (
        ("up", (joined, audio.projector_width), _IN),
        ("down", (audio.projector_width, model.width), _OUT),
    ):
        yield "projector", f"audio_projector.{name}", shape, array_axes, 1
        yield "projector", f"audio_projector.{name}_bias", shape[1:], (None,), 1


def _encoder_layers(
    part: TowerPart, config: VisionConfig | AudioConfig, *, has_key_bias: bool = True
) -> Iterator[TowerArray]:
    width, heads, count = config.width, (config.num_heads, config.head_width), config.num_layers
    for name in ("attention_norm", "mlp_norm"):
        yield from _norm(part, name, width, count)
    for name in ("query", "key", "value"):
        yield part, name, (width, *heads), ("model_weight", None, None), count
        if has_key_bias or name != "key":
            yield part, f"{name}_bias", heads, (None, None), count
    yield part, "output", (*heads, width), (None, None, "model_weight"), count
    yield part, "output_bias", (width,), (None,), count
    for name, shape, array_axes in (
        ("up", (width, config.hidden_width), _IN),
        ("down", (config.hidden_width, width), _OUT),
    ):
        yield part, name, shape, array_axes, count
        yield part, f"{name}_bias", shape[1:], (None,), count


def _norm(part: TowerPart, path: str, width: int, count: int) -> Iterator[TowerArray]:
    yield part, f"{path}.scale", (width,), (None,), count
    yield part, f"{path}.bias", (width,), (None,), count
