"""What a picture takes in a row of a batch, known from its size, and its pixels as patches: by the tower's kind.

moonvit    scaled down to the budget, padded black to whole windows; one feature a window of 2x2 patches
clip       one square of the tower's size, or that and tiles; a slot for the class token before the patches of each
qwen3_vl   resized to whole windows of 2x2 patches, each patch repeated for its frames; one feature a window
fuyu       scaled down to fit, padded to whole patches; a feature a patch, a newline token behind each row of them

The rules and numbers are those of the released processors (`mmjax/presets`), where a release gives no numbers of its
own; `max_patches` may shrink a picture more.
"""

import math
from dataclasses import dataclass

import numpy as np
import PIL.Image

from mmjax.config import VisionConfig
from mmjax.data import images
from mmjax.presets import fuyu, llava, qwen3_vl

# Among numbers of features: an ordinary token; a token that the learned newline stands in for.
ORDINARY = -1
NEWLINE = llava.NEWLINE

# (mean, deviation) of the pixels that the released towers of each kind see.
_STATISTICS = {
    "moonvit": (images.HALF, images.HALF),
    "clip": (llava.PIXEL_MEAN, llava.PIXEL_DEVIATION),
    "qwen3_vl": (qwen3_vl.PIXEL_MEAN, qwen3_vl.PIXEL_DEVIATION),
    "fuyu": (fuyu.PIXEL_MEAN, fuyu.PIXEL_DEVIATION),
}

_BICUBIC, _BILINEAR = PIL.Image.Resampling.BICUBIC, PIL.Image.Resampling.BILINEAR


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureLayout:
    """The room of one picture. Patches and features are numbered from 0 in it."""

    size: tuple[int, int]
    """(height, width) in pixels after scaling, before padding or cutting."""
    feature: np.ndarray
    """[n] int32, of each token that the picture takes: the feature in its place, NEWLINE or ORDINARY."""
    segment: np.ndarray
    """[p] int32: what attends to itself only (tiles) is 1, 2, ..."""
    position: np.ndarray
    """[p, 3] int32: frame, row, column of each patch."""
    grid: np.ndarray
    """[p, 3] int32: frames, rows, columns of what it is in."""
    tiling: tuple[int, int] = (0, 0)
    """(rows, columns) of tiles behind the whole picture; none where it is not tiled."""

    @property
    def num_patches(self) -> int:
        return len(self.segment)


