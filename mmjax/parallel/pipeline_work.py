"""What a pipeline's step computes and how long its devices wait, from its table and its stages' FLOPs. No JAX."""

from dataclasses import dataclass

from mmjax.config import RunConfig
from mmjax.parallel.pipeline_schedule import Kind, Operation, Schedule, make_schedule
from mmjax.planner.memory import keeps_layers
from mmjax.planner.stages import part_flops


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """Of one step on one data-parallel share of the mesh; FLOPs, also where they stand for time."""

    num_ticks: int
    span: float
    """From start to end, on devices that are equally fast at everything; exchanges take no time."""
    computed: tuple[float, ...]
    """Of each device of the pipe axis, what is computed again for the backward pass included."""

    @property
    def idle(self) -> float:
        """Waited for by all devices together."""
        return self.span * len(self.computed) - sum(self.computed)

    @property
    def idle_share(self) -> float:
        return self.idle / (self.span * len(self.computed))


def schedule_of(config: RunConfig) -> Schedule:
    """The table of a training step."""
    chunks = config.model.pipeline_chunks
    return make_schedule(
        config.training.pipeline_schedule,
        num_devices=len(config.model.pipeline_stages) // chunks,
        num_micro_batches=config.training.accumulation,
        num_chunks=chunks,
        latency=latency_of(config),
    )


def latency_of(config: RunConfig) -> int:
    """After how many ticks a stage can use what its neighbour computed."""
    return 2 if config.training.pipeline_transfer == "hidden" else 1


def count_work(config: RunConfig) -> PipelineWork:
    """Of a run with its `pipeline_stages`, all weights trained.

    A tick lasts as long as its longest operation. With f the FLOPs of a stage's forward pass, g those that
    rematerialisation does again (all of its layers and the tower under `remat: layer`), an operation takes

        forward                       f; nothing on the last stage, whose backward pass holds it
        backward                      f + g + 2 f
        split: input, weights         f + g + f,  f + g + 2 f: both run the stage again

    Where each layer's input is kept (`keeps_layers`), the last stage has a forward pass, its head left to the backward
    pass, and no backward pass has the first f.
    """
    schedule, data = schedule_of(config), config.data
    rows = data.rows / config.training.accumulation / _row_devices(config)
    parts, is_split = part_flops(config), config.training.pipeline_schedule == "split_backward"
    again = 1 if config.model.remat == "layer" else 0
    is_shared = config.training.pipeline_edges == "data_parallel"
    last, end, stages = schedule.num_stages - 1, 0, []
    is_kept = keeps_layers(config.model)
    for number, num_layers in enumerate(config.model.pipeline_stages):
        repeated = sum(parts.layers[end : end + num_layers])
        repeated += parts.tower if number == 0 and not is_shared else 0
        stages.append((repeated + (parts.head if number == last else 0), repeated))
        end += num_layers

    def flops(device: int, operation: Operation) -> float:
        number = schedule.stage_of(device, operation.chunk)
        whole, repeated = stages[number]
        more = again - is_kept
        match operation.kind:
            case Kind.IDLE:
                return 0.0
            case Kind.FORWARD:
                return rows * repeated if is_kept else 0.0 if number == last else rows * whole
            case Kind.BACKWARD:
                # The first stage has no input to give a gradient of, unless all stages embed.
                is_needed = number > 0 or is_shared or not is_split
                return rows * ((2 if is_split else 3) * whole + more * repeated) if is_needed else 0.0
            case Kind.WEIGHT:
                return rows * (3 * whole + more * repeated)

    ticks = [[flops(device, operation) for device, operation in enumerate(tick)] for tick in schedule.ticks]
    # Before the loop a forward pass, behind it once more from its input, and the tower's layers rematerialise always.
    edges = rows * config.training.accumulation / schedule.num_devices * parts.tower * (1 + 4) if is_shared else 0.0
    return PipelineWork(
        num_ticks=len(ticks),
        span=edges + sum(map(max, ticks)),
        computed=tuple(edges + sum(of_device) for of_device in zip(*ticks, strict=True)),
    )


def _row_devices(config: RunConfig) -> int:
    sizes = config.mesh.sizes
    return sizes["replica"] * sizes["fsdp"] * sizes["expert"]
