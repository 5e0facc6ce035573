"""Several processes as one run: started together, checked against each other, stopped at the same step."""

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from mmjax.errors import ConfigurationError
from mmjax.parallel.launch import Placement
from mmjax.parallel.roll_call import meet

_VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_LONGEST_WAIT_MILLISECONDS = 2 * 3600 * 1000


def start(placement: Placement, settings: str, timeout_seconds: int) -> None:
    """Connect the processes of a run, before the first use of a device.

    `settings` is the text of the run's settings, which all processes must share, as they must their software.

    Raises:
      ConfigurationError: a process is missing or differs, or the coordinator's port is in use.
    """
    identity = {
        "python": platform.python_version(),
        "settings": hashlib.sha256(settings.encode()).hexdigest()[:16],
        "code": code_digest(),
    }
    identity |= {name: importlib.metadata.version(name) for name in _VERSIONS}
    meet(placement, identity, timeout_seconds)
    jax.distributed.initialize(
        coordinator_address=placement.coordinator,
        num_processes=placement.num_processes,
        process_id=placement.process_index,
        local_device_ids=placement.local_devices,
        initialization_timeout=timeout_seconds,
    )


def leave_at_once(exit_code: int) -> None:
    """End a process that failed, without waiting for the others, which then fail too; does nothing to a single one."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def code_digest() -> str:
    """Of the trainer's own source files."""
    total = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in ("mmjax", "pallas_kernels"):
        for file in sorted((root / package).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:16]


def check_same(what: str, text: str, remedy: str) -> None:
    """All processes hold the same `text`; every one of them calls this.

    Raises:
      ConfigurationError: in all of them, if one differs from process 0.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    differing = np.flatnonzero((digests != digests[0]).any(axis=1))
    if differing.size:
        raise ConfigurationError(
            what,
            found=f"another one in process {', '.join(map(str, differing))} than in process 0",
            expected="the same in all processes",
            remedy=remedy,
        )


def compile_together(program: Any, *arguments: Any) -> Callable:
    """The jitted `program`, compiled for `arguments` in all processes before any goes on, if there are several.

    The exchanges of CPU devices give up on a process that comes half a minute late.
    """
    if jax.process_count() == 1:
        return program
    compiled = program.lower(*arguments).compile()
    wait_for_all("compiled")
    return compiled


def wait_for_all(what: str) -> None:
    """Wait until every process has done `what`; all call this."""
    multihost.get_barrier_sync_fn()(key=what, timeout_ms=_LONGEST_WAIT_MILLISECONDS)


def whole(array: jax.Array) -> np.ndarray:
    """The whole of a global array on the host, also where its shards lie on several processes: all call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def is_stop_agreed(step: int) -> bool:
    """Whether all processes end after this step because one of them got SIGTERM; every one asks after every step."""
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
