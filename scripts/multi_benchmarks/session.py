"""One case's side of the conversation with the runner: its turn on the GPUs, and its results."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = "BENCH_MULTI_EVENTS"
"""Environment variable: the file descriptor that events are written to, one JSON a line."""


@dataclass(frozen=True)
class Session:
    """What a case is given."""

    shared: Path
    """Folder for what other cases compare with."""
    num_devices: int
    is_tiny: bool = False
    output: Path | None = None
    """Folder of the results, for what is too long to report."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until the GPUs are this case's alone; give them back at the end."""
        self._send("ready")
        if not sys.stdin.readline():
            raise SystemExit("the runner is gone")
        yield
        self._send("released")

    def report(self, **values: Any) -> None:
        """Keep numbers of this case; what was reported before a case hangs is not lost."""
        self._send("result", values)

    def _send(self, event: str, values: dict[str, Any] | None = None) -> None:
        line = json.dumps({"event": event, "values": values or {}}) + "\n"
        os.write(int(os.environ[EVENTS]), line.encode())
