"""The layer compiled for 16 described H200: what lies between the start and the end of each exchange of rows."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.axes import DATA_AXES
from mmjax.config import MeshConfig, ModelConfig, MoeConfig, RouterConfig
from mmjax.models.moe import LatentMoe
from mmjax.parallel.described import described_mesh
from mmjax.parallel.fsdp import make_varying
from mmjax.parallel.sharding import spec, state_specs
from mmjax.planner.topology import read_cluster

pytestmark = [pytest.mark.slow, pytest.mark.deviceless, pytest.mark.usefixtures("no_compilation_cache")]
NUM_DEVICES, TOKENS, WIDTH, LATENT, EXPERTS, CHOICES = 16, 1024, 1024, 512, 64, 4


def compiled_lines(**settings) -> list[str]:
    """Instructions of the scheduled program of the layer's value and gradients, in their order."""
    moe = MoeConfig(
        num_experts=EXPERTS,
        experts_per_token=CHOICES,
        expert_width=512,
        latent_width=LATENT,
        num_shared_experts=4,
        router=RouterConfig(balancing="none", correction_bias=False),
        # One round for all, to keep the program short.
        capacity_factor=float(NUM_DEVICES),
        **settings,
    )
    model = ModelConfig(width=WIDTH, moe=moe, parameter_dtype="bfloat16", compute_dtype="bfloat16")
    graph, parameters = nnx.split(LatentMoe(model))
    mesh = described_mesh(MeshConfig(expert=NUM_DEVICES), read_cluster("2x8xh200"))
    specs, tokens, ids = state_specs(parameters, mesh.shape), spec("batch", "position", None), spec("batch", "position")

    def on_device(parameters, inputs, segment_ids):
        def loss(parameters, inputs):
            outputs, _ = nnx.merge(graph, make_varying(parameters))(inputs, segment_ids)
            return lax.psum(jnp.sum(outputs.astype(jnp.float32) ** 2), DATA_AXES)

        return jax.value_and_grad(loss, argnums=(0, 1))(parameters, inputs)

    def describe(shape, dtype, array_spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, array_spec))

    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, tokens, ids),
        out_specs=(PartitionSpec(), (specs, tokens)),
        check_vma=True,
    )
    arguments = (
        jax.tree.map(lambda leaf, array_spec: describe(leaf.shape, leaf.dtype, array_spec), parameters, specs),
        describe((NUM_DEVICES, TOKENS, WIDTH), jnp.bfloat16, tokens),
        describe((NUM_DEVICES, TOKENS), jnp.int32, ids),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(step).lower(*arguments).compile().as_text()
    return text.splitlines()


def hidden_exchanges(lines: list[str], operation: str) -> list[bool]:
    """Of each exchange of rows in turn, whether a product lies between its start and its end."""
    hidden = []
    for number, line in enumerate(lines):
        if (start := re.match(rf"\s+(%{operation}-start\S*) = \(+(?:bf16|f32)\[\d+,{LATENT}\]", line)) is None:
            continue
        between = []
        for later in lines[number + 1 :]:
            if f"{operation}-done" in later and f"({start[1]})" in later:
                break
            between.append(later)
        # XLA's products and our kernels.
        hidden.append(any(re.match(r"\s+%(?:gemm|triton_gemm|cublas|mpmd_map)\S* = ", line) for line in between))
    return hidden


def test_work_lies_between_start_and_end_of_nearly_every_exchange_of_rows():
    lines = compiled_lines(exchange_chunks=2)
    hidden = hidden_exchanges(lines, "all-to-all")
    # Two chunks, there and back; then the gradients', of which the first has nothing to lie under and one gives its
    # place to the small exchange of the weights' gradients.
    assert len(hidden) == 8
    assert all(hidden[:4]) and sum(hidden) >= 6, hidden


def test_the_experts_work_while_rows_pass_round_a_ring():
    hidden = hidden_exchanges(compiled_lines(transport="ring"), "collective-permute")
    # In each step, forward and backward; before and after the steps, of which the first of the backward pass is not.
    assert len(hidden) == 6 and all(hidden[:2]) and sum(hidden) >= 5, hidden


def test_rows_are_exchanged_without_gaps_on_gpus():
    lines = compiled_lines(transport="ragged")
    # Experts' numbers with weights, rows, results, and the gradients of these three.
    assert sum(" ragged-all-to-all" in line and "-done" not in line for line in lines) == 6
    assert not any(re.search(r"= \S+ all-to-all", line) for line in lines)
