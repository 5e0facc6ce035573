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
    SIGTERM alone: where several processes must stop at the same step, JAX handles it, and a first Ctrl-C is handed on
    as one.
    """

    def __init__(self, *, handles_sigterm: bool = True) -> None:
        self.is_requested = self._is_asked = False
        self._handles_sigterm = handles_sigterm
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
        if self._is_asked:
            raise KeyboardInterrupt
        self._is_asked = True
        # The signal may have come in the middle of a print: write past Python's buffers.
        os.write(2, _MESSAGE)
        if self._handles_sigterm:
            self.is_requested = True
        else:
            # Alone, this process would leave the others in an exchange that it takes no part in.
            os.kill(os.getpid(), signal.SIGTERM)
