"""The sizes that a configuration is checked for are those that the sharding table cannot leave whole."""

import pytest

from mmjax.axes import GATHERED_AT_USE
from mmjax.config import (
    AudioConfig,
    FullAttentionConfig,
    GatedDeltaNetConfig,
    GroupedAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)
from mmjax.config.faults import split_sizes
from mmjax.models.multimodal import define
from mmjax.parallel.sharding import RULES


@pytest.mark.parametrize("output_gate", ["full", "low_rank"])
@pytest.mark.parametrize("query_rank", [0, 31])
def test_every_axis_that_a_mesh_splits_has_its_setting_checked(output_gate: str, query_rank: int) -> None:
    # Every size a prime of its own, so that none stands for another.
    model = ModelConfig(
        width=11,
        num_layers=3,
        vocabulary_size=263,
        full_attention_layers=(2,),
        linear_attention=LinearAttentionConfig(
            num_heads=13, decay_rank=17, output_gate=output_gate, output_gate_rank=19
        ),
        full_attention=FullAttentionConfig(
            num_heads=23, query_rank=query_rank, latent_width=29, indexer=IndexerConfig(stage="sparse")
        ),
        moe=MoeConfig(num_experts=37, expert_width=41, dense_width=43, num_shared_experts=1),
        vision=VisionConfig(num_layers=1, width=47),
    )
    # A shared expert is as wide as a routed one.
    assert sizes_split(model) - {(41, "hidden")} == {(size, axis) for _, size, axis in split_sizes(model)}


def test_every_axis_of_grouped_attention_that_a_mesh_splits_has_its_setting_checked() -> None:
    model = ModelConfig(
        width=11,
        num_layers=1,
        vocabulary_size=263,
        full_attention_layers=(0,),
        full_attention_kind="grouped",
        grouped_attention=GroupedAttentionConfig(
            num_heads=13, num_key_heads=17, head_width=19, projection_bias=True, output_bias=True, head_norm=True
        ),
        mlp_bias=True,
        moe=MoeConfig(num_dense_layers=1, dense_width=43),
        vision=VisionConfig(num_layers=0),
    )
    assert sizes_split(model) == {(size, axis) for _, size, axis in split_sizes(model)}


def test_every_axis_of_gated_delta_nets_that_a_mesh_splits_has_its_setting_checked() -> None:
    model = ModelConfig(
        width=11,
        num_layers=1,
        vocabulary_size=263,
        full_attention_layers=(),
        linear_attention_kind="gated_delta_net",
        gated_delta_net=GatedDeltaNetConfig(num_key_heads=13, num_value_heads=26),
        moe=MoeConfig(num_experts=37, expert_width=41, shared_width=43, shared_gate="sigmoid", num_dense_layers=0),
        vision=VisionConfig(num_layers=0),
    )
    assert sizes_split(model) == {(size, axis) for _, size, axis in split_sizes(model)}


@pytest.mark.parametrize(
    "vision",
    [
        VisionConfig(kind="clip", num_layers=1, width=47, feature_depths=(1,)),
        VisionConfig(kind="qwen3_vl", num_layers=1, width=47, deep_layers=(0,)),
        VisionConfig(kind="fuyu"),
    ],
    ids=lambda vision: vision.kind,
)
def test_every_axis_of_a_tower_that_a_mesh_splits_has_its_setting_checked(vision: VisionConfig) -> None:
    model = ModelConfig(
        width=11,
        num_layers=1,
        vocabulary_size=263,
        full_attention_layers=(0,),
        full_attention_kind="grouped",
        grouped_attention=GroupedAttentionConfig(num_heads=13, num_key_heads=17),
        norm="layer",
        dense_mlp="relu_squared",
        mlp_bias=True,
        moe=MoeConfig(num_dense_layers=1, dense_width=43),
        vision=vision,
        audio=AudioConfig(num_layers=1, width=53, values_per_feature=2),
    )
    assert sizes_split(model) == {(size, axis) for _, size, axis in split_sizes(model)}


def sizes_split(model: ModelConfig) -> set[tuple[int, str]]:
    """Of the axes that rest split over more than what is gathered at use."""
    split = set()
    for variable in define(model).parameters.values():
        array_axes = variable.get_metadata()["array_axes"]
        shape = variable.get_value().shape[-len(array_axes) :]
        split |= {(size, axis) for size, axis in zip(shape, array_axes, strict=True) if axis}
    return {(size, axis) for size, axis in split if set(RULES[axis]) - set(GATHERED_AT_USE.get(axis, ()))}
