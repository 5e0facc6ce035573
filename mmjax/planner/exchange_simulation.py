"""Exchanges played through over links that they share, event by event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmjax.planner.hardware import Cluster

Lane = tuple[int, str]
"""(rank, name): messages of a lane go out one after the other."""
Port = tuple[str, int]
"""(kind, device): a link's end that messages share."""
# Events nearer than this share of the time to the next one happen together.
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One message from a GPU to another."""

    source: int
    destination: int
    num_bytes: float
    lane: str = "all"
    """Which of the source's lanes it waits in."""
    after: tuple[int, ...] = ()
    """Positions (in the list of all transfers) of those that must have arrived."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which GPU each rank sits on, and what one GPU can send and take in."""

    cluster: Cluster
    device_of_rank: tuple[int, ...]
    """Device r of rank: its node is device // gpus_per_node."""

    def node(self, rank: int) -> int:
        return self.device_of_rank[rank] // self.cluster.gpus_per_node

    def rail(self, rank: int) -> int:
        """Index of the rank's GPU in its node: cards of one rail hang on one switch."""
        return self.device_of_rank[rank] % self.cluster.gpus_per_node

    def is_local(self, source: int, destination: int) -> bool:
        return self.node(source) == self.node(destination)

    def ports(self, source: int, destination: int) -> tuple[Port, Port]:
        """The two ends a message occupies: NVLink inside a node, network cards between nodes."""
        kind = "inside" if self.is_local(source, destination) else "between"
        return (f"{kind} out", source), (f"{kind} in", destination)

    def bandwidth(self, port: Port) -> float:
        """Bytes a second."""
        return (self.cluster.inside if port[0].startswith("inside") else self.cluster.between).bandwidth

    def latency_seconds(self, source: int, destination: int) -> float:
        link = self.cluster.inside if self.is_local(source, destination) else self.cluster.between
        return link.latency_seconds


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an exchange went."""

    seconds: float
    between_bytes: float
    """What crossed between nodes, over all cards."""
    busy: Mapping[Port, float] = field(default_factory=dict)
    """Bytes through each port."""

    def bandwidth_use(self, network: Network) -> float:
        """Bytes of the busiest port over what it could have moved meanwhile; 0 when nothing moved."""
        if not self.seconds:
            return 0.0
        return max(num_bytes / network.bandwidth(port) for port, num_bytes in self.busy.items()) / self.seconds


def simulate(transfers: Sequence[Transfer], network: Network) -> Outcome:
    """Play `transfers`: each lane sends in order, one at a time; a message starts when those it waits for have arrived.

    Messages share ports fairly (max-min): the most crowded port is shared equally among its messages, what they leave
    on other ports is shared among the rest, and so on. A message takes its latency first, holding its lane.

    Raises:
      ValueError: messages wait for each other in a circle.
    """
    lanes: dict[Lane, list[int]] = {}
    for position, transfer in enumerate(transfers):
        lanes.setdefault((transfer.source, transfer.lane), []).append(position)
    ports = sorted({port for t in transfers for port in network.ports(t.source, t.destination)})
    port_index = {port: index for index, port in enumerate(ports)}
    capacity = np.array([network.bandwidth(port) for port in ports])
    occupied = [[port_index[port] for port in network.ports(t.source, t.destination)] for t in transfers]
    arrived: set[int] = set()
    heads = dict.fromkeys(lanes, 0)
    latency: dict[int, float] = {}
    remaining: dict[int, float] = {}
    now = 0.0
    while len(arrived) < len(transfers):
        for lane, queue in lanes.items():
            if heads[lane] < len(queue):
                position = queue[heads[lane]]
                is_new = position not in remaining and position not in latency
                if is_new and arrived.issuperset(transfers[position].after):
                    transfer = transfers[position]
                    latency[position] = network.latency_seconds(transfer.source, transfer.destination)
        active = list(remaining)
        rates = _fair_rates([occupied[position] for position in active], capacity)
        # Seconds until each message arrives, or has done its latency.
        arrivals = {position: remaining[position] / rate for position, rate in zip(active, rates, strict=True)}
        if not arrivals and not latency:
            raise ValueError("messages wait for each other in a circle: no lane can go on")
        step = min([*arrivals.values(), *latency.values()])
        now += step
        for position, seconds in list(latency.items()):
            latency[position] = seconds - step
            if seconds <= step * (1 + _SAME):
                del latency[position]
                remaining[position] = transfers[position].num_bytes
        for position, rate in zip(active, rates, strict=True):
            remaining[position] -= rate * step
            if arrivals[position] <= step * (1 + _SAME):
                del remaining[position]
                arrived.add(position)
                heads[transfers[position].source, transfers[position].lane] += 1
    busy = dict.fromkeys(ports, 0.0)
    for transfer in transfers:
        for port in network.ports(transfer.source, transfer.destination):
            busy[port] += transfer.num_bytes
    between = sum(t.num_bytes for t in transfers if not network.is_local(t.source, t.destination))
    return Outcome(seconds=float(now), between_bytes=between, busy=busy)


def _fair_rates(occupied: Sequence[Sequence[int]], capacity: np.ndarray) -> np.ndarray:
    """Max-min fair rates [messages] of messages that each occupy some ports."""
    rates = np.zeros(len(occupied))
    left = capacity.copy()
    open_messages = set(range(len(occupied)))
    while open_messages:
        crowd = np.zeros(len(capacity))
        for message in open_messages:
            crowd[list(occupied[message])] += 1
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(crowd > 0, left / crowd, np.inf)
        tightest = int(shares.argmin())
        share = shares[tightest]
        for message in [message for message in open_messages if tightest in occupied[message]]:
            rates[message] = share
            left[list(occupied[message])] -= share
            open_messages.remove(message)
        # Rounding must not empty a port that still has messages.
        left = np.maximum(left, capacity * _SAME)
    return rates
