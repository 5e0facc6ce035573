"""Every legal mesh of a cluster, its time and memory, and why each rejected one is rejected."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmjax import axes
from mmjax.config import MeshConfig, RunConfig, check, describe_mesh, mesh_split_faults
from mmjax.config.fault import Fault
from mmjax.planner.adapters import FULL, Tuning
from mmjax.planner.cost import model_flops_utilisation
from mmjax.planner.hardware import Cluster
from mmjax.planner.memory import DeviceBytes, bytes_of_shards
from mmjax.planner.parameters import shards
from mmjax.planner.step_time import Rates, StepClock, StepTime
from mmjax.planner.units import format_bytes, format_seconds

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
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run: a mesh, micro-batches and remat, with what it costs."""

    config: RunConfig
    memory: DeviceBytes
    time: StepTime
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
    """Try every mesh of the cluster with every number of micro-batches and both kinds of remat.

    `config` gives model, data and optimizer; its mesh, accumulation and remat are what is searched.

    Faults of `config` that no mesh mends are the caller's to look for, with `check_without_mesh`.
    """
    clock = StepClock(config, cluster, tuning=tuning, rates=rates)
    plans: list[Plan] = []
    rejections: list[Rejection] = []
    tightest: Rejection | None = None
    least_bytes = float("inf")
    num_meshes = 0
    for sizes in factorisations(cluster.num_devices, len(axes.MESH_AXES)):
        mesh = MeshConfig(**dict(zip(axes.MESH_AXES, sizes, strict=True)))
        num_meshes += 1
        base = dataclasses.replace(config, mesh=mesh)
        if reason := _reason_against_mesh(base):
            rejections.append(Rejection(name=describe_mesh(mesh), reason=reason))
            continue
        held = shards(clock.arrays, mesh)
        for candidate in _ways_to_run(base):
            memory = bytes_of_shards(candidate, held)
            if memory.total <= cluster.usable_bytes:
                plans.append(_plan(candidate, memory, clock.step(candidate, held), clock))
                continue
            rejection = Rejection(name=_name(candidate), reason=memory_reason(memory, cluster))
            rejections.append(rejection)
            if memory.total < least_bytes:
                least_bytes, tightest = memory.total, rejection
    plans.sort(key=lambda plan: (plan.time.total, plan.memory.total))
    return SearchResult(
        plans=tuple(plans), rejections=tuple(rejections), num_meshes=num_meshes, tightest=None if plans else tightest
    )


def memory_reason(memory: DeviceBytes, cluster: Cluster) -> str:
    """`needs 310.0 GiB of 129.2 GiB: parameters 200.0 GiB, optimizer state 80.0 GiB`"""
    parts = sorted(dataclasses.asdict(memory).items(), key=lambda item: -item[1])[:2]
    details = ", ".join(f"{_MEMORY_WORDS[part]} {format_bytes(value)}" for part, value in parts)
    return f"needs {format_bytes(memory.total)} of {format_bytes(cluster.usable_bytes)} a device: {details}"


def remedies(config: RunConfig, cluster: Cluster, *, tuning: Tuning = FULL) -> list[str]:
    """What would make a run fit that does not: each remedy was tried, and named only if a plan fits then."""
    found = []

    def fits(config: RunConfig, cluster: Cluster, tuning: Tuning) -> bool:
        return bool(search(config, cluster, tuning=tuning).plans)

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
    rows, shards = config.data.rows, config.mesh.num_row_shards
    if rows % shards:
        return f"{rows} rows are not a multiple of {shards} (replica x fsdp x expert)"
    if config.mesh.context > 1 and config.data.row_tokens % (2 * config.mesh.context):
        return f"rows of {config.data.row_tokens} tokens are not a multiple of 2 x context={config.mesh.context}"
    if config.mesh.pipe > config.model.num_layers:
        return f"{config.mesh.pipe} stages for {config.model.num_layers} layers"
    return None


def _ways_to_run(config: RunConfig) -> Iterator[RunConfig]:
    """Every number of micro-batches that divides a device's rows, with and without remat."""
    rows = config.data.rows // config.mesh.num_row_shards
    for accumulation in (number for number in range(1, rows + 1) if rows % number == 0):
        for remat in ("layer", "none"):
            yield dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, remat=remat),
                training=dataclasses.replace(config.training, accumulation=accumulation),
            )


def _plan(config: RunConfig, memory: DeviceBytes, time: StepTime, clock: StepClock) -> Plan:
    num_devices = config.mesh.num_devices
    return Plan(
        config=config,
        memory=memory,
        time=time,
        tokens_per_second=config.data.rows * config.data.row_tokens / time.total / num_devices,
        utilisation=model_flops_utilisation(
            clock.step_flops(config), time.total, num_devices, clock.cluster.gpu.flops_per_second
        ),
    )


def _name(config: RunConfig) -> str:
    return f"{describe_mesh(config.mesh)}, {config.training.accumulation} micro-batches, remat {config.model.remat}"


def check_without_mesh(config: RunConfig) -> list[Fault]:
    """Faults of a configuration that no mesh mends."""
    return [fault for fault in check(dataclasses.replace(config, mesh=MeshConfig())) if fault.path != "mesh"]
