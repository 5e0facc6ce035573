"""Checkpoints of a run: saved in the background, complete or absent, verified when restored.

A step is a folder `<directory>/<step>` that Orbax writes under a temporary name and renames, and a `manifest.json` that
is added last: the digest of every array as it was in memory, the size of every file, and what the caller says of the
step. A step without manifest counts as absent.
"""

import errno
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from mmjax.checkpoint.digest import Digest
from mmjax.checkpoint.manifest import (
    MANIFEST,
    Damage,
    check_files,
    describe_files,
    first_line,
    listed,
    read_manifest,
    write_manifest,
)
from mmjax.errors import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

State = TypeVar("State")


class Store:
    """The checkpoints under one directory.

    Keeps the `keep_last` newest steps and, with `keep_best`, the one of the highest score. A damaged or unfinished step
    is renamed, never deleted, and told through `report`. `read_only` changes nothing on disk: for reading the
    checkpoints of a run that may be under way.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int = 3,
        keep_best: bool = True,
        read_only: bool = False,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ):
        self.directory = Path(directory).absolute()
        self.keep_last, self.keep_best = keep_last, keep_best
        self._changes_disk = not read_only and jax.process_index() == 0
        self._report = report
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._checkpointer = ocp.StandardCheckpointer()
        _silence_background_tracebacks()
        if self._changes_disk:
            self._remove_leftovers()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the save under way; its failure is raised unless another error is on its way out."""
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            self._report(str(error))

    def save(self, step: int, state: Any, metadata: dict[str, Any], *, score: float | None = None) -> None:
        """Start saving `state` as `step`; returns when the arrays are copied, so that they may be donated.

        `metadata` is anything JSON holds; `score` (higher is better) is what `keep_best` goes by.

        Raises:
          CheckpointError: this or the save before failed, or a step this new is already there. Earlier steps are whole.
        """
        self.wait()
        path = self.directory / str(step)
        newest = max(self.steps(), default=-1)
        if step <= newest or path.exists():
            raise CheckpointError(
                str(path),
                found=f"{'step ' + str(newest) if step <= newest else 'the folder'} there already",
                expected="a step newer than all saved ones",
                remedy="restore the newest step first, or use another run_dir",
            )
        leaves = _named_leaves(state)
        manifest = {
            "format": 1,
            "step": step,
            "score": score,
            "metadata": json.loads(json.dumps(metadata)),
            "arrays": {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in leaves.items()},
        }
        digests = {name: Digest(leaf) for name, leaf in leaves.items()}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._check_room(leaves)
            self._checkpointer.save(path, leaves)
        except Exception as error:
            raise self._failed(path, error) from None
        self._thread = threading.Thread(
            target=self._finish, args=(path, manifest, digests), name=f"checkpoint-{step}", daemon=False
        )
        self._thread.start()

    def set_score(self, step: int, score: float) -> None:
        """Give a saved step, if it is still there, the score of an evaluation that came after its save.

        Raises:
          CheckpointError: that save failed, or this cannot be written.
        """
        self.wait()
        path = self.directory / str(step)
        if not self._changes_disk or step not in self.steps():
            return
        try:
            manifest = read_manifest(path)
            if manifest["score"] != score:
                write_manifest(path, manifest | {"score": score})
                self._delete_old()
        except Exception as error:
            raise self._failed(path, error) from None

    def wait(self) -> None:
        """Wait until the save under way is complete.

        Raises:
          CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise the CheckpointError of a save that has failed in the background, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def steps(self) -> list[int]:
        """The complete steps on disk, oldest first."""
        return [step for step in self._folders() if (self.directory / str(step) / MANIFEST).exists()]

    def restore_latest(self, abstract_state: State) -> tuple[State, dict[str, Any]] | None:
        """The newest sound step as (state, metadata), or None where none was ever completed.

        `abstract_state` has a ShapeDtypeStruct with sharding for each array: any mesh, not only the one that saved.

        Raises:
          CheckpointError: the state is of another model, or every step is damaged.
        """
        leaves = _named_leaves(abstract_state)
        for step in reversed(self._folders()):
            path = self.directory / str(step)
            if not (path / MANIFEST).exists():
                self._set_aside(path, "incomplete", f"no {MANIFEST}: its save was never finished")
                continue
            try:
                manifest = read_manifest(path)
                restored = self._restore(path, manifest, leaves)
            except Damage as damage:
                self._set_aside(path, "damaged", str(damage))
                continue
            values = [restored[name] for name in leaves]
            return jax.tree.unflatten(jax.tree.structure(abstract_state), values), manifest["metadata"]
        damaged = sorted(path.name for path in self.directory.glob("damaged-*"))
        if damaged or self.steps():
            raise CheckpointError(
                str(self.directory),
                found=f"only damaged steps ({', '.join(damaged) or self.steps()})",
                expected="a sound one",
                remedy="put a sound copy of a step there, or start anew in another run_dir",
            )
        return None

    def _folders(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and path.is_dir())

    def _restore(self, path: Path, manifest: dict[str, Any], leaves: dict[str, Any]) -> dict[str, jax.Array]:
        check_files(path, manifest)
        _compare(path, manifest["arrays"], leaves)
        try:
            restored = self._checkpointer.restore(path, leaves)
        except Exception as error:
            if isinstance(error, (MemoryError, PermissionError)) or "RESOURCE_EXHAUSTED" in str(error):
                raise CheckpointError(
                    str(path), found=first_line(error), expected="to read it", remedy="the step itself is untouched"
                ) from None
            raise Damage(first_line(error)) from None
        digests = {name: Digest(array) for name, array in restored.items()}
        wrong = [name for name, entry in manifest["arrays"].items() if digests[name].text() != entry["digest"]]
        if wrong:
            raise Damage(f"array {listed(wrong)} differs from what was saved")
        return restored

    def _check_room(self, leaves: dict[str, jax.Array]) -> None:
        needed = sum(
            shard.data.nbytes for leaf in leaves.values() for shard in leaf.addressable_shards if not shard.replica_id
        )
        if needed > (free := shutil.disk_usage(self.directory).free):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes to write, {free:,} free)")

    def _set_aside(self, path: Path, kind: str, reason: str) -> None:
        target, count = path.with_name(f"{kind}-{path.name}"), 1
        while target.exists():
            count += 1
            target = path.with_name(f"{kind}-{path.name}.{count}")
        if self._changes_disk:
            path.rename(target)
        moved = f"; kept as {target.name}" if self._changes_disk else ""
        self._report(f"checkpoint {path}: {kind}: {reason}{moved}; looking at the step before")

    def _finish(self, path: Path, manifest: dict[str, Any], digests: dict[str, Digest]) -> None:
        """In the background: wait for the arrays, then make the step complete and delete those no longer kept."""
        try:
            self._checkpointer.wait_until_finished()
            for name, digest in digests.items():
                manifest["arrays"][name]["digest"] = digest.text()
            if self._changes_disk:
                manifest["files"] = describe_files(path)
                write_manifest(path, manifest)
                self._delete_old()
        except Exception as error:
            self._error = self._failed(path, error)

    def _failed(self, path: Path, error: Exception) -> CheckpointError:
        """Free what the failed save has written; the checkpointer that failed is not used again."""
        self._checkpointer = ocp.StandardCheckpointer()
        if self._changes_disk:
            # What Orbax still writes from its threads may reappear; the next start removes that.
            self._remove_leftovers()
            if not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)
        kept = ", ".join(map(str, self.steps())) or "none"
        if getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL):
            return CheckpointError(
                str(path),
                found=f"the disk or quota full: {first_line(error)}",
                expected="room for one step more than are kept",
                remedy=f"free space and start the same command again; complete steps: {kept}",
            )
        return CheckpointError(
            str(path),
            found=first_line(error),
            expected="to write the step",
            remedy=f"mend that and start the same command again; complete steps: {kept}",
        )

    def _delete_old(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.keep_last :])
        if self.keep_best:
            scores = {step: json.loads((self.directory / str(step) / MANIFEST).read_text())["score"] for step in steps}
            scored = [step for step in steps if scores[step] is not None]
            kept |= {max(scored, key=lambda step: (scores[step], step))} if scored else set()
        for step in steps:
            if step not in kept:
                # Renamed first: a step half deleted must not look like a step.
                (self.directory / str(step)).rename(self.directory / f"deleting-{step}")
        self._remove_leftovers(in_progress=False)

    def _remove_leftovers(self, in_progress: bool = True) -> None:
        for pattern in ("deleting-*", "*.orbax-checkpoint-tmp*")[: 1 + in_progress]:
            for path in self.directory.glob(pattern):
                _remove(path)


def _remove(folder: Path) -> None:
    # Threads of a save that failed may write into it a little longer.
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _named_leaves(state: Any) -> dict[str, Any]:
    """The arrays of a pytree by dotted path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    assert len(set(names)) == len(names), "two arrays of the state share a name"
    return {name: leaf for name, (_, leaf) in zip(names, flat, strict=True)}


