"""A conversation as tokens: which of them are learned, and which stand for which picture; and what fits a row."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from mmjax.config import DataConfig, VisionConfig
from mmjax.data import images, videos
from mmjax.data.picture_layout import ORDINARY, PictureLayout, cut, lay_out, over_frames
from mmjax.data.sources.conversation import Picture, Sample, VideoFile
from mmjax.data.tokenizer import Tokenizer
from mmjax.errors import DataError

Outcome = Literal["whole", "cut", "without pictures", "dropped"]
"""What became of a sample that was to fit a row."""


class Sizes(NamedTuple):
    """What a document needs."""

    tokens: int
    """Positions."""
    patches: int
    supervised: int
    """Targets that count in the loss."""
    squared_patches: int
    """Sum over its pictures of their patches squared, which attention within pictures costs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """Consecutive frames of a video that the tower reads together."""

    video: VideoFile
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedPicture:
    """A picture, or a clip, and the room it takes."""

    picture: Picture | Clip
    layout: PictureLayout

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels after scaling, before padding."""
        return self.layout.size[1], self.layout.size[0]

    @property
    def num_patches(self) -> int:
        return self.layout.num_patches

    @property
    def num_features(self) -> int:
        """Positions it takes in a row."""
        return len(self.layout.feature)

    def tokens(self, image_token_id: int, newline_token_id: int | None, where: str) -> list[int]:
        """The tokens it takes: of images, and of newlines where its tower wants them between rows of patches."""
        is_newline = self.layout.feature == ORDINARY
        if image_token_id < 0:
            raise DataError(
                where,
                found="a picture",
                expected="text alone, since data.image_token is empty",
                remedy="set data.image_token, if the model reads pictures",
            )
        if newline_token_id is None and is_newline.any():
            raise DataError(
                where,
                found="a picture whose rows of patches end with a token",
                expected="a tokenizer with such a token",
                remedy="set data.newline_token to it",
            )
        return np.where(is_newline, newline_token_id or 0, image_token_id).tolist()


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One sample, ready for a row."""

    where: str
    tokens: np.ndarray
    """[n] int32."""
    is_supervised: np.ndarray
    """[n] bool: tokens of answers, their end tokens included; never a picture's."""
    is_feature: np.ndarray
    """[n] bool: tokens of pictures, in the order of `pictures`."""
    pictures: tuple[PlacedPicture, ...]
    answer_start: int
    """Where the last answer begins."""

    @property
    def num_patches(self) -> int:
        return sum(placed.num_patches for placed in self.pictures)

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            len(self.tokens),
            self.num_patches,
            int(self.is_supervised[1:].sum()),
            sum(placed.num_patches**2 for placed in self.pictures),
        )

    def picture_spans(self) -> list[slice]:
        """Positions of each picture."""
        places = np.flatnonzero(self.is_feature)
        stops = np.cumsum([placed.num_features for placed in self.pictures], dtype=np.int64)
        return [
            slice(int(places[stop - placed.num_features]), int(places[stop - 1]) + 1)
            for placed, stop in zip(self.pictures, stops.tolist(), strict=True)
        ]


def align(sample: Sample, tokenizer: Tokenizer, data: DataConfig, vision: VisionConfig) -> Document:
    """The sample with as many image tokens as its pictures give features. Of image files only headers are read."""
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    pictures: list[PlacedPicture] = []
    is_feature: list[bool] = []
    answer_start = 0
    for message in sample.messages:
        tokens += tokenizer.header(message.role, is_first=not tokens)
        start = len(tokens)
        answer_start = start if message.role == "assistant" else answer_start
        for part in message.parts:
            if isinstance(part, str):
                tokens += tokenizer.encode(part)
                continue
            is_video = isinstance(part, VideoFile)
            clips = place_video(part, data, vision) if is_video else [place(part, sample.where, data, vision)]
            for placed in clips:
                pictures.append(placed)
                is_feature += [False] * (len(tokens) - len(is_feature))
                tokens += placed.tokens(tokenizer.image_token_id, tokenizer.newline_token_id, sample.where)
                is_feature += [True] * placed.num_features
        tokens.append(tokenizer.end_token_id)
        if message.is_supervised:
            spans.append((start, len(tokens)))
    is_feature += [False] * (len(tokens) - len(is_feature))
    feature = np.array(is_feature)
    supervised = np.zeros(len(tokens), bool)
    for start, stop in spans:
        supervised[start:stop] = True
    return Document(
        where=sample.where,
        tokens=np.array(tokens, np.int32),
        is_supervised=supervised & ~feature,
        is_feature=feature,
        pictures=tuple(pictures),
        answer_start=answer_start,
    )


