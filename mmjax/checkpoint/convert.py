"""Released checkpoints to ours, slice by slice: one stored tensor is read at a time, and no array is ever held whole.

The folder is written under a temporary name and renamed at its end: a conversion that was killed is started over.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmjax.checkpoint.arrays import ArraySpec, ArrayWriter, WriteError, choose_chunk, pieces
from mmjax.checkpoint.lock import try_lock
from mmjax.checkpoint.manifest import Damage, describe_files, listed, read_manifest, sync, write_manifest
from mmjax.checkpoint.matching import Match, Matching, match, packed_slots
from mmjax.checkpoint.released_config import check_companions
from mmjax.checkpoint.released_files import ReleasedFiles
from mmjax.checkpoint.released_processor import with_processor
from mmjax.checkpoint.safetensors_files import dtype_name, write_file
from mmjax.checkpoint.weights import ARRAYS, CONVERTED, MODEL, RELEASED
from mmjax.config import to_yaml
from mmjax.errors import CheckpointError

TENSORS = "tensors.json"
BUFFERS = "buffers.safetensors"
# What a manifest says of a folder that the way back has written.
EXPORTED = "exported"
DEFAULT_MEMORY_BYTES = 4 << 30
# Magnitudes that no sound weight has.
_OUTLIER = 1e4
_BLOCK_VALUES = 1 << 22


class Progress(NamedTuple):
    """Told while a conversion runs."""

    advance: Callable[[int], None]
    """Bytes of stored tensors that have been dealt with since the last call."""
    remark: Callable[[str], None]
    """Something a person should know."""


def convert(
    released: ReleasedFiles,
    target: Path,
    progress: Progress,
    *,
    keeps_packed: bool = True,
    overwrite: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> Matching:
    """Write a released checkpoint as one of ours into `target`, a new or empty folder, or our own if `overwrite`.

    Raises:
      ConfigurationError: its config.json is not understood.
      CheckpointError: its tensors do not fit its config.json or are no numbers, or `target` cannot be written.
    """
    matching = match(str(released.place), released.config, released.tensors, keeps_packed=keeps_packed)
    dtypes = _dtypes(matching, released)
    _check_memory(released, memory_bytes)
    for text in released.remarks:
        progress.remark(text)
    with replacing(target, overwrite=overwrite) as folder, contextlib.ExitStack() as stack:
        needed = sum(math.prod(t.shape) * dtypes[path].itemsize for path, t in matching.targets.items())
        needed += sum(released.tensors[name].num_bytes for name in matching.buffers)
        check_room(folder, needed)
        released.write_companions(folder / RELEASED)
        if not (folder / RELEASED / "config.json").exists():
            (folder / RELEASED / "config.json").write_text(json.dumps(released.config, indent=2) + "\n")
        check_companions(folder / RELEASED, released.config, matching.model)
        model = with_processor(folder / RELEASED, matching.model)
        writer = ArrayWriter(folder / ARRAYS)
        stack.callback(writer.close)
        filler = _Filler(writer, matching, dtypes, memory_bytes)
        remarks = _Remarks()
        for one in matching.matches:
            _convert_one(one, released, filler, remarks)
            progress.advance(sum(released.tensors[name].num_bytes for name in one.sources.values()))
        filler.finish()
        _check_head(matching, released)
        for text in remarks.texts():
            progress.remark(text)
        _write_buffers(matching, released, folder / RELEASED)
        (folder / RELEASED / TENSORS).write_text(json.dumps(_describe(matching, released)))
        (folder / MODEL).write_text(to_yaml(model), encoding="utf-8")
        arrays = writer.finish()
        # Arrays have digests of their own; their files, which may be hundreds of thousands, are not looked at again.
        files = describe_files(folder, leave_out=ARRAYS)
        write_manifest(folder, {"kind": CONVERTED, "format": 1, "arrays": arrays, "files": files})
    return matching


@contextlib.contextmanager
def replacing(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which takes the place of `target` at the end; after an error nothing is left of it.

    Raises:
      CheckpointError: `target` holds something that may not be replaced, or is being written by another process.
    """
    _check_replaceable(target, overwrite)
    folder = target.with_name(f"{target.name}.unfinished")
    with _refused_by_system(target), contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, lock)
        if not try_lock(lock, folder):
            raise CheckpointError(
                str(target), found="another conversion into it", expected="one at a time", remedy="wait for it to end"
            )
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # What a killed conversion has left.
        _empty(folder)
        yield folder
        sync(folder)
        _check_replaceable(target, overwrite)
        replaced = target.with_name(f"{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        folder.rename(target)
        sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _refused_by_system(target: Path) -> Iterator[None]:
    """Turns what the system has against writing into a CheckpointError; tensorstore says it by a ValueError."""
    try:
        yield
    except (OSError, WriteError) as error:
        raise CheckpointError(
            str(target),
            found=(error.strerror if isinstance(error, OSError) else None) or str(error),
            expected="a place that can be written",
            remedy="free space or mend permissions and start the same command again, or give another folder",
        ) from error


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    is_ours = _is_ours(target)
    if not (overwrite and is_ours):
        raise CheckpointError(
            str(target),
            found="files in it" if target.is_dir() else "a file",
            expected="a new or empty folder",
            remedy="add --overwrite to replace it" if is_ours else "give another folder, or move these files away",
        )


def _is_ours(target: Path) -> bool:
    """Only what this module wrote, whole, may be replaced."""
    try:
        return read_manifest(target).get("kind") in (CONVERTED, EXPORTED)
    except (Damage, OSError):
        return False


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def check_room(folder: Path, needed: int) -> None:
    """Raises CheckpointError unless so many bytes are free where `folder` is."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise CheckpointError(
            str(folder),
            found=f"{free:,} bytes free",
            expected=f"{needed:,}",
            remedy="free space, or give another place",
        )


class _Filler:
    """Puts parts into arrays: chunks that take several are collected until they are full."""

    def __init__(self, writer: ArrayWriter, matching: Matching, dtypes: dict[str, np.dtype], memory_bytes: int):
        self._writer = writer
        self._specs: dict[str, ArraySpec] = {}
        self._stacked = {path: target.num_stacked for path, target in matching.targets.items()}
        self._open: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, list[int]]] = {}
        for path, target in matching.targets.items():
            chunk = choose_chunk(target.shape, dtypes[path], target.num_stacked, memory_bytes)
            self._specs[path] = ArraySpec(target.shape, dtypes[path], chunk)
            writer.add(path, self._specs[path])

    def part_shape(self, path: str) -> tuple[int, ...]:
        return self._specs[path].shape[self._stacked[path] :]

    def put(self, path: str, index: tuple[int, ...], part: np.ndarray) -> None:
        spec, depth = self._specs[path], self._stacked[path]
        if all(size == 1 for size in spec.chunk[:depth]):
            for piece in pieces(part.shape, spec.chunk[depth:]):
                values = np.array(part[piece], spec.dtype, order="C")
                start = (*index, *(along.start for along in piece))
                self._writer.write(path, start, values.reshape(*[1] * depth, *values.shape))
            return
        chunk_index = tuple(number // size for number, size in zip(index, spec.chunk[:depth], strict=True))
        start = tuple(number * size for number, size in zip(chunk_index, spec.chunk[:depth], strict=True))
        key = (path, start)
        if key not in self._open:
            sizes = [
                min(step, size - first)
                for step, size, first in zip(spec.chunk[:depth], spec.shape[:depth], start, strict=True)
            ]
            self._open[key] = (np.empty((*sizes, *spec.shape[depth:]), spec.dtype), [math.prod(sizes)])
        values, missing = self._open[key]
        values[tuple(number - first for number, first in zip(index, start, strict=True))] = part
        missing[0] -= 1
        if not missing[0]:
            self._writer.write(path, (*start, *[0] * (values.ndim - depth)), values)
            del self._open[key]

    def finish(self) -> None:
        assert not self._open, listed([path for path, _ in self._open])


class _Remarks:
    """Weights that look wrong and may be right."""

    def __init__(self) -> None:
        self._large: list[str] = []
        self._zero: list[str] = []

    def look(self, name: str, values: np.ndarray) -> None:
        """Raises ValueError at numbers that are none."""
        largest = largest_magnitude(values)
        if not np.isfinite(largest):
            count = sum(int(np.count_nonzero(~np.isfinite(block.astype(np.float32)))) for block in _blocks(values))
            raise ValueError(f"{count} of {values.size} numbers are NaN or infinite")
        if largest > _OUTLIER:
            self._large.append(f"{name} (up to {largest:.3g})")
        if values.ndim > 1 and values.size and largest == 0:
            self._zero.append(name)

    def texts(self) -> list[str]:
        texts = [f"tensors with magnitudes over {_OUTLIER:g}: {listed(self._large)}"] if self._large else []
        return texts + ([f"tensors of zeros only: {listed(self._zero)}"] if self._zero else [])


def largest_magnitude(values: np.ndarray) -> float:
    """The largest magnitude; NaN or infinite if any number is. Bits without the sign are in the order of magnitudes."""
    bits = values.dtype.itemsize * 8
    word = np.dtype(f"u{values.dtype.itemsize}")
    largest = max(
        (int((block.view(word) & word.type((1 << bits - 1) - 1)).max()) for block in _blocks(values)), default=0
    )
    return float(np.array(largest, word).view(values.dtype).astype(np.float64))


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    flat = values.reshape(-1)
    for start in range(0, flat.size, _BLOCK_VALUES):
        yield flat[start : start + _BLOCK_VALUES]


def _convert_one(one: Match, released: ReleasedFiles, filler: _Filler, remarks: _Remarks) -> None:
    try:
        if one.is_kept:
            for (suffix, name), slot in zip(one.sources.items(), packed_slots(one), strict=True):
                values = released.read(name)
                if suffix == "weight_scale" and (count := int(np.count_nonzero(values == 255))):
                    raise ValueError(f"{count} of {values.size} scales are NaN")
                filler.put(slot.path, slot.index, values.reshape(filler.part_shape(slot.path)))
            return
        if one.codec is None:
            values = released.read(one.sources[""])
        else:
            # The first is a copy: what is read is good until the next is read.
            values = one.codec.decode({suffix: released.read(name).copy() for suffix, name in one.sources.items()})
        remarks.look(one.expected.name, values)
        values = one.expected.oriented(values)
        if not one.expected.may_be_padded:
            values = values.reshape(one.expected.shape)
        shapes = [filler.part_shape(slot.path) for slot in one.expected.slots]
        for slot, part in zip(one.expected.slots, one.expected.layout.to_ours(values, shapes), strict=True):
            filler.put(slot.path, slot.index, part)
    except ValueError as error:
        raise CheckpointError(
            f"{released.place}: {one.expected.name}",
            found=str(error),
            expected="sound weights",
            remedy="download the file again, or take another release",
        ) from error


def _dtypes(matching: Matching, released: ReleasedFiles) -> dict[str, np.dtype]:
    """The dtype of each array: that of its parts; where those differ, one that holds all of them."""
    found: dict[str, set[np.dtype]] = {}
    for one in matching.matches:
        if one.is_kept:
            for slot in packed_slots(one):
                found[slot.path] = {np.dtype(np.uint8)}
            continue
        dtype = released.tensors[one.sources[""]].dtype if one.codec is None else one.codec.decoded_dtype
        for slot in one.expected.slots:
            found.setdefault(slot.path, set()).add(dtype)
    wide = {path: np.float64 if np.dtype(np.float64) in dtypes else np.float32 for path, dtypes in found.items()}
    return {path: next(iter(ds)) if len(ds) == 1 else np.dtype(wide[path]) for path, ds in found.items()}


def _check_memory(released: ReleasedFiles, memory_bytes: int) -> None:
    """Decoding holds the numbers of one tensor, as float32 and as they are written."""
    largest = max(released.tensors.values(), key=lambda tensor: tensor.num_bytes)
    if (needed := 2 * largest.num_bytes) > memory_bytes or memory_bytes < 1 << 28:
        raise CheckpointError(
            "--max-memory",
            found=f"{memory_bytes:,} bytes",
            expected=f"{max(needed, 1 << 28):,} at least: {largest.name} is read whole",
            remedy="allow more",
        )


def _check_head(matching: Matching, released: ReleasedFiles) -> None:
    if matching.head_copy is None:
        return
    head, embedding = matching.head_copy
    one, other = released.tensors[head], released.tensors[embedding]
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    if not is_alike or not np.array_equal(released.read(head).view(np.uint8), released.read(embedding).view(np.uint8)):
        raise CheckpointError(
            f"{released.place}: {head}",
            found=f"a head that differs from {embedding}, where config.json ties the two",
            expected="the same numbers, or tie_word_embeddings false",
            remedy="set tie_word_embeddings to false in config.json if this head was trained; else remove the tensor",
        )


def _write_buffers(matching: Matching, released: ReleasedFiles, folder: Path) -> None:
    if matching.buffers:
        entries = {name: (released.tensors[name].dtype, released.tensors[name].shape) for name in matching.buffers}
        write_file(folder / BUFFERS, entries, ((name, iter([released.read(name)])) for name in entries), {})


def _describe(matching: Matching, released: ReleasedFiles) -> dict[str, Any]:
    """What the way back needs to know of the files."""
    return {
        "files": [dataclasses.asdict(file) for file in released.files],
        "tensors": {
            name: {"dtype": dtype_name(tensor.dtype), "shape": tensor.shape}
            for name, tensor in released.tensors.items()
        },
        "head_copy": matching.head_copy,
        "buffers": matching.buffers,
    }
