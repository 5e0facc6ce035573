"""A conversation as tokens: which of them are learned, and which stand for which picture."""

from dataclasses import dataclass

import numpy as np

from mmjax.config import DataConfig, VisionConfig
from mmjax.data import images
from mmjax.data.sources.conversation import Picture, Sample
from mmjax.data.tokenizer import Tokenizer
from mmjax.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedPicture:
    """A picture and the room it takes."""

    picture: Picture
    size: tuple[int, int]
    """(width, height) in pixels after scaling, before padding."""
    grid: tuple[int, int]
    """(rows, columns) of patches."""

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One sample, ready for a row."""

    where: str
    tokens: np.ndarray
    """[n] int32."""
    is_supervised: np.ndarray
    """[n] bool: tokens of answers, their end tokens included; never a picture's."""
    is_feature: np.ndarray
    """[n] bool: tokens that merged patches stand in place of, in the order of `pictures`."""
    pictures: tuple[PlacedPicture, ...]
    answer_start: int
    """Where the last answer begins."""

    @property
    def num_patches(self) -> int:
        return sum(placed.num_patches for placed in self.pictures)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Positions, patches and supervised targets."""
        return len(self.tokens), self.num_patches, int(self.is_supervised[1:].sum())


def align(sample: Sample, tokenizer: Tokenizer, data: DataConfig, vision: VisionConfig) -> Document:
    """The sample with as many image tokens as its pictures give features. Of image files only headers are read."""
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    pictures: list[PlacedPicture] = []
    is_feature: list[bool] = []
    answer_start = 0
    for message in sample.messages:
        tokens += tokenizer.header(message.role)
        start = len(tokens)
        answer_start = start if message.role == "assistant" else answer_start
        for part in message.parts:
            if isinstance(part, str):
                tokens += tokenizer.encode(part)
                continue
            placed = _place(part, sample.where, data, vision)
            pictures.append(placed)
            is_feature += [False] * (len(tokens) - len(is_feature))
            tokens += [tokenizer.image_token_id] * (placed.num_patches // 4)
            is_feature += [True] * (placed.num_patches // 4)
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


def _place(picture: Picture, where: str, data: DataConfig, vision: VisionConfig) -> PlacedPicture:
    if not vision.is_present:
        raise DataError(
            where,
            found="a picture",
            expected="text alone, for model.vision.num_layers is 0",
            remedy="give the model a vision tower, or remove the pictures",
        )
    size = images.fitted_size(
        *images.read_size(picture, data.image_max_pixels),
        patch_pixels=vision.patch_pixels,
        max_patches=data.image_max_patches,
    )
    return PlacedPicture(picture=picture, size=size, grid=images.grid(*size, patch_pixels=vision.patch_pixels))


def read_pixels(placed: PlacedPicture, data: DataConfig, vision: VisionConfig) -> np.ndarray:
    """A picture, scaled: uint8 [height, width, channels]."""
    pixels = images.read_pixels(placed.picture, max_pixels=data.image_max_pixels, channels=vision.channels)
    return images.resize(pixels, placed.size)


def read_patches(document: Document, data: DataConfig, vision: VisionConfig) -> np.ndarray:
    """float32 [patches, C*p*p] of all pictures, one after the other; all grey where `data.images` is `blank`."""
    width = vision.channels * vision.patch_pixels**2
    pixels = [read_pixels(placed, data, vision) for placed in document.pictures]
    patches = [images.to_patches(picture, vision.patch_pixels) for picture in pixels]
    whole = np.concatenate([np.zeros((0, width), np.float32), *patches])
    return np.zeros_like(whole) if data.images == "blank" else whole
