"""Where to cut a row of layers into pipeline stages: exact, under memory, for layers of any kind."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.errors import ConfigurationError
from mmjax.planner.hardware import Link


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer of a tower or of the decoder, or anything that is not cut."""

    name: str
    seconds: float
    """Forward and backward of one micro-batch."""
    weight_bytes: float = 0.0
    """Parameters, gradients and optimizer state."""
    activation_bytes: float = 0.0
    """Kept for each micro-batch under way."""
    output_bytes: float = 0.0
    """What it hands to the next block, there and (as a gradient) back."""
    reused_bytes: float = 0.0
    """Keys and values that the next block would read again if it stood on the same stage."""
    gradient_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Score:
    """Weights of the alignment-aware score; none counts by default, and the cut is the one of least maximum time.

    score = slowest stage / mean stage
          + reuse    * bytes reused across cuts / all reused bytes
          + gradient * mean over stages of the variance of their gradient norms / variance of all
    """

    reuse: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Stages as half-open ranges of blocks, and what they come to."""

    boundaries: tuple[int, ...]
    """First block of each stage, and the number of blocks."""
    stage_seconds: tuple[float, ...]
    """Of one micro-batch, sending its outputs on included."""
    stage_bytes: tuple[float, ...]
    score: float

    @property
    def slowest_seconds(self) -> float:
        return max(self.stage_seconds)

    def step_seconds(self, num_micro_batches: int) -> float:
        """One pass through all stages, then the slowest for every further micro-batch: sum + (m - 1) max."""
        return sum(self.stage_seconds) + (num_micro_batches - 1) * self.slowest_seconds

    def bubble_fraction(self, num_micro_batches: int) -> float:
        """Share of all stages' time in a step that they do not work."""
        step = self.step_seconds(num_micro_batches)
        return 1 - num_micro_batches * sum(self.stage_seconds) / (len(self.stage_seconds) * step)


class Stages:
    """Costs of every possible stage of a row of blocks."""

    def __init__(
        self,
        blocks: Sequence[Block],
        num_stages: int,
        *,
        num_micro_batches: int,
        link: Link | None,
        memory_bytes: float,
        score: Score,
    ):
        self.blocks, self.num_stages, self.num_micro_batches = blocks, num_stages, num_micro_batches
        self.link, self.memory_bytes, self.score = link, memory_bytes, score
        self.seconds, self.weights, self.activations = (
            np.concatenate([[0.0], np.cumsum([getattr(block, name) for block in blocks])])
            for name in ("seconds", "weight_bytes", "activation_bytes")
        )
        self.mean_seconds = self.seconds[-1] / num_stages
        self.all_reused = sum(block.reused_bytes for block in blocks)
        self.norms = np.array([block.gradient_norm for block in blocks])
        self.variance = float(self.norms.var())

    def stage_seconds(self, stage: int, first: int, last: int) -> float:
        """Blocks first..last-1 and, unless it is the last stage, sending the output on and taking its gradient back."""
        seconds = float(self.seconds[last] - self.seconds[first])
        if self.link and stage < self.num_stages - 1:
            seconds += 2 * (self.blocks[last - 1].output_bytes / self.link.bandwidth + self.link.latency_seconds)
        return seconds

    def stage_bytes(self, stage: int, first: int, last: int) -> float:
        """Weights, and activations of the micro-batches under way: min(m, p - stage) in a 1F1B schedule."""
        under_way = min(self.num_micro_batches, self.num_stages - stage)
        activations = self.activations[last] - self.activations[first]
        return float(self.weights[last] - self.weights[first] + under_way * activations)

    def extra(self, stage: int, first: int, last: int) -> float:
        """What a stage adds to the score besides time."""
        extra = 0.0
        if self.score.reuse and self.all_reused and stage < self.num_stages - 1:
            extra += self.score.reuse * self.blocks[last - 1].reused_bytes / self.all_reused
        if self.score.gradient and self.variance:
            within = float(self.norms[first:last].var())
            extra += self.score.gradient * within / self.variance / self.num_stages
        return extra

    def build(self, boundaries: Sequence[int]) -> Cut:
        """The cut at these boundaries, whether it fits or not."""
        spans = [(stage, *span) for stage, span in enumerate(itertools.pairwise(boundaries))]
        seconds = tuple(self.stage_seconds(*span) for span in spans)
        return Cut(
            boundaries=tuple(boundaries),
            stage_seconds=seconds,
            stage_bytes=tuple(self.stage_bytes(*span) for span in spans),
            score=max(seconds) / self.mean_seconds + sum(self.extra(*span) for span in spans),
        )


