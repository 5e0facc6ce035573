"""Weights of a converted checkpoint: the model they are of, and its arrays on any mesh, each device reading its own.

A converted checkpoint is a folder with model.yaml (the ModelConfig), arrays/ (each in the dtype it was released in),
released/ (the files that came with the weights) and manifest.json, which is written last.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from mmjax.checkpoint.arrays import ArrayReader, dtype_of
from mmjax.checkpoint.digest import SliceDigest
from mmjax.checkpoint.manifest import MANIFEST, Damage, check_files, first_line, listed, read_manifest
from mmjax.config import ModelConfig, settings_from_yaml
from mmjax.errors import CheckpointError
from mmjax.models.layout import Relayout, Row, without_pipeline
from mmjax.models.multimodal import define

ARRAYS, MODEL, RELEASED = "arrays", "model.yaml", "released"
# What the manifest of such a folder calls it.
CONVERTED = "converted"
Bounds = tuple[tuple[int, int], ...]
Rows = Sequence[Row | None]
# Bytes of an array that are read and digested at a time.
_BLOCK_BYTES = 1 << 25


def read_model(folder: Path | str) -> ModelConfig:
    """The model whose weights a converted checkpoint holds.

    Raises:
      CheckpointError: the folder is no whole converted checkpoint.
    """
    read_contents(folder)
    path = Path(folder) / MODEL
    return settings_from_yaml(path.read_text(encoding="utf-8"), str(path), ModelConfig)


def resting_dtype(folder: Path | str, model: ModelConfig) -> Literal["bfloat16", "float32", "float64"]:
    """What frozen weights of a converted checkpoint may rest in without a loss: bfloat16 if they came so.

    Raises:
      CheckpointError: the folder is no whole converted checkpoint.
    """
    saved = read_contents(folder)["arrays"]
    narrow = define(dataclasses.replace(without_pipeline(model), parameter_dtype="bfloat16"))
    variables = narrow.parameters | narrow.router_biases | narrow.frozen
    is_exact = variables.keys() == saved.keys() and all(
        np.promote_types(dtype_of(saved[path]["dtype"]), wanted := variable.get_value().dtype) == wanted
        for path, variable in variables.items()
    )
    return "bfloat16" if is_exact else model.parameter_dtype


def read_contents(folder: Path | str) -> dict[str, Any]:
    """The manifest of a converted checkpoint, whose files are all there: `arrays` by path, with shape and dtype.

    Raises:
      CheckpointError: the folder is no whole converted checkpoint.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            str(folder),
            found="no folder" if not folder.is_dir() else f"no {MANIFEST}",
            expected="a converted checkpoint, which has one once it is complete",
            remedy="make it with `python -m mmjax.convert SRC DST`",
        )
    try:
        manifest = read_manifest(folder)
        if manifest.get("kind") != CONVERTED:
            raise Damage("it holds something else than converted weights")
        check_files(folder, manifest)
    except Damage as damage:
        raise _damaged(folder, str(damage)) from None
    return manifest


def read_step(folder: Path) -> dict[str, Any]:
    """The manifest of a step that a run has saved (see `Store`), whose files are all there.

    Raises:
      CheckpointError: it is damaged.
    """
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except (Damage, OSError) as damage:
        raise CheckpointError(
            str(folder), found=str(damage), expected="what the run saved", remedy="take an earlier step of the run"
        ) from None
    return manifest


def load_weights(
    folder: Path | str, abstract_arrays: Mapping[str, jax.ShapeDtypeStruct], model: ModelConfig | None = None
) -> dict[str, jax.Array]:
    """The arrays of a converted checkpoint, by path, with the shardings and in the dtypes that are asked for.

    Each process reads what its devices hold, a part at a time; what was read is compared with the digests of the
    manifest. `abstract_arrays` has a ShapeDtypeStruct with sharding for each array of the model; `model` is needed if
    a pipeline's stages share out its layers.

    Raises:
      CheckpointError: the folder is no whole converted checkpoint, is damaged, or holds other arrays.
    """
    folder = Path(folder)
    saved = read_contents(folder)["arrays"]
    plain = model and without_pipeline(model)
    relayout = Relayout(plain, model) if model and plain and plain != model else None
    _compare(folder, saved, abstract_arrays, relayout)
    try:
        return _load_all(ArrayReader(folder / ARRAYS), saved, abstract_arrays, relayout)
    except Damage as damage:
        raise _damaged(folder, str(damage)) from None


