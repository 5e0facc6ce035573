import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.config import MeshConfig
from mmjax.parallel.conditions import add_rounds, run_once
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.topology import read_cluster
from mmjax.training.compiled_program import collective_of, read_program
from mmjax.training.exchanges import ExchangeReader, hidden_share

# ruff: noqa: E501
# Two layers in a loop on four devices: the next weights are gathered while the present ones are used; at the end a sum.
SCHEDULED = """HloModule step, is_scheduled=true

%product (left: bf16[512,1024], right: bf16[1024,1024]) -> bf16[512,1024] {
  %left = bf16[512,1024]{1,0} parameter(0)
  %right = bf16[1024,1024]{1,0} parameter(1)
  ROOT %dot.1 = bf16[512,1024]{1,0} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%take (stack: bf16[2,256,1024], place: s32[]) -> bf16[1,256,1024] {
  %stack = bf16[2,256,1024]{2,1,0} parameter(0)
  %place = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,256,1024]{2,1,0} dynamic-slice(%stack, %place, %zero, %zero), dynamic_slice_sizes={1,256,1024}
}

%body (state: (s32[], bf16[512,1024], bf16[2,256,1024])) -> (s32[], bf16[512,1024], bf16[2,256,1024]) {
  %state = (s32[], bf16[512,1024]{1,0}, bf16[2,256,1024]{2,1,0}) parameter(0)
  %number = s32[] get-tuple-element(%state), index=0
  %rows = bf16[512,1024]{1,0} get-tuple-element(%state), index=1
  %weights = bf16[2,256,1024]{2,1,0} get-tuple-element(%state), index=2
  %mine = bf16[1,256,1024]{2,1,0} fusion(%weights, %number), kind=kLoop, calls=%take
  %flat = bf16[256,1024]{1,0} bitcast(%mine)
  %gather-start = (bf16[256,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%flat), replica_groups=[2,2]<=[4], dimensions={0}
  %busy = bf16[512,1024]{1,0} fusion(%rows, %rows), kind=kCustom, calls=%product, metadata={op_name="step/busy"}
  %gathered = bf16[1024,1024]{1,0} all-gather-done(%gather-start)
  %next = bf16[512,1024]{1,0} fusion(%busy, %gathered), kind=kCustom, calls=%product
  %shift-start = bf16[512,1024]{1,0} collective-permute-start(%next), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  %shifted = bf16[512,1024]{1,0} collective-permute-done(%shift-start)
  ROOT %out = (s32[], bf16[512,1024]{1,0}, /*index=2*/bf16[2,256,1024]{2,1,0}) tuple(%number, %shifted, /*index=2*/%weights)
}

%condition (state.1: (s32[], bf16[512,1024], bf16[2,256,1024])) -> pred[] {
  %state.1 = (s32[], bf16[512,1024]{1,0}, bf16[2,256,1024]{2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%seldom (x.1: f32[64]) -> f32[64] {
  %x.1 = f32[64]{0} parameter(0)
  ROOT %sum.1 = f32[64]{0} all-reduce(%x.1), replica_groups={{0,2},{1,3}}, to_apply=%add
}

%never (x.2: f32[64]) -> f32[64] {
  ROOT %x.2 = f32[64]{0} parameter(0)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %plus = f32[] add(%a, %b)
}

ENTRY %main (rows.1: bf16[512,1024], weights.1: bf16[2,256,1024], flag: pred[], x: f32[64]) -> f32[64] {
  %rows.1 = bf16[512,1024]{1,0} parameter(0)
  %weights.1 = bf16[2,256,1024]{2,1,0} parameter(1)
  %flag = pred[] parameter(2)
  %x = f32[64]{0} parameter(3)
  %first = s32[] constant(0)
  %begin = (s32[], bf16[512,1024]{1,0}, bf16[2,256,1024]{2,1,0}) tuple(%first, %rows.1, %weights.1)
  %loop = (s32[], bf16[512,1024]{1,0}, bf16[2,256,1024]{2,1,0}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %chosen = f32[64]{0} conditional(%flag, %x, %x), true_computation=%seldom, false_computation=%never
  %total-start = f32[64]{0} all-reduce-start(%chosen), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %total = f32[64]{0} all-reduce-done(%total-start)
}
"""
MESH = MeshConfig(fsdp=2, expert=2)


