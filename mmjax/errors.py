"""Errors a person can mend, and the exit code each kind ends a command with. No JAX."""

from typing import ClassVar


class MmjaxError(Exception):
    """Something a person can mend: says where, what was found, what was expected, and what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, where: str, *, found: str, expected: str, remedy: str):
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        super().__init__(f"{where}: found {found}; expected {expected}; {remedy}")


class ConfigurationError(MmjaxError):
    """A setting, a configuration file or the command line is wrong."""

    exit_code = 2


class DataError(MmjaxError):
    """A record, image, tokenizer or other input file cannot be used."""

    exit_code = 3


class CheckpointError(MmjaxError):
    """No checkpoint can be written or restored."""

    exit_code = 4


class NonFiniteError(MmjaxError):
    """Loss or gradient stayed non-finite for too many steps."""

    exit_code = 5


# The run was asked to stop (SIGTERM or Ctrl-C), has saved, and goes on when it is started again.
EXIT_INTERRUPTED = 75
