import itertools

import jax
import numpy as np
import pytest

from mmjax.data.batch import Batch
from mmjax.data.microbatch import BufferPool, DeviceFeed, balanced_order, cost_balance


@pytest.mark.parametrize("count", [1, 2, 3, 8, 12, 24, 35, 64, 128])
def test_contiguous_parts_of_every_size_cost_nearly_the_same(count):
    random = np.random.default_rng(count)
    costs = np.exp(random.normal(10, 0.3, count)).astype(int).tolist()
    order = balanced_order(costs)
    assert sorted(order) == list(range(count)) and order == balanced_order(costs)
    ordered = [costs[row] for row in order]
    for parts in (2, 3, 4, 8):
        if count % parts == 0 and count // parts >= 3:
            assert cost_balance(ordered, parts) <= min(1.05, cost_balance(costs, parts))


def test_rows_without_cost_balance():
    assert balanced_order([0] * 4) and cost_balance([0] * 4, 2) == 1.0


def batch(pool: BufferPool, value: float, rows: int = 2, patches: int = 8) -> Batch:
    shapes = [(rows, 16)] * 6 + [(rows, patches, 48), (rows, patches), (rows, patches, 3), (rows, patches, 3)]
    shapes += [(rows, 2), (rows, 1, 10, 4), (rows, 16)]
    kinds = [np.float32 if number in (2, 6, 11) else np.int32 for number in range(13)]
    return Batch(*(pool.full(shape, kind, value) for shape, kind in zip(shapes, kinds, strict=True)))


def test_memory_is_used_again_only_when_its_last_holder_has_let_go():
    pool = BufferPool()
    first = batch(pool, 1)
    pool.hold(first)
    pool.release(first)
    second = batch(pool, 2)
    assert np.all(first.tokens == 1) and pool.report().num_reused == 0
    assert not any(np.shares_memory(one, other) for one, other in itertools.product(first, second))
    pool.release(first)
    third = batch(pool, 3)
    assert pool.report().num_reused == 13 and np.all(second.patches == 2) and np.all(third.patches == 3)
    assert {array.__array_interface__["data"][0] for array in third} == {
        array.__array_interface__["data"][0] for array in first
    }
    report = pool.report()
    assert report.num_slabs == 26 and report.used_bytes == report.held_bytes and report.idle_share == 0


def test_fragmentation_is_measured_and_bounded():
    pool = BufferPool()
    large = batch(pool, 0, rows=8, patches=1024)
    report = pool.report()
    assert report.asked_bytes == sum(array.nbytes for array in large)
    assert 0 <= report.inner_fragmentation < 0.2
    pool.release(large)
    assert pool.report().idle_share == 1 and pool.report().inner_fragmentation == 0
    for step in range(20):
        pool.release(batch(pool, step, rows=8, patches=1024))
    assert pool.report().held_bytes == report.held_bytes
    # Other sizes are slabs of their own; those of another pool, or of none, are left alone.
    pool.release(batch(BufferPool(), 1))
    pool.release(large)
    assert pool.report().used_bytes == 0


def test_batches_on_the_devices_stay_what_they_were_while_host_memory_is_used_again():
    pool = BufferPool()
    host = (batch(pool, step) for step in range(6))
    feed = DeviceFeed(
        host,
        lambda one: jax.tree.map(lambda array: jax.numpy.array(array, copy=True), one),
        jax.block_until_ready,
        pool,
    )
    placed = [next(feed) for _ in range(6)]
    assert pool.report().num_slabs == 13 and pool.report().num_reused == 65
    for step, one in enumerate(placed):
        assert all(np.all(np.asarray(array) == step) for array in one)
    with pytest.raises(StopIteration):
        next(feed)
