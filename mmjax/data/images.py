"""Pictures: opened safely, resized to a budget of patches, cut into patches in merge order.

The rules are those of Kimi's processor: scale down only, pad with black at the right and bottom to whole merge groups,
normalise to (x / 255 - 0.5) / 0.5 unless a release says otherwise. Pixels are taken as stored (no EXIF rotation); of an
animation, the first frame.
"""

import functools
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

import numpy as np
import PIL.Image

from mmjax.data.files import LostFileError, open_regular, reason
from mmjax.data.sources.conversation import ImageContent, ImageFile, Picture
from mmjax.errors import DataError

# Formats that are pictures and nothing else: EPS and SVG are programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_SIDE_PATCHES = 512
# What Kimi-K3 lays transparent pictures on: squares of so many pixels a side, the first one white.
CHESSBOARD_SQUARE, CHESSBOARD_WHITE, CHESSBOARD_GREY = 8, 255, 180
HALF = (0.5, 0.5, 0.5)
MAX_VIDEO_PIXELS = 500_000_000
"""Of all frames of a video together."""
# Pillow's own limit raises from inside `open`, without our message; ours is tested before any decoding.
PIL.Image.MAX_IMAGE_PIXELS = None


def read_size(picture: Picture, max_pixels: int) -> tuple[int, int]:
    """(width, height) of a picture; of a file, its header alone is read."""
    if isinstance(picture, np.ndarray):
        return picture.shape[1], picture.shape[0]
    with opened(picture, max_pixels) as image:
        return image.size


def read_pixels(picture: Picture, *, max_pixels: int, channels: int, keeps_alpha: bool = False) -> np.ndarray:
    """uint8 [height, width, channels]. Transparent pictures are laid on white; 16-bit grey keeps its upper 8 bits.

    With `keeps_alpha` a file's transparent picture comes as [height, width, 4], for `on_chessboard`.
    """
    mode = {1: "L", 3: "RGB"}[channels]
    if isinstance(picture, np.ndarray):
        pixels = np.asarray(PIL.Image.fromarray(picture).convert(mode)) if picture.ndim == 3 else picture
    else:
        with opened(picture, max_pixels) as image:
            mode = "RGBA" if keeps_alpha and image.has_transparency_data else mode
            pixels = np.asarray((image if mode == "RGBA" else _flattened(image)).convert(mode))
    return pixels if pixels.ndim == 3 else np.repeat(pixels[:, :, None], channels, axis=2)


