import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import (
    DataConfig,
    GroupedAttentionConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.models.block_scan import scan_across_blocks
from mmjax.models.layout import Relayout, plan_segments
from mmjax.models.stack import gradients_together
from mmjax.parallel.mesh import make_mesh
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.step import abstract_state, init_state, make_value_and_gradient, place_batch

# Layers 1 to 6 of blocks of 3: the first of them ends a block, and so do the fourth and the last but one.
STARTS = np.array([[False, False], [True, False], [False, True]])


def mix(sources, num_finished, is_live):
    """Of the first `num_finished` sources, and of the running sum, the last one, if it is live."""
    takes_part = [place < num_finished for place in range(len(sources) - 1)] + [is_live]
    scores = [jnp.where(taken, jnp.sin(source), -jnp.inf) for taken, source in zip(takes_part, sources, strict=True)]
    shares = jax.nn.softmax(jnp.stack(scores), axis=0)
    return sum(share * source for share, source in zip(shares, sources, strict=True))


def run_layer(position, trained, others, running_sum, sums, part, shared):
    @jax.checkpoint
    def apply(trained, others, running_sum, sums, num_finished, is_live, shared):
        mixed = mix((*sums, running_sum), num_finished, is_live)
        output = jnp.tanh(mixed * trained["weight"] + others["shift"] + shared + position)
        return running_sum + output, {"loss": jnp.sum(output**2), "count": jnp.int32(1)}

    is_live = True if part.is_live is None else part.is_live
    return apply(trained, others, running_sum, sums, part.num_finished, is_live, shared)


def in_a_loop(trained, others, running_sum, finished, shared):
    running_sum, sums, records = scan_across_blocks(run_layer, trained, others, running_sum, finished, STARTS, shared)
    return running_sum, sums, sum(jnp.sum(record["loss"]) for record in records)


def one_by_one(trained, others, running_sum, finished, shared):
    sums, loss = finished, 0.0
    for layer, starts in enumerate(STARTS.reshape(-1)):
        repeat, position = divmod(layer, 2)
        if starts:
            sums, running_sum = (*sums, running_sum), jnp.zeros_like(running_sum)
        of_layer = [jax.tree.map(lambda array, r=repeat: array[r], tree[position]) for tree in (trained, others)]
        mixed = mix((*sums, running_sum), len(sums), not starts)
        output = jnp.tanh(mixed * of_layer[0]["weight"] + of_layer[1]["shift"] + shared + position)
        running_sum, loss = running_sum + output, loss + jnp.sum(output**2)
    return running_sum, sums, loss


def given(dtype: type = np.float64):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)  # noqa: E731
    trained = tuple({"weight": draw(3, 1, 4)} for _ in range(2))
    others = tuple({"shift": draw(3, 1, 4)} for _ in range(2))
    return (trained, others, draw(5, 4), (draw(5, 4),), jnp.asarray(0.3, dtype)), (draw(5, 4), draw(5, 4))


def total(run, weights, *arguments):
    running_sum, sums, loss = run(*arguments)
    return jnp.sum(running_sum * weights[0]) + sum(jnp.sum(s * weights[1]) for s in sums) + loss


def test_a_loop_across_blocks_equals_its_layers_one_by_one_in_values_and_gradients():
    with jax.enable_x64(True):
        arguments, weights = given()
        found, wanted = (
            jax.jit(jax.value_and_grad(functools.partial(total, run, weights), argnums=(0, 2, 3)))(*arguments)
            for run in (in_a_loop, one_by_one)
        )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_loop_across_blocks_keeps_what_each_layer_was_given_and_no_sums():
    arguments, weights = given(np.float32)
    program = jax.make_jaxpr(jax.grad(functools.partial(total, in_a_loop, weights)))(*arguments)
    forward = next(equation for equation in program.jaxpr.eqns if equation.primitive.name == "scan")
    kept = [variable.aval.shape for variable in forward.outvars].count((3, 5, 4))
    # One for each of two positions; with the sums there would be eight.
    assert kept == 2