def _compare(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Names, shapes and dtypes must agree exactly: nothing is cast, cut or left out."""
    differences = [f"{name} is saved and not wanted" for name in saved if name not in wanted]
    differences += [f"{name} is wanted and not saved" for name in wanted if name not in saved]
    for name in wanted:
        if name in saved:
            there = f"{saved[name]['dtype']}{saved[name]['shape']}"
            here = f"{np.dtype(wanted[name].dtype)}{list(wanted[name].shape)}"
            if there != here:
                differences.append(f"{name} is saved as {there} and wanted as {here}")
    if differences:
        raise CheckpointError(
            str(path),
            found=f"another model or optimizer: {listed(differences, '; ')}",
            expected="the arrays of this configuration",
            remedy="use the configuration that the run was saved with, or another run_dir",
        )


def _silence_background_tracebacks() -> None:
    """Let an error of Orbax's threads be told once, by the exception.

    It is also logged with hundreds of lines of traceback, and the reads or writes that it leaves behind complain to
    their event loop, and when that is gone to Python's hook for errors that nobody can catch.
    """
    if _is_no_orbax_traceback in logging.getLogger("absl").filters:
        return
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_orbax_traceback)
    hook = sys.unraisablehook

    def told_unless_left_behind(unraisable: Any) -> None:
        left_behind = str(unraisable.exc_value) == "Event loop is closed" or "async_serialize" in repr(
            unraisable.object
        )
        if not left_behind:
            hook(unraisable)

    sys.unraisablehook = told_unless_left_behind


def _is_no_orbax_traceback(record: logging.LogRecord) -> bool:
    # The event loop's complaint names the function that failed.
    return not (record.exc_info and "orbax" in record.pathname + record.getMessage())
