"""Positions of a row split over the context axis: who holds which, and what the devices give each other.

A row of S positions is cut into 2 C chunks of equal length for the C devices of the axis; device i holds chunks i and
2 C - 1 - i, in this order. So every device has as many pairs of a query and an earlier key as any other. Batches are
brought into this order on the host (`split_positions`); inside `shard_map` a device sees its two chunks as one row.

On a context axis of size 1 nothing of this is in the program.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mmjax.axes import CONTEXT, PIPE
from mmjax.parallel.fsdp import gather, varying_like


def is_split() -> bool:
    """Whether a device holds only part of its rows' positions."""
    return lax.axis_size(CONTEXT) > 1


def split_positions(array: np.ndarray, num_devices: int) -> np.ndarray:
    """`array` [B, S, ...] in row order -> in the order in which equal contiguous parts go to the devices.

    Raises:
      ValueError: S cannot be cut into two chunks a device.
    """
    if num_devices == 1:
        return array
    if array.shape[1] % (2 * num_devices):
        raise ValueError(f"{array.shape[1]} positions cannot be cut into {2 * num_devices} equal chunks")
    return array[:, _split_order(array.shape[1], num_devices)]


def join_positions(array: np.ndarray, num_devices: int) -> np.ndarray:
    """`array` [B, S, ...] as the devices hold it -> in row order."""
    return array if num_devices == 1 else array[:, np.argsort(_split_order(array.shape[1], num_devices))]


def _split_order(num_positions: int, num_devices: int) -> np.ndarray:
    chunks = np.arange(num_positions).reshape(2 * num_devices, -1)
    return np.concatenate([chunks[[i, -1 - i]].reshape(-1) for i in range(num_devices)])


def query_positions(num_local: int) -> jax.Array | None:
    """Where in the row this device's positions lie, int32 [s]; None where it holds whole rows."""
    return _own_places(num_local) if is_split() else None


def own_positions(array: jax.Array, axis: int) -> jax.Array:
    """This device's part of `array`, whose `axis` are the positions of a whole row."""
    if not is_split():
        return array
    return jnp.take(array, _own_places(array.shape[axis] // lax.axis_size(CONTEXT)), axis=axis, mode="clip")


def _own_places(num_local: int) -> jax.Array:
    chunk = num_local // 2
    return (_held_chunks()[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]).reshape(num_local)


def gather_positions(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [b, s, ...] of one dtype -> those of the whole rows, [b, S, ...] in row order: one exchange for all.

    The gradient is summed over the devices in at least float32, and each gets that of its own positions.
    """
    if not is_split():
        return arrays
    num_devices, dtype = lax.axis_size(CONTEXT), arrays[0].dtype
    rows, num_local, *_ = arrays[0].shape
    joined = jnp.concatenate([array.reshape(rows, num_local, -1) for array in arrays], axis=-1)
    if jnp.issubdtype(dtype, jnp.floating):
        wide = np.promote_types(dtype, np.float32)
        joined: jax.Array = gather(joined.astype(wide), (CONTEXT,), 1, dtype, wide)
    else:
        joined = lax.all_gather(joined, CONTEXT, axis=1, tiled=True)
    chunks = joined.reshape(rows, num_devices, 2, num_local // 2, -1)
    in_order = jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(rows, num_devices * num_local, -1)
    ends = np.cumsum([array[0, 0].size for array in arrays])
    parts = jnp.split(in_order, ends[:-1], axis=-1)
    return tuple(part.reshape(rows, -1, *array.shape[2:]) for part, array in zip(parts, arrays, strict=True))


def from_chunk_before(array: jax.Array) -> jax.Array:
    """Something of each of this device's two chunks, [b, 2, ...] -> that of the chunks before; zeros before the first.

    Between neighbours; only where rows are split.
    """
    last = lax.axis_size(CONTEXT) - 1
    early, late = array[:, 0], array[:, 1]
    if lax.axis_size(PIPE) > 1:
        # Only the devices of one stage run this, and a permutation waits for those of all stages.
        held, device = lax.all_gather(array, CONTEXT), lax.axis_index(CONTEXT)
        before_early = jnp.where(device > 0, held[jnp.maximum(device - 1, 0), :, 0], 0)
        before_late = held[jnp.minimum(device + 1, last), :, 1]
    else:
        before_early = lax.ppermute(early, CONTEXT, [(i, i + 1) for i in range(last)])
        before_late = lax.ppermute(late, CONTEXT, [(i + 1, i) for i in range(last)])
    # Chunks C - 1 and C lie on the same device.
    before_late = jnp.where(lax.axis_index(CONTEXT) == last, early, before_late)
    return jnp.stack([before_early, before_late], axis=1)


def entering_states(transition: jax.Array, state: jax.Array, continues: jax.Array) -> jax.Array:
    """The states that this device's chunks begin with, when each chunk takes the state S to `transition S + state`.

    `transition` [b, 2, H, K, K], `state` [b, 2, H, K, V]; `continues` [b, 2] says whether a chunk goes on with the
    document of the chunk before: else it begins with zeros. One exchange, of all chunks' transitions and states, which
    every device then applies in row order. Only where rows are split.
    """
    goes_on = continues[:, :, None, None, None]
    own = jnp.concatenate([jnp.where(goes_on, transition, 0), state], axis=-1)
    held = lax.all_gather(own, CONTEXT)
    chunks = jnp.concatenate([held[:, :, 0], held[::-1, :, 1]])
    key_width = transition.shape[-1]

    def step(entering: jax.Array, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        transition, addition = jnp.split(chunk, [key_width], axis=-1)
        moved = jnp.einsum("bhkl,bhlv->bhkv", transition, entering, precision=lax.Precision.HIGHEST)
        return moved + addition, entering

    nothing = varying_like(jnp.zeros_like(state[:, 0]), held)
    _, entering = lax.scan(step, nothing, chunks)
    return jnp.where(goes_on, jnp.moveaxis(entering[_held_chunks()], 0, 1), 0)


def _held_chunks() -> jax.Array:
    """Numbers of this device's two chunks, int32."""
    here = lax.axis_index(CONTEXT)
    return jnp.stack([here, 2 * lax.axis_size(CONTEXT) - 1 - here])
