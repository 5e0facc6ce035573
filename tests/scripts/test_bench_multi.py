"""The script for several GPUs: what runs when, what is ended, what is counted; and all of it in tiny shapes."""

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mmjax.config import MeshConfig, parse_mesh

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    """Scripts find what is beside them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_every_mesh_takes_all_devices_and_every_axis_has_one(number):
    from multi_benchmarks.cases import cases_for, meshes_of

    meshes = [parse_mesh(text) for text in meshes_of(number)]
    assert {mesh.num_devices for mesh in meshes} == ({number} if number > 1 else set())
    for axis in MeshConfig().sizes:
        assert number == 1 or any(mesh.sizes[axis] > 1 for mesh in meshes), axis
    cases = cases_for(number)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    # What a case is compared with comes before it, or it would keep it waiting for a place.
    assert all(not case.needs or case.needs in names[: names.index(case.name)] for case in cases)


def test_a_number_that_the_meshes_do_not_divide_is_refused():
    from multi_benchmarks.cases import cases_for

    with pytest.raises(ValueError, match="3 devices"):
        cases_for(3)


@pytest.mark.parametrize("mesh", ["expert=8", "fsdp=8", "tensor=2,expert=4", "pipe=2,expert=4"])
def test_each_of_several_devices_has_the_experts_and_tokens_of_one(mesh):
    from multi_benchmarks import shapes
    from multi_benchmarks.cases import MODELS

    for name in MODELS.values():
        start = shapes.experiment(name, is_tiny=False)
        alone = shapes.settled(shapes.spread(start, MeshConfig(), 8))
        config = shapes.settled(shapes.spread(start, parse_mesh(mesh), 8))
        moe, others = config.model.moe, alone.model.moe
        assert moe.num_resident_experts == others.num_resident_experts * config.mesh.expert
        # With all experts on all devices their number is that which tokens choose from on one device, too.
        assert not others.resident_experts or others.num_experts == 8 * others.num_resident_experts
        share = config.data.rows / config.mesh.num_devices
        assert share == alone.data.rows or (config.mesh.pipe > 1 and share > alone.data.rows)
        assert config.data.rows / config.mesh.num_row_shards / config.training.accumulation <= alone.data.rows
        assert config.model.num_layers == alone.model.num_layers
        small = shapes.tiny(start)
        assert small.model.moe.expert_width == 16
        for number, text in ((8, mesh), (8, ""), (1, "")):
            shapes.settled(shapes.spread(small, parse_mesh(text) if text else MeshConfig(), number))


def events(*kernels: tuple[int, int, str, float, float]) -> list[dict]:
    """Of (device, lane, name, start, end)."""
    lanes = {(device, lane) for device, lane, *_ in kernels}
    named = [{"name": "thread_name", "pid": d, "tid": lane, "args": {"name": f"Stream #{lane}"}} for d, lane in lanes]
    named.append({"name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "python"}})
    run = [{"ph": "X", "pid": 9, "tid": 1, "name": "nccl on the host", "ts": 0, "dur": 1e6}]
    return [
        *named,
        *run,
        *({"ph": "X", "pid": d, "tid": lane, "name": n, "ts": s, "dur": e - s} for d, lane, n, s, e in kernels),
    ]


def test_exchanges_are_hidden_as_far_as_something_computes_beside_them():
    from gpu_trace import busy_share, kernels_of
    from multi_benchmarks.overlap import describe_kernels, overlap_of

    kernels = kernels_of(
        events(
            (0, 1, "gemm", 0, 40),
            (0, 1, "fusion", 30, 50),
            (0, 2, "ncclDevKernel_SendRecv", 20, 80),
            (0, 3, "ncclDevKernel_AllGather", 70, 100),
            (1, 1, "gemm", 0, 100),
            (1, 2, "MemcpyP2P", 10, 20),
        )
    )
    found = overlap_of(kernels)
    assert found is not None
    # Device 0 computes 50, exchanges 80 and hides 30; device 1 computes 100, exchanges and hides 10.
    np.testing.assert_allclose([found.computing, found.exchanging, found.hidden], [75e-6, 45e-6, 20e-6])
    np.testing.assert_allclose([found.span, found.parts["products"], found.parts["others"]], [100e-6, 70e-6, 10e-6])
    np.testing.assert_allclose(found.computing_of_devices, [50e-6, 100e-6])
    assert "0.06 ms, 1 x, ncclDevKernel_SendRecv exposed 0.03" in describe_kernels(kernels).splitlines()
    assert busy_share(kernels) == 1.0
    assert busy_share(kernels_of(events((0, 1, "a", 0, 40), (0, 2, "b", 30, 50), (0, 1, "c", 75, 100)))) == 0.75
    assert overlap_of(kernels_of(events())) is None


def test_differences_are_those_of_the_worst_leaf_and_what_is_not_finite_is_counted():
    from multi_benchmarks.gradients import beside, bound_of, difference

    theirs = {"a": np.array([3.0, 4.0]), "b": np.array([[1.0, 0.0]]), "zero": np.zeros(2)}
    found = difference({"a": np.array([3.0, 4.5]), "b": np.array([[1.0, 0.2]]), "zero": np.zeros(2)}, theirs)
    assert (found.largest, found.norm, found.leaf, found.num_nonfinite) == (0.2, 0.2, "b", 0)
    found = difference(theirs | {"a": np.array([3.0, np.nan])}, theirs)
    assert found.norm == np.inf and found.leaf == "a" and found.num_nonfinite == 1
    assert difference(theirs | {"zero": np.array([0, 1e-30])}, theirs).norm == np.inf
    with pytest.raises(ValueError, match="other arrays"):
        difference({"a": theirs["a"]}, theirs)
    # Further apart, but b is usually so.
    ours, usual = theirs | {"a": np.array([3.0, 4.4]), "b": np.array([[1.0, 0.1]])}, {"a": 0.0, "b": 0.06, "zero": 0.0}
    found = beside(ours, theirs, usual)
    assert (found["leaf"], found["usual"]) == ("a", 0.0)
    np.testing.assert_allclose([found["norm"], found["largest"], bound_of(0.06)], [0.08, 0.1, 0.18])


CHILD = """
import sys, time
from pathlib import Path
from multi_benchmarks.session import Session

