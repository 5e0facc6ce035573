"""Times of exchanges worked by hand."""

import dataclasses

import pytest

from mmjax.config import MeshConfig
from mmjax.planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    mesh_group,
    send_seconds,
)
from mmjax.planner.hardware import Link
from mmjax.planner.topology import read_cluster


def group(num_devices: int, devices_per_node: int, latency: float = 0.0) -> Group:
    return Group(
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        inside=Link(bandwidth=100e9, latency_seconds=latency),
        between=Link(bandwidth=10e9, latency_seconds=10 * latency),
    )


def test_eight_devices_of_a_node_move_seven_eighths():
    assert all_to_all_seconds(8e9, group(8, 8)) == pytest.approx(7e9 / 100e9)
    assert all_gather_seconds(8e9, group(8, 8)) == pytest.approx(7e9 / 100e9)
    assert all_reduce_seconds(8e9, group(8, 8)) == pytest.approx(14e9 / 100e9)


def test_two_nodes_of_eight_send_half_of_an_all_to_all_over_the_network():
    # 8 of 16 shares of 0.5 GB leave the node at 10 GB/s; 7 stay inside, meanwhile.
    assert all_to_all_seconds(8e9, group(16, 8)) == pytest.approx(4e9 / 10e9)


def test_a_node_gathers_what_it_lacks_over_all_its_members_shares():
    # Each of 2 nodes lacks 4 GB and has 8 x 10 GB/s; 15/16 of 8 GB inside at 100 GB/s takes longer.
    assert all_gather_seconds(8e9, group(16, 8)) == pytest.approx(7.5e9 / 100e9)
    # One member on each of 4 nodes: 6 GB at 10 GB/s.
    assert all_gather_seconds(8e9, group(4, 1)) == pytest.approx(6e9 / 10e9)


def test_latency_counts_steps():
    assert all_gather_seconds(0, group(16, 8, latency=1e-6)) == pytest.approx(7e-6 + 10e-6)
    assert all_to_all_seconds(0, group(8, 8, latency=1e-6)) == pytest.approx(7e-6)
    assert send_seconds(10e9, Link(bandwidth=10e9, latency_seconds=0.5)) == 1.5


def test_one_device_exchanges_nothing():
    assert all_gather_seconds(8e9, group(1, 1)) == all_reduce_seconds(8e9, group(1, 1)) == 0


def test_groups_of_a_mesh_know_their_nodes():
    cluster = read_cluster("4x8xh200")
    mesh = MeshConfig(fsdp=2, expert=8, tensor=2)
    for mesh_axes, num_devices, per_node in [
        (("tensor",), 2, 2),
        (("expert",), 8, 4),
        (("fsdp",), 2, 1),
        (("fsdp", "expert"), 16, 4),
    ]:
        found = mesh_group(mesh, mesh_axes, cluster)
        assert (found.num_devices, found.devices_per_node) == (num_devices, per_node), mesh_axes


def test_a_node_without_a_network_exchanges_inside():
    lonely = dataclasses.replace(group(8, 8), between=Link(bandwidth=0.0, latency_seconds=0.0))
    assert all_to_all_seconds(8e9, lonely) == all_gather_seconds(8e9, lonely) == pytest.approx(7e9 / 100e9)
