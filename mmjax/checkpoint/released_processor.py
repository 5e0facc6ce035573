"""What a release says of its pictures' preparation: numbers of it become settings of the tower, the rest must be ours.

How each kind of tower has its pictures cut is fixed (`mmjax/data/picture_layout.py`); the statistics of pixels and the
limits of sizes are settings. A field that asks for another preparation is an error that names it.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mmjax.checkpoint.strict_json import read_json
from mmjax.config import ConfigurationFaults, ModelConfig, VisionConfig, check_model
from mmjax.data.images import CHESSBOARD_GREY, CHESSBOARD_SQUARE, CHESSBOARD_WHITE, MAX_SIDE_PATCHES
from mmjax.data.picture_layout import pixel_statistics
from mmjax.errors import CheckpointError
from mmjax.presets import fuyu, qwen3_vl

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_BILINEAR, _BICUBIC = 2, 3
# Who reads the file and how, videos, and what is counted or said beside the pictures.
_IGNORED = {
    *("image_processor_type", "processor_class", "feature_extractor_type", "auto_map", "config_type", "backend"),
    *("data_format", "input_data_format", "default_to_square", "return_tensors", "device", "disable_grouping"),
    *("num_pooled_tokens", "model_input_names", "video_processor_type", "temporal_merge_kernel_size", "sample_fps"),
    "timestamp_mode",
}
# What Kimi-K3 lays transparent pictures on.
_CHESSBOARD = {
    "pattern": "chessboard",
    "chessboard_square_size": CHESSBOARD_SQUARE,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": CHESSBOARD_WHITE,
    "chessboard_gray_value": CHESSBOARD_GREY,
}


class _Fields:
    """The fields of one file; what is never asked for is refused at the end."""

    def __init__(self, file: Path, values: Mapping[str, Any]):
        self._file, self._values, self._left = file, values, set(values) - _IGNORED

    def take(self, name: str) -> Any:
        self._left.discard(name)
        return self._values.get(name)

    def expect(self, name: str, *allowed: Any) -> None:
        """A field that is absent or null asks for nothing."""
        value = self.take(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            self.refuse(name, f"{value!r}"[:120], " or ".join(map(repr, allowed)))

    def refuse(self, name: str, found: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self._file}: {name}",
            found=found,
            expected=f"{expected or 'none'}, as pictures are prepared here for this kind of tower",
            remedy="train with pictures that are prepared so, or remove the field if it changes nothing",
        )

    def finish(self) -> None:
        for name in sorted(self._left):
            if self._values[name] not in (None, False, [], {}) and "video" not in name and "frame" not in name:
                self.refuse(name, f"{self._values[name]!r}"[:120], "no such field: it is not understood")


def with_processor(folder: Path, model: ModelConfig) -> ModelConfig:
    """`model` with the statistics of pixels and the limits of sizes that the release in `folder` gives.

    Raises:
      CheckpointError: a field asks for a preparation that is not ours, or is not understood.
    """
    found = _read(folder)
    if found is None or not model.vision.is_present:
        return model
    file, values = found
    fields, vision = _Fields(file, values), model.vision
    changes = _statistics(fields, vision) | _sizes(fields, vision)
    _check_rest(fields, vision)
    fields.finish()
    model = dataclasses.replace(model, vision=dataclasses.replace(vision, **changes))
    if faults := check_model(model):
        raise ConfigurationFaults(str(file), faults)
    return model


def _read(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The file that speaks of pictures, and what it says of them."""
    file, values = folder / PREPROCESSOR, None
    if file.exists():
        values = read_json(file)
        # Kimi's own processors nest theirs.
        if isinstance(nested := values.get("media_proc_cfg"), dict):
            values = {name: value for name, value in values.items() if name != "media_proc_cfg"} | nested
    elif (file := folder / PROCESSOR).exists() and isinstance(nested := read_json(file).get("image_processor"), dict):
        values = nested
    return None if values is None else (file, values)


def _statistics(fields: _Fields, vision: VisionConfig) -> dict[str, Any]:
    """Mean and deviation of (x / 255 - mean) / deviation, where they are not those of the kind."""
    own_mean, own_deviation = pixel_statistics(vision)
    does_scale, does_normalise = fields.take("do_rescale") is not False, fields.take("do_normalize") is not False
    factor = fields.take("rescale_factor")
    mean = _by_channel(fields, "image_mean", own_mean, vision.channels)
    deviation = _by_channel(fields, "image_std", own_deviation, vision.channels)
    if factor is not None and (type(factor) not in (int, float) or not 0 < factor < math.inf):
        fields.refuse("rescale_factor", repr(factor)[:80], "a number above 0")
    if not does_normalise:
        mean, deviation = (0.0,) * vision.channels, (1.0,) * vision.channels
    # (factor x - mean) / deviation, written with x / 255.
    span = 255.0 * (1.0 if not does_scale else 1 / 255 if factor is None else factor)
    if not math.isclose(span, 1.0, rel_tol=1e-9):
        mean, deviation = (tuple(number / span for number in numbers) for numbers in (mean, deviation))
    changes: dict[str, Any] = {}
    if mean != own_mean[: vision.channels]:
        changes["pixel_mean"] = mean
    if deviation != own_deviation[: vision.channels]:
        changes["pixel_deviation"] = deviation
    return changes