session, name = Session(Path("."), 1), sys.argv[sys.argv.index("--case") + 1]
if name == "free":
    time.sleep(100)
if name == "breaks":
    print("it cannot")
    sys.exit(3)
with session.turn():
    session.report(begun=time.time())
    if name == "hangs":
        time.sleep(100)
    time.sleep(0.2)
    session.report(ended=time.time())
"""


def test_cases_take_turns_and_one_that_hangs_or_breaks_costs_no_other(tmp_path):
    from multi_benchmarks.cases import Case
    from multi_benchmarks.runner import Runner

    def case(name: str, needs: str = "", seconds: float = 20, is_timed: bool = True, is_free: bool = False) -> Case:
        return Case(
            part="test", name=name, module="none", seconds=seconds, needs=needs, is_timed=is_timed, is_free=is_free
        )

    (tmp_path / "child.py").write_text(textwrap.dedent(CHILD))
    kept = []
    runner = Runner(
        cases=[
            case("breaks"),
            case("hangs", seconds=0.5),
            case("first"),
            case("second", needs="first"),
            case("third", needs="breaks"),
            case("check", is_timed=False),
            case("free", is_timed=False, is_free=True),
        ],
        command=[sys.executable, str(tmp_path / "child.py")],
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        logs=tmp_path,
        num_processes=7,
        seconds=60,
        compile_seconds=4,
        keep=lambda outcomes: kept.append([outcome.status for outcome in outcomes]),
    )
    found = {outcome.name: outcome for outcome in runner.run()}
    assert found["breaks"].status == "failed (3): it cannot"
    assert found["hangs"].status.startswith("ended: took longer than")
    assert found["third"].status == "not run: breaks gave nothing to compare with"
    assert found["free"].status == "ended: timings begin"
    done = {name: outcome for name, outcome in found.items() if outcome.status == "done"}
    assert done.keys() == {"first", "second", "check"}
    spans = {name: outcome.results[0] | outcome.results[1] for name, outcome in done.items()}
    # What is not timed runs while others compile; what hung kept what it had reported.
    assert spans["check"]["ended"] <= found["hangs"].results[0]["begun"] <= spans["first"]["begun"]
    assert spans["first"]["ended"] <= spans["second"]["begun"]
    assert len(kept) == 7 and "not started" not in kept[-1]


def step(name: str, tokens_per_second: float, **more) -> dict:
    values = {"step_seconds": 1.5, "tokens_per_second": tokens_per_second, "mfu": 0.4, "rounds": 1.0}
    return {"part": "steps", "name": name, "results": [values, {"peak_bytes": 2**30, "compiled_bytes": 0}, more]}


def test_the_report_holds_ratios_gradients_and_what_was_not_done():
    from multi_benchmarks.report import checks, print_report, speed_ratios
    from multi_benchmarks.runner import Outcome

    same = {"norm": 0.01, "largest": 1e-5, "leaf": "decoder.head", "num_nonfinite": 0, "usual": 0.004}
    broken = same | {"norm": float("inf"), "num_nonfinite": 7}
    traced = {
        "traced": {
            "exchanging": 0.2,
            "hidden_share": 0.75,
            "span": 1.4,
            "computing_of_devices": [1.1, 1.3],
            "parts": {"products": 0.9},
        },
        "scheduled": {"hidden_share": 0.5},
    }
    mesh = {"loss_difference": 1e-7, **same}
    outcomes = [
        Outcome(status="done", **values)
        for values in (
            step("k3_slice one GPU", 1000),
            step("k3_slice expert=8", 840, **traced),
            step("k3_slice expert=8, ring", 900, gradients=same),
            step("k3_slice expert=8, ragged", 900, gradients=broken),
            {
                "part": "meshes",
                "name": "gradients fsdp=8",
                "results": [{"dtype": "float32", **mesh}, {"dtype": "bfloat16", **mesh}],
            },
            {
                "part": "tests",
                "name": "tests test_step",
                "results": [{"test": "a[fsdp=8]", "result": "passed"}, {"test": "b", "result": "failed"}],
            },
            {"part": "links", "name": "links", "results": [{"fit": "300 GB/s", "planned_link": 3.6e11}]},
            {"part": "environment", "name": "environment", "results": [{"links": [["X", "NV18"], ["NV18", "X"]]}]},
        )
    ]
    outcomes.append(Outcome("offload", "k3_slice expert=8, attention kept", "failed (1): [no] memory"))
    assert speed_ratios(outcomes) == {
        "k3_slice expert=8": 0.84,
        "k3_slice expert=8, ring": 0.9,
        "k3_slice expert=8, ragged": 0.9,
    }
    assert {check.what: check.holds for check in checks(outcomes)} == {
        "k3_slice expert=8, ring: first gradients": True,
        "k3_slice expert=8, ragged: first gradients": False,
        "gradients fsdp=8, float32: gradients": True,
        "gradients fsdp=8, bfloat16: gradients": True,
        "tests test_step": False,
        "k3_slice expert=8: speed of one GPU": False,
    }
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(outcomes, console)
    text = console.export_text()
    for part in (
        "84.0%",
        "75%",
        "50%",
        "products 900.0",
        "NV18",
        "360 GB/s",
        "[no] memory",
        "1 failed b",
        "misses",
        "a leaf's scale",
    ):
        assert part in text, part


def test_lines_of_pytest_are_read_with_and_without_workers():
    from multi_benchmarks.mesh_tests import read_result

    assert read_result("tests/a.py::test_b[x=2,y=4] PASSED [ 10%]") == ("test_b[x=2,y=4]", "passed")
    assert read_result("[gw3] [ 10%] FAILED tests/a.py::test_b[x=2]") == ("test_b[x=2]", "failed")
    assert read_result("collected 3 items") is None


@pytest.mark.slow  # half an hour of two cores
@pytest.mark.parametrize("devices", [8, 2])
def test_the_whole_of_it_runs_on_virtual_devices(tmp_path, devices):
    # Two devices show that fewer than eight do.
    chosen = ["links", "exchange alone", "gradients replica=2", "kimi_linear expert=2"]
    # In other ways one of both models' steps is enough.
    only = ["--only", *(chosen if devices == 2 else ["environment", "links", "steps", "meshes", "k3_slice", "tests"])]
    command = [sys.executable, "scripts/bench_multi.py", "--tiny", "--devices", str(devices), "--output", str(tmp_path)]
    more = ["--seconds", "3600", "--compile-seconds", "3600", *only]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "results.json").read_text())
    unfinished = {case["name"]: case["status"] for case in results["cases"] if case["status"] != "done"}
    # A CPU has no ragged exchange.
    assert all("ragged" in name and "refused" in status for name, status in unfinished.items()), unfinished
    assert "must hold" in done.stdout and done.returncode == (1 if unfinished else 0)
    apart = [result for case in results["cases"] for result in case["results"] if "norm" in result]
    apart += [result["gradients"] for case in results["cases"] for result in case["results"] if "gradients" in result]
    assert apart and all(result["largest"] <= 1e-4 for result in apart if result.get("dtype") != "bfloat16")
