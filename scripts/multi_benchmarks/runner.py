"""Processes of cases: they compile side by side, use the GPUs in turn, and end when their time is over."""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_benchmarks.cases import Case
from multi_benchmarks.session import EVENTS


@dataclass
class Outcome:
    """What came of a case."""

    part: str
    name: str
    status: str = "not started"
    """`done`, or why it is not."""
    results: list[dict[str, Any]] = field(default_factory=list)
    ready_seconds: float = 0.0
    """From its start until it asked for the GPUs: imports, tracing, compilation, beside others."""
    turn_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class _Process:
    case: Case
    popen: subprocess.Popen
    log: Path
    started: float
    unread: bytes = b""
    state: str = "compiling"
    """Then `ready`, `running` (it has the GPUs), `released`."""
    turn_started: float = 0.0


@dataclass
class Runner:
    """Runs all cases within `seconds`; `keep` is given all outcomes after each one."""

    cases: Sequence[Case]
    command: Sequence[str]
    """To which `--case NAME` is added."""
    environment: Mapping[str, str]
    logs: Path
    num_processes: int
    seconds: float
    compile_seconds: float
    after: Path | None = None
    """A file that must be there before anything is timed: others use the GPUs until then."""
    patience: float = 1.0
    """Cases may take so many times as long as they say."""
    keep: Callable[[list[Outcome]], None] = lambda outcomes: None

    def run(self) -> list[Outcome]:
        self._begun = time.monotonic()
        self._outcomes = {case.name: Outcome(case.part, case.name) for case in self.cases}
        self._waiting = list(self.cases)
        self._live: dict[str, _Process] = {}
        self._selector = selectors.DefaultSelector()
        try:
            while (self._waiting or self._live) and time.monotonic() - self._begun < self.seconds:
                self._start_more()
                self._give_turn()
                for key, _ in self._selector.select(timeout=0.1):
                    self._read(self._live[key.data])
                self._end_overdue()
        finally:
            for process in list(self._live.values()):
                self._end(process, f"ended: all {self.seconds:.0f} s are over")
            self._selector.close()
        return list(self._outcomes.values())

    def _start_more(self) -> None:
        while self._waiting and len(self._live) < self.num_processes:
            self._start(self._waiting.pop(0))

    def _start(self, case: Case) -> None:
        receiving, sending = os.pipe()
        log = self.logs / f"{case.name.replace(' ', '_').replace(',', '')}.log"
        with log.open("w") as output:
            popen = subprocess.Popen(
                # Cores go to the case that is timed; see `_give_turn`.
                ["nice", "-n", "5", *self.command, "--case", case.name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, EVENTS: str(sending)},
                pass_fds=[sending],
                start_new_session=True,
            )
        os.close(sending)
        self._live[case.name] = _Process(case, popen, log, time.monotonic())
        self._selector.register(receiving, selectors.EVENT_READ, case.name)

    def _give_turn(self) -> None:
        states = {process.state for process in self._live.values()}
        leaving = [process.case for process in self._live.values() if process.state == "released"]
        if "running" in states or any(case.is_large for case in leaving):
            return
        is_late = time.monotonic() - self._begun > self.compile_seconds
        may_time = (is_late or "compiling" not in states) and (self.after is None or self.after.exists())
        for case in self.cases:
            process = self._live.get(case.name)
            if process is None or process.state != "ready" or (case.is_timed and not may_time):
                continue
            if case.needs:
                needed = self._outcomes[case.needs]
                if case.needs in self._live or any(case.needs == waiting.name for waiting in self._waiting):
                    continue
                if needed.status != "done":
                    self._end(process, f"not run: {case.needs} gave nothing to compare with")
                    continue
            if case.is_large and leaving:
                return
            process.state, process.turn_started = "running", time.monotonic()
            # To raise a priority again is not everyone's right.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, process.popen.pid, os.getpriority(os.PRIO_PROCESS, 0))
            # One that has just died is found out when its events end.
            with contextlib.suppress(BrokenPipeError):
                process.popen.stdin.write(b"go\n")
                process.popen.stdin.flush()
            return

    def _read(self, process: _Process) -> None:
        descriptor = next(key.fd for key in self._selector.get_map().values() if key.data == process.case.name)
        chunk = os.read(descriptor, 1 << 16)
        *lines, process.unread = (process.unread + chunk).split(b"\n")
        outcome = self._outcomes[process.case.name]
        for line in lines:
            event = json.loads(line)
            if event["event"] == "result":
                outcome.results.append(event["values"])
            elif event["event"] == "ready":
                process.state, outcome.ready_seconds = "ready", time.monotonic() - process.started
            else:
                process.state, outcome.turn_seconds = "released", time.monotonic() - process.turn_started
        if not chunk:
            process.popen.wait()
            code = process.popen.returncode
            self._end(process, "done" if code == 0 else f"failed ({code}): {last_line(process.log)}")

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for process in list(self._live.values()):
            # What has given the GPUs back has as long again to read its traces.
            limit = process.case.seconds * self.patience * (2 if process.state == "released" else 1)
            if process.turn_started and now - process.turn_started > limit:
                self._end(process, f"ended: took longer than {limit:.0f} s of its own")
            elif process.case.is_free and now - self._begun > self.compile_seconds:
                self._end(process, "ended: timings begin")

    def _end(self, process: _Process, status: str) -> None:
        outcome = self._outcomes[process.case.name]
        outcome.status = status
        if process.state == "running":
            outcome.turn_seconds = time.monotonic() - process.turn_started
        if process.popen.poll() is None:
            os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
        process.popen.stdin.close()
        key = next(key for key in self._selector.get_map().values() if key.data == process.case.name)
        self._selector.unregister(key.fd)
        os.close(key.fd)
        del self._live[process.case.name]
        elapsed = time.monotonic() - self._begun
        print(
            f"{elapsed:6.1f} s  {process.case.name}: {status} "
            f"({outcome.ready_seconds:.0f} s to be ready, {outcome.turn_seconds:.0f} s on the devices)",
            flush=True,
        )
        self.keep(list(self._outcomes.values()))


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing was said"
