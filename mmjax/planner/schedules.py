"""What a pipeline's schedule costs: ticks, and inputs that a device keeps, in closed form."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from mmjax.config import RunConfig


class Scheduling(NamedTuple):
    """The settings of a schedule."""

    name: str
    transfer: str
    chunks: int
    edges: str


@dataclass(frozen=True, kw_only=True)
class ScheduleCost:
    """A step of a pipeline. All devices meet in each tick, which lasts as long as its longest operation."""

    forward_ticks: int
    """Ticks that last as long as a forward pass of a stage."""
    backward_ticks: int
    """Ticks that last as long as its backward pass."""
    num_chunks: int
    """Stages of a device: each has 1 / chunks of its layers."""
    num_inputs: int
    """Inputs of stages that a device keeps, those on their way left out."""
    num_kept: int
    """Of how many micro-batches of a stage the device that has most keeps what its layers do, where none runs again."""

    @property
    def num_ticks(self) -> int:
        return self.forward_ticks + self.backward_ticks

    def seconds(self, forward: float, backward: float) -> float:
        """Of a step, where all layers of a device take so long for one micro-batch."""
        return (self.forward_ticks * forward + self.backward_ticks * backward) / self.num_chunks


def scheduling_of(config: RunConfig) -> Scheduling:
    """The settings of `config`'s schedule."""
    training = config.training
    return Scheduling(
        training.pipeline_schedule, training.pipeline_transfer, config.model.pipeline_chunks, training.pipeline_edges
    )


def schedule_cost(config: RunConfig) -> ScheduleCost:
    """The cost of `config`'s schedule on its mesh."""
    return cost_of(scheduling_of(config), config.mesh.pipe, config.training.accumulation)


@functools.lru_cache(maxsize=1 << 14)
def cost_of(scheduling: Scheduling, pipe: int, number: int) -> ScheduleCost:
    """Ticks and kept inputs with m = `number` micro-batches, p = `pipe` devices, v chunks.

    L is 2 where results travel during the next tick (`hidden`), 1 where they travel between ticks (`direct`).

        gpipe        m + L (p - 1) forward, as many backward ticks          m inputs        m kept by layers
        1f1b, L = 2  m + p - 1 of both                                      2 p - 3         2 p - 1
        1f1b, L = 1  p forward, 2 (m + p - 1) - p backward                  p               p
        interleaved  2 (m v + L (p - 1)) in all: half of them (L = 2), p v of them (L = 1) forward
                     inputs 2 (p - 1) + (v - 1) p (L = 1), twice that less one (L = 2)
                     kept by layers L (2 (p - 1) + (v - 1) p) + 1

    A split backward pass is not here: it computes each stage once more and never takes less time than 1f1b.
    """
    chunks, is_hidden = scheduling.chunks, scheduling.transfer == "hidden"
    latency = 2 if is_hidden else 1
    if pipe == 1:
        return ScheduleCost(forward_ticks=number, backward_ticks=number, num_chunks=1, num_inputs=0, num_kept=1)
    if scheduling.name == "gpipe":
        forward = backward = number + latency * (pipe - 1)
        inputs = kept = number
    elif chunks > 1:
        total = 2 * (number * chunks + latency * (pipe - 1))
        forward = total // 2 if is_hidden else pipe * chunks
        backward = total - forward
        inputs = 2 * (pipe - 1) + (chunks - 1) * pipe
        kept = min(number * chunks, latency * inputs + 1)
        inputs = min(number * chunks, 2 * inputs - 1 if is_hidden else inputs)
    else:
        both = number + pipe - 1
        forward, backward = (both, both) if is_hidden else (pipe, 2 * both - pipe)
        inputs = min(number, max(1, 2 * pipe - 3) if is_hidden else pipe)
        kept = min(number, 2 * pipe - 1 if is_hidden else pipe)
    return ScheduleCost(
        forward_ticks=forward, backward_ticks=backward, num_chunks=chunks, num_inputs=inputs, num_kept=kept
    )


def schedules(config: RunConfig) -> list[Scheduling]:
    """Every schedule that `config`'s mesh and micro-batches allow."""
    pipe, number, model = config.mesh.pipe, config.training.accumulation, config.model
    if pipe == 1:
        return [Scheduling("1f1b", "hidden", 1, "first_stage")]
    found, edges = [], ["first_stage"]
    # Only a tower makes the first stage's edge heavy.
    if (model.vision.is_present or model.audio.is_present) and number % pipe == 0:
        edges.append("data_parallel")
    for edge in edges:
        for transfer, latency in (("hidden", 2), ("direct", 1)):
            found += [Scheduling("1f1b", transfer, 1, edge), Scheduling("gpipe", transfer, 1, edge)]
            fills = number % (latency * pipe) == 0
            chunks = [chunks for chunks in (2, 4) if fills and pipe * chunks <= model.num_layers]
            found += [Scheduling("interleaved", transfer, number, edge) for number in chunks]
    return found
