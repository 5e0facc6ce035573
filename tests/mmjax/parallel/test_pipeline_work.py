"""Counted work and waiting of a pipeline: formulas where stages are equal, and what the placement of towers changes."""

import dataclasses

import pytest

from mmjax.config import DataConfig, MeshConfig, ModelConfig, MoeConfig, RunConfig, TrainingConfig, VisionConfig
from mmjax.parallel.pipeline_work import count_work
from mmjax.planner.stages import part_flops, with_stages

PICTURES = VisionConfig(num_layers=2, width=64, num_heads=1, head_width=64, hidden_width=128)


def run(edges: str = "first_stage", mesh: MeshConfig | None = None, **training) -> RunConfig:
    """Eight equal layers and next to no head."""
    model = ModelConfig(
        width=256,
        num_layers=8,
        vocabulary_size=2,
        full_attention_layers=tuple(range(8)),
        full_attention_kind="grouped",
        residual="plain",
        moe=MoeConfig(num_dense_layers=8, dense_width=512),
        vision=dataclasses.replace(PICTURES, num_layers=0),
        remat="none",
    )
    return RunConfig(
        model=model,
        mesh=mesh or MeshConfig(pipe=4),
        data=DataConfig(rows=16, row_tokens=128, row_patches=64, image_max_patches=16),
        training=TrainingConfig(accumulation=8, pipeline_edges=edges, **training),
    )


def with_pictures(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vision=PICTURES))


@pytest.mark.parametrize("transfer", ["direct", "hidden"])
def test_equal_stages_wait_as_the_formula_says(transfer):
    config = with_stages(run(pipeline_transfer=transfer))
    assert config.model.pipeline_stages == (2, 2, 2, 2)
    work, stage = count_work(config), 2 * sum(part_flops(config).layers[:2])
    # The last stage's forward passes are in its backward passes, so it does three quarters of what the others do.
    assert work.computed == pytest.approx([8 * 4 * stage] * 3 + [8 * 3 * stage], rel=1e-3)
    if transfer == "hidden":
        # (m + p - 1) pairs of ticks; in the last one with forward passes only the last stage would have one.
        span = (8 + 3 - 1 + 3 * (8 + 3)) * stage
        assert work.span == pytest.approx(span, rel=1e-3)
        assert work.idle_share == pytest.approx(1 - (8 * 4 * 3 + 8 * 3) / (4 * 43), rel=1e-3)


@pytest.mark.parametrize(("schedule", "passes"), [("1f1b", 3), ("split_backward", 4)])
def test_stages_that_keep_their_layers_inputs_run_none_of_them_again(schedule, passes):
    config = run(pipeline_schedule=schedule)
    model = dataclasses.replace(config.model, layer_loops="whole")
    work = count_work(with_stages(dataclasses.replace(config, model=model)))
    stage = 2 * sum(part_flops(config).layers[:2])
    # Gradients of weights apart from those of inputs follow the cotangents once more; the first stage has no input.
    assert work.computed[1:] == pytest.approx([8 * passes * stage] * 3, rel=1e-3)


def test_what_all_stages_share_is_computed_as_often_and_waited_for_less():
    first, shared = (count_work(with_stages(with_pictures(run(edges)))) for edges in ("first_stage", "data_parallel"))
    tower = 16 * part_flops(with_pictures(run())).tower
    # The tower's layers are always computed again, which the first stage counts under `remat` alone.
    assert sum(shared.computed) == pytest.approx(sum(first.computed) + tower, rel=1e-3)
    assert shared.span < first.span and shared.idle < first.idle


def test_a_tensor_axis_splits_layers_and_head_but_no_tower():
    whole, split = (part_flops(with_pictures(run(mesh=MeshConfig(pipe=4, tensor=tensor)))) for tensor in (1, 2))
    assert split.layers == pytest.approx([flops / 2 for flops in whole.layers])
    assert (split.tower, split.head) == pytest.approx((whole.tower, whole.head / 2))


def test_stages_count_the_tower_where_it_runs():
    heavy = dataclasses.replace(PICTURES, num_layers=64)

    def stages(edges: str) -> tuple[int, ...]:
        config = run(edges)
        return with_stages(
            dataclasses.replace(config, model=dataclasses.replace(config.model, vision=heavy))
        ).model.pipeline_stages

    assert stages("first_stage")[0] < 2 and stages("data_parallel") == (2, 2, 2, 2)
