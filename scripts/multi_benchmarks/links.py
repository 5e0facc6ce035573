"""Exchanges between the GPUs through JAX, and what the planner expects of their links."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from multi_benchmarks.overlap import EXCHANGE, Kernel, read_kernels
from multi_benchmarks.session import Session

from mmjax.parallel.link_readings import AT_A_TIME, read_links
from mmjax.planner.collectives import Group, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, send_seconds
from mmjax.planner.hardware import Cluster
from mmjax.planner.machine import discover
from mmjax.planner.readings import Reading, fit_link
from mmjax.planner.topology import machine_cluster, read_cluster

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30)
TINY_SIZES = (1 << 12, 1 << 20)


def run(session: Session, name: str) -> None:
    # The log says by which ways the GPUs reach each other.
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,GRAPH"}
    machine = discover()
    cluster = machine_cluster(machine) if machine.gpus else read_cluster(f"1x{session.num_devices}xh200")
    sizes, repeats = (TINY_SIZES, 3) if session.is_tiny else (SIZES, 10)
    with tempfile.TemporaryDirectory() as directory:
        with session.turn():
            readings = read_links(sizes, repeats)
            # Once more for the kernels alone: a trace slows down what starts them.
            with jax.profiler.trace(directory):
                read_links(sizes, repeats)
        kernels = read_kernels(Path(directory))
    alone = kernel_seconds(kernels, len(readings.exchanges), (repeats + 1) * AT_A_TIME)
    for reading, seconds in zip(readings.exchanges, alone, strict=True):
        session.report(
            num_devices=reading.num_devices,
            exchange=reading.exchange,
            num_bytes=reading.num_bytes,
            seconds=reading.seconds,
            kernel_seconds=seconds,
            expected_seconds=expected_seconds(reading, cluster),
            bandwidth=bandwidth(reading),
        )
    session.report(fit=fit_link(readings.exchanges).describe(), planned_link=cluster.inside.bandwidth)


def kernel_seconds(kernels: Iterable[Kernel], num_readings: int, num_each: int) -> list[float | None]:
    """Of each reading, which `num_each` kernels follow each other for, that of its kernel where no device waits."""
    of_device: dict[int, list[float]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        if EXCHANGE.search(kernel.name):
            of_device[kernel.device].append((kernel.end - kernel.begin) * 1e-6)
    if not of_device or any(len(found) != num_readings * num_each for found in of_device.values()):
        return [None] * num_readings
    shortest = np.min(list(of_device.values()), axis=0).reshape(num_readings, num_each)
    return np.median(shortest, axis=1).tolist()


def expected_seconds(reading: Reading, cluster: Cluster) -> float:
    """By the planner's formulas and the published rates."""
    if reading.exchange == "send":
        return send_seconds(reading.num_bytes, cluster.inside)
    group = Group(
        num_devices=reading.num_devices,
        devices_per_node=reading.num_devices,
        inside=cluster.inside,
        between=cluster.between,
    )
    formulas = {"all_gather": all_gather_seconds, "all_reduce": all_reduce_seconds, "all_to_all": all_to_all_seconds}
    return formulas[reading.exchange](reading.num_bytes, group)


def bandwidth(reading: Reading) -> float:
    """Bytes a second that each device sends."""
    share = 1.0 if reading.exchange == "send" else (reading.num_devices - 1) / reading.num_devices
    return reading.num_bytes * share * (2 if reading.exchange == "all_reduce" else 1) / reading.seconds
