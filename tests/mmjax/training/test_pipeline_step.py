"""A pipeline's step: every schedule gives one device's loss, gradients, norm, counts and update."""

import dataclasses
from collections import Counter
from functools import cache

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mmjax.checkpoint.adapters import define_run
from mmjax.config import (
    FullAttentionConfig,
    GroupedAttentionConfig,
    IndexerConfig,
    LinearAttentionConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    RotaryConfig,
    RunConfig,
    TrainingConfig,
    VisionConfig,
)
from mmjax.models.layout import Relayout
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.pipeline_work import schedule_of
from mmjax.planner.topology import read_cluster
from mmjax.training.compiled_program import collective_of, read_program
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.evaluation import make_predict
from mmjax.training.exchanges import ExchangeReader
from mmjax.training.step import abstract_state, init_state, make_update, make_value_and_gradient, place_batch

# Kimi-K3's parts in four layers: dense and routed experts, both mixers with an indexer, blocks of three layers that
# cross stages, and a tower.
K3 = ModelConfig(
    width=16,
    num_layers=4,
    vocabulary_size=32,
    full_attention_layers=(1, 3),
    residual_block_layers=3,
    initializer_range=0.2,
    linear_attention=LinearAttentionConfig(num_heads=2, key_width=4, value_width=4, decay_rank=4, chunk_tokens=16),
    full_attention=FullAttentionConfig(
        num_heads=2,
        query_rank=0,
        latent_width=8,
        nope_width=4,
        shared_key_width=4,
        value_width=4,
        query_chunk_tokens=16,
        indexer=IndexerConfig(stage="dense", num_heads=2, head_width=4, loss_coefficient=0.3),
    ),
    moe=MoeConfig(
        num_experts=4, experts_per_token=2, expert_width=8, latent_width=8, num_dense_layers=2, dense_width=16
    ),
    vision=VisionConfig(num_layers=1, width=16, num_heads=1, head_width=16, hidden_width=16, patch_pixels=2),
    loss_chunk_tokens=40,
    remat="none",
    parameter_dtype="float64",
    compute_dtype="float64",
)
# Eight equal layers: whatever is not at an end of the pipeline is one program.
PLAIN = ModelConfig(
    width=16,
    num_layers=8,
    vocabulary_size=32,
    full_attention_layers=tuple(range(8)),
    full_attention_kind="grouped",
    residual="plain",
    initializer_range=0.2,
    grouped_attention=GroupedAttentionConfig(num_heads=2, num_key_heads=2, head_width=8, rotary=RotaryConfig(width=8)),
    moe=MoeConfig(num_dense_layers=8, dense_width=32),
    vision=VisionConfig(num_layers=0),
    tied_head=True,
    parameter_dtype="float64",
    compute_dtype="float64",
)
# The same with attention residuals: sums of four blocks are handed on, and none begins where a stage does.
SUMS = dataclasses.replace(PLAIN, residual="attention", residual_block_layers=2)


def run_config(model: ModelConfig, *, lora: LoraConfig | None = None, **training) -> RunConfig:
    return RunConfig(
        model=model,
        lora=lora or LoraConfig(),
        optimizer=OptimizerConfig(warmup_steps=0, max_gradient_norm=0.5),
        training=TrainingConfig(**training),
    )


def staged(config: RunConfig, stages: tuple[int, ...], mesh: MeshConfig, **training) -> RunConfig:
    of_model = {name: training.pop(name) for name in ("remat", "layer_loops") if name in training}
    chunks = training.pop("chunks", 1)
    return dataclasses.replace(
        config,
        mesh=mesh,
        model=dataclasses.replace(config.model, pipeline_stages=stages, pipeline_chunks=chunks, **of_model),
        training=dataclasses.replace(config.training, **training),
    )


