"""The folder of a run: one process at a time, and nothing left of a start that was refused."""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import jax

from mmjax.checkpoint.lock import try_lock
from mmjax.errors import ConfigurationError, MmjaxError, writing


@contextlib.contextmanager
def sole_user(run_dir: Path, settled: Collection[str] = ()) -> Iterator[None]:
    """While entered, no other process of this machine trains in `run_dir`: two would remove each other's files.

    A folder that is new is removed again where the run ends in an error of the user's before it wrote anything but
    `settled`: files and folders of these names, which hold what it was given.
    """
    if jax.process_index() != 0:
        yield
        return
    is_new = not run_dir.exists()
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(run_dir, os.O_RDONLY)
    try:
        if not try_lock(folder, run_dir):
            raise ConfigurationError(
                str(run_dir),
                found="another process that trains in this folder",
                expected="no other one",
                remedy="wait for it or stop it, or give another --run-dir",
            )
        try:
            yield
        except MmjaxError:
            written = (path.relative_to(run_dir).parts[0] for path in run_dir.rglob("*") if not path.is_dir())
            if is_new and set(written) <= set(settled):
                shutil.rmtree(run_dir)
            raise
    finally:
        os.close(folder)
