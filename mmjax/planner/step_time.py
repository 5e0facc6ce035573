"""How long a step takes on a mesh of a cluster, term by term."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmjax import axes
from mmjax.config import RunConfig
from mmjax.planner.adapters import FULL, Tuning, trained_arrays
from mmjax.planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    mesh_group,
    ring_latency_seconds,
    send_seconds,
)
from mmjax.planner.compute_time import ComputeClock, Rates
from mmjax.planner.hardware import Cluster
from mmjax.planner.memory import InFlight, keeps_layers, num_expert_devices, num_moments
from mmjax.planner.parameters import ITEM_BYTES, PACKED_BYTES, ParameterArray, Shard, shards
from mmjax.planner.pipeline_cut import slowest_stage
from mmjax.planner.remat import kept_results
from mmjax.planner.schedules import Scheduling, cost_of, scheduling_of
from mmjax.planner.stages import part_flops

EXCHANGE_TERMS = (
    *("weight_exchange", "gradient_sum", "tensor_exchange", "expert_exchange", "context_exchange", "pipe_exchange"),
)
# Newton-Schulz iterations of Muon.
_MATRIX_PRODUCT_SHARE = 0.6
_PER_HEAD = ("query", "key", "value", "query_up", "key_up", "value_up", "query_key_value")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step on one device, by what they are spent on; they add up."""

    forward: float
    backward: float
    recompute: float
    bubble: float
    """A pipeline's devices wait: at its start and end, and for its slowest stage."""
    weight_exchange: float
    """Gathers of weights and scatters of gradients that computing does not hide."""
    gradient_sum: float
    """Once a step, over devices that hold the same parameters."""
    tensor_exchange: float
    expert_exchange: float
    context_exchange: float
    pipe_exchange: float
    optimizer: float
    offload: float = 0.0
    """Copies of results to the host and back that computing does not hide."""

    @property
    def terms(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _TERMS}

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in _TERMS)

    @property
    def communication_share(self) -> float:
        """Of the step, what is spent on exchanges that nothing hides."""
        return sum(getattr(self, name) for name in EXCHANGE_TERMS) / self.total


_TERMS = tuple(one.name for one in dataclasses.fields(StepTime))


def bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """Idle share of a pipeline whose stages take equally long: (p - 1) / (m + p - 1), for GPipe with `direct` and 1F1B
    with `hidden` transfers."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


class StepClock:
    """Times of steps of one model on one cluster; what does not depend on the mesh is counted once."""

    def __init__(self, config: RunConfig, cluster: Cluster, *, tuning: Tuning = FULL, rates: Rates | None = None):
        """`config` gives model, data and optimizer; its mesh, micro-batches and remat may be replaced in `step`."""
        self.cluster, self.tuning, self.rates = cluster, tuning, rates or Rates()
        self.computing = ComputeClock(config, cluster, tuning, self.rates)
        self._arrays: dict[str, list[ParameterArray]] = {}
        self._once: dict[tuple[object, ...], float] = {}
        self._imbalances: dict[tuple[int, int, str], float] = {}

    def step(self, config: RunConfig, held: Sequence[Shard] | None = None) -> StepTime:
        """Seconds of one step of `config` (all rows, all micro-batches). `held`: its shards, if they are at hand.

        forward, backward, recompute    sums over parts: `ComputeClock.parts`
        bubble     ticks of the schedule (`schedules`), as long as the slowest stage's operation, less the work itself
        exchanges  see the methods below
        """
        mesh = config.mesh
        held = shards(self.arrays_of(config), mesh) if held is None else held
        parts = self.computing.parts(config, held).values()
        forward, backward = sum(part.forward for part in parts), sum(part.backward for part in parts)
        recompute = sum(part.recompute for part in parts)
        nothing = dict.fromkeys(EXCHANGE_TERMS, 0.0)
        time = StepTime(
            forward=forward,
            backward=backward,
            recompute=recompute,
            bubble=self.bubble_seconds(config, forward, backward + recompute),
            optimizer=self._of_mesh(self._optimizer_seconds, config, held),
            offload=self._offload_seconds(config),
            **nothing,
        )
        return dataclasses.replace(time, **self.exchange_terms(config, time, held))

    def _offload_seconds(self, config: RunConfig) -> float:
        """Each micro-batch copies the results of a device's own layers: 2 bytes / bandwidth * (1 - overlap)."""
        if not (names := config.model.remat_offload):
            return 0.0
        results = kept_results(config, self.cluster, self.rates)
        host_bytes = sum(result.num_bytes for result in results if result.name in names) / config.mesh.pipe
        exposed = 2 * host_bytes / self.cluster.gpu.pcie_bandwidth * (1 - self.rates.overlap)
        return config.training.accumulation * exposed

    def exchange_terms(self, config: RunConfig, time: StepTime, held: Sequence[Shard]) -> dict[str, float]:
        """Seconds of each exchange of a step whose computing takes as long as `time` says."""
        gathers = config.training.accumulation * self._of_mesh(self._weight_exchange_seconds, config, held)
        factor, hiding = self.rates.exchange, self.rates.overlap * (time.forward + time.backward + time.recompute)
        seconds = {
            "weight_exchange": max(0.0, gathers - hiding / factor),
            "gradient_sum": self._of_mesh(self._gradient_sum_seconds, config, held),
            "tensor_exchange": self._tensor_exchange_seconds(config),
            "expert_exchange": self.expert_exchange_seconds(config),
            "context_exchange": self._context_exchange_seconds(config),
            "pipe_exchange": self.pipe_exchange_seconds(config, time.forward, time.backward + time.recompute),
        }
        return {term: factor * value for term, value in seconds.items()}

    def exchanged_bytes(self, config: RunConfig, time: StepTime) -> dict[tuple[str, ...], float]:
        """Bytes that a device exchanges over each group of mesh axes in a step that takes `time`: seconds of the
        exchanges there, times the rate of the links that the group crosses."""
        held = shards(self.arrays_of(config), config.mesh)
        factor, number = self.rates.exchange, config.training.accumulation
        seconds: dict[tuple[str, ...], float] = defaultdict(float)
        for over, value in (
            ((axes.TENSOR,), time.tensor_exchange),
            (tuple(axes.MESH_AXES_OF_EXPERTS[config.model.moe.expert_axes]), time.expert_exchange),
            ((axes.CONTEXT,), time.context_exchange),
            ((axes.PIPE,), time.pipe_exchange),
            *((over, factor * number * value) for over, value in self._weight_exchange_by_axes(config, held).items()),
            *((over, factor * value) for over, value in self._gradient_sum_by_axes(config, held).items()),
        ):
            seconds[over] += value
        groups = {over: mesh_group(config.mesh, over, self.cluster) for over in seconds}
        links = {over: group.between if group.crosses_nodes else group.inside for over, group in groups.items()}
        return {over: value * links[over].bandwidth for over, value in seconds.items() if value}

    def _of_mesh(
        self, seconds: Callable[[RunConfig, Sequence[Shard]], float], config: RunConfig, held: Sequence[Shard]
    ) -> float:
        """What depends on the mesh, the experts' axes and remat alone, worked out once for each."""
        key = (seconds.__name__, config.mesh, config.model.moe.expert_axes, config.model.remat)
        if key not in self._once:
            self._once[key] = seconds(config, held)
        return self._once[key]

    def arrays_of(self, config: RunConfig) -> list[ParameterArray]:
        """The arrays of the model, its experts spread over the axes that `config` says."""
        axis = axes.ARRAY_AXIS_OF_EXPERTS[config.model.moe.expert_axes]
        if axis not in self._arrays:
            self._arrays[axis] = trained_arrays(config.model, self.tuning)
        return self._arrays[axis]

    def bubble_seconds(self, config: RunConfig, forward: float, backward: float) -> float:
        """What a pipeline's schedule takes beyond the work of a device: `forward` and `backward` seconds of a step."""
        return self.bubble_seconds_of(config, scheduling_of(config), forward, backward)

    def bubble_seconds_of(self, config: RunConfig, scheduling: Scheduling, forward: float, backward: float) -> float:
        """The same for another schedule."""
        if config.mesh.pipe == 1:
            return 0.0
        number = config.training.accumulation
        scale = self._imbalance(config, scheduling) / number
        cost = cost_of(scheduling, config.mesh.pipe, number)
        return cost.seconds(scale * forward, scale * backward) - (forward + backward)

    def _imbalance(self, config: RunConfig, scheduling: Scheduling) -> float:
        """FLOPs of the slowest stage over those of the mean stage, with layers shared out as `stages` does."""
        mesh, model = config.mesh, config.model
        tensor = mesh.tensor if model.vision.is_present else 1
        num_stages = mesh.pipe * scheduling.chunks
        key = (num_stages, tensor, scheduling.edges)
        if key not in self._imbalances:
            parts = part_flops(config)
            together = max(1, len(model.vision.deep_layers))
            work = [sum(parts.layers[:together]), *parts.layers[together:]]
            # All stages share the tower's work, or the first one has it.
            shared = parts.tower if scheduling.edges == "data_parallel" else 0.0
            work[0] += parts.tower - shared
            work[-1] += parts.head
            slowest = slowest_stage(work, num_stages) + shared / num_stages
            self._imbalances[key] = slowest * num_stages / (sum(work) + shared)
        return self._imbalances[key]

    def step_flops(self, config: RunConfig) -> float:
        """FLOPs of MFU of a step whose rows and patches are all real: no recomputation, nothing done twice."""
        data, computing = config.data, self.computing
        text = sum(computing.training.values()) * data.rows * data.row_tokens
        return text + computing.vision_training * data.rows * data.row_patches

    def _weight_exchange_seconds(self, config: RunConfig, held: Sequence[Shard]) -> float:
        return sum(self._weight_exchange_by_axes(config, held).values())

    def _weight_exchange_by_axes(self, config: RunConfig, held: Sequence[Shard]) -> dict[tuple[str, ...], float]:
        """All gathers of weights at use (again in the backward pass under remat), and scatters of gradients.

        Of one micro-batch; weights in the compute dtype (packed experts packed), gradients in the dtype at rest.
        """
        mesh, item = config.mesh, ITEM_BYTES[config.model.compute_dtype]
        num_bytes: dict[tuple[str, ...], float] = defaultdict(float)
        num_exchanges: dict[tuple[str, ...], int] = defaultdict(int)
        for shard in held:
            if shard.gather_factor == 1:
                continue
            array = shard.array
            over = shard.gathered_over
            is_tower = array.part in ("vision", "audio", "projector")
            is_again = (array.in_decoder_layer and config.model.remat == "layer") or (is_tower and array.is_trained)
            gathered = (1 + is_again) * (PACKED_BYTES if array.is_packed else item)
            scattered = ITEM_BYTES[array.dtype] if array.is_trained else 0
            num_bytes[over] += (gathered + scattered) * shard.used_entries
            num_exchanges[over] += (1 + is_again + array.is_trained) * shard.num_layers
        seconds = {}
        for over, total in num_bytes.items():
            group = mesh_group(mesh, over, self.cluster)
            latency = ring_latency_seconds(group)
            seconds[over] = all_gather_seconds(total, group) + (num_exchanges[over] - 1) * latency
        return seconds

    def _gradient_sum_seconds(self, config: RunConfig, held: Sequence[Shard]) -> float:
        return sum(self._gradient_sum_by_axes(config, held).values())

    def _gradient_sum_by_axes(self, config: RunConfig, held: Sequence[Shard]) -> dict[tuple[str, ...], float]:
        """One all-reduce for each set of data axes that trained arrays are not split over, of all their gradients."""
        mesh = config.mesh
        num_bytes: dict[tuple[str, ...], float] = defaultdict(float)
        for shard in held:
            if shard.array.is_trained:
                unsplit = tuple(axis for axis in axes.DATA_AXES if axis not in shard.split_over)
                num_bytes[unsplit] += shard.rest_entries * ITEM_BYTES[shard.array.dtype]
        return {
            over: all_reduce_seconds(total, mesh_group(mesh, over, self.cluster)) for over, total in num_bytes.items()
        }

    def _tensor_exchange_seconds(self, config: RunConfig) -> float:
        """Sums of row-parallel products: of the mixer and of the dense or shared MLP t D c, of routed experts t R w.

        In the forward pass, again under remat, and as often in the backward pass. Nothing hides them.
        """
        mesh, model = config.mesh, config.model
        if mesh.tensor == 1:
            return 0.0
        flight = InFlight(config)
        group = mesh_group(mesh, (axes.TENSOR,), self.cluster)
        stream = all_reduce_seconds(flight.tokens * model.width * flight.compute, group)
        latent = flight.tokens * (model.moe.latent_width or model.width) * flight.wide
        seconds = 0.0
        for (_, mlp), number in flight.kinds.items():
            seconds += number * stream
            seconds += number * stream if mlp == "dense" or model.moe.num_shared_experts else 0.0
            seconds += number * all_reduce_seconds(latent, group) if mlp == "moe" else 0.0
        embedding = all_reduce_seconds(flight.tokens * model.width * flight.wide, group)
        return config.training.accumulation * (self._passes(config) * seconds / mesh.pipe + embedding)

    def expert_exchange_seconds(self, config: RunConfig) -> float:
        """Dispatch and combine of every expert layer: forward, again under remat, backward; where results of experts
        are kept, none is fetched again but by a ring.

        all_to_all   n * capacity rows there and back, filled or not
        by_node      t rows to each other node once, from there n * capacity rows to its devices, there and back
        ragged       t A rows there and back
        ring         t rows in n - 1 steps, and the sums of their results, at least float32, in n

        Nothing is taken to hide behind the experts' work, in however many chunks.
        """
        mesh, moe = config.mesh, config.model.moe
        if (num_devices := num_expert_devices(config)) == 1:
            return 0.0
        flight = InFlight(config)
        num_layers = sum(number for (_, mlp), number in flight.kinds.items() if mlp == "moe") / mesh.pipe
        width = moe.latent_width or config.model.width
        group = mesh_group(mesh, axes.MESH_AXES_OF_EXPERTS[moe.expert_axes], self.cluster)
        if moe.transport == "ring":
            link = group.between if group.crosses_nodes else group.inside
            steps = (num_devices - 1, flight.compute), (num_devices, flight.wide)
            seconds = sum(count * send_seconds(flight.tokens * width * item, link) for count, item in steps)
        elif moe.transport == "by_node" and (local := math.gcd(moe.node_members(mesh.tensor), num_devices)) > 1:
            hops = num_devices // local
            # Where the devices stand otherwise, neighbours are joined by the network.
            inside = group.inside if group.devices_per_node % local == 0 else group.between
            node = Group(num_devices=local, devices_per_node=local, inside=inside, between=group.between)
            shared = all_to_all_seconds(flight.exchanged_rows() / hops * width * flight.compute, node)
            across = send_seconds(flight.tokens * width * flight.compute, group.between)
            seconds = 2 * ((hops - 1) * across + hops * shared)
        else:
            seconds = 2 * all_to_all_seconds(flight.exchanged_rows() * width * flight.compute, group)
        passes = self._passes(config)
        if config.model.remat == "layer" and moe.transport != "ring":
            passes -= ("experts" in (*config.model.remat_keep, *config.model.remat_offload)) / 2
        return config.training.accumulation * passes * num_layers * seconds

    def _context_exchange_seconds(self, config: RunConfig) -> float:
        """All-gathers over context: latents, or keys and values, of whole rows for full attention; for linear attention
        what each chunk of a row, two a device, does to its state: H K (K + V)."""
        mesh, model = config.mesh, config.model
        if mesh.context == 1:
            return 0.0
        flight = InFlight(config)
        group = mesh_group(mesh, (axes.CONTEXT,), self.cluster)
        token = model.full_attention.latent_width + model.full_attention.shared_key_width
        if model.full_attention_kind == "grouped":
            token = 2 * model.grouped_attention.num_key_heads / mesh.tensor * model.grouped_attention.head_width
        gathered = {
            "full": flight.rows * config.data.row_tokens * token * flight.compute,
            "linear": flight.gathered_states(),
        }
        seconds = sum(
            number * all_gather_seconds(gathered[mixer], group) for (mixer, _), number in flight.kinds.items()
        )
        return config.training.accumulation * self._passes(config) * seconds / mesh.pipe

    def pipe_exchange_seconds(self, config: RunConfig, forward: float, backward: float) -> float:
        """The running sum and the finished residual blocks from stage to stage, or their gradients back, in every tick.

        Where they travel during the next tick, only what takes longer than that tick's operation counts.
        """
        return self.pipe_exchange_seconds_of(config, scheduling_of(config), forward, backward)

    def pipe_exchange_seconds_of(
        self, config: RunConfig, scheduling: Scheduling, forward: float, backward: float
    ) -> float:
        """The same for another schedule."""
        mesh, model = config.mesh, config.model
        if mesh.pipe == 1:
            return 0.0
        flight, number = InFlight(config), config.training.accumulation
        cost = cost_of(scheduling, mesh.pipe, number)
        group = mesh_group(mesh, (axes.PIPE,), self.cluster)
        link = group.between if group.crosses_nodes else group.inside
        streams = 1 + (model.num_layers / model.residual_block_layers / 2 if model.residual == "attention" else 0)
        if model.residual == "hyper":
            streams = model.hyper_connections.num_streams
        sent = send_seconds(streams * flight.tokens * model.width * flight.compute, link)
        if scheduling.transfer == "direct":
            return cost.num_ticks * sent
        tick_of_forward, tick_of_backward = (work / number / cost.num_chunks for work in (forward, backward))
        exposed = cost.forward_ticks * max(0.0, sent - tick_of_forward)
        return exposed + cost.backward_ticks * max(0.0, sent - tick_of_backward)

    def _optimizer_seconds(self, config: RunConfig, held: Sequence[Shard]) -> float:
        """Parameters and moments read and written, gradients read; for Muon also its products, 5 iterations of
        4 r^2 c + 2 r^3 FLOPs for a matrix of r <= c, repeated by devices that hold parts of the same matrix."""
        gpu = self.cluster.gpu
        num_bytes = flops = 0.0
        for shard in held:
            array = shard.array
            if not array.is_trained:
                continue
            moments = num_moments(array, config.optimizer.name)
            num_bytes += shard.rest_entries * ITEM_BYTES[array.dtype] * (2 + 2 * moments + 1)
            if config.optimizer.name == "muon" and array.is_matrix:
                experts = array.shape[0] // num_expert_devices(config) if axes.holds_experts(array.array_axes) else 1
                flops += experts * shard.num_layers * _newton_schulz_flops(array, config)
        return num_bytes / gpu.memory_bandwidth + flops / (_MATRIX_PRODUCT_SHARE * gpu.flops_per_second)

    def _passes(self, config: RunConfig) -> int:
        return 2 + (config.model.remat == "layer") + (config.mesh.pipe > 1 and not keeps_layers(config.model))


def _newton_schulz_flops(array: ParameterArray, config: RunConfig) -> float:
    """Of one layer's (and one expert's) matrices of this array, all iterations."""
    shape: Sequence[int] = array.shape[1:] if axes.holds_experts(array.array_axes) else array.shape
    rows = math.prod(shape[: array.num_input_axes])
    columns = math.prod(shape[array.num_input_axes :])
    count = 1
    if config.optimizer.muon_heads == "per_head" and array.name in _PER_HEAD and len(shape) > 2:
        count, columns = columns // shape[-1], shape[-1]
    short, long = sorted((rows, columns))
    return config.optimizer.muon_steps * count * (4 * short**2 * long + 2 * short**3)
