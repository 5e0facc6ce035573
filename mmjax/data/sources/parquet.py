"""Conversations from a Parquet file, read one row group at a time.

A row is a record as in a JSONL: the column "messages" or "conversations" (lists of structs, or JSON text) and, where
there are pictures, "images" or "image": paths, encoded bytes, or structs of "bytes" and "path"; sounds and signals in
the same forms, in "audios" and "signals". Other columns are not read. Rows are asked for in shuffled order: small row
groups (a few MiB) keep that fast.
"""

import bisect
import itertools
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from mmjax.data.files import DataFile
from mmjax.data.index_cache import IndexCache, array_text, file_key, text_array
from mmjax.data.sources.conversation import (
    ImageContent,
    ImageFile,
    MediumKind,
    Picture,
    Sample,
    Sound,
    SoundContent,
    SoundFile,
)
from mmjax.data.sources.records import UNREAD_KEYS, RecordReader, decode_record, shown
from mmjax.errors import DataError

TURN_COLUMNS = ("messages", "conversations")
# The last ones are read to be refused where they hold anything.
MEDIA = ("image", "audio", "signal", "video")
OTHER_COLUMNS = ("system", "kind", *(f"{medium}{end}" for medium in MEDIA for end in ("s", "")), *UNREAD_KEYS)
MAX_GROUP_BYTES = 512 * 2**20
KEPT_GROUPS_BYTES = 256 * 2**20


class ParquetFile:
    """Samples of one Parquet file; row i, counted from 0, is sample i."""

    def __init__(self, path: Path, media_root: Path, cache: IndexCache):
        self._file, self._media_root = DataFile(path, "a Parquet file of conversations"), media_root
        key = f"digest {file_key(path, self._file.status)}"
        self.digest = array_text(cache.get(key, lambda: {"digest": text_array(self._file.digest())})["digest"])
        with self._file.opened() as file:
            try:
                opened = pyarrow.parquet.ParquetFile(file)
                metadata, names = opened.metadata, opened.schema_arrow.names
                groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            # The library raises its own errors, and OSError and others for damaged files.
            except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
                raise self._refusal("", f"no readable Parquet file ({error})", "write the file again") from error
        turns = [name for name in TURN_COLUMNS if name in names]
        if len(turns) != 1:
            found = f"columns {', '.join(names[:20])}"
            raise self._refusal("", found, 'give it one column "messages" or "conversations"')
        self._columns = [*turns, *(name for name in OTHER_COLUMNS if name in names)]
        self._group_bytes = [group.total_byte_size for group in groups]
        self._starts = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
        if not self._starts[-1]:
            raise self._refusal("", "no row", "check how the file was written")
        self._kept: OrderedDict[int, pyarrow.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        where = f"{self._file.path}, row {index}"
        with self._lock:
            group = bisect.bisect_right(self._starts, index) - 1
            table = self._group(group)
        try:
            record: dict[str, Any] = table.slice(index - self._starts[group], 1).to_pylist()[0]
        except (pyarrow.ArrowException, UnicodeError, ValueError) as error:
            raise self._refusal(f", row {index}", f"values that cannot be read ({error})", "correct the row") from error
        for name in TURN_COLUMNS:
            if isinstance(record.get(name), str):
                record[name] = decode_record(record[name].encode(), f"{where}, column {name!r}")
        kinds = (str, bytes, dict)
        reader = RecordReader(
            where, lambda e: self._picture(e, where), kinds, sound=lambda e, kind: self._sound(e, kind, where)
        )
        return reader.read(record)

    def _group(self, number: int) -> pyarrow.Table:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        where = f", row group {number}"
        if self._group_bytes[number] > MAX_GROUP_BYTES:
            found = f"{self._group_bytes[number]:,} bytes in one row group"
            raise self._refusal(where, found, f"write row groups of at most {MAX_GROUP_BYTES:,} bytes")
        with self._file.opened() as file:
            try:
                table = pyarrow.parquet.ParquetFile(file).read_row_group(number, columns=self._columns)
            except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
                raise self._refusal(where, f"damaged data ({error})", "write the file again") from error
        self._kept[number] = table
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > KEPT_GROUPS_BYTES:
            self._kept.popitem(last=False)
        return table

    def _picture(self, entry: Any, where: str) -> Picture:
        path, content = self._medium(entry, "picture", where)
        if content is not None:
            return ImageContent(where=where, path=path, read=lambda: content)
        return ImageFile(where=where, root=self._media_root, path=path)

    def _sound(self, entry: Any, kind: MediumKind, where: str) -> Sound:
        path, content = self._medium(entry, kind, where)
        if content is not None:
            return SoundContent(where=where, path=path, read=lambda: content, kind=kind)
        return SoundFile(where=where, root=self._media_root, path=path, kind=kind)

    def _medium(self, entry: Any, kind: str, where: str) -> tuple[str, bytes | None]:
        """(path, encoded bytes, if the row holds them)."""
        content, path = entry, ""
        if isinstance(entry, dict):
            content, path = entry.get("bytes"), entry.get("path") or ""
        if isinstance(content, bytes):
            return path or "(in the row)", content
        path = entry if isinstance(entry, str) else path
        if not isinstance(path, str) or not path:
            raise self._refusal(where.removeprefix(str(self._file.path)), f"a {kind} {shown(entry)}", "give its path")
        return path, None

    def _refusal(self, where: str, found: str, remedy: str) -> DataError:
        return DataError(f"{self._file.path}{where}", found=found, expected="a Parquet of conversations", remedy=remedy)
