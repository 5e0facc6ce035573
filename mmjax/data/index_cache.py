"""What was found out about data files, kept beside a run so that its next start need not read them whole again.

An entry is named by what it depends on; one that is damaged or of something else is made anew. Entries are NumPy
archives of plain arrays: reading one runs no code.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

Arrays = dict[str, np.ndarray]


class IndexCache:
    """Entries of one folder; without a folder nothing is kept. What is new is written by `flush` alone."""

    def __init__(self, folder: Path | None = None, *, is_writer: bool = True):
        self._folder, self._is_writer = folder, is_writer
        self._new: dict[Path, Arrays] = {}
        self.num_made = 0
        """Entries that had to be made."""

    def get(self, key: str, make: Callable[[], Arrays]) -> Arrays:
        """The arrays under `key`, or those that `make` returns. A key holds all that the arrays depend on."""
        if self._folder is None:
            self.num_made += 1
            return make()
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
        arrays = _read(path)
        if arrays is None:
            self.num_made += 1
            arrays = make()
            self._new[path] = arrays
        return arrays

    def flush(self) -> None:
        """Write the new entries; without room for them the next start only takes longer."""
        for path, arrays in self._new.items() if self._is_writer else ():
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with unfinished.open("wb") as file:
                    _write(file, arrays)
                unfinished.replace(path)
            except OSError:
                unfinished.unlink(missing_ok=True)
        self._new.clear()


def file_key(path: Path, status: os.stat_result) -> str:
    """Changes when the file does: its change time cannot be set back."""
    return repr((str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


def _read(path: Path) -> Arrays | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError):
        return None


def _write(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    np.savez(file, allow_pickle=False, **dict(arrays))


def text_array(text: str) -> np.ndarray:
    """Text as an array of an entry."""
    return np.frombuffer(text.encode(), np.uint8)


def array_text(array: np.ndarray) -> str:
    """The text of `text_array`."""
    return array.tobytes().decode()
