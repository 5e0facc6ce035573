"""`training.weights_in_place`: no copies of layers' weights, and the same numbers as with copies."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from mmjax.config import (
    DataConfig,
    GroupedAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RotaryConfig,
    RouterConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.models.fused_attention import for_described_gpus
from mmjax.parallel.described import described_mesh
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.topology import read_cluster
from mmjax.training.compiled_program import read_program
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.step import abstract_state, compiler_options, init_state, make_train_step, place_batch

# Widths that Hopper's kernels of experts and cuDNN's attention take; the weights of three layers lie in one stack.
MODEL = ModelConfig(
    width=256,
    num_layers=3,
    vocabulary_size=512,
    full_attention_layers=(0, 1, 2),
    full_attention_kind="grouped",
    residual="plain",
    parameter_dtype="bfloat16",
    compute_dtype="bfloat16",
    loss_chunk_tokens=256,
    grouped_attention=GroupedAttentionConfig(
        num_heads=2, num_key_heads=2, head_width=128, rotary=RotaryConfig(width=128)
    ),
    moe=MoeConfig(
        num_experts=8,
        experts_per_token=2,
        expert_width=256,
        latent_width=0,
        latent_norm=False,
        num_dense_layers=0,
        router=RouterConfig(balancing="sign"),
    ),
    vision=VisionConfig(num_layers=0),
)
COPY_OF_EXPERTS = r"= bf16\[(?:1,)?8,256,256\]\S* fusion(?:-done)?\("


def run(*, in_place: bool, storage: str = "dense") -> RunConfig:
    return RunConfig(
        model=dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, expert_storage=storage)),
        lora=LoraConfig(rank=8, alpha=16.0, targets=(r"decoder\..*\.mixer\..*",)),
        data=DataConfig(rows=1, row_tokens=256, row_patches=0),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        training=TrainingConfig(steps=4, weights_in_place=in_place),
    )


def compiled_for_described_gpus(config: RunConfig) -> str:
    mesh = described_mesh(config.mesh, read_cluster(f"1x{config.mesh.num_devices}xh200"))
    with for_described_gpus(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = make_train_step(config, mesh).lower(abstract_state(config, mesh), abstract_batch(config, mesh))
        return lowered.compile(compiler_options=compiler_options(mesh)).as_text() or ""


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of older versions refuses this small program in place")
@pytest.mark.usefixtures("no_compilation_cache")
def test_no_operation_copies_the_experts_of_a_layer():
    programs = [compiled_for_described_gpus(run(in_place=in_place)) for in_place in (False, True)]
    copies = [len(re.findall(COPY_OF_EXPERTS, program)) for program in programs]
    assert copies[0] > 0
    assert copies[1] == 0


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of older versions refuses this small program in place")
@pytest.mark.usefixtures("no_compilation_cache")
def test_further_rounds_of_an_exchange_copy_no_experts_unless_they_run():
    config = run(in_place=True)
    moe = dataclasses.replace(config.model.moe, capacity_factor=1.25)
    config = dataclasses.replace(
        config,
        mesh=MeshConfig(expert=2),
        data=dataclasses.replace(config.data, rows=2),
        model=dataclasses.replace(config.model, moe=moe),
    )
    made = {False: [], True: []}
    for computation, _, is_conditional in read_program(compiled_for_described_gpus(config)).runs():
        made[is_conditional] += [
            instruction.name
            for instruction in computation.instructions
            if instruction.opcode in ("copy", "copy-done", "fusion", "fusion-done", "dynamic-slice")
            # A device's experts of one layer, or of all.
            and any(array.shape[-3:] == (4, 256, 256) for array in instruction.arrays)
        ]
    assert made[True]
    assert not made[False]


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["dense", "mxfp4"])
def test_losses_and_gradients_are_those_of_copies(make_batch, storage):
    found = []
    for in_place in (False, True):
        config = run(in_place=in_place, storage=storage)
        mesh = make_mesh(MeshConfig())
        state = init_state(config, mesh)
        batch = place_batch(make_batch(config.model, rows=1, row_tokens=256, row_patches=0), mesh)
        step = make_train_step(config, mesh).lower(state, batch).compile(compiler_options=compiler_options(mesh))
        losses = []
        # In the first step the second factors are zero, and so are the first ones' gradients.
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        found.append(jax.device_get((losses, state.optimizer, state.parameters)))
    copied, in_place = found
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(copied[1]))
    for one, other in zip(jax.tree.leaves(copied), jax.tree.leaves(in_place), strict=True):
        np.testing.assert_array_equal(one, other)
