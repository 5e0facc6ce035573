"""Mixers whose rows are split over devices give the values and gradients of whole rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES
from mmjax.config import (
    FullAttentionConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    RotaryConfig,
)
from mmjax.models.decoder import make_mixer
from mmjax.parallel import context
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import spec, state_specs

WIDTH = 12
# Chunks of 6 tokens on two devices, of 3 on four. Documents lie across several edges, end at one, begin at one, are one
# token long; the second half of the second row is padding.
LENGTHS = [[14, 4, 5], [2, 1, 9]]
SEGMENTS = np.zeros((2, 24), np.int32)
for row, lengths in enumerate(LENGTHS):
    SEGMENTS[row, : sum(lengths)] = np.repeat([1, 2, 3], lengths)
POSITIONS = np.stack([np.concatenate([np.arange(n) for n in (*lengths, 24 - sum(lengths))]) for lengths in LENGTHS])

MODEL = ModelConfig(
    width=WIDTH,
    parameter_dtype="float64",
    compute_dtype="float64",
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=3, value_width=5, decay_rank=3, chunk_tokens=16),
    gated_delta_net=GatedDeltaNetConfig(num_key_heads=1, num_value_heads=2, key_width=3, value_width=5),
    full_attention=FullAttentionConfig(
        num_heads=2,
        query_rank=6,
        latent_width=5,
        nope_width=3,
        shared_key_width=4,
        value_width=5,
        query_chunk_tokens=5,
        rotary=RotaryConfig(width=4, base=20.0),
        indexer=IndexerConfig(stage="sparse", num_heads=2, head_width=4, top_k=3),
    ),
    grouped_attention=GroupedAttentionConfig(
        num_heads=4, num_key_heads=2, head_width=4, query_chunk_tokens=5, rotary=RotaryConfig(width=4, base=20.0)
    ),
)


MIXERS = ("kimi_delta", "gated_delta_net", "none", "dense", "sparse", "grouped")


def model_of(name: str) -> ModelConfig:
    full = MODEL.full_attention
    match name:
        case "gated_delta_net":
            return dataclasses.replace(MODEL, linear_attention_kind="gated_delta_net")
        case "grouped":
            return dataclasses.replace(MODEL, full_attention_kind="grouped")
        case "none" | "dense" | "sparse":
            full = dataclasses.replace(full, indexer=dataclasses.replace(full.indexer, stage=name))
            return dataclasses.replace(MODEL, full_attention=full)
        case _:
            return MODEL


def split(name: str, dtype: str) -> tuple[nnx.GraphDef, nnx.State]:
    """A mixer whose parameters are all random; linear ones hardly forget."""
    model = dataclasses.replace(model_of(name), parameter_dtype=dtype, compute_dtype=dtype)
    graph, state = nnx.split(make_mixer(model, "linear" if "delta" in name else "full"))
    random = np.random.default_rng(1)

    def draw(path, leaf):
        numbers = 0.5 * random.normal(size=leaf.shape)
        return jnp.asarray(numbers - 9 if "decay_bias" in jax.tree_util.keystr(path) else numbers, leaf.dtype)

    return graph, jax.tree_util.tree_map_with_path(draw, state)


def run(name: str, num_devices: int, dtype: str = "float64"):
    """Output [B, S, D] in row order, gradients (parameters, inputs) of all that the mixer gives, compiled program."""
    graph, state = split(name, dtype)
    inputs, cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(2, *SEGMENTS.shape, WIDTH)), dtype)

    def loss(state, inputs, segment_ids, positions, cotangent):
        mixer = nnx.merge(graph, state)
        result = mixer(inputs, segment_ids) if "delta" in name else mixer(inputs, segment_ids, positions)
        output, indexer_loss = result if isinstance(result, tuple) else (result, 0.0)
        return jax.lax.psum(jnp.vdot(output, cotangent) + indexer_loss, DATA_AXES), output

    mesh = make_mesh(MeshConfig(context=num_devices))
    rows, specs, whole = spec("batch", "position", None), state_specs(state, mesh.shape), spec("batch", "position")
    arrays = (inputs, SEGMENTS, POSITIONS.astype(np.int32), cotangent)
    split_arrays = [context.split_positions(np.asarray(array), num_devices) for array in arrays]
    program = jax.jit(
        jax.shard_map(
            jax.value_and_grad(loss, argnums=(0, 1), has_aux=True),
            mesh=mesh,
            in_specs=(specs, rows, whole, whole, rows),
            out_specs=((PartitionSpec(), rows), (specs, rows)),
            check_vma=True,
        )
    )
    program = program.lower(state, *split_arrays).compile()
    (_, output), (parameters, inputs) = program(state, *split_arrays)
    output, inputs = (context.join_positions(np.asarray(array), num_devices) for array in (output, inputs))
    return output, (jax.device_get(parameters), inputs), str(program.as_text())


run_cached = functools.cache(run)


@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXERS)
def test_split_rows_give_the_values_and_gradients_of_whole_rows(name, num_devices):
    with jax.enable_x64(True):
        expected, found = run_cached(name, 1)[:2], run_cached(name, num_devices)[:2]
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = np.abs(other).max()
        assert scale > 0, jax.tree_util.keystr(path)
        assert np.abs(one - other).max() <= 1e-11 * scale, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", MIXERS)
def test_the_program_holds_the_exchanges_that_are_meant_and_no_scores_of_a_whole_row(name):
    with jax.enable_x64(True):
        text, whole = run_cached(name, 2)[2], run_cached(name, 1)[2]
    # Forward and backward: states gathered, then gradients of what enters, ends of chunks sent to neighbours and their
    # gradients back; or what keys are made of and documents gathered, and the gradients of the former scattered.
    meant = (2, 0, 4) if "delta" in name else (2, 1, 0)
    assert tuple(exchanges(text, kind) for kind in ("all-gather", "reduce-scatter", "collective-permute")) == meant
    assert not any(exchanges(whole, kind) for kind in ("all-gather", "reduce-scatter", "collective-permute"))
    assert "24,24" not in text


def exchanges(text: str, kind: str) -> int:
    return len(re.findall(rf" {kind}(?:-start)?\(", text))


@pytest.mark.parametrize("name", MIXERS[:2])
def test_half_precision_stays_within_its_rounding(name):
    expected, found = run(name, 1, "bfloat16")[:2], run(name, 2, "bfloat16")[:2]
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        one, other = (array.astype(np.float32) for array in (one, other))
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", MIXERS[:2])
def test_a_document_across_an_edge_needs_the_state_of_the_chunks_before(name, monkeypatch):
    with jax.enable_x64(True):
        expected, zeros = run_cached(name, 1)[0], lambda transition, state, continues: jnp.zeros_like(state)
        monkeypatch.setattr(context, "entering_states", zeros)
        found = run(name, 2)[0]
    scale = np.abs(expected).max()
    across, begins_here = (0, slice(6, 14)), (0, slice(14, 18))
    assert np.abs(found[across] - expected[across]).max() > 0.1 * scale
    assert np.abs(found[begins_here] - expected[begins_here]).max() <= 1e-11 * scale
