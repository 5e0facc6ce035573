"""GPUs, links and clusters as numbers: what makers publish, to be replaced by what `plan measure` reads."""

import difflib
import re
from dataclasses import dataclass

from mmjax.errors import ConfigurationError

GIBI = 1024**3


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: float
    flops_per_second: float
    """Published dense bfloat16 peak."""
    memory_bandwidth: float
    """Bytes a second of its memory."""
    nvlinks: int
    nvlink_bandwidth: float
    """Bytes a second of one link, one way."""
    pcie_bandwidth: float
    """Bytes a second, one way, usable: about 80 % of the raw rate of 16 lanes."""


def _gpu(name, gibibytes, teraflops, memory_gigabytes, nvlinks, nvlink_gigabytes, pcie_gigabytes) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=gibibytes * GIBI,
        flops_per_second=teraflops * 1e12,
        memory_bandwidth=memory_gigabytes * 1e9,
        nvlinks=nvlinks,
        nvlink_bandwidth=nvlink_gigabytes * 1e9,
        pcie_bandwidth=pcie_gigabytes * 1e9,
    )


# Memory is what nvidia-smi reports. Source: NVIDIA data sheets.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 40.0, 312, 1555, 12, 25, 25),
        _gpu("a100", 80.0, 312, 2039, 12, 25, 25),
        _gpu("h20", 95.6, 148, 4000, 18, 25, 50),
        _gpu("h800", 79.6, 989.4, 3350, 8, 25, 50),
        _gpu("h100", 79.6, 989.4, 3350, 18, 25, 50),
        _gpu("h100-pcie", 79.6, 756, 2039, 0, 25, 50),
        _gpu("h200", 140.4, 989.4, 4800, 18, 25, 50),
        _gpu("b200", 179.1, 2250, 8000, 18, 50, 50),
        _gpu("l40s", 45.0, 362, 864, 0, 0, 25),
        _gpu("rtx-4090", 24.0, 165, 1008, 0, 0, 25),
    )
}
# How drivers call them: the first pattern that is found in the name counts.
_DRIVER_NAMES = {
    r"a100\b.*40gb": "a100-40gb",
    r"a100": "a100",
    r"h20": "h20",
    r"h800": "h800",
    r"h100 pcie": "h100-pcie",
    r"h100": "h100",
    r"h200": "h200",
    r"b200": "b200",
    r"l40s": "l40s",
    r"rtx 4090": "rtx-4090",
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name: `h200`, or as its driver calls it (`NVIDIA H200`).

    Raises:
      ConfigurationError: an unknown one; the message names the nearest.
    """
    lowered = name.strip().lower()
    if lowered in GPUS:
        return GPUS[lowered]
    for pattern, known in _DRIVER_NAMES.items():
        if re.search(rf"\b{pattern}\b", lowered):
            return GPUS[known]
    nearest = difflib.get_close_matches(lowered, GPUS, n=1)
    raise ConfigurationError(
        "GPU",
        found=repr(name),
        expected=f"one of {', '.join(GPUS)}",
        remedy=f"did you mean {nearest[0]!r}?" if nearest else "add its numbers to mmjax/planner/hardware.py",
    )


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between two GPUs, one direction."""

    bandwidth: float
    """Bytes a second that one GPU can send."""
    latency_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    num_nodes: int
    gpus_per_node: int
    gpu: Gpu
    inside: Link
    """Between two GPUs of a node."""
    between: Link
    """Between GPUs of two nodes: the node's network shared by all its GPUs at once."""
    usable_memory: float = 0.92
    """Share of a GPU's memory that arrays may fill; the rest is for CUDA, NCCL and fragments."""
    host_bytes: float = 0.0
    """Of a node's memory, what one GPU may copy results to."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> float:
        return self.usable_memory * self.gpu.memory_bytes

    @property
    def name(self) -> str:
        return f"{self.num_nodes}x{self.gpus_per_node}x{self.gpu.name}"
