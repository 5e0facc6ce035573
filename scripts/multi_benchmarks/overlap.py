"""How much of the exchanges between GPUs computing hides, from the trace of a step."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXCHANGE = re.compile(r"nccl|memcpy ?p2p|ragged.?all.?to.?all|all.?reduce.?kernel", re.IGNORECASE)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of one step, the mean of the devices."""

    computing: float
    exchanging: float
    """Waiting for the other devices included."""
    hidden: float
    """Of the exchanging: while something computed, too."""

    @property
    def hidden_share(self) -> float:
        return self.hidden / self.exchanging if self.exchanging else 1.0


def read_overlap(directory: Path) -> Overlap | None:
    """From what JAX's profiler wrote; None where no GPU was traced."""
    events: list[Mapping[str, Any]] = []
    for path in directory.rglob("*.trace.json.gz"):
        events += json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return overlap_of(events)


def overlap_of(events: Iterable[Mapping[str, Any]]) -> Overlap | None:
    """Of events of Chrome's trace format, microseconds: what runs in lanes named Stream, by process (device)."""
    events = list(events)
    lanes = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    exchanges: dict[Any, list[Interval]] = defaultdict(list)
    computing: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and lanes.get((event["pid"], event.get("tid")), "").startswith("Stream"):
            found = exchanges if EXCHANGE.search(event["name"]) else computing
            found[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    devices = exchanges.keys() | computing.keys()
    if not devices:
        return None
    sums = [0.0, 0.0, 0.0]
    for device in devices:
        exchanged, computed = merged(exchanges[device]), merged(computing[device])
        sums[0] += length(computed)
        sums[1] += length(exchanged)
        # What both cover: their lengths, less that of what either covers.
        sums[2] += length(computed) + length(exchanged) - length(merged([*computed, *exchanged]))
    return Overlap(*(total * 1e-6 / len(devices) for total in sums))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
