"""What there is: clusters from a short text, a YAML file or this machine, and the graph of their links."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import yaml

from mmjax.errors import ConfigurationError
from mmjax.planner.hardware import Cluster, Gpu, Link, find_gpu
from mmjax.planner.machine import Machine

# What NCCL needs to start one exchange, inside a node and between two; published microbenchmarks lie around these.
_INSIDE_LATENCY_SECONDS = 3e-6
_BETWEEN_LATENCY_SECONDS = 10e-6
# Share of a link's published rate that large messages reach.
_LINK_EFFICIENCY = 0.8
# One network card of this rate for each GPU, where nothing else is said.
_DEFAULT_NIC_GIGABITS = 400.0
# Share of a node's memory that results of the GPUs may fill; the rest is for data, checkpoints and the system.
_USABLE_HOST_MEMORY = 0.5
_SPEC = re.compile(r"(?:(\d{1,6})x)?(?:(\d{1,4})x)?([a-z][a-z0-9 -]*)", re.IGNORECASE)
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What a YAML file of a cluster may say. Rates are published ones, one way."""

    nodes: int
    gpus_per_node: int
    gpu: str
    total_gpus: int = 0
    """A check: 0, or nodes * gpus_per_node."""
    nvlink_gigabytes: float = -1.0
    """GB/s of all links of one GPU; -1 takes the GPU's own, 0 says there is no NVLink."""
    nics_per_node: int = -1
    """-1: one for each GPU."""
    nic_gigabits: float = _DEFAULT_NIC_GIGABITS
    """Gbit/s of one network card."""
    host_gigabytes: float = 1000.0
    """Memory of one node, in GB."""


def read_cluster(text: str) -> Cluster:
    """A cluster from `16x8xh200` (nodes x GPUs of a node x GPU), `8xh200`, `h200`, or the path of a YAML file.

    Raises:
      ConfigurationError: none of these, an unknown GPU, an impossible or contradictory description.
    """
    if text.lower().endswith((".yaml", ".yml")):
        return _read_yaml(Path(text))
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise _error(text, "16x8xh200 (nodes x GPUs of a node x GPU), 8xh200, or a .yaml file", "mend it")
    first, second, gpu = match.groups()
    nodes, gpus_per_node = (int(first), int(second)) if second else (1, int(first or 1))
    return build_cluster(ClusterSpec(nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu), text)


def build_cluster(spec: ClusterSpec, where: str) -> Cluster:
    """The cluster of a description; `where` is how messages call it."""
    gpu = find_gpu(spec.gpu)
    if spec.nodes < 1 or spec.gpus_per_node < 1 or spec.nodes * spec.gpus_per_node > _MOST_DEVICES:
        found = f"{spec.nodes} nodes of {spec.gpus_per_node} GPUs"
        raise _error(where, f"at least 1 of each, at most {_MOST_DEVICES} GPUs", "mend the numbers", found)
    if spec.total_gpus and spec.total_gpus != spec.nodes * spec.gpus_per_node:
        found = f"total_gpus {spec.total_gpus}, but {spec.nodes} nodes x {spec.gpus_per_node} GPUs"
        raise _error(where, f"total_gpus {spec.nodes * spec.gpus_per_node}", "mend one of the three, or drop it", found)
    if spec.nvlink_gigabytes > 0 and not gpu.nvlinks:
        found = f"nvlink_gigabytes {spec.nvlink_gigabytes:g} for {gpu.name}"
        raise _error(where, "0: this GPU has no NVLink", "remove nvlink_gigabytes, or name another GPU", found)
    nics = spec.gpus_per_node if spec.nics_per_node == -1 else spec.nics_per_node
    if spec.nodes > 1 and (nics < 1 or spec.nic_gigabits <= 0):
        found = f"{nics} network cards of {spec.nic_gigabits:g} Gbit/s for {spec.nodes} nodes"
        raise _error(where, "a link between the nodes", "give nics_per_node and nic_gigabits, or one node", found)
    nvlink = gpu.nvlinks * gpu.nvlink_bandwidth if spec.nvlink_gigabytes < 0 else spec.nvlink_gigabytes * 1e9
    # Without NVLink the GPUs of a node share PCIe; two hops through the host halve nothing in one direction.
    inside = _LINK_EFFICIENCY * nvlink if nvlink else gpu.pcie_bandwidth
    between = _LINK_EFFICIENCY * nics * spec.nic_gigabits / 8 * 1e9 / spec.gpus_per_node if nics else 0.0
    return Cluster(
        num_nodes=spec.nodes,
        gpus_per_node=spec.gpus_per_node,
        gpu=gpu,
        inside=Link(bandwidth=inside, latency_seconds=_INSIDE_LATENCY_SECONDS),
        between=Link(bandwidth=between, latency_seconds=_BETWEEN_LATENCY_SECONDS),
        host_bytes=_USABLE_HOST_MEMORY * spec.host_gigabytes * 1e9 / spec.gpus_per_node,
    )


