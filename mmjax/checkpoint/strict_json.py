"""JSON of files that others wrote: one reading of them, or a CheckpointError that names the file and the place."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from mmjax.errors import CheckpointError

LARGEST_TEXT_BYTES = 512 << 20
# What transformers writes for a tokenizer without a limit (`model_max_length`).
_NO_LIMIT = str(int(1e30))


def read_json(file: Path, *, largest_bytes: int = LARGEST_TEXT_BYTES) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      CheckpointError: it cannot be read, is too large, or what `parse_json` refuses.
    """
    try:
        if not file.is_file():
            raise FileNotFoundError(0, "no such file")
        if (size := file.stat().st_size) > largest_bytes:
            raise OSError(0, f"{size:,} bytes")
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            str(file),
            found=error.strerror or str(error),
            expected=f"a readable file of {largest_bytes:,} bytes at most",
            remedy="check the path, or download the file again",
        ) from error
    return parse_json(content, str(file))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no name stands twice and every number is finite.

    Raises:
      CheckpointError: it is something else, such as a web page or a pointer of git-lfs.
    """

    def refuse(found: str) -> NoReturn:
        raise CheckpointError(
            where, found=found, expected="a JSON object", remedy=what_it_is(content) or "download the file again"
        )

    def constant(text: str) -> NoReturn:
        refuse(f"the number {text}")

    def number(text: str) -> float:
        if math.isinf(value := float(text)):
            refuse(f"the number {text[:20]}, which is too large")
        return value

    def integer(text: str) -> int:
        if len(text) > 20 and text != _NO_LIMIT:
            refuse(f"a whole number of {len(text)} digits")
        return int(text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            seen: set[str] = set()
            refuse(f"the name {next(n for n, _ in pairs if n in seen or seen.add(n))!r} twice in one object")
        return names

    try:
        text = content.decode("utf-8")
        parsed = json.loads(
            text, parse_constant=constant, parse_float=number, parse_int=integer, object_pairs_hook=unique
        )
    except UnicodeDecodeError as error:
        refuse(f"byte {error.start} is not UTF-8")
    except RecursionError:
        refuse("objects or lists nested too deeply")
    except ValueError as error:
        refuse(f"text that does not parse: {error}" if content else "an empty file")
    if not isinstance(parsed, dict):
        refuse(f"a {type(parsed).__name__}")
    return parsed


def what_it_is(content: bytes) -> str:
    """What a file is instead, and what to do then; empty if it is none of the usual mistakes."""
    start = content[:512].lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer: run git lfs pull"
    if start[:1] == b"<":
        return "it is an HTML page: the download failed, download the file again"
    if content[:1] == b"\x80" or content[:2] == b"PK":
        return "it is a pickle, which is never read: ask for safetensors"
    if start.startswith(b"GGUF"):
        return "it is a GGUF file: name it so"
    return ""
