"""Conversations from a WebDataset tar, read in place: nothing is ever extracted.

Members of one name up to its first dot are one sample: `cat.json` a record as in a JSONL, `cat.txt` instead of it a
caption to be learned, `cat.png` or `cat.0.jpg`, `cat.1.jpg` its pictures, `cat.wav` a sound, `cat.npy` a signal. The
record names media by what follows the first dot ("0.jpg") or whole; one that names none of a kind takes them in the
order of their names, in which "2.jpg" stands before "10.jpg".
"""

import functools
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mmjax.data.files import DataFile
from mmjax.data.index_cache import Arrays, IndexCache, array_text, file_key, text_array
from mmjax.data.sources.conversation import ImageContent, MediumKind, Message, Sample, SoundContent
from mmjax.data.sources.records import MAX_RECORD_BYTES, RecordReader, decode_record, shown
from mmjax.errors import DataError

# What a record takes that names none, by its key.
ENDINGS = {
    "image": ("png", "jpg", "jpeg", "webp", "bmp", "gif"),
    "audio": ("wav", "flac", "ogg"),
    "signal": ("npy",),
}
MAX_MEDIUM_BYTES = 256 * 2**20


class WebDataset:
    """Samples of one uncompressed tar, in the order of their first members."""

    def __init__(self, path: Path, cache: IndexCache):
        self._file = DataFile(path, "a tar of samples")
        index = cache.get(f"tar {file_key(path, self._file.status)}", self._index)
        self.digest = array_text(index["digest"])
        # (name, {ending: (offset, bytes)})
        self._samples: list[tuple[str, dict[str, tuple[int, int]]]] = json.loads(array_text(index["samples"]))
        if not self._samples:
            raise self._refusal("", "no sample", "give each sample a .json, or a .txt and a picture")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        name, members = self._samples[index]
        where = f"{self._file.path}, sample {name!r}"
        media = {
            key: sorted((ending for ending in members if ending.rsplit(".", 1)[-1] in endings), key=_by_number)
            for key, endings in ENDINGS.items()
        }
        if "json" not in members:
            return self._captioned(name, members, media)
        record = decode_record(self._read(name, members, "json"), where)
        if isinstance(record, dict):
            # A WAV may be named as a signal.
            if record.get("signals") or record.get("signal"):
                media["audio"] = []
            named = _named_in_parts(record) | {key for key in media if record.get(f"{key}s") or record.get(key)}
            unnamed = {key: found for key, found in media.items() if key not in named}
            record |= {f"{key}s": found for key, found in unnamed.items() if found}
        return RecordReader(
            where,
            lambda path: ImageContent(where=where, path=path, read=self._reading(index, path, "picture")),
            sound=lambda path, kind: self._sound(index, path, kind),
        ).read(record)

    def _captioned(self, name: str, members: dict[str, tuple[int, int]], media: dict[str, list[str]]) -> Sample:
        where = f"{self._file.path}, sample {name!r}"
        if "txt" not in members or not any(media.values()):
            found = f"members {', '.join(sorted(members))}"
            raise self._refusal(f", sample {name!r}", found, "give it a .json, or a .txt and a picture or sound")
        try:
            caption = self._read(name, members, "txt").decode()
        except UnicodeError as error:
            raise self._refusal(f", sample {name!r}", f"invalid text ({error})", "write it as UTF-8") from error
        kinds: dict[str, MediumKind] = {"audio": "sound", "signal": "signal"}
        parts = tuple(
            SoundContent(where=where, path=ending, read=read, kind=kinds[key])
            if key in kinds
            else ImageContent(where=where, path=ending, read=read)
            for key, endings in media.items()
            for ending in endings
            for read in [functools.partial(self._bytes, name, ending, members[ending], MAX_MEDIUM_BYTES)]
        )
        return Sample(
            where=where,
            messages=(
                Message(role="user", parts=parts, is_supervised=False),
                Message(role="assistant", parts=(caption.strip(),), is_supervised=True),
            ),
        )

    def _sound(self, index: int, path: Any, kind: MediumKind) -> SoundContent:
        where = f"{self._file.path}, sample {self._samples[index][0]!r}"
        return SoundContent(where=where, path=path, read=self._reading(index, path, kind), kind=kind)

    def _reading(self, index: int, path: Any, kind: str) -> Callable[[], bytes]:
        """What reads the member that a record names."""
        name, members = self._samples[index]
        base = PurePosixPath(name).name
        endings = [ending.lower() for ending in (path, path.removeprefix(f"{base}."))]
        ending = next((ending for ending in endings if ending in members), None)
        if ending is None:
            remedy = f"name one of {', '.join(sorted(members))}"
            raise self._refusal(f", sample {name!r}", f"no member for the {kind} {shown(path)}", remedy)
        return functools.partial(self._bytes, name, ending, members[ending], MAX_MEDIUM_BYTES)

    def _read(self, name: str, members: dict[str, tuple[int, int]], ending: str) -> bytes:
        return self._bytes(name, ending, members[ending], MAX_RECORD_BYTES)

    def _bytes(self, name: str, ending: str, place: tuple[int, int], limit: int) -> bytes:
        offset, size = place
        if size > limit:
            found, remedy = f"{size:,} bytes in .{ending}", f"keep it below {limit:,} bytes"
            raise self._refusal(f", sample {name!r}", found, remedy)
        with self._file.opened() as file:
            file.seek(offset)
            return file.read(size)

    def _index(self) -> Arrays:
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        with self._file.opened() as file:
            try:
                with tarfile.open(fileobj=file, mode="r:") as archive:
                    for member in archive:
                        self._add(samples, member)
                        # The archive remembers each member; this index is all that is needed.
                        cast(Any, archive).members = []
            except tarfile.FilterError as error:
                raise self._refusal(
                    "", f"a member that leads out of it ({error})", "do not use this archive"
                ) from error
            except (tarfile.TarError, ValueError, OverflowError) as error:
                remedy = "decompress it (.tar.gz cannot be read in any order), or fetch it again if it was cut off"
                raise self._refusal("", f"no readable tar ({error})", remedy) from error
        return {
            "samples": text_array(json.dumps(list(samples.items()))),
            "digest": text_array(self._file.digest()),
        }

    def _add(self, samples: dict[str, dict[str, tuple[int, int]]], member: tarfile.TarInfo) -> None:
        if member.isdir():
            return
        # Nothing is extracted, but a name that would lead elsewhere shows an archive not made for training.
        tarfile.data_filter(member, "/samples")
        if not member.isreg() or member.issparse():
            found = f"the member {shown(member.name)}, which is no regular file"
            raise self._refusal("", found, "do not use this archive")
        folder, _, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        members = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
        ending = ending.lower()
        if ending in members:
            raise self._refusal("", f"the member {shown(member.name)} twice", "write the archive again")
        if dot:
            members[ending] = (member.offset_data, member.size)

    def _refusal(self, where: str, found: str, remedy: str) -> DataError:
        return DataError(f"{self._file.path}{where}", found=found, expected="a tar of samples", remedy=remedy)


def _by_number(ending: str) -> list[str | int]:
    """Numbers in it compare as such."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", ending))]


def _named_in_parts(record: dict[str, Any]) -> set[str]:
    """The kinds of media of which a part of a message names one."""
    messages = record.get("messages")
    contents = (
        [turn.get("content") for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    is_named = lambda part: sum(value is not None for value in part.values()) > 1  # noqa: E731
    return {str(part.get("type")).removesuffix("_url") for part in parts if is_named(part)}