def fit(document: Document, data: DataConfig) -> tuple[Document | None, Outcome]:
    """The document as it stands in a row, by `data.too_long`; None where it is left out. No picture is ever cut.

    Raises:
      DataError: nothing in it is learned; or it is too long for a row and `data.too_long` is `error`.
    """
    if not document.sizes.supervised:
        raise DataError(
            document.where,
            found="no supervised token",
            expected="an answer of at least one token",
            remedy="add the answer, or remove the sample",
        )
    if _fits(document, data):
        return document, "whole"
    match data.too_long:
        case "error":
            tokens, patches, *_ = document.sizes
            raise DataError(
                document.where,
                found=f"a sample of {tokens} tokens and {patches} patches",
                expected=f"at most {data.row_tokens} tokens and {data.row_patches} patches, one row",
                remedy="raise data.row_tokens or row_patches, lower data.image_max_patches, or set data.too_long=drop",
            )
        case "drop_image":
            while document.pictures and not _fits(document, data):
                document = _without_last_picture(document)
            if _fits(document, data):
                return document, "without pictures"
        case "truncate":
            document = _cut(document, data)
            if document.sizes.supervised:
                return document, "cut"
    return None, "dropped"


def _fits(document: Document, data: DataConfig) -> bool:
    return len(document.tokens) <= data.row_tokens and document.num_patches <= data.row_patches


def _without_last_picture(document: Document) -> Document:
    *kept, span = document.picture_spans()
    length = span.stop - span.start
    return dataclasses.replace(
        document,
        tokens=np.delete(document.tokens, span),
        is_supervised=np.delete(document.is_supervised, span),
        is_feature=np.delete(document.is_feature, span),
        pictures=document.pictures[: len(kept)],
        answer_start=document.answer_start - (length if span.start < document.answer_start else 0),
    )


def _cut(document: Document, data: DataConfig) -> Document:
    """The longest beginning that fits; a picture that does not fit whole goes, with all that follows."""
    stop, patches, kept = data.row_tokens, 0, 0
    for placed, span in zip(document.pictures, document.picture_spans(), strict=True):
        patches += placed.num_patches
        if span.stop > stop or patches > data.row_patches:
            stop = min(stop, span.start)
            break
        kept += 1
    return dataclasses.replace(
        document,
        tokens=document.tokens[:stop],
        is_supervised=document.is_supervised[:stop],
        is_feature=document.is_feature[:stop],
        pictures=document.pictures[:kept],
        answer_start=min(document.answer_start, stop),
    )


def place(picture: Picture, where: str, data: DataConfig, vision: VisionConfig) -> PlacedPicture:
    """The picture with the size it is scaled to; of a file, the header alone is read."""
    if not vision.is_present:
        raise DataError(
            where,
            found="a picture",
            expected="text alone, for model.vision.num_layers is 0",
            remedy="give the model a vision tower, or remove the pictures",
        )
    width, height = images.read_size(picture, data.image_max_pixels)
    try:
        layout = lay_out(height, width, vision, data.image_max_patches)
    except ValueError as error:
        raise DataError(
            where,
            found=str(error),
            expected=f"a picture that takes at most {data.image_max_patches} patches",
            remedy="raise data.image_max_patches, or scale or remove the picture",
        ) from error
    return PlacedPicture(picture=picture, layout=layout)


def place_video(video: VideoFile, data: DataConfig, vision: VisionConfig) -> list[PlacedPicture]:
    """The clips of a video, in order; of the file no frame is decoded."""
    if not vision.is_present or vision.kind != "moonvit":
        raise DataError(
            video.where,
            found=f"a video for a model with {f'a {vision.kind} tower' if vision.is_present else 'no tower'}",
            expected="a model with a moonvit tower, which reads several frames together",
            remedy="change model.vision, or remove the record",
        )
    shape, together = videos.read_shape(video, data), data.video_frames_per_feature
    layout = lay_out(shape.height, shape.width, vision, max(4, data.image_max_patches // together // 4 * 4))
    starts = range(0, shape.num_frames, together)
    clips = [Clip(video=video, start=start, stop=min(start + together, shape.num_frames)) for start in starts]
    return [PlacedPicture(picture=clip, layout=over_frames(layout, clip.stop - clip.start)) for clip in clips]


def read_pixels(placed: PlacedPicture, data: DataConfig, vision: VisionConfig) -> np.ndarray:
    """A picture, or the first frame of a clip, scaled: uint8 [height, width, channels]."""
    return images.resize(_read(placed, data, vision, {})[0], placed.size)


def _read(
    placed: PlacedPicture, data: DataConfig, vision: VisionConfig, read: dict[int, np.ndarray]
) -> list[np.ndarray]:
    """The frames of a clip, or one picture; videos in `read` are not decoded again."""
    picture = placed.picture
    if not isinstance(picture, Clip):
        return [images.read_pixels(picture, max_pixels=data.image_max_pixels, channels=vision.channels)]
    if id(picture.video) not in read:
        read[id(picture.video)] = videos.read_frames(picture.video, data, vision.channels)
    return list(read[id(picture.video)][picture.start : picture.stop])


def read_patches(document: Document, data: DataConfig, vision: VisionConfig) -> np.ndarray:
    """float32 [patches, values] of all pictures, one after the other; all grey where `data.images` is `blank`."""
    patches, decoded = [np.zeros((0, vision.patch_values), np.float32)], {}
    for placed in document.pictures:
        frames = [cut(pixels, placed.layout, vision) for pixels in _read(placed, data, vision, decoded)]
        patches += frames
    whole = np.concatenate(patches)
    return np.zeros_like(whole) if data.images == "blank" else whole
