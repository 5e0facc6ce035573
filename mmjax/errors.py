"""Errors a person can mend, and the exit code each kind ends a command with. No JAX."""

import contextlib
from collections.abc import Iterator
from typing import ClassVar


class MmjaxError(Exception):
    """Something a person can mend: says where, what was found, what was expected, and what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, where: str, *, found: str, expected: str, remedy: str):
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        super().__init__(f"{where}: found {found}; expected {expected}; {remedy}")

    def lines(self) -> str:
        """What a command ends with."""
        lines = {"found": self.found, "expected": self.expected, "to do": self.remedy}
        return "\n".join([f"error: {self.where}", *(f"  {name:9} {text}" for name, text in lines.items())])


class ConfigurationError(MmjaxError):
    """A setting, a configuration file or the command line is wrong."""

    exit_code = 2


class DataError(MmjaxError):
    """A record, image, tokenizer or other input file cannot be used."""

    exit_code = 3


class CheckpointError(MmjaxError):
    """No checkpoint or other file of a run can be written, or no checkpoint restored."""

    exit_code = 4


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """Turns what the system has against a write at `path` (no room, no right) into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            str(path),
            found=error.strerror or str(error),
            expected="a place that can be written",
            remedy="free space or mend permissions and start the same command again, or give another --run-dir",
        ) from error


class NonFiniteError(MmjaxError):
    """Loss or gradient stayed non-finite for too many steps."""

    exit_code = 5


# The run was asked to stop (SIGTERM or Ctrl-C), has saved, and goes on when it is started again.
EXIT_INTERRUPTED = 75
