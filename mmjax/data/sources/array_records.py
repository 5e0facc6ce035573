"""Conversations from an ArrayRecord file, each record the JSON of a line of a JSONL."""

import threading
from pathlib import Path
from typing import Any, cast

import grain

from mmjax.data.files import DataFile
from mmjax.data.index_cache import IndexCache, array_text, file_key, text_array
from mmjax.data.sources.conversation import Sample
from mmjax.data.sources.records import MAX_RECORD_BYTES, decode_record, file_reader
from mmjax.errors import DataError


class ArrayRecordFile:
    """Samples of one ArrayRecord file, counted from 0."""

    def __init__(self, path: Path, media_root: Path, cache: IndexCache):
        self._file, self._media_root = DataFile(path, "an ArrayRecord of conversations"), media_root
        key = f"digest {file_key(path, self._file.status)}"
        self.digest = array_text(cache.get(key, lambda: {"digest": text_array(self._file.digest())})["digest"])
        self._lock = threading.Lock()
        try:
            self._records = grain.sources.ArrayRecordDataSource([str(path)])
            self._count = len(cast(Any, self._records))
        # The library raises RuntimeError and ValueError, by kind of damage.
        except (RuntimeError, ValueError, OSError) as error:
            raise self._refusal("", f"no readable ArrayRecord ({error})", "write the file again") from error
        if not self._count:
            raise self._refusal("", "no record", "check how the file was written")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        where = f"{self._file.path}, record {index}"
        with self._file.opened():
            try:
                with self._lock:
                    content = self._records[index]
            except (RuntimeError, ValueError, OSError) as error:
                raise self._refusal(f", record {index}", f"damaged data ({error})", "write the file again") from error
        if not isinstance(content, bytes) or len(content) > MAX_RECORD_BYTES:
            found = f"a record of {len(content):,} bytes"
            raise self._refusal(f", record {index}", found, f"keep it below {MAX_RECORD_BYTES:,} bytes")
        reader = file_reader(where, self._media_root)
        return reader.read(decode_record(content, where))

    def _refusal(self, where: str, found: str, remedy: str) -> DataError:
        return DataError(f"{self._file.path}{where}", found=found, expected="an ArrayRecord of JSON", remedy=remedy)
