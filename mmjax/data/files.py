"""Opening files that somebody else wrote."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