@pytest.fixture(scope="module")
def reader() -> ExchangeReader:
    return ExchangeReader(read_program(SCHEDULED), MESH, read_cluster("2x2xh200"))


def test_products_of_loops_count_as_often_as_they_run(reader):
    assert reader.program.flops() == 2 * 2 * (2 * 512 * 1024 * 1024)


def test_each_kind_of_exchange_is_counted_by_the_mesh_axes_of_its_groups(reader):
    found = {(e.kind, e.mesh_axes, e.is_conditional): (e.count, e.num_bytes) for e in reader.exchanges()}
    assert found == {
        ("all-gather", ("expert",), False): (2, 2 * 1024 * 1024 * 2),
        ("collective-permute", ("fsdp",), False): (2, 2 * 512 * 1024 * 2),
        ("all-reduce", ("fsdp", "expert"), False): (1, 64 * 4),
        ("all-reduce", ("fsdp",), True): (1, 64 * 4),
    }


def test_what_lies_between_start_and_end_hides_an_exchange_only_if_it_takes_as_long():
    # Inside a node 2 MiB take 6 us and a product 1.6 us; eight times as many rows take longer.
    for rows, is_hidden in ((512, False), (8192, True)):
        program = read_program(SCHEDULED.replace("[512,", f"[{rows},"))
        exchanges = ExchangeReader(program, MESH, read_cluster("1x4xh200")).exchanges()
        (gather,) = (exchange for exchange in exchanges if exchange.kind == "all-gather")
        assert (gather.hidden_bytes == gather.num_bytes) == is_hidden
        assert gather.hidden_bytes in (0, gather.num_bytes)
        # Nothing runs while the rows are passed on.
        assert sum(e.hidden_bytes for e in exchanges if e.kind != "all-gather") == 0
        assert hidden_share(exchanges) == pytest.approx(
            gather.hidden_bytes / sum(e.num_bytes for e in exchanges if not e.is_conditional)
        )


def test_the_timeline_waits_for_what_is_not_hidden(reader):
    timeline = reader.timeline()
    transfers = sum(e.seconds for e in reader.exchanges() if not e.is_conditional)
    busy = 2 * reader.instruction_seconds(
        reader.program.computations["body"], reader.program.computations["body"].by_name["busy"]
    )
    assert timeline.exposed == pytest.approx(transfers - busy)
    assert timeline.compute > 2 * busy


def test_a_slice_of_a_large_array_costs_its_own_size(reader):
    body = reader.program.computations["body"]
    assert reader.program.instruction_bytes(body, body.by_name["mine"]) == 2 * 256 * 1024 * 2 + 4


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
    ],
)
def test_groups_are_read_in_both_of_their_forms(groups, expected):
    line = f"  ROOT %sum = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    program = read_program(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{line}\n}}\n")
    main = program.computations["main"]
    found = collective_of(program, main, main.root)
    assert found is not None and found.groups == expected and found.is_synchronous and found.num_bytes == 32


def test_rows_times_stacked_weights_count_once_for_each_stack():
    text = """ENTRY %main (rows: bf16[100,32], gate: bf16[4,32,64], up: bf16[4,32,64]) -> bf16[100,64] {
  %rows = bf16[100,32]{1,0} parameter(0)
  %gate = bf16[4,32,64]{2,1,0} parameter(1)
  %up = bf16[4,32,64]{2,1,0} parameter(2)
  ROOT %kernel = bf16[100,64]{1,0} custom-call(%rows, %gate, %up), custom_call_target="mosaic_gpu_v2"
}
"""
    assert read_program(text).flops() == 2 * 2 * 100 * 32 * 64
    assert read_program(text, filled_share=0.5).flops() == 2 * 100 * 32 * 64


