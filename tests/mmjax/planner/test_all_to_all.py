"""Rank orders, groups and schedules: by hand, against brute force, and in simulation."""

import itertools

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.planner.all_to_all import (
    default_schedule,
    groups_value,
    hop_aware_groups,
    matchings,
    plan_all_to_all,
    rail_schedule,
    ring_cost,
    ring_order,
)
from mmjax.planner.exchange_simulation import Network, Transfer, simulate
from mmjax.planner.hardware import GPUS, Cluster, Link
from mmjax.planner.topology import bandwidth_matrix, cluster_graph, read_cluster


def network(num_nodes: int, gpus_per_node: int, order=None, latency: float = 0.0) -> Network:
    """10 bytes/s inside a node, 1 between nodes."""
    cluster = Cluster(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        gpu=GPUS["h200"],
        inside=Link(bandwidth=10.0, latency_seconds=latency),
        between=Link(bandwidth=1.0, latency_seconds=latency),
    )
    devices = range(num_nodes * gpus_per_node) if order is None else order
    return Network(cluster=cluster, device_of_rank=tuple(int(device) for device in devices))


def random_bandwidth(random, num_ranks: int) -> np.ndarray:
    matrix = random.uniform(1, 10, (num_ranks, num_ranks))
    return (matrix + matrix.T) * ~np.eye(num_ranks, dtype=bool)


def test_a_message_takes_its_latency_and_its_bytes():
    pair = network(1, 2, latency=0.5)
    assert simulate([Transfer(source=0, destination=1, num_bytes=30)], pair).seconds == pytest.approx(3.5)
    # Two in one lane follow each other; two lanes share the port: 1.0 of latency, or 0.5, and 6 s of bytes.
    lanes = [Transfer(source=0, destination=1, num_bytes=30, lane=lane) for lane in ("a", "a", "b")]
    assert simulate(lanes[:2], pair).seconds == pytest.approx(7.0)
    assert simulate(lanes[1:], pair).seconds == pytest.approx(6.5)


def test_ports_are_shared_fairly():
    # Two messages into rank 2 get 5 bytes/s each; that to rank 3 gets the other 5 of rank 0: 20, 40 and 25 bytes.
    four = network(1, 4)
    transfers = [
        Transfer(source=0, destination=2, num_bytes=20, lane="a"),
        Transfer(source=1, destination=2, num_bytes=40),
        Transfer(source=0, destination=3, num_bytes=25, lane="b"),
    ]
    # All run to 4 s; then 20 bytes into rank 2 at 10, and 5 to rank 3 at 10.
    outcome = simulate(transfers, four)
    assert outcome.seconds == pytest.approx(6.0)
    assert outcome.bandwidth_use(four) == pytest.approx(1.0)


def test_a_message_waits_for_those_before_it_and_never_for_itself():
    four = network(1, 4)
    chain = [
        Transfer(source=0, destination=1, num_bytes=10),
        Transfer(source=1, destination=2, num_bytes=10, after=(0,)),
    ]
    assert simulate(chain, four).seconds == pytest.approx(2.0)
    with pytest.raises(ValueError, match="circle"):
        simulate([Transfer(source=0, destination=1, num_bytes=1, after=(0,))], four)


def test_rings_equal_brute_force():
    random = np.random.default_rng(0)
    for num_ranks in (4, 5, 6, 7, 8):
        bandwidth = random_bandwidth(random, num_ranks)
        orders = ([0, *rest] for rest in itertools.permutations(range(1, num_ranks)))
        best = min(ring_cost(order, bandwidth) for order in orders)
        assert ring_cost(ring_order(bandwidth), bandwidth) == pytest.approx(best, rel=1e-12)


def test_large_rings_are_never_worse_than_the_default_and_visit_each_node_once():
    random = np.random.default_rng(1)
    for num_ranks in (12, 20):
        bandwidth = random_bandwidth(random, num_ranks)
        order = ring_order(bandwidth)
        assert sorted(order) == list(range(num_ranks)) and order[0] == 0
        assert ring_cost(order, bandwidth) <= ring_cost(range(num_ranks), bandwidth)
    # Ranks dealt at random over 2 nodes of 8: the best ring has 2 hops between them.
    placement = random.permutation(16)
    bandwidth = bandwidth_matrix(cluster_graph(read_cluster("2x8xh200")))[np.ix_(placement, placement)]
    nodes = [placement[rank] // 8 for rank in ring_order(bandwidth)]
    assert sum(a != b for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)) == 2


