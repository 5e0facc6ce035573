"""Ways to run one mesh with so many micro-batches: transport of experts' rows, what is kept, where, which schedule."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmjax import axes
from mmjax.config import MeshConfig, RunConfig
from mmjax.planner.collectives import mesh_group
from mmjax.planner.memory import (
    DeviceBytes,
    InFlight,
    bytes_of_shards,
    keeps_layers,
    kept_weight_bytes,
    num_expert_devices,
)
from mmjax.planner.parameters import Shard
from mmjax.planner.remat import KeptResult, choose_results, kept_results
from mmjax.planner.schedules import ScheduleCost, Scheduling, cost_of, schedule_cost, schedules
from mmjax.planner.step_time import StepClock, StepTime


@dataclass(frozen=True, kw_only=True)
class Way:
    """Settings of a run, and what a step of it takes."""

    config: RunConfig
    memory: DeviceBytes
    time: StepTime
    host_bytes: float = 0.0
    """Of a device, on its host."""
    result_bytes: float = 0.0
    """Results of layers that are kept on the device, of all micro-batches under way."""
    scheduling: Scheduling | None = None
    """Instead of the schedule of `config`."""

    def settled(self) -> RunConfig:
        """`config` with the schedule."""
        if self.scheduling is None:
            return self.config
        name, transfer, chunks, edges = self.scheduling
        changes: dict[str, Any] = {
            "pipeline_schedule": name,
            "pipeline_transfer": transfer,
            "pipeline_edges": edges,
        }
        return dataclasses.replace(
            self.config,
            model=dataclasses.replace(self.config.model, pipeline_chunks=chunks),
            training=dataclasses.replace(self.config.training, **changes),
        )


class Ways:
    """Finds the ways to run meshes of one model on one cluster."""

    def __init__(self, clock: StepClock):
        self.clock, self.cluster = clock, clock.cluster
        self._results: dict[int, list[KeptResult]] = {}
        self._at_rest: dict[object, tuple[DeviceBytes, float]] = {}

    def of(self, config: RunConfig, held: Sequence[Shard]) -> Iterator[list[Way]]:
        """For each choice of what is kept, all schedules, the fastest first; `config` gives mesh and micro-batches.

        What is kept: nothing but the inputs of layers; results as far as memory allows; some of them on the host; all.
        """
        for remat in ("layer", "none"):
            model = dataclasses.replace(config.model, remat=remat, remat_keep=(), remat_offload=())
            asked = dataclasses.replace(config, model=model)
            plain = self._evaluate(self.with_transport(asked), held)
            if plain.memory.total > self.cluster.usable_bytes:
                # A ring holds more than buffers do.
                plain = self._evaluate(asked, held)
            choices = [plain]
            if remat == "layer" and plain.memory.total < self.cluster.usable_bytes:
                choices += self._kept(plain)
            for choice in choices:
                yield sorted(self._scheduled(choice), key=lambda way: (way.time.total, way.memory.total))
            if plain.memory.total > self.cluster.usable_bytes:
                # Keeping everything needs more still.
                return

    def _evaluate(self, config: RunConfig, held: Sequence[Shard]) -> Way:
        key = (config.mesh, config.model.moe.expert_axes)
        if key not in self._at_rest:
            several = dataclasses.replace(config.training, accumulation=max(2, config.training.accumulation))
            everything = dataclasses.replace(
                config, model=dataclasses.replace(config.model, remat="none"), training=several
            )
            self._at_rest = {key: (bytes_of_shards(everything, held), kept_weight_bytes(everything, held))}
        memory, weights = self._at_rest[key]
        flight = InFlight(config)
        memory = dataclasses.replace(
            memory,
            micro_batch_gradients=memory.micro_batch_gradients if config.training.accumulation > 1 else 0.0,
            saved_activations=flight.saved_activations() + (weights if config.model.remat == "none" else 0.0),
            working_set=flight.largest_working_set(),
            exchange_buffers=flight.exchange_buffers(),
        )
        return Way(config=config, memory=memory, time=self.clock.step(config, held))

    def with_transport(self, config: RunConfig) -> RunConfig:
        """The transport of experts' rows that takes less time. A ragged one runs on few machines: it is never chosen.

        Permutations, of a ring or from node to node, wait for all stages of a pipeline: there they are not taken.
        """
        if num_expert_devices(config) == 1 or config.mesh.pipe > 1 or config.model.moe.transport == "ragged":
            return config
        choices = []
        group = mesh_group(config.mesh, axes.MESH_AXES_OF_EXPERTS[config.model.moe.expert_axes], self.cluster)
        by_node = ("by_node",) if group.crosses_nodes and group.devices_per_node > 1 else ()
        for transport in ("all_to_all", *by_node, "ring"):
            moe = dataclasses.replace(
                config.model.moe,
                transport=transport,
                exchange_chunks=1,
                node_devices=group.devices_per_node * config.mesh.tensor,
            )
            choice = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
            choices.append((self.clock.expert_exchange_seconds(choice), choice))
        fastest = min(choices, key=lambda choice: choice[0])[1]
        return config if fastest.model.moe.transport == config.model.moe.transport else fastest

    def _kept(self, plain: Way) -> Iterator[Way]:
        """`plain` with results kept where there is room: on the device, then also on the host."""
        config, cluster = plain.config, self.cluster
        results = self._results_of(config)
        # Where stages of a pipeline do not run again, results of all micro-batches under way are kept.
        number = self._num_kept(config, schedule_cost(config))
        limits = {
            "device_bytes": (cluster.usable_bytes - plain.memory.total) / number,
            "host_bandwidth": cluster.gpu.pcie_bandwidth,
            "overlap": self.clock.rates.overlap,
        }
        seen = set()
        for host_bytes in (0.0, cluster.host_bytes / number):
            chosen = choose_results(results, host_bytes=host_bytes, **limits)
            if not (chosen.keep or chosen.offload) or (chosen.keep, chosen.offload) in seen:
                continue
            seen.add((chosen.keep, chosen.offload))
            model = dataclasses.replace(config.model, remat_keep=chosen.keep, remat_offload=chosen.offload)
            saved_activations = plain.memory.saved_activations + number * chosen.device_bytes
            micro_batches = config.training.accumulation
            copies = 2 * chosen.host_bytes / cluster.gpu.pcie_bandwidth * (1 - self.clock.rates.overlap)
            yield Way(
                config=dataclasses.replace(config, model=model),
                memory=dataclasses.replace(plain.memory, saved_activations=saved_activations),
                time=dataclasses.replace(
                    plain.time,
                    recompute=max(0.0, plain.time.recompute - micro_batches * chosen.saved_seconds),
                    offload=micro_batches * copies,
                ),
                host_bytes=number * chosen.host_bytes,
                result_bytes=number * chosen.device_bytes,
            )

    @staticmethod
    def _num_kept(config: RunConfig, cost: ScheduleCost) -> float:
        """Of how many micro-batches a device keeps results of its layers under a schedule of `cost`."""
        return cost.num_kept / cost.num_chunks if config.mesh.pipe > 1 and keeps_layers(config.model) else 1

    def _results_of(self, config: RunConfig) -> list[KeptResult]:
        """Results of the layers of one device, of one micro-batch: what they hold and save grows with its tokens."""
        tensor = config.mesh.tensor
        if tensor not in self._results:
            one = dataclasses.replace(config, mesh=MeshConfig(tensor=tensor))
            self._results[tensor] = [
                dataclasses.replace(result, num_bytes=result.num_bytes / tokens, seconds=result.seconds / tokens)
                for tokens in [InFlight(one).tokens]
                for result in kept_results(one, self.cluster, self.clock.rates)
            ]
        share = InFlight(config).tokens / config.mesh.pipe
        return [
            dataclasses.replace(result, num_bytes=result.num_bytes * share, seconds=result.seconds * share)
            for result in self._results[tensor]
        ]

    def _scheduled(self, plain: Way) -> Iterator[Way]:
        """`plain` with every schedule that its mesh allows."""
        if plain.config.mesh.pipe == 1:
            yield plain
            return
        flight, number = InFlight(plain.config), plain.config.training.accumulation
        kept, pipe = flight.kept_inputs(), plain.config.mesh.pipe
        forward, backward = plain.time.forward, plain.time.backward + plain.time.recompute
        for scheduling in schedules(plain.config):
            # One program of interleaved stages compiled to 1.6 times the bytes that are counted here.
            if scheduling.chunks > 1 and keeps_layers(plain.config.model):
                continue
            cost = cost_of(scheduling, pipe, number)
            kept_then = flight.kept_inputs_of(cost, scheduling.edges)
            more = self._num_kept(plain.config, cost) / self._num_kept(plain.config, schedule_cost(plain.config))
            if (host_bytes := more * plain.host_bytes) > self.cluster.host_bytes:
                continue
            bubble = self.clock.bubble_seconds_of(plain.config, scheduling, forward, backward)
            exchange = self.clock.pipe_exchange_seconds_of(plain.config, scheduling, forward, backward)
            exchange *= self.clock.rates.exchange
            saved = plain.memory.saved_activations - kept + kept_then + (more - 1) * plain.result_bytes
            yield Way(
                config=plain.config,
                scheduling=scheduling,
                memory=dataclasses.replace(plain.memory, saved_activations=saved),
                time=dataclasses.replace(plain.time, bubble=bubble, pipe_exchange=exchange),
                host_bytes=host_bytes,
            )
