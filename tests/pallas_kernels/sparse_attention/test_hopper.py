"""The Hopper kernels of sparse attention: simulated on a CPU, compiled without a GPU, and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launcher
from pallas_kernels.sparse_attention import hopper, reference
from pallas_kernels.sparse_attention.api import indexer_loss, select_keys, selected_attention

SCALE = 0.07


def draw_selection(random, queries, keys, num_selected):
    """Indices [1, Q, N]: of one query none, of one all that fit, of the others some, at any place, none from behind."""
    indices = np.full((1, queries, num_selected), -1, np.int32)
    for query in range(queries):
        seen = keys - queries + query + 1
        most = min(seen, num_selected)
        count = (0, most)[query] if query < 2 else int(random.integers(1, most + 1))
        room = num_selected if query % 2 else max(count, 1)
        indices[0, query, np.sort(random.permutation(room)[:count])] = random.permutation(seen)[:count]
    return indices


def draw(queries, keys, num_selected, num_heads, value_width=512, index_heads=16, seed=0):
    """(query, latent, indices), gradient of the output, and the indexer's (query, key, head weight)."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

    width = value_width + 64
    indices = jnp.asarray(draw_selection(random, queries, keys, num_selected))
    attention = normal(1, queries, num_heads, width), normal(1, keys, width), indices
    index = normal(1, queries, index_heads, 128), normal(1, keys, 128), normal(1, queries, index_heads)
    return attention, normal(1, queries, num_heads, value_width), index


def attend(implementation, query, latent, indices, gradient, *, is_deterministic=False):
    """Output, logarithms of sums, and gradients of query and latent."""

    def run(query, latent):
        return selected_attention(
            query,
            latent,
            indices,
            scale=SCALE,
            value_width=gradient.shape[-1],
            is_deterministic=is_deterministic,
            implementation=implementation,
        )

    result, pull = jax.vjp(run, query, latent)
    return *result, *pull(result._replace(mixed=gradient, log_sums=jnp.zeros_like(result.log_sums)))


def wide(arrays):
    return [array.astype(jnp.float64) if array.dtype == jnp.bfloat16 else array for array in arrays]


def error(found, expected):
    found, expected = (np.asarray(array, np.float64) for array in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def assert_near_definition(found, arrays, gradient):
    with jax.enable_x64(True):
        expected = jax.jit(partial(attend, "reference"))(*wide(arrays), *wide([gradient]))
    assert not np.asarray(found[0], np.float32)[0, 0].any()
    assert error(found[1], expected[1]) < 1e-5
    errors = [error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < 6e-3, errors


def test_simulated_attention_over_selected_keys_and_its_gradients_are_near_float64():
    arrays, gradient, _ = draw(3, 190, 130, 72, value_width=128)
    with launcher.simulated():
        found = jax.jit(partial(attend, "pallas"))(*arrays, gradient)
    assert_near_definition(found, arrays, gradient)


def with_own_scales(random, numbers):
    """Small integers [..., K], the first replaced by 7, times a power of two for each [...].

    Of 8-bit floats each then has a scale of its own, again a power of two: sums stay exact, and one wrong scale shows.
    """
    numbers = np.concatenate([np.full_like(numbers[..., :1], 7), numbers[..., 1:]], axis=-1)
    return numbers * 2.0 ** random.integers(-2, 3, (*numbers.shape[:-1], 1))


@pytest.mark.parametrize(("score_dtype", "width"), [("own", 64), ("float8_e4m3fn", 128)])
def test_simulated_selection_is_the_plain_one(score_dtype, width):
    random = np.random.default_rng(1)
    # Small integers: products are exact, many scores are equal.
    query = random.integers(-2, 3, (2, 70, 8, width))
    key = random.integers(-2, 3, (2, 70, width))
    if score_dtype != "own":
        query, key = with_own_scales(random, query), with_own_scales(random, key)
    query, key = jnp.asarray(query, jnp.bfloat16), jnp.asarray(key, jnp.bfloat16)
    weight = jnp.asarray(random.integers(-1, 3, (2, 70, 8)), jnp.float32)
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 2, 3]], [2, 66, 2], axis=1), jnp.int32)
    positions = jnp.arange(66, 70, dtype=jnp.int32)

    def run(implementation, query, weight):
        options = {"top_k": 64, "score_dtype": score_dtype, "implementation": implementation}
        return select_keys(query, key, weight, segments, positions, **options)

    query, weight = query[:, 66:], weight[:, 66:]
    with launcher.simulated():
        found = jax.jit(partial(run, "pallas"))(query, weight)
    np.testing.assert_array_equal(found, jax.jit(partial(run, "reference"))(query, weight))