def load_step(
    folder: Path, abstract_arrays: Mapping[str, jax.ShapeDtypeStruct], relayout: Relayout | None = None
) -> dict[str, jax.Array]:
    """Those arrays of a step that a run has saved (see `Store`) that are asked for, as `load_weights` gives them.

    `relayout` leads from the run's layout to that of the arrays that are asked for, if they differ.

    Raises:
      CheckpointError: the step holds no such arrays.
      Damage: it cannot be trusted.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    needed = _expected_shapes(abstract_arrays, relayout)
    saved = {name: entry for name, entry in manifest["arrays"].items() if name in needed}
    _compare(folder, saved, abstract_arrays, relayout)
    return _load_all(ArrayReader(folder), saved, abstract_arrays, relayout)


def _load_all(
    reader: ArrayReader,
    saved: Mapping[str, Any],
    abstract_arrays: Mapping[str, jax.ShapeDtypeStruct],
    relayout: Relayout | None,
) -> dict[str, jax.Array]:
    """Raises Damage where an array cannot be read, or is not what was written."""
    arrays, digests = {}, {name: SliceDigest() for name in saved}
    for name, wanted in abstract_arrays.items():
        rows = relayout.rows(name) if relayout else None
        dtype = dtype_of(saved[next(row.path for row in rows if row) if rows else name]["dtype"])
        try:
            arrays[name] = _load(reader, name, rows, dtype, wanted, digests)
        except ValueError as error:
            raise Damage(f"array {name}: {first_line(error)}") from None
    # Nobody asks for what a pipeline's empty slots hold: read for the digests alone.
    if relayout and jax.process_index() == 0:
        for name, digest in digests.items():
            for slot in relayout.empty_slots(name):
                digest.add(reader.read(name, (slice(slot, slot + 1),)), (slot,))
    total = np.stack([digest.sums for digest in digests.values()])
    if jax.process_count() > 1:
        total = multihost_utils.process_allgather(total).sum(axis=0, dtype=np.uint32)
    wrong = []
    for name, both in zip(digests, total, strict=True):
        digest = SliceDigest()
        digest.sums = both
        if digest.text() != saved[name]["digest"]:
            wrong.append(name)
    if wrong:
        raise Damage(f"array {listed(wrong)} differs from what was written")
    return arrays


def _load(
    reader: ArrayReader,
    name: str,
    rows: Rows | None,
    saved_dtype: np.dtype,
    wanted: jax.ShapeDtypeStruct,
    digests: Mapping[str, SliceDigest],
) -> jax.Array:
    """An array, the parts of it that this process is the first to hold counted in the digests of what was saved."""
    sharding = wanted.sharding
    assert sharding is not None, f"{name} is wanted without a sharding"
    first_holder: dict[Bounds, int] = {}
    for device, index in sharding.devices_indices_map(wanted.shape).items():
        first_holder.setdefault(_bounds(index, wanted.shape), device.process_index)
    parts: dict[Bounds, np.ndarray] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(wanted.shape).items():
        bounds = _bounds(index, wanted.shape)
        if bounds not in parts:
            part = np.zeros([stop - start for start, stop in bounds], wanted.dtype)
            is_first = first_holder[bounds] == jax.process_index()
            for start, origin, block in _blocks(reader, name, rows, bounds, saved_dtype):
                if is_first:
                    digests[origin.path].add(block, (origin.index, *start[1:]) if start else ())
                inside = tuple(
                    slice(s - low, s - low + size) for s, (low, _), size in zip(start, bounds, block.shape, strict=True)
                )
                part[inside] = block.astype(wanted.dtype)
            parts[bounds] = part
        shards.append(jax.device_put(parts[bounds], device))
    return jax.make_array_from_single_device_arrays(wanted.shape, sharding, shards)


def _blocks(
    reader: ArrayReader, name: str, rows: Rows | None, bounds: Bounds, dtype: np.dtype
) -> Iterator[tuple[tuple[int, ...], Row, np.ndarray]]:
    """The part of an array within `bounds`, as (start, saved array and first index of its leading axis, values)."""
    if not bounds:
        yield (), Row(name, 0), reader.read(name)
        return
    (low, high), rest = bounds[0], bounds[1:]
    row_bytes = max(1, math.prod(stop - start for start, stop in rest) * dtype.itemsize)
    height = max(1, _BLOCK_BYTES // row_bytes) if rows is None else 1
    for start in range(low, high, height):
        if (origin := Row(name, start) if rows is None else rows[start]) is None:
            continue
        end = origin.index + min(height, high - start)
        where = (slice(origin.index, end), *(slice(*pair) for pair in rest))
        yield (start, *(first for first, _ in rest)), origin, reader.read(origin.path, where)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    index = index or ()
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _expected_shapes(
    abstract_arrays: Mapping[str, jax.ShapeDtypeStruct], relayout: Relayout | None
) -> dict[str, list[int]]:
    """The shape of each saved array that is needed."""
    shapes = {name: list(leaf.shape) for name, leaf in abstract_arrays.items()}
    if relayout is None:
        return shapes
    return {path: [n or shape[0], *shape[1:]] for name, shape in shapes.items() for path, n in relayout.origins(name)}


def _compare(
    folder: Path,
    saved: Mapping[str, Any],
    abstract_arrays: Mapping[str, jax.ShapeDtypeStruct],
    relayout: Relayout | None,
) -> None:
    wanted = _expected_shapes(abstract_arrays, relayout)
    differences = [f"{name} is there and not wanted" for name in saved if name not in wanted]
    differences += [f"{name} is wanted and not there" for name in wanted if name not in saved]
    for name in wanted:
        if name in saved and saved[name]["shape"] != wanted[name]:
            differences.append(f"{name} has shape {saved[name]['shape']}, wanted is {wanted[name]}")
    if differences:
        raise CheckpointError(
            str(folder),
            found=f"weights of another model: {listed(differences, '; ')}",
            expected="the arrays of this model",
            remedy=f"use the model in {folder / MODEL}, or convert the weights that belong to yours",
        )


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        str(folder), found=what, expected="what the conversion wrote", remedy="convert the released weights again"
    )