def one_step(config: RunConfig, batch, arrays: dict | None = None):
    """The arrays at the start by group, then (loss, report, counts, gradients), metrics and the state after a step."""
    mesh = make_mesh(config.mesh)
    value_and_gradient, update = make_value_and_gradient(config, mesh), make_update(config)
    abstract = abstract_state(config, mesh)
    if arrays is None:
        random = np.random.default_rng(0)

        def draw(leaves: dict) -> dict:
            return {path: random.normal(size=leaves[path].shape, scale=0.2) for path in sorted(leaves)}

        arrays = {"parameters": draw(abstract.parameters), "frozen": draw(abstract.frozen)}

    def place(leaf: jax.ShapeDtypeStruct, values: np.ndarray | None = None) -> jax.Array:
        values = np.zeros(leaf.shape) if values is None else values
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    groups = {
        group: {path: place(leaf, arrays[group][path]) for path, leaf in getattr(abstract, group).items()}
        for group in arrays
    }
    state = dataclasses.replace(jax.tree.map(place, abstract), **groups)

    @jax.jit
    def step(state, batch):
        found = value_and_gradient(state.parameters, state.router_biases, batch, state.frozen)
        new_state, metrics = update(state, *found)
        return found, metrics, new_state

    return arrays, *jax.device_get(step(state, place_batch(batch, mesh)))


def relaid(source: RunConfig, target: RunConfig, arrays: dict, group: str) -> dict:
    """Arrays by path in the layout of `source`, in that of `target`."""
    relayout = Relayout(source.model, target.model)
    return relayout.apply(arrays, getattr(define_run(target), group), np)


def assert_near(ours, theirs, name: str, bound: float = 1e-9) -> None:
    scale = np.abs(theirs).max(initial=0)
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max(initial=0)
    assert difference <= bound * scale + 1e-300, f"{name}: {difference} against {scale}"


def assert_equals_one_device(config: RunConfig, theirs: RunConfig, batch, reference, bound: float = 1e-9) -> None:
    arrays, (loss, report, counts, gradients), metrics, state = reference
    start = {group: relaid(theirs, config, arrays[group], group) for group in ("parameters", "frozen")}
    _, (our_loss, our_report, our_counts, our_gradients), our_metrics, our_state = one_step(config, batch, start)
    assert_near(our_loss, loss, "loss", bound)
    # One device exchanges nothing: rounds are those of a mesh.
    for name, value in (counts | {n: v for n, v in metrics.items() if n != "exchange_rounds"}).items():
        assert_near((our_counts | our_metrics)[name], value, name, bound)
    expected = {
        "gradient": (our_gradients, relaid(theirs, config, gradients, "parameters")),
        "parameter": (our_state.parameters, relaid(theirs, config, state.parameters, "parameters")),
    }
    for kind, (ours, wanted) in expected.items():
        for path in wanted:
            assert_near(ours[path], wanted[path], f"{kind} {path}", bound)
    assert_near(our_report.nonfinite_layers, report.nonfinite_layers, "nonfinite_layers", bound)
    if bound > 1e-9:
        # Rounding may move a token's score over the border of two bins.
        return
    relayout = Relayout(theirs.model, config.model)
    for path, counted in our_report.routers.items():
        for field, ours in counted._asdict().items():
            if field == "rounds":
                continue
            by_path = {f"{p}.{field}": getattr(router, field) for p, router in report.routers.items()}
            wanted = relayout.apply(by_path, [f"{path}.{field}"], np)
            assert_near(ours, wanted[f"{path}.{field}"], f"{path}.{field}", bound)
    for path, bias in relaid(theirs, config, state.router_biases, "router_biases").items():
        held = [row is not None for row in relayout.rows(path) or ()]
        assert_near(our_state.router_biases[path][held], bias[held], path, bound)


@pytest.fixture(scope="module")
def batches(make_batch):
    """8 rows of packed documents of each model; the last four rows are nothing but padding, without pictures."""
    return {
        "k3": make_batch(K3, rows=8, row_tokens=20, row_patches=16, empty_rows=4),
        **dict.fromkeys(("plain", "sums"), make_batch(PLAIN, rows=8, row_tokens=12, row_patches=0, empty_rows=1)),
    }


@pytest.fixture(scope="module")
def references(batches):
    """A step on one device, done once for each model and kind of training."""

    @cache
    def find(name: str, lora: LoraConfig | None):
        config = run_config({"k3": K3, "plain": PLAIN, "sums": SUMS}[name], lora=lora)
        return config, one_step(config, batches[name])

    return find


