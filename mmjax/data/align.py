"""A conversation as tokens: which are learned, which stand for which picture or sound; and what fits a row."""

import dataclasses
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np

from mmjax.config import AudioConfig, DataConfig, VisionConfig
from mmjax.data import images, signals, videos
from mmjax.data.picture_layout import ORDINARY, PictureLayout, cut, lay_out, over_frames
from mmjax.data.sources.conversation import Picture, Sample, Sound, VideoFile
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
    """Sum over its pictures of their patches squared, which attention within pictures costs (not within tiles, whose
    size is the tower's)."""
    clips: int = 0
    """Of its sounds."""


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
class PlacedSound:
    """A sound, and the room it takes."""

    sound: Sound
    num_clips: int
    num_features: int
    """Positions it takes in a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One sample, ready for a row."""

    where: str
    tokens: np.ndarray
    """[n] int32."""
    is_supervised: np.ndarray
    """[n] bool: tokens of answers, their end tokens included; never those of a picture or sound."""
    is_feature: np.ndarray
    """[n] bool: tokens of pictures, in the order of `pictures`."""
    pictures: tuple[PlacedPicture, ...]
    is_sound: np.ndarray
    """[n] bool: tokens of sounds, in the order of `sounds`."""
    sounds: tuple[PlacedSound, ...]
    answer_start: int
    """Where the last answer begins."""

    @property
    def num_patches(self) -> int:
        return sum(placed.num_patches for placed in self.pictures)

    @property
    def num_clips(self) -> int:
        return sum(placed.num_clips for placed in self.sounds)

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            len(self.tokens),
            self.num_patches,
            int(self.is_supervised[1:].sum()),
            sum(placed.num_patches**2 for placed in self.pictures),
            self.num_clips,
        )

    def picture_spans(self) -> list[slice]:
        """Positions of each picture."""
        return _spans(self.is_feature, [placed.num_features for placed in self.pictures])

    def sound_spans(self) -> list[slice]:
        """Positions of each sound."""
        return _spans(self.is_sound, [placed.num_features for placed in self.sounds])


def _spans(is_taken: np.ndarray, lengths: list[int]) -> list[slice]:
    places, stops = np.flatnonzero(is_taken), np.cumsum(lengths, dtype=np.int64).tolist()
    return [
        slice(int(places[stop - length]), int(places[stop - 1]) + 1)
        for length, stop in zip(lengths, stops, strict=True)
    ]


_WORD, _PICTURE, _SOUND = range(3)


def align(
    sample: Sample, tokenizer: Tokenizer, data: DataConfig, vision: VisionConfig, audio: AudioConfig | None = None
) -> Document:
    """The sample with as many image and audio tokens as its media give features. Of files only headers are read."""
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    pictures: list[PlacedPicture] = []
    sounds: list[PlacedSound] = []
    kinds: list[int] = []
    answer_start = 0
    for message in sample.messages:
        tokens += tokenizer.header(message.role, is_first=not tokens)
        start = len(tokens)
        answer_start = start if message.role == "assistant" else answer_start
        for part in message.parts:
            if isinstance(part, str):
                tokens += tokenizer.encode(part)
                continue
            kinds += [_WORD] * (len(tokens) - len(kinds))
            if isinstance(part, Sound):
                sounds.append(place_sound(part, data, audio, tokenizer.audio_token_id))
                tokens += [tokenizer.audio_token_id] * sounds[-1].num_features
                kinds += [_SOUND] * sounds[-1].num_features
                continue
            is_video = isinstance(part, VideoFile)
            clips = place_video(part, data, vision) if is_video else [place(part, sample.where, data, vision)]
            for placed in clips:
                pictures.append(placed)
                tokens += placed.tokens(tokenizer.image_token_id, tokenizer.newline_token_id, sample.where)
                kinds += [_PICTURE] * placed.num_features
        tokens.append(tokenizer.end_token_id)
        if message.is_supervised:
            spans.append((start, len(tokens)))
    kind = np.array(kinds + [_WORD] * (len(tokens) - len(kinds)))
    supervised = np.zeros(len(tokens), bool)
    for start, stop in spans:
        supervised[start:stop] = True
    return Document(
        where=sample.where,
        tokens=np.array(tokens, np.int32),
        is_supervised=supervised & (kind == _WORD),
        is_feature=kind == _PICTURE,
        pictures=tuple(pictures),
        is_sound=kind == _SOUND,
        sounds=tuple(sounds),
        answer_start=answer_start,
    )