def test_groups_equal_brute_force_and_find_the_nodes():
    random = np.random.default_rng(2)
    bandwidth = random_bandwidth(random, 6)
    found = groups_value(hop_aware_groups(bandwidth, 3), bandwidth)
    pairs = (
        [[0, *rest], [rank for rank in range(1, 6) if rank not in rest]]
        for rest in itertools.combinations(range(1, 6), 2)
    )
    assert found == max(groups_value(groups, bandwidth) for groups in pairs)
    placement = random.permutation(16)
    bandwidth = bandwidth_matrix(cluster_graph(read_cluster("2x8xh200")))[np.ix_(placement, placement)]
    groups = hop_aware_groups(bandwidth, 8)
    assert [len({placement[rank] // 8 for rank in group}) for group in groups] == [1, 1]
    with pytest.raises(ConfigurationError, match=r"\[1, 2, 4, 8, 16\]"):
        hop_aware_groups(bandwidth, 3)


def test_matchings_by_hand():
    rounds = matchings(np.array([[0, 3, 1], [1, 0, 3], [3, 1, 0]]))
    assert [(step.destination, step.num_bytes) for step in rounds] == [((1, 2, 0), 3), ((2, 0, 1), 1)]


def test_matchings_carry_all_traffic_in_the_least_time():
    random = np.random.default_rng(3)
    for num_ranks in (3, 5, 8):
        traffic = random.lognormal(0, 2, (num_ranks, num_ranks)) * (random.random((num_ranks, num_ranks)) < 0.6)
        left, total = traffic.copy(), 0.0
        for step in matchings(traffic):
            receivers = [destination for destination in step.destination if destination >= 0]
            assert len(set(receivers)) == len(receivers)
            total += step.num_bytes
            for source, destination in enumerate(step.destination):
                if destination >= 0:
                    left[source, destination] = max(0.0, left[source, destination] - step.num_bytes)
        assert left.max() <= 1e-9 * traffic.max()
        assert total == pytest.approx(max(traffic.sum(axis=0).max(), traffic.sum(axis=1).max()))
    assert matchings(np.zeros((4, 4))) == []
    with pytest.raises(ConfigurationError, match="square"):
        matchings(np.zeros((2, 3)))


def test_rails_deliver_every_byte_and_load_cards_evenly():
    random = np.random.default_rng(4)
    net = network(2, 4, random.permutation(8))
    traffic = random.lognormal(0, 1.5, (8, 8)) * ~np.eye(8, dtype=bool)
    transfers = rail_schedule(traffic, net)
    # What each rank takes in less what it hands on is what it is due.
    balance = np.zeros(8)
    for transfer in transfers:
        balance[transfer.destination] += transfer.num_bytes
        balance[transfer.source] -= transfer.num_bytes
    np.testing.assert_allclose(balance, traffic.sum(axis=0) - traffic.sum(axis=1), atol=1e-9 * traffic.sum())
    crossing = [t for t in transfers if not net.is_local(t.source, t.destination)]
    assert all(net.rail(t.source) == net.rail(t.destination) for t in crossing)
    for node in (0, 1):
        sent = [
            sum(t.num_bytes for t in crossing if net.node(t.source) == node and net.rail(t.source) == rail)
            for rail in range(4)
        ]
        np.testing.assert_allclose(sent, np.mean(sent), rtol=1e-9)


def test_two_nodes_of_two_by_hand():
    # 10 bytes from every rank to every other. Between nodes 2 x 10 bytes a card at 1 byte/s: 20 s; inside meanwhile.
    net = network(2, 2)
    traffic = 10.0 * ~np.eye(4, dtype=bool)
    plan = plan_all_to_all(traffic, net)
    assert plan.outcome.seconds == pytest.approx(20.0)
    # Ranks 0, 2 | 1, 3: the default sends to a rank of the other node, then inside (1 s), then to the other node again.
    mixed = plan_all_to_all(traffic, network(2, 2, [0, 2, 1, 3]))
    assert mixed.default.seconds == pytest.approx(21.0) and mixed.outcome.seconds == pytest.approx(20.0)


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_two_nodes_of_eight_gain_at_least_17_per_cent_over_the_default_order(kind):
    """Ranks dealt at random; NVLink and InfiniBand of an H200 cluster."""
    cluster = read_cluster("2x8xh200")
    for seed in range(3):
        random = np.random.default_rng(seed)
        net = Network(cluster=cluster, device_of_rank=tuple(random.permutation(16).tolist()))
        traffic = np.full((16, 16), 8e6)
        if kind == "skewed":
            traffic *= random.lognormal(0, 1, (16, 16)) * random.lognormal(0, 0.5, (1, 16))
        np.fill_diagonal(traffic, 0)
        plan = plan_all_to_all(traffic, net)
        assert plan.speedup >= 1.17
        # Payload over what all cards could carry meanwhile: the gain in use of bandwidth is the gain in time.
        assert plan.outcome.between_bytes == pytest.approx(plan.default.between_bytes)


def test_a_single_node_is_never_worse_than_the_default():
    random = np.random.default_rng(5)
    for traffic in (np.full((8, 8), 1.0), random.lognormal(0, 1.5, (8, 8))):
        plan = plan_all_to_all(traffic * ~np.eye(8, dtype=bool), network(1, 8, random.permutation(8)))
        assert plan.speedup >= 1.0
    assert plan_all_to_all(np.zeros((8, 8)), network(1, 8)).outcome.seconds == 0
    assert default_schedule(np.zeros((8, 8))) == []


def test_ranks_without_a_link_are_refused():
    with pytest.raises(ConfigurationError, match="no link joins"):
        ring_order(np.zeros((4, 4)))
