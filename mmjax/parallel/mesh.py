"""The device mesh: six named axes, always all present."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mmjax import axes
from mmjax.config import MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Mesh of `config` over the first devices of the list (default: all there are), in `config.device_order`.

    Raises:
      ValueError: an axis is open (-1), there are too few devices, or the order is no permutation of them.
    """
    devices = jax.devices() if devices is None else devices
    sizes = tuple(config.sizes.values())
    if min(sizes) < 1:
        raise ValueError(f"mesh {config.sizes} has an axis below 1; resolve -1 first with config.resolve_mesh")
    if config.num_devices > len(devices):
        raise ValueError(f"mesh {config.sizes} needs {config.num_devices} devices, {len(devices)} are there")
    order = config.device_order or range(config.num_devices)
    if sorted(order) != list(range(config.num_devices)):
        raise ValueError(f"device order {tuple(order)} is no permutation of {config.num_devices} devices")
    grid = np.asarray([devices[index] for index in order]).reshape(sizes)
    return jax.sharding.Mesh(grid, axes.MESH_AXES)
