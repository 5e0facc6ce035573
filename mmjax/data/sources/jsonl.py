"""Conversations from a JSONL file, one record a line, read by byte offset: the file is never held in memory."""

import hashlib
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmjax.data.files import DataFile
from mmjax.data.index_cache import Arrays, IndexCache, array_text, file_key, text_array
from mmjax.data.sources.conversation import Sample
from mmjax.data.sources.records import MAX_RECORD_BYTES, decode_record, file_reader
from mmjax.errors import DataError


class ConversationFile:
    """Samples of one JSONL file. `file[i]` reads, checks and returns record i (blank lines are no records)."""

    def __init__(self, path: Path, media_root: Path, cache: IndexCache):
        self._file, self._media_root = DataFile(path, "a JSONL of conversations"), media_root
        index = cache.get(f"jsonl {file_key(path, self._file.status)}", self._index)
        self._starts, self._lengths, self._lines = index["starts"], index["lengths"], index["lines"]
        self.digest = array_text(index["digest"])
        if not len(self._starts):
            raise DataError(
                str(path),
                found="no record",
                expected="one conversation a line",
                remedy="check how the file was written",
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Sample:
        where = f"{self._file.path}, line {self._lines[index]}"
        record = file_reader(where, self._media_root)
        if self._lengths[index] > MAX_RECORD_BYTES:
            record.refuse(
                f"{self._lengths[index]:,} bytes",
                f"at most {MAX_RECORD_BYTES:,} bytes a line",
                "keep images in files of their own, and check for missing line ends",
            )
        with self._file.opened() as file:
            file.seek(self._starts[index])
            line = file.read(self._lengths[index])
        return record.read(decode_record(line, where))

    def _index(self) -> Arrays:
        with self._file.opened() as file:
            return _index(file)


def _index(file: BinaryIO) -> Arrays:
    """Byte offset, length and line number of each record, and the SHA-256 of the file."""
    starts, lengths, lines, digest = array("q"), array("q"), array("q"), hashlib.sha256()
    start = position = 0
    line, is_blank = 1, True
    while True:
        piece = file.readline(MAX_RECORD_BYTES + 1)
        digest.update(piece)
        position += len(piece)
        is_blank = is_blank and (not piece or piece.isspace())
        if piece.endswith(b"\n") or not piece:
            if not is_blank:
                starts.append(start)
                lengths.append(position - start)
                lines.append(line)
            start, line, is_blank = position, line + 1, True
        if not piece:
            numbers = {"starts": starts, "lengths": lengths, "lines": lines}
            arrays = {name: np.array(values, np.int64) for name, values in numbers.items()}
            return arrays | {"digest": text_array(digest.hexdigest())}