def test_gradients_that_go_on_together_are_the_same():
    def loss(run, weights):
        one, other = run((weights, weights[:2]))
        return jnp.sum(one**2) + jnp.sum(other)

    weights = jnp.arange(3.0)
    found = jax.jit(jax.grad(functools.partial(loss, gradients_together)))
    np.testing.assert_array_equal(found(weights), jax.grad(functools.partial(loss, lambda tree: tree))(weights))
    assert found.lower(weights).as_text().count("optimization_barrier") == 1


MODEL = ModelConfig(
    width=16,
    num_layers=4,
    vocabulary_size=32,
    full_attention_layers=tuple(range(4)),
    full_attention_kind="grouped",
    grouped_attention=GroupedAttentionConfig(num_heads=2, num_key_heads=2, head_width=16),
    residual="attention",
    residual_block_layers=2,
    moe=MoeConfig(num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, dense_width=16),
    vision=VisionConfig(num_layers=0),
)
RUN = RunConfig(model=MODEL, mesh=MeshConfig(), data=DataConfig(rows=2, row_tokens=12))


def run_with(**changes):
    return dataclasses.replace(RUN, model=dataclasses.replace(MODEL, **changes))


def gradient(config):
    """Loss and gradients of one batch, the residuals' queries away from their zeros."""
    mesh = make_mesh(config.mesh)
    state, random = init_state(config, mesh), np.random.default_rng(0)
    batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_batch(config, mesh))
    tokens = random.integers(0, 32, (2, 13), np.int32)
    batch = batch._replace(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_weight=np.ones((2, 12), np.float32),
        segment_ids=np.repeat(np.array([[1, 2, 0]], np.int32), [5, 5, 2], axis=1).repeat(2, axis=0),
        feature_index=np.full((2, 12), -1, np.int32),
    )
    query = np.cos(np.arange(MODEL.width))
    parameters = {
        path: leaf + np.broadcast_to(query, leaf.shape).astype(leaf.dtype) if path.endswith("residual.query") else leaf
        for path, leaf in state.parameters.items()
    }
    step = jax.jit(make_value_and_gradient(config, mesh))
    loss, _, _, gradients = step(parameters, state.router_biases, place_batch(batch, mesh))
    return loss, gradients


WIDE = {"parameter_dtype": "float64", "compute_dtype": "float64"}


@pytest.mark.parametrize(
    ("mesh", "stages"),
    [
        (MeshConfig(fsdp=2, tensor=2), ()),
        # The second stage begins within a block, and goes on into the next.
        pytest.param(MeshConfig(pipe=2), (1, 3), marks=pytest.mark.slow),
    ],
    ids=["fsdp and tensor", "pipeline"],
)
def test_a_model_gives_the_same_loss_and_gradients_with_loops_across_blocks(mesh, stages):
    with jax.enable_x64(True):
        blocks, whole = run_with(**WIDE), run_with(layer_loops="whole", pipeline_stages=stages, **WIDE)
        whole = dataclasses.replace(whole, mesh=mesh, training=TrainingConfig(accumulation=mesh.pipe))
        assert [len(plan_segments(run.model)) for run in (blocks, whole)] == [3, 2]
        (wanted_loss, wanted), (loss, found) = gradient(blocks), gradient(whole)
        found = Relayout(whole.model, blocks.model).apply(found, wanted)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-13)
    for path, leaf in wanted.items():
        scale = float(np.abs(np.asarray(leaf)).max()) or 1.0
        np.testing.assert_allclose(found[path], leaf, rtol=0, atol=1e-11 * scale, err_msg=path)


@pytest.mark.slow
def test_each_layer_more_takes_little_more_memory_than_its_input():
    data = DataConfig(rows=2, row_tokens=1024)

    def temporaries(num_layers):
        layers = {"num_layers": num_layers, "full_attention_layers": tuple(range(num_layers)), "width": 128}
        config = dataclasses.replace(run_with(layer_loops="whole", **layers), data=data)
        mesh = make_mesh(config.mesh)
        state = abstract_state(config, mesh)
        step = jax.jit(make_value_and_gradient(config, mesh))
        arguments = state.parameters, state.router_biases, abstract_batch(config, mesh)
        memory = step.lower(*arguments).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    # Blocks of 2: of 8 layers more, 8 inputs, 4 sums and their gradients; kept for every layer, sums alone were 60.
    layer_input = 1024 * 128 * 4
    assert (temporaries(13) - temporaries(5)) / 8 < 3 * layer_input
