"""Bytes between products, counted by hand on tiny layers."""

import dataclasses

import pytest

from mmjax.config import (
    GroupedAttentionConfig,
    LinearAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    VisionConfig,
)
from mmjax.planner.adapters import Tuning, trained_arrays
from mmjax.planner.elementwise import adapter_bytes, cast_bytes, patch_bytes, token_bytes
from mmjax.planner.parameters import shards

DENSE = ModelConfig(
    width=8,
    num_layers=1,
    vocabulary_size=16,
    full_attention_layers=(0,),
    full_attention_kind="grouped",
    residual="plain",
    grouped_attention=GroupedAttentionConfig(num_heads=4, num_key_heads=2, head_width=4),
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=4, value_width=4),
    moe=MoeConfig(num_dense_layers=1, dense_width=24),
    vision=VisionConfig(num_layers=0),
    compute_dtype="bfloat16",
)


def test_a_dense_layer_by_hand():
    # Two sublayers: stream and result read, sum and norm written, 8 numbers each. Queries (16) and keys (8) turned.
    # Gate and up read, their product written: 24 each. Two bytes a number.
    assert token_bytes(DENSE, 1) == 2 * (2 * 4 * 8 + 2 * (16 + 8) + 3 * 24)
    # Heads and hidden values are shared, the stream is not.
    assert token_bytes(DENSE, 2) == 2 * (2 * 4 * 8 + (16 + 8) + 3 * 12)


def test_a_linear_layer_with_experts_by_hand():
    moe = MoeConfig(num_experts=6, experts_per_token=2, expert_width=4, num_shared_experts=1, num_dense_layers=0)
    model = dataclasses.replace(DENSE, full_attention_layers=(), moe=moe)
    mixer = 2 * 3 * 8 * 2 + 8 * (2 + 4) + 3 * 8 * 2
    mlp = 3 * model.moe.shared_hidden_width * 2 + 3 * 6 * 4 + 3 * 8 * 2
    assert token_bytes(model, 1) == 2 * 4 * 8 * 2 + mixer + mlp


def test_a_patch_by_hand():
    vision = VisionConfig(num_layers=2, width=8, num_heads=2, head_width=4, hidden_width=16)
    model = dataclasses.replace(DENSE, vision=vision)
    assert patch_bytes(model) == 2 * 2 * (8 * 8 + 4 * 8 + 2 * 16)


def test_adapters_read_inputs_and_results_are_written_and_read():
    tuning = Tuning(kind="lora", rank=3)
    held = shards(trained_arrays(DENSE, tuning), MeshConfig())
    # Inputs and outputs of query, key, value, output, gate, up and down.
    inputs, outputs = 3 * 8 + 16 + 2 * 8 + 24, 16 + 2 * 8 + 8 + 2 * 24 + 8
    assert adapter_bytes(DENSE, held) == pytest.approx(2 * (inputs + 2 * outputs))
    assert adapter_bytes(DENSE, shards(trained_arrays(DENSE), MeshConfig())) == 0


def test_weights_are_cast_where_they_rest_in_another_dtype():
    config = RunConfig(model=DENSE)
    entries = sum(array.size for array in trained_arrays(DENSE))
    assert cast_bytes(config, shards(trained_arrays(DENSE), MeshConfig())) == 6 * entries
    half = dataclasses.replace(DENSE, parameter_dtype="bfloat16")
    assert cast_bytes(dataclasses.replace(config, model=half), shards(trained_arrays(half), MeshConfig())) == 0