def test_a_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no entry"):
        read_program("HloModule nothing\n")


def test_the_exchanges_of_a_program_for_eight_devices_are_those_that_it_asks_for():
    config = MeshConfig(fsdp=2, expert=4)
    mesh = make_mesh(config)

    def step(rows, weights):
        def layer(rows, weight):
            whole = lax.all_gather(weight, ("fsdp", "expert"), axis=0, tiled=True)
            rows = lax.all_to_all(rows @ whole, "expert", 0, 0, tiled=True)
            return rows, None

        rows, _ = lax.scan(layer, rows, weights)
        return lax.psum(jnp.sum(rows), ("fsdp", "expert"))

    specs = (PartitionSpec(("fsdp", "expert")), PartitionSpec(None, ("fsdp", "expert")))
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True)
    shapes = ((64, 16), (3, 16, 16))
    arguments = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    program = read_program(jax.jit(step).lower(*arguments).compile().as_text())
    reader = ExchangeReader(program, config, read_cluster("8xh200"))
    found = {(e.kind, e.mesh_axes): (e.count, e.num_bytes) for e in reader.exchanges()}
    assert found["all-gather", ("fsdp", "expert")] == (3, 3 * 16 * 16 * 4)
    assert found["all-to-all", ("expert",)] == (3, 3 * 8 * 16 * 4)
    assert found["all-reduce", ("fsdp", "expert")] == (1, 4)
    assert len(found) == 3
    assert program.flops() == 3 * 2 * 8 * 16 * 16


def test_the_largest_arrays_are_named_by_shape_and_operation(reader):
    largest = reader.program.largest_results(2)
    assert [(result.shape, result.num_bytes) for result in largest] == [
        ("bf16[1024,1024]", 1024 * 1024 * 2),
        ("bf16[512,1024]", 512 * 1024 * 2),
    ]
    assert "step/busy" in {result.operation for result in reader.program.largest_results(9)}


def test_a_condition_counts_as_often_as_its_name_says():
    count, name = 'backend_config={"known_trip_count":{"n":"2"}}', 'metadata={op_name="step/runs_3_of_4/while"}'
    assert count in SCHEDULED
    for text, expected in ((SCHEDULED, 2), (SCHEDULED.replace(count, f"{count}, {name}"), 0.75)):
        assert [times for body, times, _ in read_program(text).runs() if body.name == "body"] == [expected]


def test_a_compiled_condition_keeps_the_name_that_says_how_often_it_runs():
    def add_under_condition(total: jax.Array, number: jax.Array):
        product = jnp.full((8, 8), 0.5)
        return run_once(
            number % 3 == 0, lambda old, new: (old @ product) * new, total, number.astype(jnp.float32), (2, 6)
        ), None

    @jax.jit
    def add_up(start: jax.Array):
        return lax.scan(add_under_condition, start, jnp.arange(6))[0]

    program = read_program(add_up.lower(jnp.ones((8, 8))).compile().as_text())
    # Two products of 8 x 8 matrices, in a loop of six turns.
    assert program.flops() == 2 * 2 * 8**3
    assert {instruction.runs for c, *_ in program.runs() for instruction in c.instructions} == {1, 2 / 6, 6}


def test_rounds_that_hardly_ever_run_are_known_as_such_forward_and_backward():
    def run_round(number: jax.Array, weight: jax.Array, _) -> jax.Array:
        return jnp.tanh(weight) * number.astype(weight.dtype)

    @jax.jit
    def differentiate(start: jax.Array, weight: jax.Array, num_rounds: jax.Array):
        total, pullback = jax.vjp(lambda *given: add_rounds(given[0], run_round, num_rounds, given[1]), start, weight)
        return total, pullback(total)

    program = read_program(differentiate.lower(jnp.ones(8), jnp.ones(8), jnp.int32(1)).compile().as_text())
    loops = [i for c in program.computations.values() for i in c.instructions if i.opcode == "while"]
    assert [loop.runs for loop in loops] == [0, 0]