ADAPTERS = LoraConfig(rank=2)
SLOW = pytest.mark.slow
DIRECT = {"accumulation": 4, "pipeline_transfer": "direct"}


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("model", "stages", "mesh", "settings", "lora"),
    [
        pytest.param(
            "k3",
            (2, 2),
            MeshConfig(pipe=2, expert=2, tensor=2),
            {"accumulation": 2},
            None,
            id="K3, pipe=2,expert=2,tensor=2",
        ),
        pytest.param("plain", (2, 2, 2, 2), MeshConfig(pipe=4, fsdp=2), DIRECT, None, id="1f1b, pipe=4,fsdp=2"),
        pytest.param("plain", (1,) * 8, MeshConfig(pipe=8), {"accumulation": 8}, None, id="pipe=8", marks=SLOW),
        pytest.param(
            "plain",
            (3, 2, 2, 1),
            MeshConfig(pipe=4, tensor=2),
            {"accumulation": 4, "pipeline_schedule": "gpipe"},
            None,
            id="gpipe, pipe=4,tensor=2",
            marks=SLOW,
        ),
        pytest.param(
            "plain",
            (1, 3, 3, 1),
            MeshConfig(pipe=4, replica=2),
            {"accumulation": 4, "pipeline_schedule": "split_backward"},
            None,
            id="split, pipe=4,replica=2",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (2, 2),
            MeshConfig(pipe=2, fsdp=2, expert=2),
            {"accumulation": 2, "remat": "layer"},
            None,
            id="K3, pipe=2,fsdp=2,expert=2",
            marks=SLOW,
        ),
        pytest.param(
            "plain",
            (1, 3, 1, 3),
            MeshConfig(pipe=2),
            {"accumulation": 4, "pipeline_schedule": "interleaved", "chunks": 2},
            None,
            id="interleaved",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (1, 3),
            MeshConfig(pipe=2),
            {"accumulation": 4, "pipeline_schedule": "split_backward", "pipeline_edges": "data_parallel"},
            None,
            id="K3, split, embedded by all stages",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (3, 1),
            MeshConfig(pipe=2),
            {"accumulation": 2, "pipeline_schedule": "gpipe", "remat": "layer"},
            None,
            id="K3, gpipe",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (1, 1, 1, 1),
            MeshConfig(pipe=4, fsdp=2),
            DIRECT,
            None,
            id="K3, pipe=4,fsdp=2",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (2, 2),
            MeshConfig(pipe=2, fsdp=2),
            {"accumulation": 2, "pipeline_edges": "data_parallel"},
            None,
            id="K3, embedded by all stages",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (2, 2),
            MeshConfig(pipe=2, context=2, fsdp=2),
            {"accumulation": 2},
            None,
            id="K3, pipe=2,context=2,fsdp=2",
            marks=SLOW,
        ),
        pytest.param("k3", (3, 1), MeshConfig(pipe=2), {"accumulation": 2}, ADAPTERS, id="K3, adapters", marks=SLOW),
        pytest.param(
            "k3",
            (3, 1),
            MeshConfig(pipe=2, expert=2),
            {"accumulation": 2, "layer_loops": "whole", "remat": "layer"},
            None,
            id="one program, K3, pipe=2,expert=2",
        ),
        pytest.param(
            "k3",
            (1, 3),
            MeshConfig(pipe=2, fsdp=2, tensor=2),
            {"accumulation": 2, "layer_loops": "whole", "pipeline_edges": "data_parallel"},
            None,
            id="one program, K3, embedded by all stages",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (1, 1, 1, 1),
            MeshConfig(pipe=4, context=2),
            DIRECT | {"layer_loops": "whole", "remat": "layer"},
            ADAPTERS,
            id="one program, K3, adapters, pipe=4,context=2",
            marks=SLOW,
        ),
        pytest.param(
            "plain",
            (1, 3, 1, 3),
            MeshConfig(pipe=2),
            {"accumulation": 4, "pipeline_schedule": "interleaved", "chunks": 2, "layer_loops": "whole"},
            None,
            id="one program, interleaved",
            marks=SLOW,
        ),
        pytest.param(
            "k3",
            (2, 2),
            MeshConfig(pipe=2),
            {"accumulation": 4, "pipeline_schedule": "split_backward", "layer_loops": "whole"},
            None,
            id="one program, K3, split",
            marks=SLOW,
        ),
        pytest.param(
            "sums", (1, 3, 2, 2), MeshConfig(pipe=4, replica=2), {"accumulation": 4}, None, id="sums, 1f1b", marks=SLOW
        ),
        pytest.param(
            "sums",
            (1, 3, 1, 3),
            MeshConfig(pipe=2),
            {"accumulation": 4, "pipeline_schedule": "interleaved", "chunks": 2},
            None,
            id="sums, interleaved",
            marks=SLOW,
        ),
        pytest.param(
            "sums",
            (1, 2, 1, 1, 1, 2),
            MeshConfig(pipe=2, fsdp=2),
            DIRECT | {"pipeline_schedule": "interleaved", "chunks": 3, "layer_loops": "whole", "remat": "layer"},
            None,
            id="one program, sums, interleaved",
        ),
        pytest.param(
            "sums",
            (1,) * 8,
            MeshConfig(pipe=4),
            {"accumulation": 8, "pipeline_schedule": "interleaved", "chunks": 2, "layer_loops": "whole"},
            None,
            id="one program, sums, interleaved, pipe=4",
            marks=SLOW,
        ),
        pytest.param(
            "sums",
            (1, 3, 2, 2),
            MeshConfig(pipe=4),
            {"accumulation": 4, "pipeline_schedule": "gpipe", "layer_loops": "whole"},
            None,
            id="one program, sums, gpipe",
            marks=SLOW,
        ),
    ],
)
def test_every_schedule_gives_one_devices_loss_gradients_and_update(
    batches, references, model, stages, mesh, settings, lora
):
    with jax.enable_x64(True):
        theirs, reference = references(model, lora)
        assert_equals_one_device(staged(theirs, stages, mesh, **settings), theirs, batches[model], reference)


