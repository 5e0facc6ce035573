"""Exchanges between the devices that are there, timed through JAX."""

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.planner.readings import EXCHANGES, Exchange, Reading, Readings

_AXIS = "devices"
# Exchanges in one program, one after the other: what it takes to start a program is shared by all of them.
_AT_A_TIME = 8


def read_links(sizes: Sequence[int], repeats: int = 10, devices: Sequence[Any] | None = None) -> Readings:
    """Time each kind of exchange among all `devices` (default: all of this process) for each size in bytes.

    A reading is the median of `repeats` runs of several exchanges that wait for each other, after one that compiles.
    Sizes are rounded up to whole float32 values.
    """
    devices = jax.local_devices() if devices is None else devices
    mesh = Mesh(np.asarray(devices), (_AXIS,))
    return Readings(
        hardware=f"{len(devices)} x {devices[0].device_kind}",
        versions={name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        exchanges=tuple(_read(exchange, size, repeats, mesh) for exchange in EXCHANGES for size in sizes),
    )


def _read(exchange: Exchange, num_bytes: int, repeats: int, mesh: Mesh) -> Reading:
    num_devices = mesh.size
    # Of one device: the share it gives to a gather, else all it sends.
    parts = num_devices if exchange == "all_gather" else 1
    local_values = max(num_devices, -(-num_bytes // (4 * parts * num_devices)) * num_devices)
    exchanged = _exchanges(num_devices)[exchange]

    def next_one(_: int, values: jax.Array) -> jax.Array:
        # Sums are as large as what they are of. Of other results one number is put into the next message: whole ones
        # would be copied.
        return exchanged(values) if exchange == "all_reduce" else values.at[:1].set(exchanged(values)[-1:])

    run = jax.jit(
        jax.shard_map(
            lambda values: lax.fori_loop(0, _AT_A_TIME, next_one, values),
            mesh=mesh,
            in_specs=PartitionSpec(_AXIS),
            out_specs=PartitionSpec(_AXIS),
            check_vma=False,
        )
    )
    values = jax.device_put(np.zeros(local_values * num_devices, np.float32), NamedSharding(mesh, PartitionSpec(_AXIS)))
    run(values).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(values).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return Reading(
        exchange=exchange,
        num_devices=num_devices,
        num_bytes=4.0 * local_values * parts,
        seconds=float(np.median(seconds)) / _AT_A_TIME,
    )


def _exchanges(num_devices: int) -> dict[Exchange, Callable[[jax.Array], jax.Array]]:
    ring = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return {
        "send": lambda values: lax.ppermute(values, _AXIS, ring),
        "all_gather": lambda values: lax.all_gather(values, _AXIS, tiled=True),
        "all_reduce": lambda values: lax.psum(values, _AXIS),
        "all_to_all": lambda values: lax.all_to_all(values, _AXIS, split_axis=0, concat_axis=0, tiled=True),
    }
