"""Attention by cuDNN's kernels against plain JAX: who is asked, a compiled program, and numbers on a GPU."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import MeshConfig
from mmjax.models.fused_attention import MOST_DOCUMENTS, for_described_gpus, packed_attention, reason_against
from mmjax.parallel.described import described_mesh
from mmjax.planner.topology import read_cluster
from pallas_kernels.sparse_attention.api import attention

SETTINGS = {"scale": 0.1, "query_chunk_tokens": 64}


def draw(segment_ids, heads, key_heads, width, dtype=jnp.bfloat16, value_width=0):
    """(query, key, value, gradient of the result), segments."""
    random = np.random.default_rng(0)
    numbers, widths = (heads, key_heads, key_heads, heads), (width, width, value_width or width, value_width or width)
    shapes = [(*segment_ids.shape, number, each) for number, each in zip(numbers, widths, strict=True)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes], jnp.asarray(segment_ids, jnp.int32)


def step(attend, arrays, segment_ids):
    *inputs, gradient = arrays
    result, transpose = jax.vjp(lambda *inputs: attend(*inputs, segment_ids, None, **SETTINGS), *inputs)
    return result, transpose(gradient)


def rows_of_documents(*rows, length):
    """[len(rows), length]: rows of documents of the given lengths, then padding."""
    result = np.zeros((len(rows), length), np.int32)
    for row, documents in zip(result, rows, strict=True):
        numbers = np.repeat(np.arange(1, len(documents) + 1), documents)
        row[: len(numbers)] = numbers
    return result


def test_without_a_gpu_it_is_the_plain_form():
    arrays, segment_ids = draw(rows_of_documents([3, 2], [7], length=8), 4, 2, 8, jnp.float32)
    assert "Hopper" in reason_against(*arrays[:3])
    for one, other in zip(
        jax.tree.leaves(step(packed_attention, arrays, segment_ids)),
        jax.tree.leaves(step(attention, arrays, segment_ids)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize("widths", [(64,), (192, jnp.bfloat16, 128)])
def test_it_compiles_for_a_gpu_inside_shard_map(widths):
    pytest.importorskip("jax_cuda13_plugin")
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = described_mesh(MeshConfig(fsdp=2), read_cluster("1x2xh200"))
    rows = PartitionSpec("fsdp")
    arrays, segment_ids = draw(np.ones((4, 128), np.int32), 4, 2, *widths)
    split = jax.shard_map(partial(step, packed_attention), mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, rows)),
        (arrays, segment_ids),
    )
    # Rows of one document and rows of several, forward and backward.
    with for_described_gpus(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(split).lower(*arguments).compile().as_text() or ""
    assert (
        len(re.findall(r"__cudnn\$fmhaSoftmax\b", text)) == len(re.findall(r"__cudnn\$fmhaSoftmaxBackward", text)) == 2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
def test_scores_of_a_form_that_may_not_be_taken_have_no_place_unless_they_are_kept():
    pytest.importorskip("jax_cuda13_plugin")
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = described_mesh(MeshConfig(fsdp=2), read_cluster("1x2xh200"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays, segment_ids = draw(np.ones((2, 1024), np.int32), 4, 2, 64)
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=everywhere), (arrays, segment_ids)
    )

    def temporaries(keeps_scores):
        def three_layers(query, *others, **settings):
            attend = partial(packed_attention, keeps_scores=keeps_scores, **settings)
            return jax.lax.scan(lambda query, _: (attend(query, *others), None), query, length=3)[0]

        split = jax.shard_map(
            partial(step, three_layers), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        with for_described_gpus(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(split).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    # At least a byte a pair of tokens in two rows of most layers: the compiler shares some.
    assert temporaries(False) < temporaries(True) - 2 * 2 * 1024**2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("key_heads", "widths"), [(8, (128,)), (2, (128,)), (8, (192, jnp.bfloat16, 128)), (8, (256,))]
)
def test_on_a_gpu_results_and_gradients_are_near_the_plain_form(key_heads, widths):
    whole = rows_of_documents([256], [256], [100], [], [1], length=256)
    several = rows_of_documents([100, 100, 56], [256], [1, 2, 3, 4], [], [10, 200], length=256)
    many = rows_of_documents([3] * (MOST_DOCUMENTS + 1), [256], length=256)
    for rows, keeps_scores in ((whole, True), (several, True), (many, True), (many, False)):
        arrays, segment_ids = draw(rows, 8, key_heads, *widths)
        attend = jax.jit(partial(step, partial(packed_attention, keeps_scores=keeps_scores)))
        got, again = (attend(arrays, segment_ids) for _ in range(2))
        wide = [array.astype(jnp.float32) for array in arrays]
        with jax.default_matmul_precision("highest"):
            want = jax.jit(partial(step, attention))(wide, segment_ids)
        for one, same, other in zip(*map(jax.tree.leaves, (got, again, want)), strict=True):
            one, same, other = (np.asarray(array, np.float32) for array in (one, same, other))
            assert np.isfinite(one).all() and not one[rows == 0].any()
            assert np.linalg.norm(one - other) < 8e-3 * np.linalg.norm(other)
            assert np.linalg.norm(one - same) < 4e-3 * np.linalg.norm(other)
