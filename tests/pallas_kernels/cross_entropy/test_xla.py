"""Chunked cross-entropy and greedy tokens against the whole logits; memory; a vocabulary split over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.cross_entropy.api import cross_entropy, greedy_tokens

TOKENS, WIDTH, VOCABULARY = 22, 5, 12


def arguments(weights=None):
    """Ragged tokens, some of weight 0 whose targets lie outside the vocabulary."""
    random = np.random.default_rng(0)
    weights = (random.uniform(size=TOKENS) < 0.7).astype(float) if weights is None else weights
    targets = np.where(
        weights == 0, random.choice([-100, VOCABULARY, 3], TOKENS), random.integers(0, VOCABULARY, TOKENS)
    )
    hidden, head = random.normal(size=(TOKENS, WIDTH)), 3 * random.normal(size=(WIDTH, VOCABULARY))
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets, jnp.int32), jnp.asarray(weights)


def loss_and_gradients(factor, hidden, head, targets, weights, **settings):
    def scaled(hidden, head):
        return factor * cross_entropy(hidden, head, targets, weights, **settings)

    return jax.value_and_grad(scaled, argnums=(0, 1))(hidden, head)


whole_logits = jax.jit(partial(loss_and_gradients, chunk_tokens=1, implementation="reference"))


def assert_close(actual, expected, tolerance=1e-13):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_value_and_gradients_equal_the_whole_logits_for_any_cotangent(chunk_tokens):
    with jax.enable_x64(True):
        arrays = arguments()
        chunked = jax.jit(partial(loss_and_gradients, chunk_tokens=chunk_tokens))
        for factor in (1.0, 3.0, 0.25):
            assert_close(chunked(factor, *arrays), whole_logits(factor, *arrays))


def test_a_head_that_is_not_trained_gets_no_gradient_and_no_wide_copy():
    with jax.enable_x64(True):
        arrays = arguments()
        frozen = partial(loss_and_gradients, 1.0, chunk_tokens=4, is_head_trained=False)
        loss, (to_hidden, to_head) = jax.jit(frozen)(*arrays)
        expected, (to_hidden_expected, _) = whole_logits(1.0, *arrays)
    assert_close((loss, to_hidden), (expected, to_hidden_expected))
    assert not np.any(to_head)
    hidden, head, targets, weights = arrays
    narrow = (hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), targets, weights.astype(jnp.float32))
    wide_head = f"f32[{WIDTH},{VOCABULARY}]"
    trained = partial(loss_and_gradients, 1.0, chunk_tokens=4)
    assert wide_head in str(jax.make_jaxpr(trained)(*narrow))
    assert wide_head not in str(jax.make_jaxpr(partial(trained, is_head_trained=False))(*narrow))


def test_tokens_of_weight_zero_and_their_targets_do_not_count():
    with jax.enable_x64(True):
        hidden, head, targets, weights = arguments()
        kept = np.flatnonzero(np.asarray(weights))
        run = jax.jit(partial(loss_and_gradients, 1.0, chunk_tokens=6))
        loss, (to_hidden, to_head) = run(hidden, head, targets, weights)
        alone, (to_hidden_alone, to_head_alone) = run(hidden[kept], head, targets[kept], weights[kept])
    assert 0 < len(kept) < TOKENS
    assert_close((loss, to_hidden[kept], to_head), (alone, to_hidden_alone, to_head_alone))
    assert np.all(np.delete(np.asarray(to_hidden), kept, axis=0) == 0)


@pytest.mark.parametrize("counted", [[], [0, 9, 21], range(TOKENS)])
def test_chunks_without_a_token_that_counts_are_left_out(counted):
    weights = np.zeros(TOKENS)
    weights[list(counted)] = 1.0
    with jax.enable_x64(True):
        hidden, head, targets, weights = arguments(weights)
        # Were they reached, numbers that are none would show it, forward and backward.
        spoilt = jnp.where((weights == 0)[:, None], jnp.nan, hidden)
        run = jax.jit(partial(loss_and_gradients, 1.0, chunk_tokens=3 if len(counted) == 3 else 1))
        loss, (to_hidden, to_head) = run(spoilt, head, targets, weights)
        assert_close((loss, to_hidden, to_head), whole_logits(1.0, hidden, head, targets, weights))


def test_no_supervised_token_gives_zero_loss_and_zero_gradients():
    run = jax.jit(partial(loss_and_gradients, 1.0, chunk_tokens=6))
    loss, (to_hidden, to_head) = run(*arguments(np.zeros(TOKENS)))
    assert all(np.all(np.asarray(zero) == 0) for zero in (loss, to_hidden, to_head))


def test_large_logits_stay_finite():
    hidden, head, targets, weights = arguments()
    large = jax.jit(partial(loss_and_gradients, 1.0, chunk_tokens=6))(1e4 * hidden, head, targets, weights)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(large))


def test_bfloat16_sums_the_head_gradient_over_chunks_in_float32():
    random = np.random.default_rng(1)
    hidden = jnp.asarray(1 + 0.1 * random.normal(size=(512, 8)), jnp.bfloat16)
    head = jnp.asarray(random.normal(size=(8, 16)), jnp.bfloat16)
    targets, weights = jnp.asarray(random.integers(0, 16, 512), jnp.int32), jnp.ones(512)
    loss, (_, to_head) = jax.jit(partial(loss_and_gradients, chunk_tokens=1))(1.0, hidden, head, targets, weights)
    wide = (hidden.astype(jnp.float32), head.astype(jnp.float32))
    expected, (_, to_head_wide) = whole_logits(1.0, *wide, targets, weights)
    assert loss.dtype == jnp.float32
    assert_close(loss, expected, 1e-5)
    # bfloat16 keeps 2^-9; sums in bfloat16 over 512 chunks would be off by several times this.
    assert_close(to_head.astype(jnp.float32), to_head_wide, 2**-8)


def test_neither_pass_holds_all_logits():
    tokens, vocabulary, chunk = 2048, 4096, 64
    shapes = (
        jax.ShapeDtypeStruct((tokens, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    compiled = jax.jit(partial(loss_and_gradients, 1.0, chunk_tokens=chunk)).lower(*shapes).compile()
    assert f"[{tokens},{vocabulary}]" not in compiled.as_text()
    assert f"[{chunk},{vocabulary}]" in compiled.as_text()
    whole_logits_bytes = 4 * tokens * vocabulary
    assert compiled.memory_analysis().temp_size_in_bytes < whole_logits_bytes / 4


def split_over_devices(function, num_outputs_split):
    """`function(hidden, head, ...)` with tokens split over two devices and the vocabulary over two others."""
    mesh = jax.make_mesh((2, 2), ("rows", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    outputs = (P(), (P("rows"), P(None, "tensor"))) if num_outputs_split == 3 else P("rows")
    inputs = (P("rows"), P(None, "tensor"), P("rows"), P("rows"))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=True))


@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_a_split_vocabulary_equals_one_device(chunk_tokens):
    def local(hidden, head, targets, weights):
        def scaled(hidden, head):
            loss = cross_entropy(hidden, head, targets, weights, chunk_tokens=chunk_tokens, vocabulary_axis="tensor")
            return 3 * jax.lax.psum(loss, "rows")

        return jax.value_and_grad(scaled, argnums=(0, 1))(hidden, head)

    with jax.enable_x64(True):
        arrays = arguments()
        assert_close(split_over_devices(local, 3)(*arrays), whole_logits(3.0, *arrays))


def test_greedy_tokens_are_the_lowest_best_whole_and_split():
    hidden, head, targets, weights = arguments()
    hidden = jnp.round(hidden).at[0].set(0)
    # Columns of the second half repeat those of the first, so every token has ties within and across devices.
    head = jnp.round(head)
    head = jnp.concatenate([head[:, :3], head[:, :3], head[:, :3], head[:, :3]], axis=1)
    expected = np.argmax(np.asarray(hidden) @ np.asarray(head), axis=1)
    everywhere = jnp.ones(TOKENS, bool)
    whole = greedy_tokens(hidden, head, everywhere, chunk_tokens=4)
    np.testing.assert_array_equal(whole, expected)
    by_definition = greedy_tokens(hidden, head, everywhere, chunk_tokens=4, implementation="reference")
    np.testing.assert_array_equal(by_definition, expected)

    def local(hidden, head, targets, weights):
        return greedy_tokens(hidden, head, targets == targets, chunk_tokens=4, vocabulary_axis="tensor")

    np.testing.assert_array_equal(split_over_devices(local, 1)(hidden, head, targets, weights), expected)
    reverse = head[:, ::-1].at[:, -1].add(100 * jnp.ones(WIDTH))
    best = np.argmax(np.asarray(hidden) @ np.asarray(reverse), axis=1)
    assert np.any(best >= VOCABULARY // 2)
    np.testing.assert_array_equal(split_over_devices(local, 1)(hidden, reverse, targets, weights), best)


@pytest.mark.parametrize("wanted", [[], [3], [0, 5, 8, 13, 21]])
def test_greedy_tokens_are_found_where_they_are_wanted_alone(wanted):
    hidden, head, targets, _ = arguments()
    is_wanted = jnp.isin(jnp.arange(TOKENS), jnp.asarray(wanted, jnp.int32))
    expected = np.where(is_wanted, np.argmax(np.asarray(hidden) @ np.asarray(head), axis=1), 0)
    np.testing.assert_array_equal(greedy_tokens(hidden, head, is_wanted, chunk_tokens=2), expected)
    whole = greedy_tokens(hidden, head, is_wanted, chunk_tokens=2, implementation="reference")
    np.testing.assert_array_equal(whole, expected)

    def local(hidden, head, targets, weights):
        return greedy_tokens(hidden, head, weights > 0, chunk_tokens=2, vocabulary_axis="tensor")

    split = split_over_devices(local, 1)(hidden, head, targets, is_wanted.astype(hidden.dtype))
    np.testing.assert_array_equal(split, expected)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        cross_entropy(*arguments(), chunk_tokens=0)
    with pytest.raises(ValueError, match="whole vocabulary"):
        cross_entropy(*arguments(), chunk_tokens=4, vocabulary_axis="tensor", implementation="reference")
