"""Exchanges between the GPUs through JAX, and what the planner expects of their links."""

import os

from multi_benchmarks.session import Session

from mmjax.parallel.link_readings import read_links
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
    with session.turn():
        readings = read_links(TINY_SIZES if session.is_tiny else SIZES, repeats=3 if session.is_tiny else 10)
    for reading in readings.exchanges:
        session.report(
            num_devices=reading.num_devices,
            exchange=reading.exchange,
            num_bytes=reading.num_bytes,
            seconds=reading.seconds,
            expected_seconds=expected_seconds(reading, cluster),
            bandwidth=bandwidth(reading),
        )
    session.report(fit=fit_link(readings.exchanges).describe(), planned_link=cluster.inside.bandwidth)


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
