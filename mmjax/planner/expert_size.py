"""Over how many devices routed experts are spread, and how large the buffers of their exchange are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmjax.config import ModelConfig
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import FULL, Tuning, trained_arrays
from mmjax.planner.hardware import Cluster, Link
from mmjax.planner.parameters import ITEM_BYTES, PACKED_BYTES, wide
from mmjax.planner.search import Plan

# Share of a device's memory that experts and what the optimizer keeps of them may take by the rule.
_SHARE_OF_EXPERTS = 0.5


def expert_size_by_rule(
    model: ModelConfig, cluster: Cluster, *, tuning: Tuning = FULL, optimizer: str = "adamw"
) -> int:
    """The smallest number of devices that divides the experts and on which they take at most half of the memory.

    Parameters, gradients in at least float32 and moments count, over all layers. Inside a node if that is enough: its
    links are the fastest. 1 for a model without experts.

    Raises:
      ConfigurationError: even one expert on a device is too much.
    """
    experts = model.moe.num_experts if model.moe.num_dense_layers < model.num_layers else 1
    num_bytes = 0.0
    for array in trained_arrays(model, tuning):
        if (array.adapted_part or array.part) == "routed experts":
            moments = 1 if optimizer == "muon" and array.is_matrix else 2
            item = PACKED_BYTES if array.is_packed else ITEM_BYTES[array.dtype]
            if array.is_trained:
                item += moments * ITEM_BYTES[array.dtype] + ITEM_BYTES[wide(array.dtype)]
            num_bytes += array.size * item
    limit = _SHARE_OF_EXPERTS * cluster.usable_bytes
    for size in (size for size in range(1, cluster.num_devices + 1) if experts % size == 0):
        if cluster.num_devices % size == 0 and num_bytes / size <= limit:
            return size
    raise ConfigurationError(
        "experts",
        found=f"{num_bytes / cluster.num_devices / 1e9:,.0f} GB of experts a device on {cluster.name}",
        expected=f"at most {limit / 1e9:,.0f} GB",
        remedy="take more GPUs, keep frozen experts in MXFP4, or split them over fsdp too",
    )


def expert_sizes_by_search(plans: Sequence[Plan]) -> Mapping[int, Plan]:
    """The fastest plan for each number of devices that experts are spread over, from plans with the fastest first."""
    found: dict[int, Plan] = {}
    for plan in plans:
        mesh, moe = plan.config.mesh, plan.config.model.moe
        size = mesh.expert * (mesh.context if moe.expert_axes == "context_and_expert" else 1)
        found.setdefault(size, plan)
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Size of the exchange's buffers, and what it comes to."""

    capacity_factor: float
    rounds: int
    seconds: float
    """Of one exchange, one way."""
    num_bytes: float
    """Of one buffer of a device."""


def exchange_buffer(
    fullest: float, *, mean_bytes: float, link: Link, num_devices: int, memory_bytes: float = math.inf
) -> Buffer:
    """The capacity factor of least time for pairs of devices of which the fullest has `fullest` times the mean rows.

        rounds = ceil(fullest / factor)
        seconds = rounds * ((n - 1) latency + factor * mean bytes (n - 1) / n / bandwidth)

    `mean_bytes` are what a device sends in a balanced exchange. Buffers travel filled or not: a factor that needs k
    rounds is best at fullest / k, so only those are tried, at most `memory_bytes` large.

    Raises:
      ConfigurationError: a fullest pair below the mean, or no room for any buffer.
    """
    if fullest < 1 or mean_bytes <= 0 or num_devices < 2:
        raise ConfigurationError(
            "exchange buffer",
            found=f"{fullest:g} times the mean, {mean_bytes:g} bytes, {num_devices} devices",
            expected="at least 1 time the mean, bytes above 0, at least 2 devices",
            remedy="measure the rows of each pair of devices",
        )
    choices = []
    for rounds in range(1, math.ceil(fullest * 8) + 1):
        factor = fullest / rounds
        if factor * mean_bytes <= memory_bytes:
            sent = factor * mean_bytes * (num_devices - 1) / num_devices / link.bandwidth
            seconds = rounds * ((num_devices - 1) * link.latency_seconds + sent)
            choices.append(
                Buffer(capacity_factor=factor, rounds=rounds, seconds=seconds, num_bytes=factor * mean_bytes)
            )
    if not choices:
        raise ConfigurationError(
            "exchange buffer",
            found=f"{memory_bytes:,.0f} bytes of memory",
            expected=f"at least {mean_bytes / 8:,.0f}",
            remedy="take more micro-batches",
        )
    return min(choices, key=lambda choice: choice.seconds)
