"""Every legal mesh of a cluster, its time and memory, and why each rejected one is rejected."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax import axes
from mmjax.config import MeshConfig, RunConfig, check, describe_mesh, mesh_split_faults
from mmjax.config.fault import Fault
from mmjax.planner.adapters import FULL, Tuning
from mmjax.planner.compute_time import Rates
from mmjax.planner.cost import model_flops_utilisation
from mmjax.planner.device_order import nested_order, nestings, order_for_links
from mmjax.planner.hardware import Cluster
from mmjax.planner.memory import DeviceBytes, bytes_of_shards
from mmjax.planner.parameters import ITEM_BYTES, PACKED_BYTES, shards
from mmjax.planner.step_time import StepClock, StepTime
from mmjax.planner.units import format_bytes, format_seconds
from mmjax.planner.ways import Way, Ways

# So many of the fastest plans are tried with every nesting of their axes over the devices.
_NUM_ORDERED = 12
# Differences smaller than this share are rounding.
_SAME = 1e-9

# Parts of a device's memory, as messages call them.
_MEMORY_WORDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "batch": "the batch",
    "gradients": "gradients",
    "micro_batch_gradients": "gradients of a micro-batch",
    "saved_activations": "saved activations",
    "gathered_weights": "gathered weights",
    "working_set": "the working set of a layer",
    "exchange_buffers": "exchange buffers",
}
_TIME_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "bubble": "pipeline bubble",
    "weight_exchange": "gathers of weights",
    "gradient_sum": "sum of gradients",
    "tensor_exchange": "tensor exchange",
    "expert_exchange": "expert exchange",
    "context_exchange": "context exchange",
    "pipe_exchange": "pipe exchange",
    "optimizer": "optimizer",
    "offload": "copies to the host",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run: a mesh, micro-batches, a schedule and what is kept, with what it costs."""

    config: RunConfig
    memory: DeviceBytes
    time: StepTime
    host_bytes: float
    tokens_per_second: float
    """Of a device."""
    utilisation: float
    """MFU: FLOPs the model needs over what the devices could do."""

    @property
    def name(self) -> str:
        return _name(self.config)


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A mesh (or a way to run it) that cannot be, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """All plans that fit, fastest first, and all that do not."""

    plans: tuple[Plan, ...]
    rejections: tuple[Rejection, ...]
    num_meshes: int
    tightest: Rejection | None
    """Of the legal plans that do not fit, the one that needs the least memory."""
    siblings: tuple[Plan, ...] = ()
    """Other schedules and choices of what is kept for the mesh and micro-batches of the first plan, fastest first."""

    def reasons_against(self, plan: Plan) -> str:
        """Why `plan` is slower than the best: the terms that cost it most."""
        best = self.plans[0]
        if plan is best:
            return "the fastest that fits"
        ratio = plan.time.total / best.time.total
        losses = {term: plan.time.terms[term] - seconds for term, seconds in best.time.terms.items()}
        worst = sorted(losses, key=lambda term: -losses[term])[:2]
        details = ", ".join(
            f"{_TIME_WORDS[term]} {format_seconds(plan.time.terms[term])} for {format_seconds(best.time.terms[term])}"
            for term in worst
            if losses[term] > 0.01 * best.time.total
        )
        return f"{ratio:.2f} x the time" + (f": {details}" if details else "")

    def front(self) -> tuple[Plan, ...]:
        """Plans that no other beats in both time and memory, fastest first."""
        kept: list[Plan] = []
        for plan in self.plans:
            if not kept or plan.memory.total < kept[-1].memory.total:
                kept.append(plan)
        return tuple(kept)


def factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of so many ordered factors."""
    if num_factors == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in factorisations(number // factor, num_factors - 1):
                yield (factor, *rest)


def search(
    config: RunConfig,
    cluster: Cluster,
    *,
    tuning: Tuning = FULL,
    rates: Rates | None = None,
) -> SearchResult:
    """Try every mesh of the cluster with every number of micro-batches, schedule, and choice of what is kept and where.

    `config` gives model, data and optimizer; all that `plan_file.PLANNED` names is searched. Of the ways to run a mesh
    with so many micro-batches there is a plan for each choice of what is kept, with its fastest schedule that fits, and
    with the nesting of the mesh axes over the devices that exchanges fastest.

    Faults of `config` that no mesh mends are the caller's to look for, with `check_without_mesh`.
    """
    clock = StepClock(config, cluster, tuning=tuning, rates=rates)
    ways = Ways(clock)
    plans: list[Plan] = []
    rejections: list[Rejection] = []
    tightest: Rejection | None = None
    least_bytes = float("inf")
    num_meshes = 0
    for base in _meshes(config, cluster):
        num_meshes += 1
        if reason := _reason_against_mesh(base):
            rejections.append(Rejection(name=_mesh_name(base), reason=reason))
            continue
        held = shards(clock.arrays_of(base), base.mesh)
        # The smallest micro-batches need least memory: where they do not fit, nothing does.
        for candidate in reversed(list(_micro_batches(base))):
            is_any_fitting = False
            for choices in ways.of(candidate, held):
                fitting = next((way for way in choices if way.memory.total <= cluster.usable_bytes), None)
                if fitting:
                    is_any_fitting = True
                    plans.append(_plan(fitting, clock))
                    continue
                leanest = min(choices, key=lambda way: way.memory.total)
                reason = memory_reason(leanest.memory, cluster)
                rejection = Rejection(name=_name(leanest.settled()), reason=reason)
                rejections.append(rejection)
                if leanest.memory.total < least_bytes:
                    least_bytes, tightest = leanest.memory.total, rejection
            if not is_any_fitting:
                break
    plans.sort(key=lambda plan: (plan.time.total, plan.memory.total))
    plans = _with_device_orders(plans, clock)
    return SearchResult(
        plans=tuple(plans),
        rejections=tuple(rejections),
        num_meshes=num_meshes,
        tightest=None if plans else tightest,
        siblings=tuple(_siblings(plans[0], ways)) if plans else (),
    )


def _meshes(config: RunConfig, cluster: Cluster) -> Iterator[RunConfig]:
    """`config` on every mesh; where positions are split, also with experts spread over them."""
    moe = config.model.moe
    has_experts = moe.num_dense_layers < config.model.num_layers
    spread = dataclasses.replace(
        config.model, moe=dataclasses.replace(moe, expert_axes="context_and_expert", transport="all_to_all")
    )
    for sizes in factorisations(cluster.num_devices, len(axes.MESH_AXES)):
        mesh = MeshConfig(**dict(zip(axes.MESH_AXES, sizes, strict=True)))
        yield dataclasses.replace(config, mesh=mesh)
        if has_experts and mesh.context > 1 and moe.expert_axes == "expert":
            yield dataclasses.replace(config, mesh=mesh, model=spread)


def _with_device_orders(plans: list[Plan], clock: StepClock) -> list[Plan]:
    """The first plans, each with the nesting of its axes over the devices that takes least time; sorted again.

    With their own nesting the last axes run over a node's GPUs; another one matters where a node ends elsewhere.
    """
    cluster = clock.cluster
    if cluster.num_nodes == 1 or cluster.gpus_per_node == 1:
        return plans
    improved = []
    for plan in plans[:_NUM_ORDERED]:
        best, held = plan, shards(clock.arrays_of(plan.config), plan.config.mesh)
        for nesting in nestings(plan.config.mesh):
            order = nested_order(plan.config.mesh, nesting)
            mesh = dataclasses.replace(plan.config.mesh, device_order=order)
            config = dataclasses.replace(plan.config, mesh=mesh)
            time = dataclasses.replace(plan.time, **clock.exchange_terms(config, plan.time, held))
            if order and time.total < best.time.total * (1 - _SAME):
                best = _plan(Way(config=config, memory=plan.memory, time=time, host_bytes=plan.host_bytes), clock)
        improved.append(best)
    return sorted([*improved, *plans[_NUM_ORDERED:]], key=lambda plan: (plan.time.total, plan.memory.total))


def with_links(result: SearchResult, clock: StepClock, bandwidth: np.ndarray) -> SearchResult:
    """The first plans with their devices in the order that suits links of uneven `bandwidth` [n, n], in bytes a second
    between every two devices. Times stay those of the slowest link."""
    ordered = []
    for plan in result.plans[:_NUM_ORDERED]:
        order = order_for_links(plan.config.mesh, bandwidth, clock.exchanged_bytes(plan.config, plan.time))
        mesh = dataclasses.replace(plan.config.mesh, device_order=order)
        ordered.append(dataclasses.replace(plan, config=dataclasses.replace(plan.config, mesh=mesh)))
    return dataclasses.replace(result, plans=(*ordered, *result.plans[_NUM_ORDERED:]))


def _siblings(best: Plan, ways: Ways) -> Iterator[Plan]:
    """All other schedules and choices of what is kept that fit the best plan's mesh and micro-batches."""
    mesh = dataclasses.replace(best.config.mesh, device_order=())
    config = dataclasses.replace(best.config, mesh=mesh)
    held = shards(ways.clock.arrays_of(config), mesh)
    found = [_plan(way, ways.clock) for choices in ways.of(config, held) for way in choices]
    fits = [plan for plan in found if plan.memory.total <= ways.cluster.usable_bytes and plan.name != best.name]
    return iter(sorted(fits, key=lambda plan: plan.time.total))


