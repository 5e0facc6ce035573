"""The manifest of a checkpoint folder: written last, so that a folder with one is whole; every file and array in it."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# Files up to this size get a digest of their own, so that a damaged one is named before anything is read from it.
_SMALL_FILE_BYTES = 1 << 20
_DIFFERENCES_NAMED = 5


class Damage(Exception):
    """A checkpoint folder cannot be trusted: what differs."""


def describe_files(path: Path, *, leave_out: str = "") -> dict[str, dict[str, Any]]:
    """Size and, of small files, digest of every file of a folder but those in `leave_out`; each is made durable."""
    files = {}
    entries = (entry for entry in path.iterdir() if entry.name != leave_out)
    inside = (file for entry in entries for file in ([entry] if entry.is_file() else entry.rglob("*")))
    for file in sorted(file for file in inside if file.is_file()):
        sync(file)
        size = file.stat().st_size
        content = _file_digest(file) if size <= _SMALL_FILE_BYTES else None
        files[file.relative_to(path).as_posix()] = {"bytes": size, "digest": content}
    return files


def check_files(path: Path, manifest: dict[str, Any]) -> None:
    """Every file must be there with its size, and the small ones, whose reading costs nothing, with their content.

    Raises:
      Damage: one is not.
    """
    if not isinstance(files := manifest.get("files"), dict):
        raise Damage(f"file {MANIFEST} names no files")
    for name, entry in files.items():
        file = path / name
        if not file.exists():
            raise Damage(f"file {name} is missing")
        if (size := file.stat().st_size) != entry["bytes"]:
            raise Damage(f"file {name} has {size} bytes of {entry['bytes']}")
        if entry["digest"] is not None and _file_digest(file) != entry["digest"]:
            raise Damage(f"file {name} differs from what was saved")


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest to a folder, whole or not at all."""
    manifest = {**manifest, "digest": _content_digest(manifest)}
    temporary = path / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1))
    sync(temporary)
    temporary.rename(path / MANIFEST)
    sync(path)
    sync(path.parent)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
      Damage: it is not what was written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        expected = manifest.pop("digest")
    except (ValueError, KeyError, AttributeError):
        raise Damage(f"file {MANIFEST} cannot be read") from None
    if _content_digest(manifest) != expected:
        raise Damage(f"file {MANIFEST} differs from what was saved")
    return manifest


def sync(path: Path) -> None:
    """Make a file or folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listed(names: list[str], separator: str = ", ") -> str:
    """The first few of many names, and how many more there are."""
    more = f" and {len(names) - _DIFFERENCES_NAMED} more" if len(names) > _DIFFERENCES_NAMED else ""
    return separator.join(names[:_DIFFERENCES_NAMED]) + more


def first_line(error: BaseException) -> str:
    """Kind and first line of an error from a library."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _content_digest(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _file_digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