def loss_by(function, index, gradient):
    losses, pull = jax.vjp(function, *index)
    return losses, *pull(gradient.astype(losses.dtype))


@pytest.mark.parametrize("mode", ["selected", "selected, in integers", "all keys"])
def test_the_interpreted_loss_and_its_gradients_are_near_float64(monkeypatch, mode):
    (query, latent, indices), _, index = draw(5, 90, 64, 8, value_width=128)
    random = np.random.default_rng(3)
    gradient = jnp.asarray(random.normal(size=(1, 5)), jnp.float32)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], [3, 86, 1], axis=1), jnp.int32)
    indices = None if mode == "all keys" else jnp.where(indices < 3, -1, indices).at[:, 4].set(-1)
    # The target as the definition has it: what comes after it is tested here.
    monkeypatch.setattr(hopper, "summed_probabilities", _probabilities)
    monkeypatch.setattr(hopper, "selected_attention", lambda *_: (None, jnp.zeros((1, 2, 8))))
    monkeypatch.setattr(hopper, "DENSE_SCORES", 2 * 128)
    monkeypatch.setattr(hopper, "APART", 7)

    def run(implementation, query, latent, *index):
        options = {"scale": SCALE, "is_deterministic": mode.endswith("integers"), "implementation": implementation}
        positions = jnp.asarray([2, 86, 87, 88, 89], jnp.int32)
        sums = None if indices is None else jnp.zeros(query.shape[:3])
        return indexer_loss(*index, query, latent[:, :, None], segments, indices, positions, sums, **options)

    with launcher.simulated():
        found = loss_by(partial(run, "pallas", query, latent), index, gradient)
    with jax.enable_x64(True):
        arrays = wide([query, latent])
        expected = loss_by(partial(run, "reference", *arrays), wide(index), gradient)
    assert not np.asarray(found[0])[0, 4]
    errors = [error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < 6e-3, errors


def _probabilities(query, latent, indices, sums, *, scale):
    mask = reference.selection_mask(indices[None], latent.shape[0])
    probabilities = reference.probabilities(query[None], latent[None, :, None], mask, scale).sum(axis=(1, 2))[0]
    return jnp.take_along_axis(probabilities, jnp.maximum(indices, 0), axis=1)[None]


def test_what_kernels_cannot_take_is_said():
    (query, latent, indices), _, index = draw(2, 90, 64, 8)
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        selected_attention(query, latent, indices, scale=1.0, value_width=512, implementation="pallas")
    with launcher.simulated():
        assert hopper.reason_against_attention(query, latent, 512) is None
        assert "64 more than" in hopper.reason_against_attention(query, latent, 448)
        assert "multiple of 8 heads" in hopper.reason_against_attention(query[:, :, :7], latent, 512)
        assert "bfloat16" in hopper.reason_against_attention(query.astype(jnp.float32), latent, 512)
        assert hopper.reason_against_selection(*index[:2], 2048) is None
        assert "power of two" in hopper.reason_against_selection(*index[:2], 2000)
        assert "width 128" in hopper.reason_against_selection(*(a[..., :64] for a in index[:2]), 2048, "float8_e4m3fn")
        assert "index heads" in hopper.reason_against_selection(index[0][:, :, :7], index[1], 2048)
        assert "at least 16" in hopper.reason_against_loss(index[0][:, :, :8], index[1], query, latent)


@pytest.mark.slow
def test_the_sparse_layer_compiles_for_a_gpu_with_heads_split_over_devices(described_gpus):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(described_gpus), ("tensor",))
    tokens, heads, index_heads = 4096, 192, 32

    def step(query, latent, index_query, index_key, weight, segments):
        def run(query, latent, index_query, index_key, weight):
            index, options = (index_query, index_key, weight), {"implementation": "pallas"}
            indices = select_keys(*index, segments, top_k=2048, **options)
            options["scale"] = SCALE
            mixed, sums = selected_attention(query, latent, indices, value_width=512, **options)
            losses = indexer_loss(
                *index, query, latent[:, :, None], segments, indices, None, sums, head_axis="tensor", **options
            )
            return jax.lax.psum(mixed.astype(jnp.float32).sum(), "tensor") + losses.sum()

        return jax.grad(run, argnums=range(5))(query, latent, index_query, index_key, weight)

    split, own = PartitionSpec(None, None, "tensor"), PartitionSpec()
    shapes = [(1, tokens, heads, 576), (1, tokens, 576), (1, tokens, index_heads, 128), (1, tokens, 128)]
    shapes += [(1, tokens, index_heads), (1, tokens)]
    dtypes, specs = [jnp.bfloat16] * 4 + [jnp.float32, jnp.int32], [split, *[own] * 5]
    step = jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=(split, *[own] * 4), check_vma=True)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(step).lower(*arrays).compile()
    text = compiled.as_text()
    for kernel in ("index_scores", "selected_attention", "selected_attention_backward", "summed_probabilities"):
        assert f"{kernel}_mosaic_gpu" in text
    # Nothing as large as the scores of all queries for every head, nor as their gathered keys.
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * 2048 * 128 * 2