def _flattened(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    if image.mode.startswith("I;16"):
        return PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def on_chessboard(pixels: np.ndarray) -> np.ndarray:
    """uint8 [height, width, 4] -> [height, width, 3], laid on white and grey squares."""
    row, column = (np.arange(size) // CHESSBOARD_SQUARE for size in pixels.shape[:2])
    board = np.where((row[:, None] + column[None, :]) % 2, np.float32(CHESSBOARD_GREY), np.float32(CHESSBOARD_WHITE))
    alpha = pixels[..., 3:].astype(np.float32) / np.float32(255)
    return (alpha * pixels[..., :3] + (1 - alpha) * board[..., None]).astype(np.uint8)


def fitted_size(width: int, height: int, *, patch_pixels: int, max_patches: int) -> tuple[int, int]:
    """(width, height) in pixels that keep the shape and cover, with padding, at most `max_patches` patches.

    scale = min(1, sqrt(max_patches / ((width // p) (height // p))), 512 p / width, 512 p / height)

    and smaller where the padding of a long, thin picture would pass the limit.
    """
    area = max(1, width // patch_pixels) * max(1, height // patch_pixels)
    scale = min(
        1.0, math.sqrt(max_patches / area), *(MAX_SIDE_PATCHES * patch_pixels / side for side in (width, height))
    )
    while True:
        fitted = max(1, int(width * scale)), max(1, int(height * scale))
        count = math.prod(grid(*fitted, patch_pixels=patch_pixels))
        if count <= max(4, max_patches):
            return fitted
        scale *= min(0.99, math.sqrt(max_patches / count))


def grid(width: int, height: int, *, patch_pixels: int) -> tuple[int, int]:
    """(rows, columns) of patches after padding; both even."""
    return 2 * math.ceil(height / (2 * patch_pixels)), 2 * math.ceil(width / (2 * patch_pixels))


def resize(
    pixels: np.ndarray, size: tuple[int, int], kernel: PIL.Image.Resampling = PIL.Image.Resampling.BICUBIC
) -> np.ndarray:
    """`pixels` [height, width, channels] at another (width, height), with antialiasing."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    image = PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return np.asarray(image.resize(size, kernel)).reshape(size[1], size[0], -1)


def to_patches(
    pixels: np.ndarray, patch_pixels: int, mean: tuple[float, ...] = HALF, deviation: tuple[float, ...] = HALF
) -> np.ndarray:
    """uint8 [height, width, C] -> float32 [patches, C*p*p], padded, (x / 255 - mean) / deviation, in merge order."""
    rows, columns = grid(pixels.shape[1], pixels.shape[0], patch_pixels=patch_pixels)
    padding = (rows * patch_pixels - pixels.shape[0], columns * patch_pixels - pixels.shape[1])
    padded = np.pad(pixels, ((0, padding[0]), (0, padding[1]), (0, 0))) if any(padding) else pixels
    cells = padded.reshape(rows // 2, 2, patch_pixels, columns // 2, 2, patch_pixels, -1)
    channels = pixels.shape[2]
    ordered = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, channels, -1)
    mean_of, deviation_of = (np.array(numbers[:channels], np.float32)[:, None] for numbers in (mean, deviation))
    scaled = ordered.astype(np.float32) / (np.float32(255) * deviation_of) - mean_of / deviation_of
    return scaled.reshape(rows * columns, -1)


@functools.cache
def patch_positions(rows: int, columns: int) -> np.ndarray:
    """int32 [rows * columns, 3]: frame, row, column of each patch in merge order."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    ordered = places.reshape(rows // 2, 2, columns // 2, 2, 2).swapaxes(1, 2).reshape(-1, 2)
    return np.pad(ordered, ((0, 0), (1, 0))).astype(np.int32)


@contextmanager
def opened(
    file: ImageFile | ImageContent, max_pixels: int, *, kind: Literal["image", "video"] = "image"
) -> Iterator[PIL.Image.Image]:
    """The image, header read. All that goes wrong until the block ends becomes a DataError that names the file."""
    where = f"{file.where}, {kind} {file.path!r}"
    path = confined(file, where) if isinstance(file, ImageFile) else None
    try:
        with _stream(file, path) as stream, PIL.Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise _refusal(
                    where,
                    f"{image.width} x {image.height} pixels",
                    f"at most {max_pixels:,} pixels",
                    "scale the picture down, or raise data.image_max_pixels",
                )
            yield image
    except DataError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise _refusal(where, "no known picture", f"one of {', '.join(FORMATS)}", "convert or replace it") from error
    except OSError as error:
        found = f"no readable picture ({reason(error)})"
        raise _refusal(where, found, "a whole picture", "check the path and the file") from error
    except Exception as error:
        # Decoders raise all kinds of errors on damaged files.
        raise _refusal(where, f"a damaged picture ({error})", "a whole picture", "replace the file") from error


def _stream(file: ImageFile | ImageContent, path: Path | None) -> BinaryIO:
    return io.BytesIO(file.read()) if isinstance(file, ImageContent) else open_regular(path or Path())


def confined(file: ImageFile, where: str) -> Path:
    """The real path of the file, proven to lie in its root."""
    expected = f"a path inside {file.root}"
    if "://" in file.path or file.path.startswith("data:"):
        raise _refusal(where, "a URL", expected, "download the picture first: training uses no network")
    written = PurePosixPath(file.path)
    if not file.path or "\0" in file.path or written.is_absolute() or ".." in written.parts:
        raise _refusal(
            where,
            "a path that is empty, absolute or leads upwards",
            expected,
            "set data.media_root and use relative paths",
        )
    try:
        root = file.root.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        found, remedy = f"no such folder ({error})", "check data.media_root, or see data.lost_source"
        raise LostFileError(str(file.root), found=found, expected="the folder of pictures", remedy=remedy) from error
    try:
        path = (root / written).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise _refusal(where, f"no such file ({error})", expected, "check the path and data.media_root") from error
    if not path.is_relative_to(root):
        raise _refusal(where, f"a link to {path}", expected, "copy the picture into the folder")
    return path


def _refusal(where: str, found: str, expected: str, remedy: str) -> DataError:
    return DataError(where, found=found, expected=expected, remedy=remedy)