def memory_reason(memory: DeviceBytes, cluster: Cluster) -> str:
    """`needs 310.0 GiB of 129.2 GiB: parameters 200.0 GiB, optimizer state 80.0 GiB`"""
    parts = sorted(dataclasses.asdict(memory).items(), key=lambda item: -item[1])[:2]
    details = ", ".join(f"{_MEMORY_WORDS[part]} {format_bytes(value)}" for part, value in parts)
    return f"needs {format_bytes(memory.total)} of {format_bytes(cluster.usable_bytes)} a device: {details}"


def fits(config: RunConfig, cluster: Cluster, tuning: Tuning = FULL) -> bool:
    """Whether any plan fits: the smallest micro-batches, nothing kept but the inputs of layers, need least memory."""
    clock = StepClock(config, cluster, tuning=tuning)
    # However they are split, all devices together hold every array once.
    held = sum(
        array.size * (PACKED_BYTES if array.is_packed else ITEM_BYTES[array.dtype]) for array in clock.arrays_of(config)
    )
    if held > cluster.num_devices * cluster.usable_bytes:
        return False
    for base in _meshes(config, cluster):
        if not _reason_against_mesh(base):
            *_, smallest = _micro_batches(base)
            memory = bytes_of_shards(smallest, shards(clock.arrays_of(base), base.mesh))
            if memory.total <= cluster.usable_bytes:
                return True
    return False


