"""Released checkpoints: the name and shape of each tensor of a family, and which parameters hold its numbers.

A family is a module of this package with

    MODEL_TYPES                     values of `model_type` in the config.json files it reads
    read_config(config)             config.json -> ModelConfig; a field that is not understood is an error
    released_tensors(model)         every tensor of a checkpoint, under the name a release gives it
    canonical_name(name)            optional: the released name of a tensor that some files call otherwise
    is_left_out(model, name)        optional: a tensor of a file that is no part of the model; it is kept as it is
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmjax.config import ModelConfig
from mmjax.models.multimodal import define

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """How a released tensor and parts of our parameters hold the same numbers. Both ways give views where they can."""

    to_ours: Callable[[np.ndarray, Sequence[Shape]], list[np.ndarray]]
    """(released tensor, shapes of the parts) -> the parts."""
    to_released: Callable[[Sequence[np.ndarray], Shape], np.ndarray]
    """(the parts, released shape) -> released tensor."""


class Slot(NamedTuple):
    """A part of one of our parameters."""

    path: str
    """As in `multimodal.Arrays`."""
    index: Shape = ()
    """Position along its leading axes: the repeat in a stack of layers, the expert."""


@dataclass(frozen=True)
class ReleasedTensor:
    """One tensor of a released checkpoint and the slots that hold its numbers.

    Numbers mean weights as they are computed with: how a file packs them (MXFP4, FP8 blocks) is a matter of the file.
    """

    name: str
    shape: Shape
    slots: tuple[Slot, ...]
    layout: Layout
    may_be_padded: bool = False
    """Some files hold more numbers, the further ones zero."""
    may_be_swapped: bool = False
    """Some files hold its last two axes the other way round; square ones are taken for such, as transformers does."""

    def accepts(self, shape: Shape) -> bool:
        """Whether a file may hold the tensor in this shape: axes of size one make no difference."""
        if self.may_be_padded:
            return math.prod(shape) == max(shape)
        if self.may_be_swapped and shape == self._swapped_shape:
            return True
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

    @property
    def _swapped_shape(self) -> Shape:
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    def oriented(self, values: np.ndarray) -> np.ndarray:
        """What a file holds, with the axes in the order of `shape`."""
        is_swapped = self.may_be_swapped and values.shape == self._swapped_shape
        return values.swapaxes(-1, -2) if is_swapped else values


def _reshape_to_ours(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
    return [value.reshape(shapes[0])]


def _reshape_to_released(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
    return parts[0].reshape(shape)


def _linear_to_ours(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
    return [value.reshape(value.shape[0], -1).T.reshape(shapes[0])]


def _linear_to_released(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
    return parts[0].reshape(math.prod(shape[1:]), shape[0]).T.reshape(shape)


SAME = Layout(_reshape_to_ours, _reshape_to_released)
"""Reshaped only."""

LINEAR = Layout(_linear_to_ours, _linear_to_released)
"""[out, in...] -> [in..., out...], whatever heads our axes name; also [channels, 1, taps] -> [taps, channels...]."""


def stacked_rows(layout: Layout, *sizes: int) -> Layout:
    """Several tensors of `layout` one after the other along axis 0, of `sizes` rows: one slot each."""
    ends = np.cumsum(sizes)

    def to_ours(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        pieces = np.split(value, ends[:-1])
        return [layout.to_ours(piece, [shape])[0] for piece, shape in zip(pieces, shapes, strict=True)]

    def to_released(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        pieces = [layout.to_released([part], (size, *shape[1:])) for part, size in zip(parts, sizes, strict=True)]
        return np.concatenate(pieces)

    return Layout(to_ours, to_released)


def padded(size: int) -> Layout:
    """`size` numbers and then zeros; anything else is a ValueError."""

    def to_ours(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        flat = value.reshape(-1)
        if flat.size < size or flat[size:].any():
            raise ValueError(f"{flat.size} numbers; expected {size}, and zeros after them")
        return [flat[:size].reshape(shapes[0])]

    def to_released(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        flat = parts[0].reshape(-1)
        return np.pad(flat, (0, math.prod(shape) - flat.size)).reshape(shape)

    return Layout(to_ours, to_released)


def heads_of_two(first_width: int) -> Layout:
    """[heads * (first + second), in] -> [in, heads, first] and [in, heads, second]: keys and values of each head."""

    def to_ours(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        num_inputs, num_heads, _ = shapes[0]
        by_head = value.reshape(num_heads, -1, num_inputs).transpose(2, 0, 1)
        return [by_head[..., :first_width], by_head[..., first_width:]]

    def to_released(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        return np.concatenate(parts, axis=-1).transpose(1, 2, 0).reshape(shape)

    return Layout(to_ours, to_released)


def grouped_rows(num_groups: int, *widths: int) -> Layout:
    """[groups * (sum of widths), in] -> [in, ...] for each width: every group holds a piece of all of them, in turn."""
    ends = np.cumsum(widths)[:-1]

    def to_ours(value: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        by_group = value.reshape(num_groups, sum(widths), -1).transpose(2, 0, 1)
        pieces = np.split(by_group, ends, axis=-1)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def to_released(parts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        pieces = [part.reshape(-1, num_groups, width) for part, width in zip(parts, widths, strict=True)]
        return np.concatenate(pieces, axis=-1).transpose(1, 2, 0).reshape(shape)

    return Layout(to_ours, to_released)


def from_released(
    model: ModelConfig, expected: Iterable[ReleasedTensor], tensors: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Released tensors held in memory -> (parameters, router biases) by path, in the dtypes of `model`.

    Raises:
      ValueError: a tensor is missing, left over, of another shape or wrongly padded, or a parameter is not filled
        exactly once; all are named.
    """
    definition = define(model)
    described = {path: v.get_value() for path, v in (definition.parameters | definition.router_biases).items()}
    expected = list(expected)
    names = {tensor.name for tensor in expected}
    if names != tensors.keys():
        raise ValueError(
            f"missing tensors: {sorted(names - tensors.keys())}; not understood: {sorted(tensors.keys() - names)}"
        )
    arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in described.items()}
    filled = dict.fromkeys(arrays, 0)
    for tensor in expected:
        value = tensors[tensor.name]
        if not tensor.accepts(value.shape):
            raise ValueError(f"{tensor.name}: shape {value.shape}; expected {tensor.shape}")
        parts = [arrays[slot.path][slot.index] for slot in tensor.slots]
        try:
            values = tensor.layout.to_ours(tensor.oriented(value), [part.shape for part in parts])
        except ValueError as error:
            raise ValueError(f"{tensor.name}: {error}") from None
        for slot, part, new in zip(tensor.slots, parts, values, strict=True):
            part[...] = new
            filled[slot.path] += part.size
    if wrong := [path for path, array in arrays.items() if filled[path] != array.size]:
        raise ValueError(f"parameters that released tensors do not fill exactly once: {wrong}")
    return {p: arrays[p] for p in definition.parameters}, {p: arrays[p] for p in definition.router_biases}


def to_released(expected: Iterable[ReleasedTensor], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters and router biases by path (or their gradients) -> released tensors."""
    return {
        tensor.name: tensor.layout.to_released(
            [np.asarray(arrays[slot.path])[slot.index] for slot in tensor.slots], tensor.shape
        )
        for tensor in expected
    }
