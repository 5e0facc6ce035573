"""What tests of several folders share."""

import jax.numpy as jnp
import pytest
from jax import lax


@pytest.fixture
def ragged_on_cpu(monkeypatch):
    """`lax.ragged_all_to_all` by the words of its documentation: XLA has none for a CPU.

    Where sender and receiver do not agree on a size the slice is poisoned.
    """

    def move(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        operands, offsets, sizes, targets = (
            lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)
        )
        here, place = lax.axis_index(axis_name), jnp.arange(output.shape[0], dtype=jnp.int32)
        offset, size, target = (array[:, here, None] for array in (offsets, sizes, targets))
        is_sent = (place[None, :] >= target) & (place[None, :] < target + size)
        is_right = (size == recv_sizes[:, None]) & (offset + size <= len(operand)) & (target + size <= len(output))
        sender = jnp.argmax(is_sent, axis=0)
        source = jnp.take_along_axis(offset + place[None, :] - target, sender[None, :], axis=0)[0]
        taken = operands[sender, jnp.clip(source, 0, len(operand) - 1)]
        poison = jnp.asarray(jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else -(10**6), output.dtype)
        widen = lambda flags: flags.reshape(-1, *(1,) * (output.ndim - 1))  # noqa: E731
        output = jnp.where(widen(jnp.any(is_sent, axis=0)), taken, output)
        output = jnp.where(jnp.all(is_right), output, poison)
        return output

    monkeypatch.setattr(lax, "ragged_all_to_all", move)