def remedies(config: RunConfig, cluster: Cluster, *, tuning: Tuning = FULL) -> list[str]:
    """What would make a run fit that does not: each remedy was tried, and named only if a plan fits then."""
    found = []

    if tuning.kind == "lora" and tuning.experts_at_rest != "mxfp4":
        packed = dataclasses.replace(tuning, experts_at_rest="mxfp4")
        if fits(config, cluster, packed):
            found.append("keep the frozen experts in MXFP4 (--experts-at-rest mxfp4)")
    frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, parameter_dtype="bfloat16"))
    if tuning.kind == "full" and fits(frozen, cluster, Tuning(kind="lora", experts_at_rest="mxfp4")):
        found.append("train adapters over frozen MXFP4 experts (--lora --experts-at-rest mxfp4)")
    for factor in (2, 4, 8, 16):
        larger = dataclasses.replace(cluster, num_nodes=cluster.num_nodes * factor)
        rows = dataclasses.replace(config.data, rows=config.data.rows * factor)
        if fits(dataclasses.replace(config, data=rows), larger, tuning):
            found.append(f"take {larger.num_nodes} nodes ({larger.name}), with as many rows for each device")
            break
    for factor in (2, 4, 8, 16):
        data = config.data
        shorter = dataclasses.replace(
            data,
            row_tokens=data.row_tokens // factor,
            row_patches=data.row_patches // factor // 4 * 4,
            image_max_patches=min(data.image_max_patches, data.row_patches // factor // 4 * 4),
        )
        if shorter.row_tokens and fits(dataclasses.replace(config, data=shorter), cluster, tuning):
            found.append(f"take rows of {shorter.row_tokens:,} tokens (--seq {shorter.row_tokens})")
            break
    return found


def _reason_against_mesh(config: RunConfig) -> str | None:
    faults: Sequence[Fault] = list(mesh_split_faults(config))
    if faults:
        return "; ".join(f"{fault.path} {fault.found}" for fault in faults[:2])
    moe = config.model.moe
    if config.mesh.expert > 1 and moe.num_dense_layers >= config.model.num_layers:
        return "no experts: fsdp splits the same"
    rows, shards = config.data.rows, config.mesh.num_row_shards
    if rows % shards:
        return f"{rows} rows are not a multiple of {shards} (replica x fsdp x expert)"
    if config.mesh.context > 1 and config.data.row_tokens % (2 * config.mesh.context):
        return f"rows of {config.data.row_tokens} tokens are not a multiple of 2 x context={config.mesh.context}"
    if config.mesh.pipe > config.model.num_layers:
        return f"{config.mesh.pipe} stages for {config.model.num_layers} layers"
    return None


def _micro_batches(config: RunConfig) -> Iterator[RunConfig]:
    """Every number of micro-batches that divides a device's rows, the fewest first."""
    rows = config.data.rows // config.mesh.num_row_shards
    for accumulation in (number for number in range(1, rows + 1) if rows % number == 0):
        yield dataclasses.replace(config, training=dataclasses.replace(config.training, accumulation=accumulation))


def _plan(way: Way, clock: StepClock) -> Plan:
    config, num_devices = way.settled(), way.config.mesh.num_devices
    return Plan(
        config=config,
        memory=way.memory,
        time=way.time,
        host_bytes=way.host_bytes,
        tokens_per_second=config.data.rows * config.data.row_tokens / way.time.total / num_devices,
        utilisation=model_flops_utilisation(
            clock.step_flops(config), way.time.total, num_devices, clock.cluster.gpu.flops_per_second
        ),
    )


def _mesh_name(config: RunConfig) -> str:
    spread = " experts over context" if config.model.moe.expert_axes == "context_and_expert" else ""
    return describe_mesh(config.mesh) + spread


def _name(config: RunConfig) -> str:
    parts = [_mesh_name(config), f"{config.training.accumulation} micro-batches", describe_kept(config)]
    if config.mesh.pipe > 1:
        parts.append(describe_schedule(config))
    return ", ".join(parts)


def describe_kept(config: RunConfig) -> str:
    """`remat layer`, `remat layer but projections, experts (host)`, `remat none`"""
    model = config.model
    kept = [*model.remat_keep, *(f"{name} (host)" for name in model.remat_offload)]
    return f"remat {model.remat}" + (f" but {', '.join(kept)}" if kept else "")


def describe_schedule(config: RunConfig) -> str:
    """`1f1b hidden`, `interleaved 2 direct, tower on all stages`"""
    training, chunks = config.training, config.model.pipeline_chunks
    text = f"{training.pipeline_schedule}{f' {chunks}' if chunks > 1 else ''} {training.pipeline_transfer}"
    return text + (", tower on all stages" if training.pipeline_edges == "data_parallel" else "")


def check_without_mesh(config: RunConfig) -> list[Fault]:
    """Faults of a configuration that no mesh mends."""
    return [fault for fault in check(dataclasses.replace(config, mesh=MeshConfig())) if fault.path != "mesh"]
