"""Orders of devices: nestings of axes by hand, orders for links against brute force, and what a mesh makes of them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from mmjax.config import MeshConfig, RunConfig, check
from mmjax.errors import ConfigurationError
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.collectives import mesh_group
from mmjax.planner.device_order import nested_order, nestings, order_for_links, order_seconds
from mmjax.planner.topology import bandwidth_matrix, cluster_graph, read_cluster

MESH = MeshConfig(fsdp=2, expert=4)


def test_a_nesting_puts_neighbours_on_its_last_axis():
    # Devices 0 and 1 on fsdp: places (fsdp, expert) in rows of expert hold 0 2 4 6 | 1 3 5 7.
    assert nested_order(MESH, ("pipe", "replica", "context", "tensor", "expert", "fsdp")) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert nested_order(MESH, ("pipe", "replica", "fsdp", "context", "expert", "tensor")) == ()
    found = [nested_order(MESH, nesting) for nesting in nestings(MESH)]
    assert found == [(), (0, 2, 4, 6, 1, 3, 5, 7)]


def test_groups_of_a_permuted_mesh_know_their_nodes():
    cluster = read_cluster("4x2xh200")
    own = MESH, ("fsdp",)
    turned = dataclasses.replace(MESH, device_order=(0, 2, 4, 6, 1, 3, 5, 7)), ("fsdp",)
    assert [mesh_group(*one, cluster).devices_per_node for one in (own, turned)] == [1, 2]
    assert mesh_group(turned[0], ("expert",), cluster).devices_per_node == 1
    # One group inside a node, the other across: the second counts.
    mixed = MeshConfig(fsdp=2, expert=2, device_order=(0, 1, 2, 4)), ("expert",)
    with pytest.raises(ValueError, match="no permutation"):
        make_mesh(mixed[0])
    assert mesh_group(*mixed, cluster).devices_per_node == 1


def test_orders_equal_brute_force():
    random = np.random.default_rng(0)
    for mesh, exchanged in (
        (MeshConfig(fsdp=2, tensor=3), {("fsdp",): 5.0, ("tensor",): 2.0, ("fsdp", "tensor"): 1.0}),
        (MeshConfig(expert=5), {("expert",): 1.0}),
        (MeshConfig(pipe=2, context=2, tensor=2), {("pipe",): 1.0, ("context",): 3.0, ("tensor",): 9.0}),
    ):
        number = mesh.num_devices
        bandwidth = random.uniform(1, 10, (number, number))
        bandwidth = bandwidth + bandwidth.T

        def by_hand(order, mesh=mesh, exchanged=exchanged, bandwidth=bandwidth):
            grid, total = np.array(order).reshape(tuple(mesh.sizes.values())), 0.0
            places = {axis: index for index, axis in enumerate(mesh.sizes)}
            for mesh_axes, num_bytes in exchanged.items():
                groups = {}
                for place in np.ndindex(grid.shape):
                    others = tuple(p for axis, p in zip(places, place, strict=True) if axis not in mesh_axes)
                    groups.setdefault(others, []).append(int(grid[place]))
                hops = [
                    bandwidth[a, b]
                    for group in groups.values()
                    for a, b in zip(group, [*group[1:], group[0]], strict=True)
                ]
                total += num_bytes / min(hops)
            return total

        found = order_for_links(mesh, bandwidth, exchanged) or tuple(range(number))
        orders = list(itertools.islice(itertools.permutations(range(number)), 0, None, 1 if number < 8 else 37))
        best = min(map(by_hand, orders))
        assert by_hand(found) <= best * (1 + 1e-12)
        if number < 8:
            assert by_hand(found) == pytest.approx(best)


def test_large_orders_find_the_nodes_and_are_never_worse_than_the_devices_own():
    random, mesh = np.random.default_rng(1), MeshConfig(fsdp=2, expert=8)
    exchanged = {("expert",): 10.0, ("fsdp",): 1.0}
    placement = random.permutation(16)
    bandwidth = bandwidth_matrix(cluster_graph(read_cluster("2x8xh200")))[np.ix_(placement, placement)]
    order = order_for_links(mesh, bandwidth, exchanged)
    nodes = (placement[list(order)] // 8).reshape(2, 8)
    assert [len(set(row)) for row in nodes.tolist()] == [1, 1]
    for _ in range(3):
        links = random.uniform(1, 10, (12, 12))
        mesh, exchanged = MeshConfig(context=3, tensor=4), {("context",): 2.0, ("tensor",): 1.0}
        found = order_for_links(mesh, links + links.T, exchanged) or range(12)
        seconds = order_seconds(mesh, np.array([list(found), list(range(12))]), links + links.T, exchanged)
        assert seconds[0] <= seconds[1]


def test_even_links_keep_the_devices_own_order_and_missing_ones_are_refused():
    assert order_for_links(MESH, np.ones((8, 8)), {("expert",): 1.0}) == ()
    with pytest.raises(ConfigurationError, match="no link joins"):
        order_for_links(MESH, np.zeros((8, 8)), {("expert",): 1.0})
    with pytest.raises(ConfigurationError, match="of 8 devices"):
        order_for_links(MESH, np.ones((4, 4)), {("expert",): 1.0})


@pytest.mark.parametrize(
    ("order", "mesh", "found"),
    [
        ((0, 1, 2, 2), MeshConfig(fsdp=4), "none of them 3"),
        ((0, 1), MeshConfig(fsdp=4), "2 numbers for 4 devices"),
        ((0, 1, 2, 3), MeshConfig(fsdp=-1), "fsdp=-1"),
    ],
)
def test_an_order_that_is_no_permutation_is_a_fault(order, mesh, found):
    config = RunConfig(mesh=dataclasses.replace(mesh, device_order=order))
    (fault,) = [fault for fault in check(config) if fault.path == "mesh.device_order"]
    assert found in fault.found


def test_a_mesh_stands_on_its_devices_in_the_order_that_it_is_given():
    mesh = make_mesh(dataclasses.replace(MESH, device_order=(0, 2, 4, 6, 1, 3, 5, 7)))
    assert [device.id for device in mesh.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [device.id for device in make_mesh(MESH, jax.devices()).devices.flat] == list(range(8))