def _read_yaml(path: Path) -> Cluster:
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _error(str(path), "a readable YAML file", "mend it", " ".join(str(error).split())) from error
    kinds = ClusterSpec.__annotations__
    if not isinstance(values, dict):
        raise _error(str(path), f"settings as `name: value`: {', '.join(kinds)}", "mend it", repr(values)[:80])
    if unknown := [name for name in values if name not in kinds]:
        raise _error(str(path), f"names out of {', '.join(kinds)}", "rename or remove them", f"{unknown}")
    if missing := [name for name in ("nodes", "gpus_per_node", "gpu") if name not in values]:
        raise _error(str(path), "nodes, gpus_per_node and gpu", f"add {', '.join(missing)}", f"no {missing[0]}")
    for name, value in values.items():
        wanted = {int: (int,), float: (int, float), str: (str,)}[kinds[name]]
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise _error(str(path), f"{name} as {kinds[name].__name__}", "mend it", f"{name}: {value!r}")
    return build_cluster(ClusterSpec(**values), str(path))


def machine_cluster(machine: Machine, nic_gigabits: float = _DEFAULT_NIC_GIGABITS, nodes: int = 1) -> Cluster:
    """So many nodes like this machine, each GPU with the slowest link of the machine.

    Raises:
      ConfigurationError: no GPU, or GPUs of several kinds.
    """
    if not machine.gpus:
        raise _error("this machine", "GPUs", "give a description such as --cluster 8xh200", "no GPU")
    kinds = sorted(set(machine.gpus))
    if len(kinds) > 1:
        raise _error("this machine", "GPUs of one kind", "hide some with CUDA_VISIBLE_DEVICES", ", ".join(kinds))
    gpu = find_gpu(kinds[0])
    nvlinks = min((link for row in machine.nvlinks() for link in row if link >= 0), default=0)
    return build_cluster(
        ClusterSpec(
            nodes=nodes,
            gpus_per_node=len(machine.gpus),
            gpu=gpu.name,
            nvlink_gigabytes=nvlinks * gpu.nvlink_bandwidth / 1e9 if len(machine.gpus) > 1 else -1.0,
            nics_per_node=len(machine.working_nics),
            nic_gigabits=nic_gigabits,
        ),
        "this machine",
    )


def cluster_graph(cluster: Cluster) -> networkx.Graph:
    """GPUs `(node, index)`, a switch for each node, and one fabric; edges carry `bandwidth` and `latency_seconds`.

    Half a link's latency lies on each of its two edges.
    """
    graph = networkx.Graph()
    for node in range(cluster.num_nodes):
        for index in range(cluster.gpus_per_node):
            if cluster.gpus_per_node > 1:
                _join(graph, (node, index), f"switch {node}", cluster.inside)
            if cluster.num_nodes > 1:
                _join(graph, (node, index), "fabric", cluster.between)
            graph.add_node((node, index))
    return graph


def machine_graph(machine: Machine, gpu: Gpu) -> networkx.Graph:
    """GPUs `(0, index)` of one machine, an edge for each pair: NVLink where there is one, else PCIe or the CPU link."""
    graph = networkx.Graph()
    graph.add_nodes_from((0, index) for index in range(len(machine.gpus)))
    for first, row in enumerate(machine.links):
        for second, link in enumerate(row[:first]):
            graph.add_edge(
                (0, first),
                (0, second),
                bandwidth=link_bandwidth(link, gpu),
                latency_seconds=_INSIDE_LATENCY_SECONDS,
            )
    return graph


def link_bandwidth(link: str, gpu: Gpu) -> float:
    """Bytes a second, one way, of a link as `nvidia-smi topo -m` names it.

    NV#: # links of the GPU. PIX, PXB, PHB: PCIe. NODE: 3/4 of it, SYS (between CPU sockets): half of it.
    """
    if link.startswith("NV"):
        return _LINK_EFFICIENCY * int(link[2:]) * gpu.nvlink_bandwidth
    share = {"PIX": 1.0, "PXB": 1.0, "PHB": 1.0, "NODE": 0.75, "SYS": 0.5}[link]
    return share * gpu.pcie_bandwidth


def bandwidth_matrix(graph: networkx.Graph) -> np.ndarray:
    """[n, n] bytes a second between GPUs, in order: the widest path of the graph; 0 on the diagonal."""
    # The widest path between any two nodes runs along a maximum spanning tree.
    tree = networkx.maximum_spanning_tree(graph, weight="bandwidth")
    gpus = sorted(node for node in graph if isinstance(node, tuple))
    matrix = np.zeros((len(gpus), len(gpus)))
    for row, gpu in enumerate(gpus):
        widths = _widths(tree, gpu)
        # A direct edge is taken as it is: data is not sent over a third GPU.
        for column, other in enumerate(gpus):
            direct = graph.get_edge_data(gpu, other)
            matrix[row, column] = direct["bandwidth"] if direct else widths.get(other, 0.0)
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _widths(tree: networkx.Graph, start: Any) -> dict[Any, float]:
    widths = {start: float("inf")}
    for before, after in networkx.bfs_edges(tree, start):
        widths[after] = min(widths[before], tree.edges[before, after]["bandwidth"])
    return widths


def _join(graph: networkx.Graph, gpu: Any, hub: str, link: Link) -> None:
    graph.add_edge(gpu, hub, bandwidth=link.bandwidth, latency_seconds=link.latency_seconds / 2)


def _error(where: str, expected: str, remedy: str, found: str = "") -> ConfigurationError:
    return ConfigurationError(f"cluster {where!r}", found=found or repr(where), expected=expected, remedy=remedy)