def fill_free_memory_with_nan():
    """What a kernel leaves unwritten is then seen."""
    jax.block_until_ready(jnp.full((2**29,), jnp.nan))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("num_heads", [8, 64, 96, 128])
def test_attention_over_selected_keys_and_its_gradients_are_near_float64_on_a_gpu(num_heads):
    arrays, gradient, _ = draw(200, 3000 if num_heads == 64 else 300, 2048, num_heads)
    step = jax.jit(partial(attend, "pallas")).lower(*arrays, gradient).compile()
    fill_free_memory_with_nan()
    assert_near_definition(step(*arrays, gradient), arrays, gradient)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
def test_gradients_summed_in_integers_are_bitwise_repeatable_on_a_gpu():
    arrays, gradient, _ = draw(300, 300, 256, 96)
    step = jax.jit(partial(attend, "pallas", is_deterministic=True)).lower(*arrays, gradient).compile()
    fill_free_memory_with_nan()
    found, again = (step(*arrays, gradient) for _ in range(2))
    for first, second in zip(found, again, strict=True):
        np.testing.assert_array_equal(first, second)
    assert_near_definition(found, arrays, gradient)


def draw_segments(lengths, padding):
    return np.concatenate([np.repeat(np.arange(1, len(lengths) + 1), lengths), np.zeros(padding)]).astype(np.int32)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize(
    ("score_dtype", "index_heads", "is_exact"),
    [
        ("own", 8, True),
        ("own", 32, False),
        ("own", 128, False),
        ("float8_e4m3fn", 8, False),
        ("float8_e4m3fn", 64, True),
        ("float8_e4m3fn", 128, False),
    ],
)
def test_selected_keys_on_a_gpu_are_the_best_of_the_own_document(index_heads, is_exact, score_dtype):
    # Documents of every length around the number of keys.
    segments = draw_segments([2047, 2048, 2049, 1, 2, 2100, 127, 128, 129], 33)[None]
    given_segments = jnp.asarray(segments)
    random, tokens = np.random.default_rng(5), segments.shape[1]
    kind = (lambda *s: random.integers(-2, 3, s)) if is_exact else (lambda *s: random.normal(size=s))
    index = [kind(1, tokens, *shape) for shape in ((index_heads, 128), (128,), (index_heads,))]
    if is_exact and score_dtype != "own":
        index[:2] = [with_own_scales(random, array) for array in index[:2]]
    index = [jnp.asarray(array, jnp.bfloat16) for array in index]
    positions = jnp.asarray(np.concatenate([np.arange(0, 60), np.arange(2000, tokens, 40)]), jnp.int32)
    query, weight = index[0][:, positions], index[2][:, positions]

    def run(implementation):
        return jax.jit(
            lambda *a: select_keys(
                *a, given_segments, positions, top_k=2048, score_dtype=score_dtype, implementation=implementation
            )
        )(query, index[1], weight)

    with jax.default_matmul_precision("highest"):
        found, expected = np.asarray(run("pallas"))[0], np.asarray(run("xla"))[0]
    own, last = segments[0, positions], np.asarray(positions)
    for row in range(len(found)):
        keys = found[row][found[row] >= 0]
        assert (np.diff(keys) > 0).all() and (segments[0, keys] == own[row]).all() and (keys <= last[row]).all()
        assert len(keys) == (expected[row] >= 0).sum()
        other = np.setxor1d(keys, expected[row][expected[row] >= 0])
        if is_exact:
            # Equal but for the rounding of sums in another order.
            scores = exact_scores(query[0, row], index[1][0, other], weight[0, row])
            assert len(other) == 0 or np.ptp(scores) <= 1e-6 * np.abs(scores).max()
        # Of many thousand scores neighbours differ by less than float32's rounding of sums in another order.
        # Tensor cores sum products of 8-bit floats with fewer digits.
        assert len(other) <= 2 * (0.001 if is_exact or score_dtype == "own" else 0.01) * len(keys)


