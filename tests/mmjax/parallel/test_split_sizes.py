"""The sizes that a configuration is checked for are those that the sharding table splits."""

import pytest

from mmjax.config import (
    FullAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)
from mmjax.config.faults import split_sizes
from mmjax.models.multimodal import define


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
    split = set()
    for variable in define(model).parameters.values():
        array_axes = variable.get_metadata()["array_axes"]
        shape = variable.get_value().shape[-len(array_axes) :]
        split |= {(size, axis) for size, axis in zip(shape, array_axes, strict=True) if axis}
    # The projector joins four patches; a shared expert is as wide as a routed one, whose check is the stricter.
    split -= {(4 * 47, "model_weight"), (41, "hidden")}
    assert split == {(size, axis) for _, size, axis in split_sizes(model)}
