"""Positions of a row split over the context axis: who holds which, and what the devices give each other.

A row of S positions is cut into 2 C chunks of equal length for the C devices of the axis; device i holds chunks i and
2 C - 1 - i, in this order. So every device has as many pairs of a query and an earlier key as any other. Batches are
brought into this order on the host (`split_positions`); inside `shard_map` a device sees its two chunks as one row.

On a context axis of size 1 nothing of this is in the program.
"""

from collections.abc import Callable

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
    every device then applies in row order; the gradients take one of transitions and gradients, applied in the reverse
    order. Only where rows are split.
    """
    goes_on = continues[:, :, None, None, None]
    return jnp.where(goes_on, _passed_on(jnp.where(goes_on, transition, 0), state), 0)


@jax.custom_vjp
def _passed_on(transition: jax.Array, state: jax.Array) -> jax.Array:
    """What enters this device's chunks where all go on:   entering_0 = 0,   entering_{c+1} = T_c entering_c + state_c.

    Differentiated by JAX, the loop would keep what enters every chunk of the row, and add up gradients of all of them.
    """

    def step(entering: jax.Array, transition: jax.Array, addition: jax.Array) -> jax.Array:
        return jnp.einsum("bhkl,bhlv->bhkv", transition, entering, precision=lax.Precision.HIGHEST) + addition

    return _before_own_chunks(step, transition, state, is_reverse=False)


def _passed_on_forward(transition: jax.Array, state: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    entering = _passed_on(transition, state)
    return entering, (transition, entering)


def _passed_on_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    transition, entering = saved

    def step(of_next: jax.Array, transition: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.einsum("bhkl,bhkv->bhlv", transition, of_next, precision=lax.Precision.HIGHEST) + own

    of_state = _before_own_chunks(step, transition, gradient, is_reverse=True)
    of_transition = jnp.einsum("bnhkv,bnhlv->bnhkl", of_state, entering, precision=lax.Precision.HIGHEST)
    return of_transition, of_state


_passed_on.defvjp(_passed_on_forward, _passed_on_backward)


def _before_own_chunks(
    step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    transition: jax.Array,
    addition: jax.Array,
    *,
    is_reverse: bool,
) -> jax.Array:
    """From zeros, `step(value, transition, addition)` of all chunks of the row in order, or from its end: the values
    [b, 2, ...] that it comes to at this device's chunks."""
    num_chunks, own = 2 * lax.axis_size(CONTEXT), _held_chunks()
    held = lax.all_gather(jnp.concatenate([transition, addition], axis=-1), CONTEXT)

    def pass_chunk(carry: tuple[jax.Array, jax.Array], chunk: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        value, taken = carry
        taken = jnp.where((own == chunk)[None, :, None, None, None], value[:, None], taken)
        # The second half of a row lies on the devices in reverse order.
        place = jnp.minimum(chunk, num_chunks - 1 - chunk), 2 * chunk // num_chunks
        of_device = lax.dynamic_index_in_dim(held, place[0], keepdims=False)
        of_chunk = lax.dynamic_index_in_dim(of_device, place[1], axis=1, keepdims=False)
        return (step(value, *jnp.split(of_chunk, [transition.shape[-1]], axis=-1)), taken), None

    nothing = (jnp.zeros_like(addition[:, 0]), jnp.zeros_like(addition))
    nothing = jax.tree.map(lambda leaf: varying_like(leaf, held), nothing)
    (_, taken), _ = lax.scan(pass_chunk, nothing, jnp.arange(num_chunks, dtype=jnp.int32), reverse=is_reverse)
    return taken


def _held_chunks() -> jax.Array:
    """Numbers of this device's two chunks, int32."""
    here = lax.axis_index(CONTEXT)
    return jnp.stack([here, 2 * lax.axis_size(CONTEXT) - 1 - here])