@SLOW
def test_a_float32_pipeline_stays_within_rounding_of_one_device(batches):
    # With a small epsilon AdamW's first update is the sign of a gradient, which rounding can turn.
    narrow = dataclasses.replace(K3, parameter_dtype="float32", compute_dtype="float32")
    optimizer = OptimizerConfig(warmup_steps=0, max_gradient_norm=0.5, epsilon=0.1)
    theirs = dataclasses.replace(run_config(narrow), optimizer=optimizer)
    mesh = MeshConfig(pipe=2, expert=2, tensor=2)
    config = staged(theirs, (2, 2), mesh, accumulation=2)
    reference = one_step(theirs, batches["k3"])
    assert_equals_one_device(config, theirs, batches["k3"], reference, bound=1e-4)


def traced(config: RunConfig, batch):
    """The jaxpr of a step's gradient, and the body of the scan over its ticks."""
    mesh, state = make_mesh(config.mesh), abstract_state(config, make_mesh(config.mesh))
    jaxpr = jax.make_jaxpr(make_value_and_gradient(config, mesh))(
        state.parameters, state.router_biases, jax.eval_shape(lambda: place_batch(batch, mesh)), state.frozen
    )
    (body, num_ticks), *others = [
        (equation.params["jaxpr"].jaxpr, equation.params["length"])
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "scan" and exchanges(equation.params["jaxpr"].jaxpr, "pipe")
    ]
    assert not others
    # Hidden, a round of 1F1B is a tick of forward passes and one of backward passes.
    is_in_turn = config.training.pipeline_transfer == "hidden" and config.training.pipeline_schedule == "1f1b"
    assert num_ticks * (2 if is_in_turn else 1) == len(schedule_of(config).ticks)
    return jaxpr.jaxpr, body