def fit(document: Document, data: DataConfig) -> tuple[Document | None, Outcome]:
    """The document as it stands in a row, by `data.too_long`; None where it is left out. No medium is ever cut.

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
            tokens, patches, *_, clips = document.sizes
            found, room = f"{tokens} tokens and {patches} patches", f"{data.row_tokens} tokens and {data.row_patches}"
            remedy = "raise data.row_tokens or row_patches, lower data.image_max_patches, or set data.too_long=drop"
            if clips:
                found, room = f"{found} and {clips} clips of sound", f"{room} patches and {data.row_clips} clips"
                remedy = "raise data.row_clips, row_tokens or row_patches, or set data.too_long=drop"
            raise DataError(
                document.where,
                found=f"a sample of {found}",
                expected=f"at most {room}{'' if clips else ' patches'}, one row",
                remedy=remedy,
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
    room = (data.row_tokens, data.row_patches, data.row_clips)
    needed = (len(document.tokens), document.num_patches, document.num_clips)
    return all(size <= limit for size, limit in zip(needed, room, strict=True))


def _without_last_picture(document: Document) -> Document:
    first = _first_clip(document, len(document.pictures) - 1)
    spans = document.picture_spans()[first:]
    # Clips of a video lie side by side.
    span = slice(spans[0].start, spans[-1].stop)
    length = span.stop - span.start
    return dataclasses.replace(
        document,
        tokens=np.delete(document.tokens, span),
        is_supervised=np.delete(document.is_supervised, span),
        is_feature=np.delete(document.is_feature, span),
        pictures=document.pictures[:first],
        is_sound=np.delete(document.is_sound, span),
        answer_start=document.answer_start - (length if span.start < document.answer_start else 0),
    )


def _first_clip(document: Document, number: int) -> int:
    """The first of the clips of the video that picture `number` is one of; itself, if it is a picture."""
    clip = document.pictures[number].picture
    if not isinstance(clip, Clip):
        return number
    videos_of = [p.picture.video if isinstance(p.picture, Clip) else None for p in document.pictures]
    return next(n for n, video in enumerate(videos_of) if video is clip.video)


def _cut(document: Document, data: DataConfig) -> Document:
    """The longest beginning that fits; a medium that does not fit whole goes, with all that follows."""
    stop = data.row_tokens
    media = (
        (document.picture_spans(), [placed.num_patches for placed in document.pictures], data.row_patches),
        (document.sound_spans(), [placed.num_clips for placed in document.sounds], data.row_clips),
    )
    for is_sound, (spans, sizes, room) in enumerate(media):
        for number, (span, used) in enumerate(zip(spans, np.cumsum(sizes), strict=True)):
            if span.stop > stop or used > room:
                stop = min(stop, spans[number if is_sound else _first_clip(document, number)].start)
                break
    num_pictures, num_sounds = (sum(span.stop <= stop for span in spans) for spans, *_ in media)
    return dataclasses.replace(
        document,
        tokens=document.tokens[:stop],
        is_supervised=document.is_supervised[:stop],
        is_feature=document.is_feature[:stop],
        pictures=document.pictures[:num_pictures],
        is_sound=document.is_sound[:stop],
        sounds=document.sounds[:num_sounds],
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


def place_sound(sound: Sound, data: DataConfig, audio: AudioConfig | None, token_id: int) -> PlacedSound:
    """The sound or signal with the room it takes; of the file, the header alone is read."""
    heard = f"{audio.hears} alone (model.audio.hears)" if audio is not None else ""
    refusals = {
        "the model hears none, for model.audio.num_layers is 0": audio is None or not audio.is_present,
        f"the model hears {heard}": audio is not None and audio.hears != f"{sound.kind}s",
        "no token stands for one, for data.audio_token is empty": token_id < 0,
    }
    for reason, is_so in refusals.items():
        if is_so:
            raise DataError(
                sound.where,
                found=f"a {sound.kind}, {sound.path!r}",
                expected=f"none: {reason}",
                remedy=f"set what is missing, or remove the {sound.kind}s",
            )
    assert audio is not None
    if sound.kind == "signal":
        num_clips, num_features = signals.read_shape(sound, audio, data)
    else:
        shape = _sound_reader(sound).read_shape(sound, audio, data.sound_max_seconds)
        num_clips, num_features = shape.num_clips, shape.num_features
    return PlacedSound(sound=sound, num_clips=num_clips, num_features=num_features)


def read_spectrograms(document: Document, data: DataConfig, audio: AudioConfig) -> np.ndarray:
    """float32 [clips, frames, bins] of all sounds and signals, one after the other.

    Silence, or zeros for a signal, where `data.sounds` is `blank`.
    """
    spectrograms = [np.zeros((0, audio.clip_frames, audio.mel_bins), np.float32)]
    for placed in document.sounds:
        clips, num_features = _read_clips(placed.sound, data, audio)
        if (len(clips), num_features) != (placed.num_clips, placed.num_features):
            raise DataError(
                f"{document.where}, {placed.sound.kind} {placed.sound.path!r}",
                found=f"{num_features} features of {placed.sound.kind} where its header says {placed.num_features}",
                expected="a whole file, which stays as it is",
                remedy="write the file again",
            )
        spectrograms.append(clips)
    return np.concatenate(spectrograms)


def _read_clips(sound: Sound, data: DataConfig, audio: AudioConfig) -> tuple[np.ndarray, int]:
    """[clips, frames, bins] and how many features they give."""
    if sound.kind == "signal":
        clips, num_features = signals.read_clips(sound, audio, data)
        return np.zeros_like(clips) if data.sounds == "blank" else clips, num_features
    reader = _sound_reader(sound)
    samples = reader.read_sound(sound, data.sound_max_seconds)
    shape = reader.shape_of(len(samples), audio)
    is_blank = data.sounds == "blank"
    return reader.silence(shape.num_clips, audio) if is_blank else reader.clips(samples, audio), shape.num_features


def _sound_reader(sound: Sound) -> ModuleType:
    """The module that reads sounds, for whose sake alone its packages need not be there."""
    try:
        return importlib.import_module("mmjax.data.sounds")
    except ImportError as error:
        raise DataError(
            sound.where,
            found=f"a sound, {sound.path!r}, and no package {error.name}",
            expected="the extra for sounds",
            remedy="pip install -e '.[audio]'",
        ) from error


def read_pixels(placed: PlacedPicture, data: DataConfig, vision: VisionConfig) -> np.ndarray:
    """A picture, or the first frame of a clip, scaled: uint8 [height, width, channels]."""
    pixels = images.resize(_read(placed, data, vision, {})[0], placed.size)
    return images.on_chessboard(pixels) if pixels.shape[2] == 4 else pixels


def _read(
    placed: PlacedPicture, data: DataConfig, vision: VisionConfig, read: dict[int, np.ndarray]
) -> list[np.ndarray]:
    """The frames of a clip, or one picture; videos in `read` are not decoded again."""
    picture = placed.picture
    if not isinstance(picture, Clip):
        keeps_alpha = vision.transparency == "chessboard"
        options = {"max_pixels": data.image_max_pixels, "channels": vision.channels}
        return [images.read_pixels(picture, **options, keeps_alpha=keeps_alpha)]
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
