"""What a source gives: conversations made of text, pictures, videos and sounds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """A picture in a file that nobody has opened yet."""

    where: str
    """The record that names it, for messages."""
    root: Path
    """Folder that it must lie in."""
    path: str
    """As the record writes it, relative to `root`."""


@dataclass(frozen=True, kw_only=True)
class ImageContent:
    """A picture inside a record or an archive, not decoded yet."""

    where: str
    """The record that holds it, for messages."""
    path: str
    """Its name there."""
    read: Callable[[], bytes]
    """The encoded bytes. Raises OSError where the file that holds them fails."""


@dataclass(frozen=True, kw_only=True)
class VideoFile:
    """A video in a file that nobody has opened yet."""

    where: str
    """The record that names it, for messages."""
    root: Path
    """Folder that it must lie in."""
    path: str
    """As the record writes it, relative to `root`."""


MediumKind = Literal["sound", "signal"]
"""A sound is heard as people hear it; a signal's channels are read as the numbers that they are."""


@dataclass(frozen=True, kw_only=True)
class SoundFile:
    """A sound or signal in a file that nobody has opened yet."""

    where: str
    """The record that names it, for messages."""
    root: Path
    """Folder that it must lie in."""
    path: str
    """As the record writes it, relative to `root`."""
    kind: MediumKind = "sound"


@dataclass(frozen=True, kw_only=True)
class SoundContent:
    """A sound or signal inside a record or an archive, not decoded yet."""

    where: str
    """The record that holds it, for messages."""
    path: str
    """Its name there."""
    read: Callable[[], bytes]
    """The encoded bytes. Raises OSError where the file that holds them fails."""
    kind: MediumKind = "sound"


Picture = np.ndarray | ImageFile | ImageContent
"""uint8 [height, width] or [height, width, 3], or something to decode."""
Sound = SoundFile | SoundContent
Part = str | Picture | VideoFile | Sound


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """One turn."""

    role: Role
    parts: tuple[Part, ...]
    is_supervised: bool
    """Whether its tokens are learned."""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str)).strip()


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One conversation."""

    where: str
    """File and line, or the name and number of a generated sample."""
    messages: tuple[Message, ...]
    kind: str = ""
    """Kind of question, for evaluation by kind."""

    @property
    def pictures(self) -> Iterator[Picture]:
        parts = (part for message in self.messages for part in message.parts)
        return (part for part in parts if not isinstance(part, str | VideoFile | Sound))


class Source(Protocol):
    """Samples by number. `source[i]` raises DataError where sample i cannot be used."""

    digest: str
    """Changes whenever any sample could."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...