def lay_out(height: int, width: int, vision: VisionConfig, max_patches: int) -> PictureLayout:
    """The layout of a picture of `height` x `width` pixels.

    Raises:
      ValueError: it cannot be laid out: no `max_patches` hold it, or it is far too long; the message says which.
    """
    match vision.kind:
        case "moonvit":
            if vision.max_pixels:
                max_patches = min(max_patches, vision.max_pixels // vision.patch_pixels**2)
            fitted = images.fitted_size(width, height, patch_pixels=vision.patch_pixels, max_patches=max_patches)
            return _windows((fitted[1], fitted[0]), images.grid(*fitted, patch_pixels=vision.patch_pixels))
        case "qwen3_vl":
            layout = _stretched_windows(height, width, vision, max_patches)
        case "clip":
            layout = _tiles(height, width, vision, max_patches)
        case "fuyu":
            layout = _lines(height, width, vision, max_patches)
    if layout.num_patches > max_patches:
        raise ValueError(f"a picture of {width} x {height} pixels takes {layout.num_patches} patches")
    return layout


def over_frames(layout: PictureLayout, num_frames: int) -> PictureLayout:
    """The layout of a clip whose frames each have `layout`; a feature of it stands for all frames."""
    position, grid = np.tile(layout.position, (num_frames, 1)), np.tile(layout.grid, (num_frames, 1))
    position[:, 0] = np.repeat(np.arange(num_frames), layout.num_patches)
    grid[:, 0] = num_frames
    segment = np.tile(layout.segment, num_frames)
    return PictureLayout(size=layout.size, feature=layout.feature, segment=segment, position=position, grid=grid)


def cut(pixels: np.ndarray, layout: PictureLayout, vision: VisionConfig) -> np.ndarray:
    """`pixels`, uint8 [height, width, C] of the whole picture, as float32 [p, values of a patch] in its layout."""
    side = vision.patch_pixels
    mean, deviation = pixel_statistics(vision)
    match vision.kind:
        case "moonvit":
            scaled = _resized(pixels, layout.size)
            scaled = images.on_chessboard(scaled) if scaled.shape[2] == 4 else scaled
            return images.to_patches(scaled, side, mean, deviation)
        case "qwen3_vl":
            scaled = _normalised(_resized(pixels, layout.size), mean, deviation)
            rows, columns = layout.grid[0, 1:]
            cells = scaled.reshape(rows // 2, 2, side, columns // 2, 2, side, -1).transpose(0, 3, 1, 4, 6, 2, 5)
            frames = np.broadcast_to(cells[..., None, :, :], (*cells.shape[:5], vision.frames_per_patch, side, side))
            return frames.reshape(layout.num_patches, vision.patch_values)
        case "clip":
            pieces = _normalised(_pieces(pixels, layout, vision), mean, deviation)
            cells = pieces.reshape(len(pieces), vision.table_rows, side, vision.table_columns, side, -1)
            patches = cells.transpose(0, 1, 3, 5, 2, 4).reshape(len(pieces), -1, vision.patch_values)
            return np.pad(patches, ((0, 0), (1, 0), (0, 0))).reshape(layout.num_patches, vision.patch_values)
        case "fuyu":
            rows, columns = layout.grid[0, 1:]
            rest = (rows * side - layout.size[0], columns * side - layout.size[1])
            padding = ((0, rest[0]), (0, rest[1]), (0, 0))
            scaled = np.pad(_resized(pixels, layout.size, _BILINEAR), padding, constant_values=fuyu.PADDING_PIXEL)
            scaled = _normalised(scaled, mean, deviation)
            cells = scaled.reshape(rows, side, columns, side, -1).transpose(0, 2, 1, 3, 4)
            return cells.reshape(layout.num_patches, vision.patch_values)


def pixel_statistics(vision: VisionConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, deviation) by channel: pixels are (x / 255 - mean) / deviation."""
    mean, deviation = _STATISTICS[vision.kind]
    return vision.pixel_mean or mean, vision.pixel_deviation or deviation


def _windows(size: tuple[int, int], grid: tuple[int, int]) -> PictureLayout:
    position = images.patch_positions(*grid)
    return PictureLayout(
        size=size,
        feature=np.arange(len(position) // 4, dtype=np.int32),
        segment=np.ones(len(position), np.int32),
        position=position,
        grid=np.broadcast_to(np.array((1, *grid), np.int32), position.shape),
    )


def _stretched_windows(height: int, width: int, vision: VisionConfig, max_patches: int) -> PictureLayout:
    factor, most = 2 * vision.patch_pixels, max_patches * vision.patch_pixels**2
    least, largest = vision.min_pixels or qwen3_vl.MIN_PIXELS, vision.max_pixels or qwen3_vl.MAX_PIXELS
    limits = {"min_pixels": min(least, most), "max_pixels": min(largest, most)}
    rows, columns = (side // factor for side in qwen3_vl.fitted_size(height, width, factor=factor, **limits))
    # A long, thin picture keeps one window across: the rule then goes beyond its own limit.
    if rows > columns:
        rows = min(rows, max_patches // 4 // columns)
    else:
        columns = min(columns, max_patches // 4 // rows)
    if not rows or not columns:
        raise ValueError(f"a window takes 4 patches, more than {max_patches}")
    return _windows((rows * factor, columns * factor), (2 * rows, 2 * columns))


def _tiles(height: int, width: int, vision: VisionConfig, max_patches: int) -> PictureLayout:
    side, per_tile = vision.table_rows * vision.patch_pixels, 1 + vision.table_rows * vision.table_columns
    if vision.tilings:
        pairs = zip(vision.tilings[::2], vision.tilings[1::2], strict=True)
        allowed = [pair for pair in pairs if (1 + math.prod(pair)) * per_tile <= max_patches]
        if not allowed:
            raise ValueError(f"no tiling of a picture takes at most {max_patches} patches")
        tilings = tuple(length for pair in allowed for length in pair)
        tiling = llava.best_tiling(height, width, tilings, side)
        size = llava.fitted_size(height, width, tiling[0] * side, tiling[1] * side)
        feature, num_tiles = llava.tile_slots(height, width, vision, tiling), 1 + math.prod(tiling)
    else:
        tiling, size, num_tiles = (0, 0), llava.covering_size(height, width, side), 1
        feature = np.arange(0 if vision.class_feature == "keep" else 1, per_tile, dtype=np.int32)
    places = np.moveaxis(np.indices((vision.table_rows, vision.table_columns)), 0, -1).reshape(-1, 2)
    places = np.concatenate([[(0, -1, -1)], np.pad(places, ((0, 0), (1, 0)))]).astype(np.int32)
    grid = np.array((1, vision.table_rows, vision.table_columns), np.int32)
    return PictureLayout(
        size=size,
        feature=feature,
        segment=np.repeat(np.arange(1, num_tiles + 1, dtype=np.int32), per_tile),
        position=np.tile(places, (num_tiles, 1)),
        grid=np.broadcast_to(grid, (num_tiles * per_tile, 3)),
        tiling=tiling,
    )


def _pieces(pixels: np.ndarray, layout: PictureLayout, vision: VisionConfig) -> np.ndarray:
    """uint8 [tiles, side, side, C]: the middle of the picture; or all of it, and then its tiles."""
    side = vision.table_rows * vision.patch_pixels
    scaled = _resized(pixels, layout.size)
    if layout.tiling == (0, 0):
        top, left = (layout.size[0] - side) // 2, (layout.size[1] - side) // 2
        return scaled[None, top : top + side, left : left + side]
    rows, columns = layout.tiling
    rest = (rows * side - layout.size[0], columns * side - layout.size[1])
    # Half of the padding in front, and all that is left behind.
    padding = [(length // 2, length - length // 2) for length in rest]
    whole = np.pad(scaled, (*padding, (0, 0)))
    tiles = whole.reshape(rows, side, columns, side, -1).swapaxes(1, 2).reshape(rows * columns, side, side, -1)
    return np.concatenate([_resized(pixels, (side, side))[None], tiles])


def _lines(height: int, width: int, vision: VisionConfig, max_patches: int) -> PictureLayout:
    size = fuyu.fitted_size(height, width)
    while math.prod(grid := fuyu.grid(*size, vision.patch_pixels)) > max(1, max_patches):
        scale = min(0.99, math.sqrt(max_patches / math.prod(grid)))
        size = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    rows, columns = grid
    number = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    places = np.moveaxis(np.indices(grid), 0, -1).reshape(-1, 2)
    return PictureLayout(
        size=size,
        feature=np.pad(number, ((0, 0), (0, 1)), constant_values=ORDINARY).reshape(-1),
        segment=np.ones(rows * columns, np.int32),
        position=np.pad(places, ((0, 0), (1, 0))).astype(np.int32),
        grid=np.broadcast_to(np.array((1, rows, columns), np.int32), (rows * columns, 3)),
    )


def _resized(pixels: np.ndarray, size: tuple[int, int], kernel: PIL.Image.Resampling = _BICUBIC) -> np.ndarray:
    return images.resize(pixels, (size[1], size[0]), kernel)


def _normalised(pixels: np.ndarray, mean: tuple[float, ...], deviation: tuple[float, ...]) -> np.ndarray:
    """float32 (x / 255 - mean) / deviation by channel, the last axis; a grey picture takes the first of them."""
    num_channels = pixels.shape[-1]
    scale = np.float32(1) / (np.float32(255) * np.array(deviation[:num_channels], np.float32))
    shift = np.array(mean[:num_channels], np.float32) / np.array(deviation[:num_channels], np.float32)
    return pixels.astype(np.float32) * scale - shift
