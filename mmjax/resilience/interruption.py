"""SIGTERM and Ctrl-C as a request: the run finishes its step, saves and leaves."""

import os
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MESSAGE = b"\nasked to stop: finishing the step, then saving (ask again to stop at once, without saving)\n"


class Interruption:
    """While entered, the first signal sets `is_requested`; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, signals keep their meaning. `handles_sigterm=False` leaves
    SIGTERM alone: where several processes must stop at the same step, JAX handles it.
    """

    def __init__(self, *, handles_sigterm: bool = True) -> None:
        self.is_requested = False
        self._signals = _SIGNALS if handles_sigterm else (signal.SIGINT,)
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._request) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        # The signal may have come in the middle of a print: write past Python's buffers.
        os.write(2, _MESSAGE)
