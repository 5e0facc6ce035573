"""Where the parameters of the decoder's layers lie: which layers share a stack, and in which place of it each is.

Without a pipeline a stack is a segment: consecutive layers that repeat a pattern, run by one scan. With one, all layers
of a kind form one stack [devices * slots, ...] whose axis is split over the pipe axis; each device uses its own slots.
Devices with fewer layers of a kind leave slots empty: zeros that nothing reads, with a gradient of zero.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mmjax.config import LayerKind, ModelConfig, layer_kinds


@dataclass(frozen=True)
class Segment:
    """Consecutive layers, of one residual block or several, that repeat a pattern of layer kinds: run by one scan."""

    first_layer: int
    kinds: tuple[LayerKind, ...]
    num_repeats: int
    starts_block: bool

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.num_repeats


def block_layers(model: ModelConfig) -> int:
    """Layers of a residual block."""
    return model.residual_block_layers if model.residual == "attention" else model.num_layers


def plan_segments(model: ModelConfig, first_layer: int = 0, end_layer: int | None = None) -> tuple[Segment, ...]:
    """Split the decoder, or its layers from `first_layer` to before `end_layer`, into segments.

    Each is as long a repetition as its residual block allows, or longer with `layer_loops="whole"`. Kimi-K3 (blocks of
    12 layers, pattern of 4) gets 13 segments with 36 layer bodies for its 93 layers, or 4 with 7.
    """
    kinds, num_deep = layer_kinds(model), len(model.vision.deep_layers)
    last = model.num_layers if end_layer is None else end_layer
    block_size = block_layers(model)
    segments = []
    layer = first_layer
    while layer < last:
        is_whole = model.layer_loops == "whole" and layer >= num_deep
        block_end = last if is_whole else min(layer // block_size * block_size + block_size, last)
        # Layers that get additions form segments of their own.
        end = num_deep if layer < num_deep < block_end else block_end
        period, num_repeats = _longest_repetition(kinds[layer:end])
        segments.append(Segment(layer, kinds[layer : layer + period], num_repeats, layer % block_size == 0))
        layer += segments[-1].num_layers
    return tuple(segments)


def _longest_repetition(kinds: tuple[LayerKind, ...]) -> tuple[int, int]:
    """(period, repeats) of the longest repetition that `kinds` begins with; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        num_repeats = 1
        while kinds[period * num_repeats :][:period] == kinds[:period]:
            num_repeats += 1
        if num_repeats > 1 and period * num_repeats > best[0] * best[1]:
            best = (period, num_repeats)
    return best


def block_starts(model: ModelConfig, segment: Segment) -> np.ndarray:
    """[repeats, layers of the pattern] bool: which layers of a segment begin a residual block."""
    layers = segment.first_layer + np.arange(segment.num_layers)
    return (layers % block_layers(model) == 0).reshape(segment.num_repeats, len(segment.kinds))


class Stack(NamedTuple):
    """One stack of parameters: `num_repeats` times the layers of `kinds`."""

    kinds: tuple[LayerKind, ...]
    num_repeats: int


def parameter_stacks(model: ModelConfig) -> tuple[Stack, ...]:
    """The stacks of the decoder's layers, in the order of `decoder.segments`."""
    if not model.pipeline_stages:
        return tuple(Stack(segment.kinds, segment.num_repeats) for segment in plan_segments(model))
    return tuple(Stack((kind,), num_devices(model) * number) for kind, number in slots_of_kinds(model).items())


def num_devices(model: ModelConfig) -> int:
    """Devices of the pipe axis that the layout is for; stage s lies on device s modulo that."""
    return len(model.pipeline_stages) // model.pipeline_chunks


def stage_layers(model: ModelConfig) -> tuple[range, ...]:
    """The layers of each pipeline stage."""
    ends = list(itertools.accumulate(model.pipeline_stages))
    return tuple(range(end - number, end) for end, number in zip(ends, model.pipeline_stages, strict=True))


def slots_of_kinds(model: ModelConfig) -> dict[LayerKind, int]:
    """Slots of a device for each kind of layer, in the order in which kinds appear: as many as the fullest needs."""
    kinds = layer_kinds(model)
    held = Counter((kinds[layer], device) for layer, device in enumerate(_devices(model)))
    return {kind: max(number for (k, _), number in held.items() if k == kind) for kind in dict.fromkeys(kinds)}


def _devices(model: ModelConfig) -> list[int]:
    """The pipe device of each layer."""
    stages = stage_layers(model)
    return [stage % num_devices(model) for stage, layers in enumerate(stages) for _ in layers]