def equations(jaxpr):
    """All equations of a jaxpr, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def exchanges(jaxpr, axis: str) -> list:
    """What is sent or summed over a mesh axis; `pvary` only marks, and its transpose is the sum."""
    named = [e for e in equations(jaxpr) if axis in (e.params.get("axes") or e.params.get("axis_name") or ())]
    return [equation for equation in named if equation.primitive.name not in ("pvary", "axis_index")]


@pytest.mark.parametrize(("transfer", "num_kept"), [("direct", 4), ("hidden", 5)])
def test_the_loop_has_the_tables_ticks_keeps_few_inputs_and_sums_no_gradients(batches, transfer, num_kept):
    with jax.enable_x64(True):
        config = staged(
            run_config(PLAIN, accumulation=8), (1, 2, 2, 3), MeshConfig(pipe=4, replica=2), pipeline_transfer=transfer
        )
        batch = jax.tree.map(lambda array: np.repeat(array, 2, axis=0), batches["plain"])
        whole, body = traced(config, batch)
    assert exchanges(body, "replica") == [] and exchanges(whole, "replica")
    sent = [equation for equation in exchanges(body, "pipe") if equation.primitive.name == "ppermute"]
    there, back = ((0, 1), (1, 2), (2, 3)), ((1, 0), (2, 1), (3, 2))
    # Hidden, gradients go back while forward passes are computed, then outputs go on while backward passes are.
    assert [equation.params["perm"] for equation in sent] == [there, back][:: 1 if transfer == "direct" else -1]
    # [slots, b, s, d]: the inputs of micro-batches under way. GPipe would keep all 8.
    buffers = [v.aval.shape[0] for v in body.invars if v.aval.shape[1:] == (1, 12, 16)]
    assert max(buffers) == num_kept
    assert schedule_of(config).slots().num_inputs == num_kept


@pytest.mark.parametrize("transfer", ["direct", "hidden"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "split_backward"])
def test_the_loop_of_every_schedule_has_its_tables_ticks_and_buffers(batches, schedule, transfer):
    chunks = 2 if schedule == "interleaved" else 1
    stages = (2, 2, 2, 2) if schedule == "interleaved" else (4, 4)
    with jax.enable_x64(True):
        config = staged(
            run_config(PLAIN, accumulation=4, pipeline_transfer=transfer),
            stages,
            MeshConfig(pipe=2),
            pipeline_schedule=schedule,
            chunks=chunks,
        )
        _, body = traced(config, batches["plain"])
    buffers = [v.aval.shape[0] for v in body.invars if v.aval.shape[1:] == (2, 12, 16)]
    slots = schedule_of(config).slots()
    assert sorted(buffers) == sorted([slots.num_inputs, slots.num_cotangents])


@SLOW
def test_memory_falls_as_the_pipe_axis_grows_and_each_tick_sends_once(batches):
    wide = dataclasses.replace(PLAIN, moe=dataclasses.replace(PLAIN.moe, dense_width=512))

    def memory(devices: int) -> tuple[int, int]:
        config = staged(run_config(wide, accumulation=8), (8 // devices,) * devices, MeshConfig(pipe=devices))
        mesh, state = make_mesh(config.mesh), abstract_state(config, make_mesh(config.mesh))
        batch = jax.eval_shape(lambda: place_batch(batches["plain"], mesh))
        step = jax.jit(make_value_and_gradient(config, mesh))
        program = step.lower(state.parameters, state.router_biases, batch, state.frozen).compile()
        reader = ExchangeReader(read_program(program.as_text()), config.mesh, read_cluster("1x8xh200"))
        found = {(exchange.kind, exchange.mesh_axes): exchange.count for exchange in reader.exchanges()}
        # Sums of counts, loss and gradients of what stages share; embedding and head are one, of the first and last.
        assert found.pop(("all-reduce", ("pipe",))) <= 6
        assert found == {("collective-permute", ("pipe",)): len(schedule_of(config).ticks)}
        memory = program.memory_analysis()
        return memory.argument_size_in_bytes, memory.temp_size_in_bytes

    with jax.enable_x64(True):
        (arguments, temporaries), (fewer, less) = memory(2), memory(8)
    assert fewer < 0.4 * arguments and less < 0.6 * temporaries


def test_gradients_of_weights_split_off_leave_their_products_to_their_own_pass():
    """As one program of all stages: in passes forward, backward to the input, and backward to the weights."""
    config = staged(
        run_config(dataclasses.replace(PLAIN, width=64, moe=dataclasses.replace(PLAIN.moe, dense_width=256))),
        (4, 4),
        MeshConfig(pipe=2),
        accumulation=4,
        pipeline_schedule="split_backward",
        layer_loops="whole",
        remat="layer",
    )
    with jax.enable_x64(True):
        mesh = make_mesh(config.mesh)
        state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
        step = jax.jit(make_value_and_gradient(config, mesh))
        text = step.lower(state.parameters, state.router_biases, batch, state.frozen).compile().as_text()
    program = read_program(text)
    (ticks,) = [c for c, *_ in program.runs() if any(i.opcode.startswith("collective-permute") for i in c.instructions)]

    def flops(name: str) -> float:
        body = program.computations[name]
        loops = (i.runs * flops(i.attribute("body")) for i in body.instructions if i.opcode == "while")
        return sum(loops) + sum(program.instruction_flops(body, instruction) for instruction in body.instructions)

    forward, to_input, to_weights = (flops(i.attribute("body")) for i in ticks.instructions if i.opcode == "while")
    # Each rematerialises its layers; the share of the first and the last stage, embedding and head, is small.
    assert 1.6 < to_input / forward < 2.1 and 2.5 < to_weights / forward < 3.1


@pytest.mark.parametrize("loops", [pytest.param("blocks", marks=SLOW), "whole"])
@pytest.mark.parametrize(
    ("schedule", "stages", "num_crossing"),
    [
        # The sums of blocks that begin before layers 1, 4 and 6: one, two and three, and the running sum.
        ("1f1b", (1, 3, 2, 2), {(0, 1): 2, (1, 2): 3, (2, 3): 4}),
        # Stages begin with layers 0, 1, 4 and 5. Device 1 gets the first sum of device 0, which has it; then each gets
        # from the other what that has finished.
        ("interleaved", (1, 3, 1, 3), {(0, 1): 2, (1, 0): 2}),
    ],
)
def test_sums_of_residual_blocks_cross_a_border_only_if_they_are_new_behind_it(
    batches, schedule, stages, num_crossing, loops
):
    settings = {"pipeline_schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1, "layer_loops": loops}
    mesh = MeshConfig(pipe=len(stages) // settings["chunks"], replica=2)
    config = staged(run_config(SUMS, accumulation=4), stages, mesh, **settings)
    with jax.enable_x64(True):
        devices = make_mesh(mesh)
        state = abstract_state(config, devices)
        batch = jax.eval_shape(lambda: place_batch(batches["sums"], devices))
        step = jax.jit(make_value_and_gradient(config, devices))
        text = step.lower(state.parameters, state.router_biases, batch, state.frozen).compile().as_text()
    program = read_program(text)
    reader = ExchangeReader(program, mesh, read_cluster("1x8xh200"))
    crossed = Counter()
    for computation, times, _ in program.runs():
        for instruction in computation.instructions:
            exchange = collective_of(program, computation, instruction)
            if exchange is not None and exchange.kind == "collective-permute":
                for sender, receiver in exchange.groups:
                    crossed[sender // 2, receiver // 2] += int(times * exchange.num_bytes)
            elif exchange is not None:
                # Data-parallel sums of gradients, behind the loop.
                assert times == 1 or "replica" not in reader.mesh_axes(exchange)
    # Of rows [12 positions, width] of both replicas, in each tick; 1F1B sends in every other one in each direction.
    num_ticks = len(schedule_of(config).ticks) // (2 if schedule == "1f1b" else 1)
    there = {border: number * num_ticks * 2 * 12 * SUMS.width * 8 for border, number in num_crossing.items()}
    assert crossed == Counter(there) + Counter({(b, a): number for (a, b), number in there.items()})


def test_a_pipeline_predicts_one_devices_tokens(batches):
    with jax.enable_x64(True):
        plain = run_config(PLAIN)
        piped = staged(plain, (5, 3), MeshConfig(pipe=2))
        state, ours = init_state(plain, make_mesh(plain.mesh)), init_state(piped, make_mesh(piped.mesh))
        relaid_start = relaid(plain, piped, jax.device_get(state.parameters), "parameters")
        for path, array in jax.device_get(ours.parameters).items():
            np.testing.assert_array_equal(array, relaid_start[path], path)
        tokens = [
            np.asarray(
                make_predict(config, make_mesh(config.mesh))(
                    s.parameters, s.router_biases, s.frozen, place_batch(batches["plain"], make_mesh(config.mesh))
                )
            )
            for config, s in ((plain, state), (piped, ours))
        ]
        assert len(np.unique(tokens[0])) > 2
        np.testing.assert_array_equal(tokens[1], tokens[0])