def exact_scores(query, keys, weight):
    """Of one query, in float64."""
    query, keys, weight = (np.asarray(array, np.float64) for array in (query, keys, weight))
    return weight @ np.maximum(query @ keys.T, 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("score_dtype", ["own", "float8_e4m3fn"])
def test_of_keys_above_the_threshold_by_more_than_rounding_nearly_all_are_selected_on_a_gpu(score_dtype, is_even):
    random, queries, keys, top_k = np.random.default_rng(7), 128, 32768, 2048
    query, key, weight = (random.normal(size=shape) for shape in ((queries, 64, 128), (keys, 128), (queries, 64)))
    if not is_even:
        # Channels and keys of very different size, and a direction that all keys share.
        query, key = query * np.exp(random.normal(size=128)), key * np.exp(0.5 * random.normal(size=(keys, 1)))
        key += 2 * random.normal(size=128)
    given = [jnp.asarray(array[None], jnp.bfloat16) for array in (query, key)]
    given_weight, segments = jnp.asarray(weight[None], jnp.float32), jnp.ones((1, keys), jnp.int32)
    positions = jnp.arange(keys - queries, keys, dtype=jnp.int32)
    select = partial(select_keys, top_k=top_k, score_dtype=score_dtype, implementation="pallas")
    selected = np.asarray(jax.jit(select)(*given, given_weight, segments, positions))[0]
    rounded = given if score_dtype == "own" else [reference.rounded_to_float8(array) for array in given]

    with jax.enable_x64(True):

        @jax.jit
        def scores(query, key, weight):
            return jax.lax.map(lambda one: one[1] @ jnp.maximum(one[0] @ key.T, 0), (query, weight))

        exact = np.asarray(scores(*map(jnp.asarray, (query, key, weight))))
        of_rounded = np.asarray(scores(*[array[0].astype(jnp.float64) for array in rounded], jnp.asarray(weight)))
    is_seen = np.arange(keys)[None] <= np.asarray(positions)[:, None]
    exact = np.where(is_seen, exact, -np.inf)
    rounding = np.sqrt(np.mean((of_rounded - exact)[is_seen] ** 2))
    threshold = np.sort(exact, axis=1)[:, -top_k][:, None]
    is_above = exact > threshold + 4 * rounding
    is_selected = np.zeros(exact.shape, bool)
    np.put_along_axis(is_selected, selected, True, axis=1)
    recall = (is_above & is_selected).sum() / is_above.sum()
    print(f"recall above {recall:.6f}, of all {(is_selected & (exact >= threshold)).sum() / top_k / queries:.4f}")
    assert is_above.sum() > 0.5 * top_k * queries
    assert recall > 0.999


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
@pytest.mark.parametrize(
    ("num_heads", "index_heads", "mode"),
    [
        (64, 64, "selected"),
        (8, 16, "selected"),
        (96, 32, "selected, in integers"),
        (96, 32, "all keys"),
        (8, 64, "all keys"),
    ],
)
def test_the_loss_and_its_gradients_are_near_float64_on_a_gpu(num_heads, index_heads, mode):
    (query, latent, indices), _, index = draw(200, 2500, 2048, num_heads, index_heads=index_heads)
    gradient = jnp.asarray(np.random.default_rng(6).normal(size=(1, 200)), jnp.float32)
    segments, positions = jnp.ones((1, 2500), jnp.int32), jnp.arange(2300, 2500, dtype=jnp.int32)
    indices = None if mode == "all keys" else indices

    def run(implementation, query, latent, *index):
        options = {"scale": SCALE, "is_deterministic": mode.endswith("integers"), "implementation": implementation}
        return indexer_loss(*index, query, latent[:, :, None], segments, indices, positions, **options)

    def step(implementation, heads, index):
        return loss_by(partial(run, implementation, *heads), index, gradient)

    compiled = jax.jit(partial(step, "pallas")).lower((query, latent), index).compile()
    fill_free_memory_with_nan()
    found = compiled((query, latent), index)
    if mode.endswith("integers"):
        for one, other in zip(found, compiled((query, latent), index), strict=True):
            np.testing.assert_array_equal(one, other)
    with jax.enable_x64(True):
        expected = jax.jit(partial(step, "reference"))(wide((query, latent)), wide(index))
    assert mode == "all keys" or not np.asarray(found[0])[0, 0]
    errors = [error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < 8e-3, errors
