"""Videos that Pillow reads (animated GIF, WebP, PNG): opened as safely as pictures, frames capped before decoding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import PIL.Image
import PIL.ImageSequence

from mmjax.config import DataConfig
from mmjax.data import images
from mmjax.data.lengths import fit_length, fitted_length
from mmjax.data.sources.conversation import ImageFile, VideoFile
from mmjax.errors import DataError


@dataclass(frozen=True)
class VideoShape:
    """What the header says, and the rule makes of it."""

    width: int
    height: int
    num_frames: int
    """Real frames after the rule of `data.video`."""


def read_shape(video: VideoFile, data: DataConfig) -> VideoShape:
    """The shape of a video, its frames counted but not decoded."""
    with _opened(video, data) as (image, num_frames):
        _, num_real = fitted_length(num_frames, data.video)
        return VideoShape(image.width, image.height, num_real)


def read_frames(video: VideoFile, data: DataConfig, channels: int) -> np.ndarray:
    """uint8 [frames, height, width, channels]: the real frames after the rule of `data.video`."""
    mode = {1: "L", 3: "RGB"}[channels]
    with _opened(video, data) as (image, _):
        decoded, milliseconds = [], 0.0
        for frame in PIL.ImageSequence.Iterator(image):
            decoded.append(np.asarray(frame.convert(mode)))
            # Of a WebP, how long a frame is shown is known once it is decoded.
            milliseconds += float(image.info.get("duration") or 0)
            _check_seconds(milliseconds, video, data)
    frames = np.stack(decoded).reshape(len(decoded), *decoded[0].shape[:2], channels)
    fitted, is_real = fit_length(frames, data.video)
    return np.rint(fitted[is_real]).clip(0, 255).astype(np.uint8)


@contextmanager
def _opened(video: VideoFile, data: DataConfig) -> Iterator[tuple[PIL.Image.Image, int]]:
    """The video at its first frame, and how many there are."""
    file = ImageFile(where=video.where, root=video.root, path=video.path)
    with images.opened(file, data.image_max_pixels, kind="video") as image:
        num_frames = 0
        milliseconds = 0.0
        while True:
            # Of a GIF, counting with `n_frames` would go through a million frames before it says so.
            try:
                image.seek(num_frames)
            except EOFError:
                break
            num_frames += 1
            milliseconds += float(image.info.get("duration") or 0)
            _check_seconds(milliseconds, video, data)
            if num_frames > data.video_max_frames:
                raise _too_much(video, f"{data.video_max_frames} frames", "data.video_max_frames")
            if num_frames * image.width * image.height > images.MAX_VIDEO_PIXELS:
                raise _too_much(video, f"{images.MAX_VIDEO_PIXELS:,} pixels in all frames", "")
        image.seek(0)
        yield image, num_frames


def _check_seconds(milliseconds: float, video: VideoFile, data: DataConfig) -> None:
    if milliseconds > 1000 * data.video_max_seconds:
        raise _too_much(video, f"{data.video_max_seconds:g} seconds", "data.video_max_seconds")


def _too_much(video: VideoFile, limit: str, setting: str) -> DataError:
    return DataError(
        f"{video.where}, video {video.path!r}",
        found=f"more than {limit}",
        expected=f"at most {limit}",
        remedy="cut or scale the video" + (f", or raise {setting}" if setting else ""),
    )
