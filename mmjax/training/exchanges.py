"""The exchanges of a compiled step: their bytes, mesh axes and times, and whether computing hides them."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax import axes
from mmjax.config import MeshConfig
from mmjax.planner.collectives import Group, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, send_seconds
from mmjax.planner.hardware import Cluster
from mmjax.training.compiled_program import Collective, Computation, Instruction, Program, collective_of

# Shares of the published rates that matrix products and memory reach.
_PRODUCT_SHARE, _MEMORY_SHARE = 0.7, 0.8


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """All exchanges of one kind over the same mesh axes, in one step on one device."""

    kind: str
    mesh_axes: tuple[str, ...]
    count: float
    num_bytes: float
    """Those that take no part in a permutation counted as none, on average."""
    seconds: float
    """Of the transfers alone, one after the other."""
    hidden_bytes: float
    """Of exchanges between whose start and end at least as much computing time lies as their transfer takes."""
    is_conditional: bool
    """Runs only where a condition holds, such as a further round of a full buffer; counted as if it did."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Estimated seconds of a step on one device: one stream that computes, one that transfers."""

    compute: float
    exposed: float
    """Waiting for transfers that nothing hides."""


class ExchangeReader:
    """Reads the exchanges of a program that runs on `mesh` of `cluster`, devices in mesh order."""

    def __init__(self, program: Program, mesh: MeshConfig, cluster: Cluster):
        self.program, self.mesh, self.cluster = program, mesh, cluster
        self._timelines: dict[str, Timeline] = {}

    def exchanges(self) -> list[Exchange]:
        """Largest first."""
        found: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for computation, times, is_conditional in self.program.runs():
            for collective, between in self._collectives(computation):
                mesh_axes = self.mesh_axes(collective)
                if not mesh_axes:
                    continue
                seconds = self.transfer_seconds(collective)
                is_hidden = between >= seconds
                entry = found[collective.kind, mesh_axes, is_conditional]
                entry["count"] += times
                num_bytes = times * collective.num_bytes * self._sending_share(collective)
                entry["num_bytes"] += num_bytes
                entry["seconds"] += times * seconds
                entry["hidden_bytes"] += num_bytes * is_hidden
        exchanges = [
            Exchange(
                kind=kind,
                mesh_axes=mesh_axes,
                is_conditional=is_conditional,
                **{name: entry[name] for name in ("count", "num_bytes", "seconds", "hidden_bytes")},
            )
            for (kind, mesh_axes, is_conditional), entry in found.items()
        ]
        return sorted(exchanges, key=lambda exchange: -exchange.num_bytes)

    def timeline(self) -> Timeline:
        """Of the whole step; transfers go one after the other, conditional parts do not run."""
        return self._timeline(self.program.entry)

    def mesh_axes(self, collective: Collective) -> tuple[str, ...]:
        """The mesh axes along which its devices differ; none where nothing leaves a device."""
        groups = collective.groups or (tuple(range(self.mesh.num_devices)),)
        sizes = self.mesh.sizes
        differing = set()
        for group in groups:
            places = [_coordinates(device, tuple(sizes.values())) for device in group]
            differing |= {axis for number, axis in enumerate(sizes) if len({place[number] for place in places}) > 1}
            if len(differing) == sum(size > 1 for size in sizes.values()) or collective.kind != "collective-permute":
                break
        return tuple(axis for axis in axes.MESH_AXES if axis in differing)

    def _sending_share(self, collective: Collective) -> float:
        """Of all devices: how many send. Over the borders of a pipeline not all do."""
        return len(collective.groups) / self.mesh.num_devices if collective.kind == "collective-permute" else 1.0

    def transfer_seconds(self, collective: Collective) -> float:
        """By the planner's formulas, over the links that the exchange's devices have."""
        groups = collective.groups or (tuple(range(self.mesh.num_devices)),)
        per_node = self.cluster.gpus_per_node
        if collective.kind == "collective-permute":
            crosses = any(source // per_node != target // per_node for source, target in groups)
            return send_seconds(collective.num_bytes, self.cluster.between if crosses else self.cluster.inside)
        members = groups[0]
        local = sum(member // per_node == members[0] // per_node for member in members)
        while len(members) % local:
            local -= 1
        group = Group(
            num_devices=len(members), devices_per_node=local, inside=self.cluster.inside, between=self.cluster.between
        )
        if collective.kind == "all-reduce":
            return all_reduce_seconds(collective.num_bytes, group)
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            return all_to_all_seconds(collective.num_bytes, group)
        return all_gather_seconds(collective.num_bytes, group)

    def _collectives(self, computation: Computation) -> list[tuple[Collective, float]]:
        """Each exchange that a computation starts, and the seconds of computing until it must have ended."""
        found, open_starts, clock = [], {}, 0.0
        for instruction in computation.instructions:
            if (collective := collective_of(self.program, computation, instruction)) is not None:
                if collective.is_synchronous:
                    found.append((collective, 0.0))
                else:
                    open_starts[instruction.name] = (collective, clock)
            elif (start := next((name for name in instruction.operands if name in open_starts), "")) and (
                instruction.opcode.endswith("-done")
            ):
                collective, since = open_starts.pop(start)
                found.append((collective, clock - since))
            else:
                clock += self.instruction_seconds(computation, instruction)
        return found

    def instruction_seconds(self, computation: Computation, instruction: Instruction) -> float:
        """Estimated computing time: the longer of its products and its memory traffic.

        Loops and calls with all they do; of a condition's branches the shortest.
        """
        match instruction.opcode:
            case "while":
                return instruction.runs * self._timeline(instruction.attribute("body")).compute
            case "call":
                return sum(self._timeline(name).compute for name in instruction.called)
            case "conditional":
                return self._shortest_branch(instruction).compute
        gpu = self.cluster.gpu
        products = self.program.instruction_flops(computation, instruction) / (_PRODUCT_SHARE * gpu.flops_per_second)
        memory = self.program.instruction_bytes(computation, instruction) / (_MEMORY_SHARE * gpu.memory_bandwidth)
        return max(products, memory)

    def _shortest_branch(self, instruction: Instruction) -> Timeline:
        return min(map(self._timeline, instruction.called), key=lambda branch: branch.compute + branch.exposed)

    def _timeline(self, name: str) -> Timeline:
        if name not in self._timelines:
            self._timelines[name] = self._simulate(self.program.computations[name])
        return self._timelines[name]

    def _simulate(self, computation: Computation) -> Timeline:
        compute = clock = link_free = 0.0
        ends: dict[str, float] = {}
        for instruction in computation.instructions:
            if (collective := collective_of(self.program, computation, instruction)) is not None:
                seconds = self.transfer_seconds(collective) if self.mesh_axes(collective) else 0.0
                link_free = max(link_free, clock) + seconds
                ends[instruction.name] = link_free
                clock = link_free if collective.is_synchronous else clock
            elif instruction.opcode.endswith("-done"):
                clock = max([clock, *(ends[operand] for operand in instruction.operands if operand in ends)])
            else:
                seconds = self.instruction_seconds(computation, instruction)
                compute += seconds
                clock += seconds + self._exposed_inside(instruction)
        return Timeline(compute=compute, exposed=clock - compute)

    def _exposed_inside(self, instruction: Instruction) -> float:
        match instruction.opcode:
            case "while":
                return instruction.runs * self._timeline(instruction.attribute("body")).exposed
            case "call":
                return sum(self._timeline(name).exposed for name in instruction.called)
            case "conditional":
                return self._shortest_branch(instruction).exposed
        return 0.0


def hidden_share(exchanges: Sequence[Exchange]) -> float:
    """Share of the exchanged bytes that computing hides, conditional exchanges left out; 1 where there are none."""
    counted = [exchange for exchange in exchanges if not exchange.is_conditional]
    total = sum(exchange.num_bytes for exchange in counted)
    return sum(exchange.hidden_bytes for exchange in counted) / total if total else 1.0


@functools.cache
def _coordinates(device: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of a device in a mesh of these sizes, the last axis on neighbours."""
    place = []
    for size in reversed(sizes):
        place.append(device % size)
        device //= size
    return tuple(reversed(place))