def cut_pipeline(
    blocks: Sequence[Block],
    num_stages: int,
    *,
    num_micro_batches: int = 1,
    link: Link | None = None,
    memory_bytes: float = float("inf"),
    score: Score | None = None,
) -> Cut:
    """Stages of consecutive blocks with the least maximum time (or the least `score`) that fit `memory_bytes` each.

    Exact, by dynamic programming over (stage, first block): all that matters of a beginning is its slowest stage and
    what it added to the score, so the front of both is kept.

    Raises:
      ConfigurationError: fewer blocks than stages, or nothing fits; the message says how much memory would do.
    """
    stages = _stages(blocks, num_stages, num_micro_batches, link, memory_bytes, score)
    # fronts[j]: beginnings that cover blocks 0..j-1, as (slowest seconds, extra, boundaries).
    fronts: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, 0.0, (0,))]}
    for stage in range(num_stages):
        reached: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for first, beginnings in fronts.items():
            lasts = [len(blocks)] if stage == num_stages - 1 else range(first + 1, len(blocks) - num_stages + stage + 2)
            for last in lasts:
                if last <= first:
                    continue
                if stages.stage_bytes(stage, first, last) > memory_bytes:
                    break
                seconds, extra = stages.stage_seconds(stage, first, last), stages.extra(stage, first, last)
                reached.setdefault(last, []).extend(
                    (max(slowest, seconds), added + extra, (*boundaries, last))
                    for slowest, added, boundaries in beginnings
                )
        fronts = {last: _front(beginnings) for last, beginnings in reached.items()}
    ends = fronts.get(len(blocks))
    if not ends:
        raise ConfigurationError(
            "pipeline stages",
            found=f"{len(blocks)} blocks in {num_stages} stages of {memory_bytes:,.0f} bytes each",
            expected=f"at least {_least_memory(stages):,.0f} bytes a stage",
            remedy="take more stages, fewer micro-batches under way, or GPUs with more memory",
        )
    best = min(ends, key=lambda end: (end[0] / stages.mean_seconds + end[1], end[0]))
    return stages.build(best[2])


def equal_layers(
    blocks: Sequence[Block],
    num_stages: int,
    *,
    num_micro_batches: int = 1,
    link: Link | None = None,
    score: Score | None = None,
) -> Cut:
    """The usual cut: as many blocks on each stage as on any other, the first ones taking what is left over."""
    stages = _stages(blocks, num_stages, num_micro_batches, link, float("inf"), score)
    size, left = divmod(len(blocks), num_stages)
    boundaries = [0]
    for stage in range(num_stages):
        boundaries.append(boundaries[-1] + size + (stage < left))
    return stages.build(boundaries)


def slowest_stage(work: Sequence[float], num_stages: int) -> float:
    """The least maximum of so many sums of consecutive numbers: what `cut_pipeline` finds without links and memory.

    By halving: a limit is enough if filling stage after stage up to it needs no more of them.
    """
    low, high = max(max(work), sum(work) / num_stages), sum(work)
    while high - low > 1e-12 * high:
        limit = (low + high) / 2
        stages, filled = 1, 0.0
        for amount in work:
            filled += amount
            if filled > limit:
                stages, filled = stages + 1, amount
        low, high = (low, limit) if stages <= num_stages else (limit, high)
    return high


def _stages(
    blocks: Sequence[Block],
    num_stages: int,
    num_micro_batches: int,
    link: Link | None,
    memory_bytes: float,
    score: Score | None,
) -> Stages:
    if not 1 <= num_stages <= len(blocks) or sum(block.seconds for block in blocks) <= 0:
        raise ConfigurationError(
            "pipeline stages",
            found=f"{num_stages} stages for {len(blocks)} blocks",
            expected="at least 1 stage, a block for each stage, and blocks that take time",
            remedy=f"give 1 to {len(blocks)} stages",
        )
    return Stages(
        blocks,
        num_stages,
        num_micro_batches=num_micro_batches,
        link=link,
        memory_bytes=memory_bytes,
        score=score or Score(),
    )


def _front(beginnings: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    """Those that no other beats in both numbers."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for beginning in sorted(beginnings):
        if not kept or beginning[1] < kept[-1][1]:
            kept.append(beginning)
    return kept


def _least_memory(stages: Stages) -> float:
    """The memory of the fullest stage of the cut that needs least."""
    best = {0: 0.0}
    num_blocks = len(stages.blocks)
    for stage in range(stages.num_stages):
        best = {
            last: min(max(best[first], stages.stage_bytes(stage, first, last)) for first in best if first < last)
            for last in range(stage + 1, num_blocks + 1)
        }
    return best[num_blocks]
