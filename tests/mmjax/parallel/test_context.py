"""Splitting positions over devices: every device the same work, and exchanges that give what whole rows hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mmjax.config import MeshConfig
from mmjax.parallel import context
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec

ROWS, POSITIONS, DEVICES = 2, 24, 4
SPLIT = spec("batch", "position", None)


def on_devices(function, *arrays, num_outputs: int = 1):
    """`function` of the devices' shares of arrays [B, S, ...] in row order; results in the devices' order."""
    placed = [context.split_positions(array, DEVICES) for array in arrays]
    specs = tuple(PartitionSpec(*SPLIT[:2], *(None,) * (array.ndim - 2)) for array in arrays)
    outputs = (SPLIT,) * num_outputs if num_outputs > 1 else SPLIT
    mesh = make_mesh(MeshConfig(context=DEVICES))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=outputs))(*placed)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_every_device_has_as_many_pairs_of_a_query_and_an_earlier_key(num_devices):
    positions = np.arange(POSITIONS)[None]
    split = context.split_positions(positions, num_devices)
    np.testing.assert_array_equal(context.join_positions(split, num_devices), positions)
    assert len(set(split.reshape(num_devices, -1).sum(axis=1))) == 1


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="20 positions cannot be cut into 8"):
        context.split_positions(np.zeros((1, 20)), 4)


def test_a_device_knows_its_positions_and_gathers_the_others_in_row_order():
    positions = np.broadcast_to(np.arange(POSITIONS, dtype=np.int32)[None, :, None], (ROWS, POSITIONS, 1))
    values = np.random.default_rng(0).normal(size=(ROWS, POSITIONS, 2, 3)).astype(np.float32)

    def compare(positions, values):
        assert values.shape == (ROWS, POSITIONS // DEVICES, 2, 3)
        own = context.query_positions(values.shape[1])
        (row,) = context.gather_positions(positions)
        first, second = context.gather_positions(values, values[..., 0] + 1)
        is_own = (positions[0, :, 0] == own) & (context.own_positions(row, axis=1)[0, :, 0] == own)
        is_row = jnp.all(row[:, :, 0] == jnp.arange(POSITIONS, dtype=jnp.int32)[None])
        is_same = jnp.all(first[:, own] == values) & jnp.all(second[:, own] == values[..., 0] + 1)
        return jnp.broadcast_to((is_own & is_row & is_same)[None, :, None], positions.shape)

    assert np.asarray(on_devices(compare, positions, values)).all()


def test_gradients_of_gathered_values_add_up_over_the_devices_that_used_them():
    values, weights = np.random.default_rng(1).normal(size=(2, ROWS, POSITIONS, 3)).astype(np.float32)
    device = np.repeat(np.arange(DEVICES), 3)
    factor = np.concatenate([device, device[::-1]]).astype(np.float32)[None, :, None] + np.ones(
        (ROWS, 1, 1), np.float32
    )

    def gradient(values, factor):
        weighted = lambda values: jnp.sum(context.gather_positions(values)[0] * weights * factor[:, :1])  # noqa: E731
        return jax.grad(weighted)(values)

    found = context.join_positions(np.asarray(on_devices(gradient, values, factor)), DEVICES)
    # Device i weighs everything by i + 1.
    np.testing.assert_allclose(found, 10 * weights, rtol=1e-6)


def test_states_pass_through_all_chunks_in_row_order():
    """Of 8 chunks the first two, and chunks 2 to 5, hold one document each; the others' documents end with them."""
    random, length = np.random.default_rng(2), POSITIONS // (2 * DEVICES)
    continues = np.array([False, True, False, True, True, True, False, False])
    transition, state = random.normal(size=(ROWS, 8, 1, 2, 2)), random.normal(size=(ROWS, 8, 1, 2, 3))
    expected, entering = [], np.zeros((ROWS, 1, 2, 3))
    for chunk in range(8):
        entering = entering * continues[chunk]
        expected.append(entering)
        entering = transition[:, chunk] @ entering + state[:, chunk]

    def spread(array):
        """[B, 8, ...] -> [B, S, ...] with chunk's number at its first position."""
        return np.repeat(array, length, axis=1)

    def enter(transition, state, continues, numbers):
        first = [array[:, ::length] for array in (transition, state, continues[..., 0], numbers)]
        entering = context.entering_states(*first[:3])
        before = context.from_chunk_before(first[3])
        return entering.reshape(ROWS, 2, 6), before.reshape(ROWS, 2, 1)

    with jax.enable_x64(True):
        numbers = np.broadcast_to(np.arange(1.0, 9.0)[None, :, None], (ROWS, 8, 1))
        flags = np.broadcast_to(continues[None, :, None], (ROWS, 8, 1))
        found, before = on_devices(enter, *map(spread, (transition, state, flags, numbers)), num_outputs=2)
    found = context.join_positions(np.asarray(found), DEVICES)
    np.testing.assert_allclose(found, np.stack(expected, axis=1).reshape(ROWS, 8, 6), rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(context.join_positions(np.asarray(before), DEVICES)[0, :, 0], np.arange(8))
