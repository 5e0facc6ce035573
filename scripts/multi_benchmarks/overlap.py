"""How much of the exchanges between GPUs computing hides, from the trace of a step."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_trace import Interval, Kernel, length, merged, part_of

EXCHANGE = re.compile(r"nccl|memcpy ?p2p|ragged.?all.?to.?all|all.?reduce.?kernel", re.IGNORECASE)
# Of the kernels of a step, so many of the longest are described.
_NUM_DESCRIBED = 40


@dataclass(frozen=True)
class Overlap:
    """Seconds of one step, the mean of the devices."""

    computing: float
    exchanging: float
    """Waiting for the other devices included."""
    hidden: float
    """Of the exchanging: while something computed, too."""
    span: float
    """From the first kernel to the end of the last."""
    parts: dict[str, float]
    """Computing by `gpu_trace.PARTS`, what runs side by side counted twice."""
    computing_of_devices: list[float]

    @property
    def hidden_share(self) -> float:
        return self.hidden / self.exchanging if self.exchanging else 1.0


def overlap_of(kernels: Iterable[Kernel]) -> Overlap | None:
    """None where no GPU was traced."""
    exchanges: dict[int, list[Interval]] = defaultdict(list)
    computing: dict[int, list[Interval]] = defaultdict(list)
    parts: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        if EXCHANGE.search(kernel.name):
            exchanges[kernel.device].append((kernel.begin, kernel.end))
        else:
            computing[kernel.device].append((kernel.begin, kernel.end))
            parts[part_of(kernel.name)] += kernel.end - kernel.begin
    devices = sorted(exchanges.keys() | computing.keys())
    if not devices:
        return None
    sums = [0.0, 0.0, 0.0, 0.0]
    for device in devices:
        exchanged, computed = merged(exchanges[device]), merged(computing[device])
        both = merged([*computed, *exchanged])
        sums[0] += length(computed)
        sums[1] += length(exchanged)
        # What both cover: their lengths, less that of what either covers.
        sums[2] += length(computed) + length(exchanged) - length(both)
        sums[3] += both[-1][1] - both[0][0]
    scale = 1e-6 / len(devices)
    return Overlap(
        *(total * scale for total in sums),
        parts={part: total * scale for part, total in sorted(parts.items(), key=lambda item: -item[1])},
        computing_of_devices=[length(merged(computing[device])) * 1e-6 for device in devices],
    )


def describe_kernels(kernels: Sequence[Kernel]) -> str:
    """The longest by name: milliseconds on each device, how often, name; of exchanges also what nothing hides."""
    times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[str, int] = defaultdict(int)
    computing: dict[int, list[Interval]] = defaultdict(list)
    exchanges: dict[str, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for kernel in kernels:
        times[kernel.name][kernel.device] += (kernel.end - kernel.begin) * 1e-3
        counts[kernel.name] += 1
        interval = (kernel.begin, kernel.end)
        if EXCHANGE.search(kernel.name):
            exchanges[kernel.name][kernel.device].append(interval)
        else:
            computing[kernel.device].append(interval)
    computed = {device: merged(intervals) for device, intervals in computing.items()}
    lines = []
    for name in sorted(times, key=lambda name: -sum(times[name].values()))[:_NUM_DESCRIBED]:
        exposed = [
            length(merged([*computed.get(device, []), *intervals])) - length(computed.get(device, []))
            for device, intervals in sorted(exchanges[name].items())
        ]
        devices = ", ".join(f"{total:.2f}" for _, total in sorted(times[name].items()))
        waited = f" exposed {', '.join(f'{total * 1e-3:.2f}' for total in exposed)}" if exposed else ""
        lines.append(f"{devices} ms, {counts[name]} x, {name[:120]}{waited}")
    return "\n".join(lines)


def save_kernels(path: Path, kernels: Sequence[Kernel]) -> None:
    """As JSON: names, and [device, lane, place of the name, begin, end] of each."""
    names = sorted({kernel.name for kernel in kernels})
    places = {name: place for place, name in enumerate(names)}
    rows = [[k.device, k.lane, places[k.name], round(k.begin, 3), round(k.end, 3)] for k in kernels]
    path.write_bytes(gzip.compress(json.dumps({"names": names, "kernels": rows}).encode()))
