"""A folder for one process alone, where the file system has locks."""

import errno
import fcntl
import sys

# What file systems without them answer, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def try_lock(descriptor: int, folder: object) -> bool:
    """Whether this process has the open `folder` for itself from now on, until it closes the descriptor.

    Where the file system has no locks, that is told, and the folder taken for free.

    Raises:
      OSError: it cannot be locked for another reason.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(f"note: the file system of {folder} has no locks: let no other process write there", file=sys.stderr)
    return True
