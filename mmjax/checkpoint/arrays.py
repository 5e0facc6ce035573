"""Arrays on disk, written and read slice by slice in the layout that Orbax restores; none is ever held whole.

One folder an array, in Zarr format 2: `.zarray` and one file a chunk, named by its place. `_METADATA` names the arrays.
"""

import json
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from mmjax.checkpoint.digest import SliceDigest, slice_sums
from mmjax.checkpoint.manifest import first_line
from mmjax.errors import CheckpointError

Shape = tuple[int, ...]

# Arrays up to this size are one chunk, whatever is stacked in them.
SMALL_ARRAY_BYTES = 1 << 20
# Slots up to this size are put together, so that files are not too many.
_GROUPED_BYTES = 1 << 22
_CACHE_BYTES = 1 << 26
# Larger slots are cut, so that a transposed one is copied in parts.
_PIECE_BYTES = 1 << 25


@dataclass(frozen=True)
class ArraySpec:
    """An array that is to be written."""

    shape: Shape
    dtype: np.dtype
    chunk: Shape


def choose_chunk(shape: Shape, dtype: np.dtype, num_stacked: int, memory_bytes: int) -> Shape:
    """The chunk of an array whose leading `num_stacked` axes stack slots that are filled one by one.

    A large slot is cut along its first axis, small ones are put together along the last stacked axis, a small array is
    one chunk. All arrays of a model together can have a chunk open within half of `memory_bytes`.
    """
    if math.prod(shape) * dtype.itemsize <= SMALL_ARRAY_BYTES:
        return shape
    stacked, slot = shape[:num_stacked], shape[num_stacked:]
    slot_bytes = math.prod(slot) * dtype.itemsize
    grouped_bytes = min(_GROUPED_BYTES, memory_bytes // 512)
    if slot_bytes <= grouped_bytes and stacked:
        together = min(stacked[-1], max(1, grouped_bytes // max(1, slot_bytes)))
        return (*[1] * (num_stacked - 1), together, *slot)
    return (*[1] * num_stacked, *_cut(slot, dtype, min(_PIECE_BYTES, memory_bytes // 16)))


def _cut(shape: Shape, dtype: np.dtype, piece_bytes: int) -> Shape:
    """A piece of `shape` of about `piece_bytes` at most, as whole as can be along its last axes."""
    piece = list(shape)
    for axis, size in enumerate(shape):
        rest = math.prod(shape[axis + 1 :]) * dtype.itemsize
        piece[axis] = max(1, min(size, piece_bytes // max(1, rest)))
        if rest <= piece_bytes:
            break
    return tuple(piece)


def pieces(shape: Shape, chunk: Shape) -> Iterator[tuple[slice, ...]]:
    """The chunks of an array, the last ones of an axis cut off at its end."""
    for index in np.ndindex(*(-(-size // step) for size, step in zip(shape, chunk, strict=True))):
        yield tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(index, chunk, shape, strict=True))


class WriteError(Exception):
    """The system did not take what was written."""


class ArrayWriter:
    """Writes arrays into a folder that does not exist yet, from several threads."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._arrays: dict[str, tuple[ts.TensorStore, ArraySpec, SliceDigest]] = {}
        folder.mkdir(parents=True)
        num_threads = min(8, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="array-writer")
        # So many chunks at most wait to be written.
        self._waiting: deque[Future[None]] = deque()
        self._most_waiting = num_threads + 1
        self._lock = threading.Lock()

    def add(self, name: str, spec: ArraySpec) -> None:
        """Declare an array."""
        store = ts.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": f"{self._folder / name}/"},
                "metadata": {
                    "shape": list(spec.shape),
                    "chunks": list(spec.chunk),
                    "dtype": spec.dtype.name if spec.dtype.kind == "V" else spec.dtype.str,
                    # What Orbax reads as "nothing": every chunk is written, also one of zeros.
                    "fill_value": None,
                    "compressor": None,
                },
                "store_data_equal_to_fill_value": True,
            },
            create=True,
        ).result()
        self._arrays[name] = (store, spec, SliceDigest())

    def write(self, name: str, start: Shape, values: np.ndarray) -> None:
        """Write whole chunks from `start` on, counted in the digest; `values` may not change any more.

        Raises:
          WriteError: this or an earlier write failed.
        """
        while len(self._waiting) >= self._most_waiting:
            self._wait()
        self._waiting.append(self._threads.submit(self._write, name, start, values))

    def _write(self, name: str, start: Shape, values: np.ndarray) -> None:
        store, _, digest = self._arrays[name]
        sums = slice_sums(values, start)
        with self._lock:
            digest.sums += sums
        where = tuple(slice(first, first + size) for first, size in zip(start, values.shape, strict=True))
        store[where].write(values).result()

    def _wait(self) -> None:
        try:
            self._waiting.popleft().result()
        except ValueError as error:
            raise WriteError(first_line(error)) from error

    def close(self) -> None:
        """Stop writing; what waits is left out."""
        self._threads.shutdown(cancel_futures=True)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Name the arrays to Orbax; returns shape, dtype and digest of each, as a manifest has them.

        Raises:
          WriteError: a write failed.
        """
        while self._waiting:
            self._wait()
        self.close()
        tree = {
            str((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],
                "value_metadata": {
                    "value_type": "jax.Array",
                    "skip_deserialize": False,
                    "write_shape": list(spec.shape),
                },
            }
            for name, (_, spec, _) in self._arrays.items()
        }
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self._folder / "_METADATA").write_text(json.dumps(metadata))
        return {
            name: {"shape": list(spec.shape), "dtype": spec.dtype.name, "digest": digest.text()}
            for name, (_, spec, digest) in self._arrays.items()
        }


class ArrayReader:
    """Reads slices of the arrays of a folder that Orbax or ArrayWriter has written."""

    def __init__(self, folder: Path):
        metadata = json.loads((folder / "_METADATA").read_bytes())
        self._driver = "zarr3" if metadata["use_zarr3"] else "zarr"
        self._is_ocdbt = metadata["use_ocdbt"]
        self._folder = folder.absolute()
        self.names = tuple(
            ".".join(str(part["key"]) for part in entry["key_metadata"]) for entry in metadata["tree_metadata"].values()
        )
        """Of all arrays, the parts of nested ones joined by dots."""
        # Neighbours of one chunk are often read one after the other.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._stores: dict[str, ts.TensorStore] = {}

    def read(self, name: str, where: tuple[int | slice, ...] = ()) -> np.ndarray:
        """A slice of an array, as the dtype it has there."""
        if (store := self._stores.get(name)) is None:
            if self._is_ocdbt:
                kvstore = {"driver": "ocdbt", "base": f"file://{self._folder}", "path": f"{name}/"}
            else:
                kvstore = {"driver": "file", "path": f"{self._folder / name}/"}
            store = self._stores[name] = ts.open(
                {"driver": self._driver, "kvstore": kvstore}, open=True, context=self._context
            ).result()
        values = (store[where] if where else store).read().result()
        return np.asarray(values)


class CheckedReader:
    """Reads the arrays of a folder part by part; one that has been read whole must be what its manifest says.

    Parts may be read again, but must not overlap otherwise: each is an index along leading axes.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Mapping[str, Any]]):
        """`entries` are the `arrays` of the manifest: shape and digest by name."""
        self._folder, self._reader, self._entries = folder, ArrayReader(folder), entries
        self._digests = {name: SliceDigest() for name in entries}
        self._unread = {name: math.prod(entry["shape"]) for name, entry in entries.items()}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray:
        """The part of an array at `index` of its leading axes.

        Raises:
          CheckpointError: the array cannot be read, or differs from what was written.
        """
        try:
            values = self._reader.read(name, index)
        except ValueError as error:
            raise self._damaged(name, first_line(error)) from None
        if (name, index) not in self._seen:
            self._seen.add((name, index))
            self._digests[name].add(values.reshape(*[1] * len(index), *values.shape), index)
            self._unread[name] -= values.size
            if not self._unread[name] and self._digests[name].text() != self._entries[name]["digest"]:
                raise self._damaged(name, "numbers that differ from what was written")
        return values

    def _damaged(self, name: str, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: array {name}",
            found=found,
            expected="what was written, of which the manifest has a digest",
            remedy="convert the released weights again, or take an earlier step of the run",
        )


def dtype_of(name: str) -> np.dtype:
    """The dtype that a manifest names, those of JAX among them."""
    return np.dtype(jnp.dtype(name))