def _by_channel(fields: _Fields, name: str, own: tuple[float, ...], channels: int) -> tuple[float, ...]:
    value = fields.take(name)
    if value is None:
        return own[:channels]
    numbers = value if isinstance(value, list) else [value] * channels
    if len(numbers) != channels or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        fields.refuse(name, f"{value!r}"[:120], f"{channels} finite numbers")
    return tuple(float(number) for number in numbers)


def _sizes(fields: _Fields, vision: VisionConfig) -> dict[str, Any]:
    """Limits of a picture's size, where they are not those of the kind."""
    size, side = fields.take("size"), vision.table_rows * vision.patch_pixels
    match vision.kind:
        case "moonvit":
            if size not in (None, {"max_height": MAX_SIDE_PATCHES, "max_width": MAX_SIDE_PATCHES}):
                fields.refuse("size", f"{size!r}"[:120], f"max_height and max_width {MAX_SIDE_PATCHES}")
            names = ("max_patches", "in_patch_limit", "in_token_limit")
            limits = [(name, limit) for name in names if (limit := fields.take(name)) is not None]
            for name, limit in limits:
                if type(limit) is not int or limit < 4:
                    fields.refuse(name, f"{limit!r}"[:80], "a number of patches, at least 4")
                if limit != limits[0][1]:
                    fields.refuse(name, str(limit), f"{limits[0][1]}, as {limits[0][0]} says")
            fields.expect("patch_limit_on_one_side", MAX_SIDE_PATCHES)
            fields.expect("fixed_output_tokens")
            changes: dict[str, Any] = {"max_pixels": limits[0][1] * vision.patch_pixels**2} if limits else {}
            fields.expect("transparent_bg_config", _CHESSBOARD)
            has_chessboard = fields.take("transparent_bg_config") is not None
            if has_chessboard:
                changes["transparency"] = "chessboard"
            fields.expect("transparent_bg_fill_stage", "after_resize", *([] if has_chessboard else ["before_resize"]))
            return changes
        case "qwen3_vl":
            size = size or {}
            if not isinstance(size, dict) or size.keys() - {"shortest_edge", "longest_edge"}:
                fields.refuse("size", f"{size!r}"[:120], "shortest_edge and longest_edge, numbers of pixels")
            changes, own = {}, {"min_pixels": qwen3_vl.MIN_PIXELS, "max_pixels": qwen3_vl.MAX_PIXELS}
            for ours, theirs in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
                given = fields.take(ours)
                limit = size.get(theirs) if given is None else given
                if limit is not None and (type(limit) is not int or limit < 1):
                    fields.refuse(ours if given is not None else "size", f"{limit!r}"[:80], "a number of pixels")
                if limit not in (None, own[ours]):
                    changes[ours] = limit
            return changes
        case "clip":
            if size not in (None, side, {"shortest_edge": side}):
                fields.refuse("size", f"{size!r}"[:120], f"shortest_edge {side}, the size of the tower")
            fields.expect("crop_size", side, {"height": side, "width": side})
        case "fuyu":
            if size not in (None, {"height": fuyu.MAX_HEIGHT, "width": fuyu.MAX_WIDTH}):
                fields.refuse("size", f"{size!r}"[:120], f"height {fuyu.MAX_HEIGHT} and width {fuyu.MAX_WIDTH}")
    return {}


def _check_rest(fields: _Fields, vision: VisionConfig) -> None:
    kind, patch = vision.kind, vision.patch_pixels
    is_tiled = bool(vision.tilings)
    fields.expect("do_resize", True)
    fields.expect("do_convert_rgb", vision.channels == 3)
    fields.expect("resample", _BILINEAR if kind == "fuyu" else _BICUBIC)
    fields.expect("patch_size", patch, {"height": patch, "width": patch})
    if kind == "clip":
        # A tile has the size that it would be cropped to.
        fields.expect("do_center_crop", *([True, False] if is_tiled else [True]))
        fields.expect("do_pad", is_tiled)
        side = vision.table_rows * patch
        pairs = zip(vision.tilings[::2], vision.tilings[1::2], strict=True)
        fields.expect("image_grid_pinpoints", [[rows * side, columns * side] for rows, columns in pairs])
        fields.expect("aspect_ratio_setting", "anyres")
    else:
        fields.expect("do_center_crop", False)
        fields.expect("do_pad", kind in ("fuyu", "moonvit"))
    if kind == "fuyu":
        fields.expect("padding_value", float(fuyu.PADDING_PIXEL), fuyu.PADDING_PIXEL)
        fields.expect("padding_mode", "constant")
    if vision.patches_per_feature == 4:
        fields.expect("merge_size", 2)
        fields.expect("merge_kernel_size", 2, [2, 2])
    if kind == "qwen3_vl":
        fields.expect("temporal_patch_size", vision.frames_per_patch)
    if kind == "moonvit":
        fields.expect("pad_input", True)
