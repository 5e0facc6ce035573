"""Opening files that somebody else wrote."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mmjax.errors import DataError

_PIECE_BYTES = 2**20


class LostFileError(DataError):
    """A file of a source cannot be opened: it is gone, or what holds it is."""


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises OSError for all else: a pipe would wait for ever, a device never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def reason(error: OSError) -> str:
    """What the system says, without the path that the message names already."""
    return error.strerror or str(error)


class DataFile:
    """One file of samples that must stay as it was when the run started."""

    def __init__(self, path: Path, kind: str):
        """`kind` says what it should be, for messages."""
        self.path, self._kind = path, kind
        with self.opened() as file:
            self.status = os.fstat(file.fileno())

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, open.

        Raises:
          LostFileError: it cannot be opened.
          DataError: it is another one than before.
        """
        try:
            file = open_regular(self.path)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        with file:
            if hasattr(self, "status") and _stamp(os.fstat(file.fileno())) != _stamp(self.status):
                raise DataError(
                    str(self.path),
                    found="a file that changed since the run started",
                    expected="the same bytes",
                    remedy="start the run again",
                )
            try:
                yield file
            except OSError as error:
                raise self._lost(error) from error

    def _lost(self, error: OSError | ValueError) -> LostFileError:
        return LostFileError(
            str(self.path),
            found=f"no readable file ({reason(error) if isinstance(error, OSError) else error})",
            expected=self._kind,
            remedy="check the path in data.source or data.eval_source, or see data.lost_source",
        )

    def digest(self) -> str:
        """SHA-256 of the bytes."""
        total = hashlib.sha256()
        with self.opened() as file:
            while piece := file.read(_PIECE_BYTES):
                total.update(piece)
        return total.hexdigest()


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
