"""Our arrays back to a released checkpoint, with the names, dtypes and files it had, tensor by tensor."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.checkpoint.arrays import CheckedReader
from mmjax.checkpoint.codecs import MXFP4, encode_mxfp4
from mmjax.checkpoint.convert import BUFFERS, EXPORTED, TENSORS, Progress, check_room, replacing
from mmjax.checkpoint.manifest import describe_files, listed, write_manifest
from mmjax.checkpoint.matching import Match, Matching, match, packed_slots
from mmjax.checkpoint.released_config import without_packing
from mmjax.checkpoint.released_files import INDEX, SINGLE, ReleasedFile
from mmjax.checkpoint.safetensors_files import StoredTensor, dtype_named, read_header, write_file
from mmjax.checkpoint.strict_json import read_json
from mmjax.checkpoint.weights import ARRAYS, RELEASED, read_contents, read_step
from mmjax.config import ModelConfig
from mmjax.errors import CheckpointError
from mmjax.models.layout import Relayout, without_pipeline

DEFAULT_SHARD_BYTES = 5 * 10**9
# Part of a tensor that is written at a time.
_PART_BYTES = 1 << 26

Read = Callable[[str, tuple[int, ...]], np.ndarray]
"""(path of an array, position along its leading axes) -> that part of it."""


def converted_arrays(folder: Path) -> tuple[Read, set[str]]:
    """How to read the arrays of a converted checkpoint, and which there are."""
    entries = read_contents(folder)["arrays"]
    return CheckedReader(folder / ARRAYS, entries).read, set(entries)


def run_arrays(step: Path, model: ModelConfig | None = None) -> tuple[Read, set[str]]:
    """How to read the weights in a step of a training run, and which there are. Optimizer and adapters are left out.

    `model` is that of the run: layers that lie as a pipeline's stages want them are found by it.
    """
    entries = read_step(step)["arrays"]
    reader = CheckedReader(step, entries)
    places = {
        path: f"{group}.{path}"
        for group in ("parameters", "router_biases", "frozen")
        for path in (name.removeprefix(f"{group}.") for name in entries if name.startswith(f"{group}."))
    }
    if model is None or model == without_pipeline(model):
        return (lambda path, index: reader.read(places[path], index)), set(places)
    relayout = Relayout(model, without_pipeline(model))
    for path, place in places.items():
        # Read so that all of the array is compared with its digest.
        for slot in relayout.empty_slots(path):
            reader.read(place, (slot,))

    def read(path: str, index: tuple[int, ...]) -> np.ndarray:
        if (rows := relayout.rows(path)) is None:
            return reader.read(places[path], index)
        if not index:
            return np.stack([read(path, (number,)) for number in range(len(rows))])
        row = rows[index[0]]
        assert row is not None
        return reader.read(places[row.path], (row.index, *index[1:]))

    return read, {target for path in places for target in relayout.targets(path)}


def export(
    released: Path,
    read: Read,
    paths: set[str],
    target: Path,
    progress: Progress,
    *,
    keeps_packed: bool = True,
    overwrite: bool = False,
    shard_bytes: int | None = None,
) -> None:
    """Write arrays as a released checkpoint into `target`, a new or empty folder, or our own if `overwrite`.

    `released` is the converted checkpoint whose names, dtypes and companion files are taken. Weights that it had packed
    as MXFP4 are packed again (exactly, if they are as they came) unless not `keeps_packed`; those of other packings
    leave in bfloat16. Without `shard_bytes` tensors go to files as they came, if all have the size they had.

    Raises:
      CheckpointError: the arrays are not those of that model, or `target` cannot be written.
    """
    read_contents(released)
    source = released / RELEASED
    config = read_json(source / "config.json")
    description = read_json(source / TENSORS)
    stored = {
        name: StoredTensor(name, source, dtype_named(entry["dtype"]), tuple(entry["shape"]), 0)
        for name, entry in description["tensors"].items()
    }
    holds_packed = any(path.endswith("_codes") for path in paths)
    matching = match(str(released), config, stored, keeps_packed=holds_packed)
    if differing := sorted(matching.targets.keys() ^ paths):
        raise CheckpointError(
            str(released),
            found=f"arrays of another model: {listed(differing)}",
            expected="the model that these released files belong to",
            remedy="give the converted checkpoint that the run started from",
        )
    writer = _Writer(matching, stored, read, source, keeps_packed)
    is_as_released = writer.entries.keys() == stored.keys() and shard_bytes is None
    files = [ReleasedFile(**{**file, "tensors": tuple(file["tensors"])}) for file in description["files"]]
    if not is_as_released:
        files = _shard(writer, shard_bytes or DEFAULT_SHARD_BYTES)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in writer.entries.items()}
    with replacing(target, overwrite=overwrite) as folder:
        check_room(folder, sum(sizes.values()))
        for file in files:
            entries = {name: writer.entries[name] for name in file.tensors}
            values = _told(((name, writer.parts(name)) for name in entries), sizes, progress)
            write_file(folder / file.name, entries, values, file.metadata)
        for file in sorted(source.iterdir()):
            if file.name not in (TENSORS, BUFFERS, INDEX, "config.json"):
                shutil.copyfile(file, folder / file.name)
        _write_config(source, folder, config, is_packed=writer.is_packed)
        if is_as_released and (source / INDEX).exists():
            shutil.copyfile(source / INDEX, folder / INDEX)
        elif len(files) > 1:
            places = {name: file.name for file in files for name in file.tensors}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        write_manifest(folder, {"kind": EXPORTED, "format": 1, "files": describe_files(folder)})


def _told(
    values: Iterator[tuple[str, Iterator[np.ndarray]]], sizes: dict[str, int], progress: Progress
) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    for name, parts in values:
        yield name, parts
        progress.advance(sizes[name])


class _Writer:
    """Every tensor of a released checkpoint: its dtype and shape, and its bytes from our arrays."""

    def __init__(
        self, matching: Matching, stored: dict[str, StoredTensor], read: Read, source: Path, keeps_packed: bool
    ):
        self.entries: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self.is_packed = False
        """Whether any tensor leaves packed."""
        self._read = read
        self._sources: dict[str, Callable[[], np.ndarray]] = {}
        self._encoded: tuple[str, tuple[np.ndarray, np.ndarray]] | None = None
        for one in matching.matches:
            self._add(one, stored, keeps_packed)
        if matching.head_copy is not None:
            head, embedding = matching.head_copy
            self.entries[head], self._sources[head] = self.entries[embedding], self._sources[embedding]
        if matching.buffers:
            kept, _ = read_header(source / BUFFERS)
            for name, tensor in kept.items():
                self.entries[name] = (tensor.dtype, tensor.shape)
                self._sources[name] = lambda tensor=tensor: _read_tensor(tensor)

    def _add(self, one: Match, stored: dict[str, StoredTensor], keeps_packed: bool) -> None:
        if one.codec is MXFP4 and keeps_packed:
            self.is_packed = True
            for number, name in enumerate(one.sources.values()):
                self.entries[name] = (stored[name].dtype, stored[name].shape)
                self._sources[name] = lambda number=number: self._packed(one)[number]
            return
        if one.codec is None:
            name = one.sources[""]
            self.entries[name] = (stored[name].dtype, stored[name].shape)
        else:
            name = next(iter(one.sources.values())).rpartition(".")[0] + ".weight"
            self.entries[name] = (one.codec.decoded_dtype, one.expected.shape)
        self._sources[name] = lambda: self._numbers(one)

    def parts(self, name: str) -> Iterator[np.ndarray]:
        """A tensor's values in its dtype, in parts."""
        dtype, shape = self.entries[name]
        values = self._sources[name]().reshape(shape or (1,))
        step = max(1, _PART_BYTES // max(1, math.prod(values.shape[1:]) * dtype.itemsize))
        for first in range(0, len(values), step):
            yield values[first : first + step].astype(dtype)

    def _packed(self, one: Match) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales; both are written one after the other, so the last ones are remembered."""
        if self._encoded is None or self._encoded[0] != one.expected.name:
            if one.is_kept:
                codes, scales = (self._read(slot.path, slot.index) for slot in packed_slots(one))
            else:
                codes, scales = encode_mxfp4(self._numbers(one))
            self._encoded = (one.expected.name, (codes, scales))
        return self._encoded[1]

    def _numbers(self, one: Match) -> np.ndarray:
        if one.is_kept:
            codes, scales = (self._read(slot.path, slot.index) for slot in packed_slots(one))
            return MXFP4.decode({"weight_packed": codes, "weight_scale": scales})
        parts = [self._read(slot.path, slot.index) for slot in one.expected.slots]
        expected, shape = one.expected, one.expected.shape
        if one.codec is None:
            shape_there = self.entries[one.sources[""]][1]
            if expected.may_be_padded:
                shape = shape_there
            elif expected.may_be_swapped and shape_there == (*shape[:-2], shape[-1], shape[-2]):
                return expected.layout.to_released(parts, shape).swapaxes(-1, -2)
        return expected.layout.to_released(parts, shape)


def _read_tensor(tensor: StoredTensor) -> np.ndarray:
    return np.fromfile(tensor.file, tensor.dtype, math.prod(tensor.shape), offset=tensor.offset)


def _shard(writer: _Writer, shard_bytes: int) -> list[ReleasedFile]:
    """Files of `shard_bytes` at most, unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in writer.entries.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    return [ReleasedFile(name, tuple(group), {"format": "pt"}) for name, group in zip(names, groups, strict=True)]


def _write_config(source: Path, folder: Path, config: dict[str, Any], *, is_packed: bool) -> None:
    """config.json as it came, less its word of packing if nothing is packed any more."""
    plain = without_packing(config)
    if is_packed or plain == config:
        shutil.copyfile(source / "config.json", folder / "config.json")
        return
    (folder / "config.json").write_text(json.dumps(plain, indent=2) + "\n")
