"""Files of safetensors: their headers checked without trust, tensors read where they lie, files written as a stream.

The safetensors library reads tensors as copies and names no offsets; here a tensor is a view of the mapped file.
"""

import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from mmjax.checkpoint.manifest import listed, sync
from mmjax.checkpoint.strict_json import parse_json, what_it_is
from mmjax.errors import CheckpointError

Shape = tuple[int, ...]

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BOOL": np.bool_,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
}
_DTYPE_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}
_LARGEST_HEADER_BYTES = 100_000_000
_MOST_TENSORS = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it."""

    name: str
    file: Path
    dtype: np.dtype
    shape: Shape
    offset: int
    """Of its first byte, from the start of the file."""
    encoding: str = ""
    """How the bytes hold numbers of `dtype`, where they are not simply those: a quantisation of GGUF."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_name(name: str, where: str) -> None:
    """Raises CheckpointError unless a tensor's name is one that any file system and any library can take."""
    if not _NAME.fullmatch(name) or name.startswith(".") or ".." in name:
        raise CheckpointError(
            where,
            found=f"a tensor named {name[:80]!r}",
            expected="names of letters, digits and _ . - up to 256 characters",
            remedy="do not use this file: no released model has such names",
        )


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file in the order of its header, and its `__metadata__`. Reads the header only.

    Raises:
      CheckpointError: the file is not exactly what the format says: header, then the bytes of each tensor once.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")

        def refuse(found: str, remedy: str = "download the file again") -> NoReturn:
            content = start + stream.read(512)
            raise CheckpointError(
                str(file),
                found=found,
                expected="a file of safetensors",
                remedy=what_it_is(content) or remedy,
            )

        if len(start) < 8:
            refuse(f"{size} bytes, fewer than the 8 of a header's length")
        if length > _LARGEST_HEADER_BYTES:
            refuse(f"a header of {length:,} bytes; {_LARGEST_HEADER_BYTES:,} is the most")
        if length > size - 8:
            refuse(f"a header of {length:,} bytes in a file of {size:,}", "the download was cut off: repeat it")
        header = parse_json(stream.read(length), f"{file}: header")
    metadata = header.pop("__metadata__", {})
    if len(header) > _MOST_TENSORS:
        refuse(f"{len(header):,} tensors; {_MOST_TENSORS:,} is the most", "no released model has so many")
    tensors = {name: _read_entry(file, name, entry, 8 + length) for name, entry in header.items()}
    end, previous = 8 + length, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            kind = "overlaps" if tensor.offset < end else "leaves a hole after"
            _refuse_entry(file, tensor.name, f"offset {tensor.offset - 8 - length:,}, which {kind} {previous}")
        end, previous = tensor.offset + tensor.num_bytes, tensor.name
    if end != size:
        cut = "the download was cut off: repeat it" if end > size else "something was appended: take a sound copy"
        raise CheckpointError(
            str(file), found=f"{size:,} bytes", expected=f"{end:,}, of which the header speaks", remedy=cut
        )
    return tensors, metadata if isinstance(metadata, dict) else {}


def _read_entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    check_name(name, str(file))
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse_entry(file, name, "an entry that is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _refuse_entry(file, name, f"dtype {str(dtype)[:40]!r}", f"one of {', '.join(_DTYPES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            _refuse_entry(file, name, f"{what} {str(numbers)[:80]}", "whole numbers that are not negative")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        _refuse_entry(file, name, f"data_offsets {offsets[:4]}", "the first and the last byte")
    if len(shape) > 8:
        _refuse_entry(file, name, f"{len(shape)} axes", "8 at most")
    tensor = StoredTensor(name, file, np.dtype(_DTYPES[dtype]), tuple(shape), data_start + offsets[0])
    if tensor.num_bytes != offsets[1] - offsets[0]:
        _refuse_entry(
            file,
            name,
            f"{offsets[1] - offsets[0]:,} bytes for {dtype} of shape {shape}",
            f"{tensor.num_bytes:,} bytes",
        )
    return tensor


def _refuse_entry(file: Path, name: str, found: str, expected: str = "what the format says") -> NoReturn:
    raise CheckpointError(f"{file}: {name}", found=found, expected=expected, remedy="download the file again")


class MappedFiles:
    """Tensors of mapped files, as views. The pages of one are let go when the next one is read."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._last: tuple[mmap.mmap, int, int] | None = None

    def bytes_of(self, file: Path, offset: int, size: int) -> np.ndarray:
        """[size] uint8, good until the next call."""
        if self._last is not None:
            mapped, first, length = self._last
            first -= first % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, length)
        if size == 0:
            return np.empty(0, np.uint8)
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        mapped = self._maps[file]
        self._last = (mapped, offset, size)
        return np.frombuffer(mapped, np.uint8, size, offset)

    def read(self, tensor: StoredTensor) -> np.ndarray:
        """The tensor, good until the next call. An offset may be unaligned, for which a copy is made."""
        raw = self.bytes_of(tensor.file, tensor.offset, tensor.num_bytes)
        if tensor.offset % tensor.dtype.itemsize:
            raw = raw.copy()
        return raw.view(tensor.dtype).reshape(tensor.shape)


def dtype_name(dtype: np.dtype) -> str:
    """The format's name of a dtype."""
    return _DTYPE_NAMES[np.dtype(dtype)]


def dtype_named(name: str) -> np.dtype:
    """The dtype of one of the format's names."""
    return np.dtype(_DTYPES[name])


def write_file(
    file: Path,
    entries: Mapping[str, tuple[np.dtype, Shape]],
    values: Iterable[tuple[str, Iterator[np.ndarray]]],
    metadata: Mapping[str, str],
) -> None:
    """Write a file in the order of `entries`, each tensor from its values, which come in the same order, in parts."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Data starts at a multiple of 8 bytes, as from the safetensors library.
    text += b" " * (-len(text) % 8)
    written: list[str] = []
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, parts in values:
            before = stream.tell()
            for part in parts:
                stream.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            dtype, shape = entries[name]
            assert stream.tell() - before == math.prod(shape) * dtype.itemsize, name
            written.append(name)
    assert written == list(entries), listed(written)
    sync(file)