def without_pipeline(model: ModelConfig) -> ModelConfig:
    """The same model in the layout of converted checkpoints: no pipeline, and loops within residual blocks."""
    return dataclasses.replace(model, pipeline_stages=(), pipeline_chunks=1, layer_loops="blocks")


class LayerAddress(NamedTuple):
    """Where a decoder layer's parameters lie: `decoder.segments.{segment}.layers.{position}.*[repeat]`."""

    segment: int
    position: int
    repeat: int


def layer_address(model: ModelConfig, layer: int) -> LayerAddress:
    if not 0 <= layer < model.num_layers:
        raise ValueError(f"layer {layer} is outside 0..{model.num_layers - 1}")
    if not model.pipeline_stages:
        for index, segment in enumerate(plan_segments(model)):
            offset = layer - segment.first_layer
            if offset < segment.num_layers:
                return LayerAddress(index, offset % len(segment.kinds), offset // len(segment.kinds))
    kinds, devices, slots = layer_kinds(model), _devices(model), slots_of_kinds(model)
    kind, device = kinds[layer], devices[layer]
    earlier = sum(kinds[other] == kind and devices[other] == device for other in range(layer))
    return LayerAddress(list(slots).index(kind), 0, device * slots[kind] + earlier)


_PLACE = re.compile(r"(.*\bdecoder\.segments\.)(\d+)\.layers\.(\d+)(\..+)")


class Row(NamedTuple):
    """One layer's place in a stack: the array's path, and its index of the leading axis."""

    path: str
    index: int


class Relayout:
    """How arrays by path in the layout of one model lie in that of another, which differs in its pipeline alone."""

    def __init__(self, source: ModelConfig, target: ModelConfig):
        self._addresses = [(layer_address(source, n), layer_address(target, n)) for n in range(source.num_layers)]
        self._origin = {there: here for here, there in self._addresses}
        self._sizes = [stack.num_repeats for stack in parameter_stacks(target)]
        self._source_sizes = [stack.num_repeats for stack in parameter_stacks(source)]

    def empty_slots(self, path: str) -> list[int]:
        """The places of the source's array `path` that hold no layer."""
        if (match := _PLACE.fullmatch(path)) is None:
            return []
        segment, position = int(match[2]), int(match[3])
        filled = {here.repeat for here, _ in self._addresses if (here.segment, here.position) == (segment, position)}
        return [slot for slot in range(self._source_sizes[segment]) if slot not in filled]

    def origins(self, path: str) -> list[tuple[str, int | None]]:
        """(path, size of its leading axis) of each of the source's arrays that the target's `path` comes from.

        The size is None where nothing is stacked.
        """
        if (rows := self.rows(path)) is None:
            return [(path, None)]
        paths = dict.fromkeys(row.path for row in rows if row)
        matches = ((path, _PLACE.fullmatch(path)) for path in paths)
        return [(path, self._source_sizes[int(match[2])]) for path, match in matches if match]

    def targets(self, path: str) -> list[str]:
        """The target's arrays that hold layers of the source's array `path`."""
        if (match := _PLACE.fullmatch(path)) is None:
            return [path]
        place = (int(match[2]), int(match[3]))
        found = [there for here, there in self._addresses if (here.segment, here.position) == place]
        return list(dict.fromkeys(f"{match[1]}{a.segment}.layers.{a.position}{match[4]}" for a in found))

    def rows(self, path: str) -> list[Row | None] | None:
        """Where each layer of the target's stack `path` comes from, None being an empty slot; None for no stack."""
        if (match := _PLACE.fullmatch(path)) is None:
            return None
        segment, position = int(match[2]), int(match[3])
        origins = [self._origin.get(LayerAddress(segment, position, n)) for n in range(self._sizes[segment])]
        return [o and Row(f"{match[1]}{o.segment}.layers.{o.position}{match[4]}", o.repeat) for o in origins]

    def apply(self, arrays: Mapping[str, Any], paths: Iterable[str], numpy: Any = jnp) -> dict[str, Any]:
        """The target's arrays of `paths`, from the source's; empty slots hold zeros. With NumPy or jax.numpy."""

        def stack(path: str) -> Any:
            rows = self.rows(path)
            if rows is None:
                return arrays[path]
            zeros = next(numpy.zeros_like(arrays[row.path][0]) for row in rows if row)
            return numpy.stack([arrays[row.path][row.index] if row else zeros for row in rows])

        return {path: stack(path) for path in paths}
