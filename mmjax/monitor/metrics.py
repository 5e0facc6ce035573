"""What a run says while it goes on: `metrics.jsonl`, TensorBoard, one printed line a step and the progress bar."""

import json
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from mmjax.errors import writing

# Generated modules: a type checker sees nothing in them.
_event: Any = event_pb2
_summary: Any = summary_pb2

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


class RunMonitor:
    """Files and terminal of one run.

    `first_step` is the number of steps done already: what the files say of later ones is dropped, so that a resumed run
    reads as one. On processes other than the first it is silent and writes nothing (`is_silent`).
    """

    def __init__(self, run_dir: Path, *, first_step: int, num_steps: int, is_silent: bool = False):
        self._console = Console(quiet=is_silent)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("steps", total=num_steps, completed=first_step)
        self._run_dir, self._is_silent = run_dir, is_silent
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}"
        self._events_file = run_dir / "tensorboard" / name
        if not is_silent:
            with writing(run_dir):
                for name in (METRICS, EVALUATIONS):
                    drop_lines_after(run_dir / name, first_step)
                self._events_file.parent.mkdir(exist_ok=True)
            self._add_event(file_version="brain.Event:2")
            # Tells TensorBoard to forget what an interrupted run wrote of this step and later ones.
            self._add_event(step=first_step + 1, session_log=_event.SessionLog(status=_event.SessionLog.START))

    def __enter__(self) -> "RunMonitor":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: int, values: Mapping[str, float], *, is_printed: bool = True) -> None:
        """Record the metrics of a finished step, the first being 1."""
        self._record(METRICS, "train", step, values)
        self._progress.update(self._task, completed=step)
        if is_printed:
            self.say(step_line(step, int(self._progress.tasks[0].total or 0), values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Record an evaluation made after `step` steps."""
        self._record(EVALUATIONS, "evaluation", step, values)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, rows: Mapping[str, str]) -> None:
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        self._console.print(table)

    def _record(self, file: str, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._is_silent:
            return
        # JSON has no word for a number that is not finite.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with writing(self._run_dir / file), (self._run_dir / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, **finite}) + "\n")
        scalars = [
            _summary.Summary.Value(tag=f"{group}/{name}", simple_value=float(value)) for name, value in values.items()
        ]
        self._add_event(step=step, summary=_summary.Summary(value=scalars))

    def _add_event(self, **event: Any) -> None:
        # At once and here: TensorBoard's own writer fails on a thread, with a traceback that nobody can catch.
        with writing(self._events_file), self._events_file.open("ab") as file:
            RecordWriter(file).write(_event.Event(wall_time=time.time(), **event).SerializeToString())


def step_line(step: int, num_steps: int, values: Mapping[str, float]) -> str:
    """`step 12/300  loss 2.3456  ...`: what one looks at while a run goes on."""
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps}",
        f"loss {values['loss']:.4f}",
        f"{values['tokens_per_second']:,.0f} tokens/s",
        f"{values['step_seconds']:.3f} s",
        f"gradient {values['gradient_norm']:.3g}",
        f"lr {values['learning_rate']:.2e}",
        f"MoE max/mean {values['moe_load_max_over_mean']:.2f}",
        f"memory {values['memory_bytes'] / 2**20:,.0f} MiB",
    ]
    if values.get("exchange_rounds", 0) > 1:
        parts.append(f"exchange {values['exchange_rounds']:.2f} rounds")
    if values["dropped_rows"]:
        parts.append(f"dropped {values['dropped_rows']:.0f} rows")
    return "  ".join(parts)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, without a last one cut off by a crash. None for numbers not finite."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the records of a file up to and including `step`, in one rename."""
    records = read_lines(path)
    kept = [record for record in records if record["step"] <= step]
    if path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        temporary.rename(path)


def memory_bytes() -> int:
    """The most that any of this process's devices has held so far; where devices do not say, what the process holds.

    The peak, since between steps, when this is read, a device holds little more than the state.
    """
    statistics = [device.memory_stats() for device in jax.local_devices()]
    if used := [entry["peak_bytes_in_use"] for entry in statistics if entry]:
        return max(used)
    if sys.platform == "linux":
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
