"""Conversations from a WebDataset tar, read in place: nothing is ever extracted.

Members of one name up to its first dot are one sample: `cat.json` a record as in a JSONL, `cat.txt` instead of it a
caption to be learned, `cat.png` or `cat.0.jpg`, `cat.1.jpg` its pictures. The record names pictures by what follows
the first dot ("0.jpg") or whole; one that names none takes them in the order of their names.
"""

import json
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mmjax.data.files import DataFile
from mmjax.data.index_cache import Arrays, IndexCache, array_text, file_key, text_array
from mmjax.data.sources.conversation import ImageContent, Message, Picture, Sample
from mmjax.data.sources.records import MAX_RECORD_BYTES, RecordReader, decode_record, shown
from mmjax.errors import DataError

IMAGE_ENDINGS = ("png", "jpg", "jpeg", "webp", "bmp", "gif")
MAX_IMAGE_BYTES = 256 * 2**20


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
        pictures = sorted(ending for ending in members if ending.rsplit(".", 1)[-1] in IMAGE_ENDINGS)
        if "json" not in members:
            return self._captioned(name, members, pictures)
        record = decode_record(self._read(name, members, "json"), where)
        if isinstance(record, dict) and pictures and not record.get("images") and not record.get("image"):
            record["images"] = pictures
        return RecordReader(where, lambda path: self._picture(index, path)).read(record)

    def _captioned(self, name: str, members: dict[str, tuple[int, int]], pictures: list[str]) -> Sample:
        where = f"{self._file.path}, sample {name!r}"
        if "txt" not in members or not pictures:
            found = f"members {', '.join(sorted(members))}"
            raise self._refusal(f", sample {name!r}", found, "give it a .json, or a .txt and a picture")
        try:
            caption = self._read(name, members, "txt").decode()
        except UnicodeError as error:
            raise self._refusal(f", sample {name!r}", f"invalid text ({error})", "write it as UTF-8") from error
        parts = tuple(self._content(where, name, members, ending) for ending in pictures)
        return Sample(
            where=where,
            messages=(
                Message(role="user", parts=parts, is_supervised=False),
                Message(role="assistant", parts=(caption.strip(),), is_supervised=True),
            ),
        )

    def _picture(self, index: int, path: Any) -> Picture:
        name, members = self._samples[index]
        base = PurePosixPath(name).name
        endings = [ending.lower() for ending in (path, path.removeprefix(f"{base}."))]
        ending = next((ending for ending in endings if ending in members), None)
        if ending is None:
            remedy = f"name one of {', '.join(sorted(members))}"
            raise self._refusal(f", sample {name!r}", f"no member for the picture {shown(path)}", remedy)
        return self._content(f"{self._file.path}, sample {name!r}", name, members, ending)

    def _content(self, where: str, name: str, members: dict[str, tuple[int, int]], ending: str) -> ImageContent:
        place = members[ending]
        return ImageContent(where=where, path=ending, read=lambda: self._bytes(name, ending, place, MAX_IMAGE_BYTES))

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
