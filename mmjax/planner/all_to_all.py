"""Rank orders, groups and message orders that keep traffic on fast links."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from mmjax.errors import ConfigurationError
from mmjax.planner.exchange_simulation import Network, Outcome, Transfer, simulate

# Up to so many ranks, orders and groups are exact.
EXACT_RANKS = 9
# Differences smaller than this share are rounding.
_SAME = 1e-12


def ring_cost(order: Sequence[int], bandwidth: np.ndarray) -> tuple[float, float]:
    """(slowest hop, sum of hops) of a ring, in seconds for a byte: smaller is better, the slowest hop first.

    All hops of a ring work at once, so the slowest sets its pace. `bandwidth` [n, n] in bytes a second, row to column.
    """
    if len(order) < 2:
        return 0.0, 0.0
    hops = 1 / bandwidth[list(order), [*order[1:], order[0]]]
    return float(hops.max()), float(hops.sum())


def ring_order(bandwidth: np.ndarray) -> list[int]:
    """Ring of the least `ring_cost`: exact for up to 9 ranks, else a heuristic that is never worse than 0, 1, 2, ...

    Exact: a table over subsets (Held and Karp). Heuristic: from the default order and from nearest neighbours of every
    rank, segments are turned round and single ranks moved as long as that helps.

    Raises:
      ConfigurationError: not a square matrix, or ranks that no link joins.
    """
    _check_bandwidth(bandwidth)
    num_ranks = len(bandwidth)
    if num_ranks <= 3:
        orders = ([0, *rest] for rest in itertools.permutations(range(1, num_ranks)))
        return min(orders, key=lambda order: ring_cost(order, bandwidth), default=[])
    if num_ranks <= EXACT_RANKS:
        return _exact_ring(1 / np.where(np.eye(num_ranks), 1.0, bandwidth))
    starts = [list(range(num_ranks)), *(_nearest_neighbours(bandwidth, start) for start in range(min(num_ranks, 8)))]
    best = min((_improve_ring(start, bandwidth) for start in starts), key=lambda order: ring_cost(order, bandwidth))
    turn = best.index(0)
    return best[turn:] + best[:turn]


def hop_aware_groups(bandwidth: np.ndarray, group_size: int) -> list[list[int]]:
    """Ranks in groups of `group_size` whose members are joined by fast links.

    Largest slowest link inside any group, then largest sum of bandwidths inside groups. Exact for up to 9 ranks; else
    grown greedily and improved by swaps, never worse than consecutive ranks.

    Raises:
      ConfigurationError: the size does not divide the number of ranks.
    """
    _check_bandwidth(bandwidth)
    num_ranks = len(bandwidth)
    if group_size < 1 or num_ranks % group_size:
        raise ConfigurationError(
            "groups",
            found=f"{num_ranks} ranks in groups of {group_size}",
            expected="a size that divides the number of ranks",
            remedy=f"give one of {[size for size in range(1, num_ranks + 1) if num_ranks % size == 0]}",
        )
    if num_ranks <= EXACT_RANKS:
        return max(_partitions(list(range(num_ranks)), group_size), key=lambda groups: groups_value(groups, bandwidth))
    default = [list(range(start, start + group_size)) for start in range(0, num_ranks, group_size)]
    candidates = [_swap_members(groups, bandwidth) for groups in (default, _grow_groups(bandwidth, group_size))]
    return max(candidates, key=lambda groups: groups_value(groups, bandwidth))


def groups_value(groups: Sequence[Sequence[int]], bandwidth: np.ndarray) -> tuple[float, float]:
    """(slowest link, sum of bandwidths) inside groups: larger is better."""
    inside = [bandwidth[a, b] for group in groups for a, b in itertools.permutations(group, 2)]
    return (float(min(inside)), float(sum(inside))) if inside else (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Round:
    """At one time each source sends to one destination and each destination takes in from one source."""

    destination: tuple[int, ...]
    """Of each source; -1 for a source that rests."""
    num_bytes: float
    """Sent by each at most; a pair with less left is done sooner."""


def matchings(traffic: np.ndarray) -> list[Round]:
    """Rounds that together carry `traffic` [n, n] bytes (row to column) in the least total time.

    sum over rounds of their bytes = the largest sum of a row or column, which no order can beat

    The matrix is filled up until all rows and columns sum to that, then taken apart into perfect matchings (Birkhoff),
    each time the one whose smallest entry is largest. What was filled in is never sent.
    """
    traffic = np.array(traffic, dtype=np.float64)
    if traffic.ndim != 2 or traffic.shape[0] != traffic.shape[1] or (traffic < 0).any():
        raise ConfigurationError(
            "traffic", found=f"shape {traffic.shape}", expected="a square matrix of bytes >= 0", remedy="mend it"
        )
    total = max(traffic.sum(axis=0).max(initial=0.0), traffic.sum(axis=1).max(initial=0.0))
    if total == 0:
        return []
    filled = _fill_up(traffic, total)
    left, rounds = traffic.copy(), []
    while filled.max() > total * _SAME * len(filled):
        columns = _largest_matching(filled)
        rows = np.arange(len(filled))
        amount = float(filled[rows, columns].min())
        filled[rows, columns] = np.where(
            filled[rows, columns] - amount <= total * _SAME, 0.0, filled[rows, columns] - amount
        )
        # Real bytes are sent before filling: the same entry may hold both.
        is_sent = left[rows, columns] > total * _SAME
        rounds.append(
            Round(
                destination=tuple(int(column) if sent else -1 for column, sent in zip(columns, is_sent, strict=True)),
                num_bytes=amount,
            )
        )
        left[rows, columns] = np.maximum(left[rows, columns] - amount, 0.0)
    return rounds


def default_schedule(traffic: np.ndarray) -> list[Transfer]:
    """What a library does that knows no links: rank r sends to r + 1, r + 2, ... one after the other."""
    num_ranks = len(traffic)
    return [
        Transfer(
            source=rank,
            destination=(rank + step) % num_ranks,
            num_bytes=float(traffic[rank, (rank + step) % num_ranks]),
        )
        for step in range(1, num_ranks)
        for rank in range(num_ranks)
        if traffic[rank, (rank + step) % num_ranks] > 0
    ]


def direct_schedule(traffic: np.ndarray, network: Network) -> list[Transfer]:
    """Two lanes a rank at the same time, inside the node and between nodes, each in the order of matchings."""
    ranks = range(len(traffic))
    is_local = np.array([[network.is_local(a, b) for b in ranks] for a in ranks])
    return [*_in_order(_inside(traffic, network), "inside"), *_in_order(np.where(is_local, 0.0, traffic), "between")]


def rail_schedule(traffic: np.ndarray, network: Network) -> list[Transfer]:
    """Two levels: inside the node to the GPU whose card takes it, along that card's rail, inside the other node.

    A rail joins cards of one index, so traffic between nodes needs no way between rails. It prefers the rail of its
    destination, which saves the last hop; what exceeds an equal share of what one node sends another moves to rails
    with room, so that no card, sending or taking in, has more than its share. Nodes follow each other in the order of
    the matchings of the traffic between them. Hops inside a node go in the order in which the cards need them.
    """
    ranks, cluster = range(len(traffic)), network.cluster
    rank_at = {(network.node(rank), network.rail(rank)): rank for rank in ranks}
    between = np.zeros((cluster.num_nodes, cluster.num_nodes))
    for source, destination in itertools.product(ranks, ranks):
        if not network.is_local(source, destination):
            between[network.node(source), network.node(destination)] += traffic[source, destination]
    legs: list[tuple[int, int, int, int, float, int]] = []
    for position, (here, there) in enumerate(_pair_order(between)):
        turns = dict.fromkeys(range(cluster.gpus_per_node), 0)
        for source, destination, rail, num_bytes in _share_out(traffic, network, here, there):
            turns[rail] += 1
            turn = position * len(ranks) + turns[rail]
            legs.append((source, rank_at[here, rail], rank_at[there, rail], destination, num_bytes, turn))
    # One piece for every card before the next piece of any.
    legs.sort(key=lambda leg: leg[-1])
    transfers: list[Transfer] = []
    for source, gateway, exit, destination, num_bytes, _ in legs:
        after: tuple[int, ...] = ()
        if source != gateway:
            transfers.append(Transfer(source=source, destination=gateway, num_bytes=num_bytes, lane="inside"))
            after = (len(transfers) - 1,)
        transfers.append(Transfer(source=gateway, destination=exit, num_bytes=num_bytes, lane="between", after=after))
        if exit != destination:
            after = (len(transfers) - 1,)
            transfers.append(
                Transfer(source=exit, destination=destination, num_bytes=num_bytes, lane="onward", after=after)
            )
    return transfers + _in_order(_inside(traffic, network), "inside")


def _share_out(traffic: np.ndarray, network: Network, here: int, there: int) -> list[tuple[int, int, int, float]]:
    """(source, destination, rail, bytes) of pieces from node `here` to node `there`, each rail with an equal sum."""
    sources = [rank for rank in range(len(traffic)) if network.node(rank) == here]
    destinations = [rank for rank in range(len(traffic)) if network.node(rank) == there]
    room = np.full(network.cluster.gpus_per_node, traffic[np.ix_(sources, destinations)].sum() / len(sources))
    pieces, rest = [], []
    for destination in destinations:
        rail = network.rail(destination)
        # What starts on the rail stays on it first: it needs no hop at all.
        for source in sorted(sources, key=lambda rank: (network.rail(rank) - rail) % len(sources)):
            num_bytes = float(traffic[source, destination])
            taken = min(num_bytes, float(room[rail]))
            room[rail] -= taken
            pieces.append((source, destination, rail, taken))
            rest.append((source, destination, num_bytes - taken))
    smallest = room.sum() * _SAME + traffic.max() * _SAME
    for source, destination, num_bytes in rest:
        while num_bytes > smallest:
            rail = network.rail(source) if room[network.rail(source)] > smallest else int(room.argmax())
            taken = min(num_bytes, float(room[rail]))
            if taken <= smallest:
                break
            room[rail] -= taken
            num_bytes -= taken
            pieces.append((source, destination, rail, taken))
    return [piece for piece in pieces if piece[-1] > smallest]


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """The schedule chosen for an all-to-all, and how it and the default fared in simulation."""

    name: str
    transfers: tuple[Transfer, ...]
    outcome: Outcome
    default: Outcome

    @property
    def speedup(self) -> float:
        """Time of the default over its own; what it gains in use of bandwidth."""
        return self.default.seconds / self.outcome.seconds if self.outcome.seconds else 1.0


def plan_all_to_all(traffic: np.ndarray, network: Network) -> ExchangePlan:
    """The fastest in simulation of default, direct and rail schedules: never worse than the default.

    `traffic` [n, n] bytes from rank to rank; the diagonal stays where it is.
    """
    schedules = {"default": default_schedule(traffic), "direct": direct_schedule(traffic, network)}
    has_whole_nodes = len(traffic) == network.cluster.num_devices
    if network.cluster.num_nodes > 1 and has_whole_nodes:
        schedules["rail"] = rail_schedule(traffic, network)
    outcomes = {name: simulate(transfers, network) for name, transfers in schedules.items()}
    # Of equals the simplest: they stand in this order.
    best = min(outcomes, key=lambda name: round(outcomes[name].seconds, 12))
    return ExchangePlan(
        name=best, transfers=tuple(schedules[best]), outcome=outcomes[best], default=outcomes["default"]
    )


def _inside(traffic: np.ndarray, network: Network) -> np.ndarray:
    """`traffic` without what leaves a node and what stays on a rank."""
    ranks = range(len(traffic))
    return np.where([[a != b and network.is_local(a, b) for b in ranks] for a in ranks], traffic, 0.0)


def _in_order(traffic: np.ndarray, lane: str) -> list[Transfer]:
    """Whole messages in the order in which matchings first take them."""
    return [
        Transfer(source=source, destination=destination, num_bytes=float(traffic[source, destination]), lane=lane)
        for source, destination in _pair_order(traffic)
    ]


def _pair_order(traffic: np.ndarray) -> list[tuple[int, int]]:
    """(source, destination) of all traffic, in the order in which matchings first take it."""
    pairs = [
        (source, destination)
        for step in matchings(traffic)
        for source, destination in enumerate(step.destination)
        if destination >= 0
    ]
    return list(dict.fromkeys(pairs))


def _fill_up(traffic: np.ndarray, total: float) -> np.ndarray:
    """`traffic` with more added until every row and every column sums to `total`."""
    filled = traffic.copy()
    rows, columns = total - filled.sum(axis=1), total - filled.sum(axis=0)
    row = column = 0
    while row < len(filled) and column < len(filled):
        amount = max(0.0, min(rows[row], columns[column]))
        filled[row, column] += amount
        rows[row] -= amount
        columns[column] -= amount
        if rows[row] <= columns[column]:
            row += 1
        else:
            column += 1
    return filled


def _largest_matching(weights: np.ndarray) -> np.ndarray:
    """Column of each row in a perfect matching whose smallest entry is as large as can be."""
    values = np.unique(weights[weights > 0])
    low, high, best = 0, len(values) - 1, None
    while low <= high:
        middle = (low + high) // 2
        match = maximum_bipartite_matching(csr_array(weights >= values[middle]), perm_type="column")
        if (match >= 0).all():
            best, low = match, middle + 1
        else:
            high = middle - 1
    assert best is not None, "a matrix whose rows and columns sum to the same has a perfect matching"
    return best


def _exact_ring(cost: np.ndarray) -> list[int]:
    """Held and Karp over subsets, twice: the least slowest hop, then the least sum among hops no slower."""
    limit = _held_karp(cost, combine=max)[0]
    return _held_karp(np.where(cost > limit * (1 + _SAME), np.inf, cost), combine=lambda a, b: a + b)[1]


def _held_karp(cost: np.ndarray, combine) -> tuple[float, list[int]]:
    num_ranks = len(cost)
    best: dict[tuple[int, int], tuple[float, int]] = {(1 << k, k): (cost[0, k], 0) for k in range(1, num_ranks)}
    for size in range(2, num_ranks):
        for subset in itertools.combinations(range(1, num_ranks), size):
            mask = sum(1 << rank for rank in subset)
            for last in subset:
                before = mask & ~(1 << last)
                best[mask, last] = min(
                    (combine(best[before, rank][0], cost[rank, last]), rank) for rank in subset if rank != last
                )
    mask = sum(1 << rank for rank in range(1, num_ranks))
    total, last = min((combine(best[mask, rank][0], cost[rank, 0]), rank) for rank in range(1, num_ranks))
    order = []
    while last:
        order.append(last)
        mask, last = mask & ~(1 << last), best[mask, last][1]
    return total, [0, *reversed(order)]


def _nearest_neighbours(bandwidth: np.ndarray, start: int) -> list[int]:
    order, left = [start], set(range(len(bandwidth))) - {start}
    while left:
        order.append(max(left, key=lambda rank: (bandwidth[order[-1], rank], -rank)))
        left.remove(order[-1])
    return order


def _improve_ring(order: list[int], bandwidth: np.ndarray) -> list[int]:
    """Turn segments round and move single ranks while the ring gets better."""
    cost = ring_cost(order, bandwidth)
    is_better = True
    while is_better:
        is_better = False
        for first, second in itertools.combinations(range(len(order)), 2):
            turned = [*order[:first], *reversed(order[first : second + 1]), *order[second + 1 :]]
            moved = [*order[:first], *order[first + 1 : second + 1], order[first], *order[second + 1 :]]
            for candidate in (turned, moved):
                new_cost = ring_cost(candidate, bandwidth)
                if (new_cost[0], new_cost[1] * (1 + _SAME)) < cost:
                    order, cost, is_better = candidate, new_cost, True
    return order


def _partitions(ranks: list[int], group_size: int) -> Iterator[list[list[int]]]:
    if not ranks:
        yield []
        return
    first, *others = ranks
    for members in itertools.combinations(others, group_size - 1):
        rest = [rank for rank in others if rank not in members]
        for groups in _partitions(rest, group_size):
            yield [[first, *members], *groups]


def _grow_groups(bandwidth: np.ndarray, group_size: int) -> list[list[int]]:
    left, groups = list(range(len(bandwidth))), []
    while left:
        group = [left.pop(0)]
        while len(group) < group_size:
            nearest = max(left, key=lambda rank: (bandwidth[group, rank].min(), bandwidth[group, rank].sum()))
            group.append(nearest)
            left.remove(nearest)
        groups.append(sorted(group))
    return groups


def _swap_members(groups: list[list[int]], bandwidth: np.ndarray) -> list[list[int]]:
    groups = [list(group) for group in groups]
    value = groups_value(groups, bandwidth)
    is_better = True
    while is_better:
        is_better = False
        for one, other in itertools.combinations(range(len(groups)), 2):
            for a, b in itertools.product(range(len(groups[one])), range(len(groups[other]))):
                groups[one][a], groups[other][b] = groups[other][b], groups[one][a]
                new_value = groups_value(groups, bandwidth)
                if new_value > (value[0], value[1] * (1 + _SAME)):
                    value, is_better = new_value, True
                else:
                    groups[one][a], groups[other][b] = groups[other][b], groups[one][a]
    return [sorted(group) for group in groups]


def _check_bandwidth(bandwidth: np.ndarray) -> None:
    is_square = bandwidth.ndim == 2 and bandwidth.shape[0] == bandwidth.shape[1]
    off_diagonal = ~np.eye(len(bandwidth), dtype=bool) if is_square else None
    if not is_square or (bandwidth[off_diagonal] <= 0).any() or not np.isfinite(bandwidth[off_diagonal]).all():
        raise ConfigurationError(
            "bandwidths",
            found=f"shape {bandwidth.shape}" if not is_square else "ranks that no link joins",
            expected="a square matrix of bytes a second, above 0 off the diagonal",
            remedy="measure or describe every link",
        )
