"""Which device stands at which place of a mesh: the axes that exchange most on the fastest links."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mmjax import axes
from mmjax.config import MeshConfig
from mmjax.errors import ConfigurationError
from mmjax.planner.all_to_all import EXACT_RANKS, hop_aware_groups

# With more devices swapping two of them at a time takes too long.
_MOST_SWAPPED = 64
# Differences smaller than this share are rounding.
_SAME = 1e-12


def nested_order(mesh: MeshConfig, nesting: Sequence[str]) -> tuple[int, ...]:
    """The order in which the axes `nesting` (all of the mesh, slowest first) run over the devices; `()` for their own.

    With the axes' own nesting the last axis runs over neighbours. Another one puts neighbours on another axis.
    """
    sizes = [mesh.sizes[axis] for axis in nesting]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    order = tuple(numbers.transpose([nesting.index(axis) for axis in axes.MESH_AXES]).ravel().tolist())
    return () if order == tuple(range(len(order))) else order


def nestings(mesh: MeshConfig) -> Iterator[tuple[str, ...]]:
    """Every nesting of the axes that split anything, their own one first; unused axes stay outermost."""
    used = [axis for axis in axes.MESH_AXES if mesh.sizes[axis] > 1]
    unused = [axis for axis in axes.MESH_AXES if mesh.sizes[axis] == 1]
    for chosen in itertools.permutations(used):
        yield (*unused, *chosen)


def order_seconds(
    mesh: MeshConfig, orders: np.ndarray, bandwidth: np.ndarray, exchanged: Mapping[tuple[str, ...], float]
) -> np.ndarray:
    """[k] seconds of the exchanges of a step in each of the orders [k, n]: every group is a ring in mesh order, as fast
    as the slowest hop of the slowest group.

        sum over groups of axes of  bytes / min over their hops of bandwidth [device, device]

    `exchanged` holds the bytes that a device sends over each group of axes in a step.
    """
    grid = orders.reshape(len(orders), *mesh.sizes.values())
    seconds = np.zeros(len(orders))
    for mesh_axes, num_bytes in exchanged.items():
        places = [1 + axes.MESH_AXES.index(axis) for axis in mesh_axes]
        size = math.prod(mesh.sizes[axis] for axis in mesh_axes)
        if size == 1 or not num_bytes:
            continue
        groups = np.moveaxis(grid, places, range(-len(places), 0)).reshape(len(orders), -1, size)
        hops = bandwidth[groups, np.roll(groups, -1, axis=-1)]
        seconds += num_bytes / hops.min(axis=(1, 2))
    return seconds


def order_for_links(
    mesh: MeshConfig, bandwidth: np.ndarray, exchanged: Mapping[tuple[str, ...], float]
) -> tuple[int, ...]:
    """The order of least `order_seconds`; `()` where none is faster than the devices' own.

    Exact for up to 9 devices. Else the best of all nestings of the axes, over the devices as they stand and over groups
    joined by fast links, improved by swaps up to 64 devices.

    Raises:
      ConfigurationError: `bandwidth` [n, n] is not of this mesh's devices, or some have no link.
    """
    number = mesh.num_devices
    is_square = bandwidth.shape == (number, number)
    if not is_square or (bandwidth[~np.eye(number, dtype=bool)] <= 0).any():
        raise ConfigurationError(
            "device order",
            found=f"bandwidths {bandwidth.shape} of {number} devices"
            if not is_square
            else "devices that no link joins",
            expected="bytes a second between every two devices of the mesh",
            remedy="measure or describe every link",
        )
    default = np.arange(number)

    def seconds(orders: np.ndarray) -> np.ndarray:
        return order_seconds(mesh, orders, bandwidth, exchanged)

    if number <= EXACT_RANKS:
        orders = np.array(list(itertools.permutations(range(number))))
    else:
        starts = [np.array(nested_order(mesh, nesting) or default) for nesting in nestings(mesh)]
        grouped = np.array(_grouped(mesh, bandwidth))
        orders = np.array([*starts, *(grouped[start] for start in starts)])
        best = orders[int(seconds(orders).argmin())]
        orders = (_swapped(best, seconds) if number <= _MOST_SWAPPED else best)[None]
    found = seconds(orders)
    best, least = orders[int(found.argmin())], float(found.min())
    is_faster = least < float(seconds(default[None])[0]) * (1 - _SAME)
    return tuple(int(device) for device in best) if is_faster else ()


def _grouped(mesh: MeshConfig, bandwidth: np.ndarray) -> list[int]:
    """Devices so that each run of the innermost axes' size is joined by fast links, then runs of runs."""
    blocks = [[device] for device in range(mesh.num_devices)]
    for axis in reversed(axes.MESH_AXES):
        size = mesh.sizes[axis]
        if 1 < size <= len(blocks):
            # Between blocks the slowest link of any two of their devices counts.
            links = np.array([[bandwidth[np.ix_(one, other)].min() for other in blocks] for one in blocks])
            groups = hop_aware_groups(links, size) if len(blocks) > size else [list(range(size))]
            blocks = [[device for index in group for device in blocks[index]] for group in groups]
    return [device for block in blocks for device in block]


def _swapped(order: np.ndarray, seconds) -> np.ndarray:
    """Swap two devices while that helps."""
    pairs = list(itertools.combinations(range(len(order)), 2))
    least = float(seconds(order[None])[0])
    while True:
        candidates = np.repeat(order[None], len(pairs), axis=0)
        for row, (one, other) in enumerate(pairs):
            candidates[row, [one, other]] = candidates[row, [other, one]]
        found = seconds(candidates)
        if not float(found.min()) < least * (1 - _SAME):
            return order
        order, least = candidates[int(found.argmin())], float(found.min())
