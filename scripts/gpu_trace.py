"""What the GPUs ran, from a trace that JAX wrote: kernels, the parts of a step that they are, intervals of time."""

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = (  # the first pattern that a kernel's name holds counts
    ("attention", r"fmha|sdpa|flash|cudnn_generated"),
    ("linear attention", r"prepare|scan_back|^scan|parts_of_tokens|gradients|convolve"),
    ("experts", r"moe_"),
    ("cross-entropy", r"cross_entropy"),
    ("attention residuals", r"attention_residual"),
    ("products", r"gemm|nvjet|cutlass|xmma|sm90_xmma|dot"),
    ("copies", r"memcpy|copy|memset|dynamic_slice|dynamic_update_slice"),
)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Kernel:
    """What ran on a stream of a device, in microseconds."""

    device: int
    lane: int
    name: str
    begin: float
    end: float


def read_kernels(directory: Path) -> list[Kernel]:
    """From what JAX's profiler wrote; none where no GPU was traced."""
    events: list[Mapping[str, Any]] = []
    for path in directory.rglob("*.trace.json.gz"):
        events += json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return kernels_of(events)


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """Of events of Chrome's trace format: what runs in lanes named Stream, by process (device)."""
    events = list(events)
    lanes = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    return [
        Kernel(event["pid"], event["tid"], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and lanes.get((event["pid"], event.get("tid")), "").startswith("Stream")
    ]


def part_of(kernel: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, kernel, re.IGNORECASE)), "others")


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


def busy_share(kernels: Iterable[Kernel]) -> float:
    """Of the time from the first kernel to the end of the last, the share in which at least one ran."""
    busy = merged((kernel.begin, kernel.end) for kernel in kernels)
    return length(busy) / (busy[-1][1] - busy[0][0])
