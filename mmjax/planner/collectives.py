"""Times of collective exchanges over two levels of links, in seconds, from bytes, bandwidths and latencies."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from mmjax import axes
from mmjax.config import MeshConfig
from mmjax.planner.hardware import Cluster, Link


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that exchange with each other, as many of them on each node as on any other."""

    num_devices: int
    devices_per_node: int
    inside: Link
    between: Link

    @property
    def num_nodes(self) -> int:
        return self.num_devices // self.devices_per_node

    @property
    def crosses_nodes(self) -> bool:
        return self.num_nodes > 1


def mesh_group(mesh: MeshConfig, mesh_axes: tuple[str, ...], cluster: Cluster) -> Group:
    """The group that a collective over `mesh_axes` forms, devices in mesh order: the last axis on neighbours.

    Of a permuted order the group that is spread over nodes most.
    """
    devices, per_node = _sharing(mesh, mesh_axes, cluster.gpus_per_node)
    return Group(num_devices=devices, devices_per_node=per_node, inside=cluster.inside, between=cluster.between)


@functools.lru_cache(maxsize=1 << 16)
def _sharing(mesh: MeshConfig, mesh_axes: tuple[str, ...], gpus_per_node: int) -> tuple[int, int]:
    """(devices of a group, how many of them share a node)."""
    if mesh.device_order:
        grid = np.asarray(mesh.device_order).reshape(tuple(mesh.sizes.values())) // gpus_per_node
        places = [axes.MESH_AXES.index(axis) for axis in mesh_axes]
        groups = np.moveaxis(grid, places, range(-len(places), 0)).reshape(-1, _product(mesh, mesh_axes))
        shared = min(int(np.unique(group, return_counts=True)[1].min()) for group in groups)
        num_devices = groups.shape[1]
    else:
        strides, stride = {}, 1
        for axis in reversed(axes.MESH_AXES):
            strides[axis] = stride
            stride *= mesh.sizes[axis]
        members = [0]
        for axis in mesh_axes:
            members = [member + index * strides[axis] for member in members for index in range(mesh.sizes[axis])]
        # The fullest sharing of a node counts: how many of the group's members its first device's node holds.
        shared, num_devices = sum(member < gpus_per_node for member in members), len(members)
    # A group whose members are spread unevenly is as slow as its emptiest node: take the share that divides it.
    while num_devices % shared:
        shared -= 1
    return num_devices, shared


def _product(mesh: MeshConfig, mesh_axes: tuple[str, ...]) -> int:
    return math.prod(mesh.sizes[axis] for axis in mesh_axes)


def all_gather_seconds(total_bytes: float, group: Group) -> float:
    """Every device ends with `total_bytes`, 1/n of which it held before.

        max( B (n - 1) / n / inside,  B (N - 1) / N / (m between) ) + (N - 1) latency' + (m - 1) latency

    n devices on N nodes, m on each; `inside` and `between` the bandwidth of one device. A node takes in what it lacks
    over the network shares of its m members, and passes it on inside at the same time. Reduce-scatter costs the same.
    """
    devices, nodes, local = group.num_devices, group.num_nodes, group.devices_per_node
    if devices == 1:
        return 0.0
    inside = total_bytes * (devices - 1) / devices / group.inside.bandwidth if local > 1 else 0.0
    between = total_bytes * (nodes - 1) / nodes / (local * group.between.bandwidth) if nodes > 1 else 0.0
    return max(inside, between) + ring_latency_seconds(group)


def all_reduce_seconds(num_bytes: float, group: Group) -> float:
    """Every device ends with the sum of all arrays of `num_bytes`: a reduce-scatter, then an all-gather."""
    return 2 * all_gather_seconds(num_bytes, group)


def all_to_all_seconds(bytes_per_device: float, group: Group) -> float:
    """Time for every device to send an equal share of `bytes_per_device` to every device, itself included.

        max( B (m - 1) / n / inside,  B (n - m) / n / between ) + (n - 1) latency

    Both levels work at the same time; the latency is that of the slower one in use.
    """
    devices, local = group.num_devices, group.devices_per_node
    inside = bytes_per_device * (local - 1) / devices / group.inside.bandwidth
    # A single node may have no network at all.
    between = bytes_per_device * (devices - local) / devices / group.between.bandwidth if devices > local else 0.0
    latency = group.between.latency_seconds if group.crosses_nodes else group.inside.latency_seconds
    return max(inside, between) + (devices - 1) * latency


def send_seconds(num_bytes: float, link: Link) -> float:
    """One message to one device: bytes / bandwidth + latency."""
    return num_bytes / link.bandwidth + link.latency_seconds


def ring_latency_seconds(group: Group) -> float:
    """Latency of one gather: the steps of a ring inside a node and of a ring between the nodes; 0 for one device."""
    inside = (group.devices_per_node - 1) * group.inside.latency_seconds
    return inside + (group.num_nodes - 1) * group.between.latency_seconds
