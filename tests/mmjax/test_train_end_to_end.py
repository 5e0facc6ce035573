"""The whole command with a tiny model on a mesh of eight devices: killed, stopped, damaged, spoilt, without room."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import PIL.Image
import pytest

from mmjax import train
from mmjax.config import RunConfig, saved
from mmjax.data import order, packing
from mmjax.data.batch import Batch, digest
from mmjax.data.sources import digits
from mmjax.errors import EXIT_INTERRUPTED
from mmjax.monitor.metrics import read_lines
from mmjax.parallel.mesh import make_mesh
from mmjax.training import evaluation, loop
from mmjax.training.step import abstract_state
from tests.mmjax import tiny_run

ROOT = Path(__file__).parents[2]
STEPS = 20
SETTINGS = f"""{tiny_run.SETTINGS}
mesh: {{tensor: 2, expert: 4}}
checkpoint: {{every_steps: 5}}
training: {{steps: 20, accumulation: 2, eval_every_steps: 10, max_nonfinite_steps: 3}}
"""

Change = Callable[[int, Batch], Batch | None]
"""What to do before a batch is used, given how many this run has used: it may give another one to be used instead."""


@dataclasses.dataclass
class Observed:
    """What a run in this process did."""

    batches: list[str] = dataclasses.field(default_factory=list)
    """Digests of the batches taken."""
    compiled: list[str] = dataclasses.field(default_factory=list)
    """Names of the programs compiled."""


@dataclasses.dataclass
class Undisturbed(Observed):
    """A run that nothing disturbed, and its programs."""

    run_dir: Path = Path()
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `compile_step`, `init_state` (on the host) and `make_predict` gave it."""


def run(run_dir: Path, *options: str, change: Change | None = None) -> tuple[int, Observed]:
    """Run the train command in this process; its exit code, and what it did."""
    observed, place_batch = Observed(), loop.place_batch

    def place(batch: Batch, mesh: jax.sharding.Mesh) -> Batch:
        observed.batches.append(digest(batch))
        changed = change(len(observed.batches) - 1, batch) if change else None
        return place_batch(batch if changed is None else changed, mesh)

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event.endswith("/backend_compile_duration"):
            observed.compiled.append(details["fun_name"])

    settings = run_dir.parent / "tiny.yaml"
    settings.write_text(SETTINGS)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "400")
            patch.setattr(loop, "place_batch", place)
            # A few epochs in one run.
            patch.setattr(digits, "EPOCH_SAMPLES", 96)
            code = train.main(["--config", str(settings), "--run-dir", str(run_dir), *options])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return code, observed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    kept: dict[str, Any] = {}

    def keep(module: Any, name: str) -> None:
        make = getattr(module, name)

        def make_and_keep(*arguments: Any) -> Any:
            made = make(*arguments)
            # Arrays of a first state are donated to the first step: keep a copy.
            kept[name] = jax.device_get(made) if name == "init_state" else made
            return made

        patch.setattr(module, name, make_and_keep)

    # Small programs too, for the process that is to be killed.
    patient = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        keep(loop, "compile_step")
        keep(loop, "init_state")
        keep(evaluation, "make_predict")
        code, observed = run(run_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", patient)
    assert code == 0
    return Undisturbed(**dataclasses.asdict(observed), run_dir=run_dir, kept=kept)


@pytest.fixture
def compiled(undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take the programs and the first state of the undisturbed run, which would be the same."""
    kept = undisturbed.kept

    def init_state(*arguments: Any) -> Any:
        return jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), kept["init_state"], abstract_state(*arguments)
        )

    monkeypatch.setattr(loop, "compile_step", lambda *_: kept["compile_step"])
    monkeypatch.setattr(loop, "init_state", init_state)
    monkeypatch.setattr(evaluation, "make_predict", lambda *_: kept["make_predict"])


def arrays(run_dir: Path, step: int) -> dict[str, str]:
    """Digests of all arrays that a complete checkpoint holds, by name."""
    manifest = json.loads((run_dir / "checkpoints" / str(step) / "manifest.json").read_text())
    return {name: entry["digest"] for name, entry in manifest["arrays"].items()}


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_lines(run_dir / "metrics.jsonl")]


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "evaluations.jsonl")


def stop_at(number: int) -> Change:
    """Asks the run to stop when so many steps of it are done: while it makes the next batch."""
    return lambda current, _: os.kill(os.getpid(), signal.SIGTERM) if current == number else None


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(
        int(path.parent.name) for path in run_dir.glob("checkpoints/*/manifest.json") if path.parent.name.isdecimal()
    )


CHILD = """
    import os, signal, sys

    from mmjax import train
    from mmjax.checkpoint import store
    from mmjax.data.batch import digest
    from mmjax.data.sources import digits
    from mmjax.training import loop

    write_manifest, place_batch = store.write_manifest, loop.place_batch

    def write_or_die(path, manifest):
        if path.name == "10":
            os.kill(os.getpid(), signal.SIGKILL)
        write_manifest(path, manifest)

    def place(batch, mesh):
        print("batch", digest(batch), file=sys.stderr, flush=True)
        return place_batch(batch, mesh)

    digits.EPOCH_SAMPLES, store.write_manifest, loop.place_batch = 96, write_or_die, place
    sys.exit(train.main(sys.argv[1:]))
"""


def run_until_killed(run_dir: Path, *options: str) -> list[str]:
    """The command in a process of its own that dies while checkpoint 10 is written; digests of the batches it took."""
    (run_dir.parent / "tiny.yaml").write_text(SETTINGS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = ["--config", str(run_dir.parent / "tiny.yaml"), "--run-dir", str(run_dir), *options]
    program = [sys.executable, "-c", textwrap.dedent(CHILD), *arguments]
    child = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    return [line.split()[1] for line in child.stderr.splitlines() if line.startswith("batch ")]


def test_a_run_killed_in_a_save_and_stopped_by_a_signal_ends_bitwise_as_the_undisturbed_one(
    undisturbed: Undisturbed, compiled: None, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    taken = run_until_killed(run_dir, "--training.eval-every-steps", "0")
    # The save goes on beside the steps after it.
    assert len(taken) > 10 and taken == undisturbed.batches[: len(taken)]
    assert steps_saved(run_dir) == [5]

    code, observed = run(run_dir, change=stop_at(8))
    assert code == EXIT_INTERRUPTED
    assert observed.batches == undisturbed.batches[5:14]
    assert steps_saved(run_dir) == [5, 10, 13]
    captured = capfd.readouterr()
    assert "checkpoints/10: incomplete" in captured.err and "resumed after step 5" in captured.out

    code, observed = run(run_dir)
    assert code == 0
    assert observed.batches == undisturbed.batches[13:]
    assert arrays(run_dir, 20) == arrays(undisturbed.run_dir, 20)
    assert losses(run_dir) == losses(undisturbed.run_dir)
    assert evaluations(run_dir) == evaluations(undisturbed.run_dir)


@pytest.mark.slow
def test_muon_an_indexer_and_one_device_resume_bitwise_too(tmp_path: Path) -> None:
    options = ["--mesh", "1x1x1", "--training.accumulation", "1", "--optimizer.name", "muon", "--model.num-layers", "4"]
    options += ["--model.full-attention-layers", "2", "3", "--model.full-attention.indexer.stage", "sparse"]
    options += ["--model.full-attention.indexer.top-k", "8", "--model.residual-block-layers", "3"]
    code, whole = run(tmp_path / "whole", *options)
    assert code == 0 and len(whole.batches) == STEPS
    assert run_until_killed(tmp_path / "killed", *options)[:10] == whole.batches[:10]
    code, resumed = run(tmp_path / "killed", *options)
    assert code == 0 and resumed.batches == whole.batches[5:]
    assert resumed.compiled.count("jit(train_step)") == whole.compiled.count("jit(train_step)") == 1
    assert arrays(tmp_path / "killed", 20) == arrays(tmp_path / "whole", 20)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_checkpoint_holds_every_array_by_its_name_and_each_changes_from_step_to_step(
    undisturbed: Undisturbed,
) -> None:
    names, before, after = (arrays(undisturbed.run_dir, step) for step in (20, 10, 20))
    state = undisturbed.kept["init_state"]
    parameters = {f"parameters.{path}" for path in state.parameters}
    biases = {f"router_biases.{path}" for path in state.router_biases}
    assert parameters | biases | {"step", "nonfinite_steps"} == {name for name in names if "optimizer" not in name}
    moments = [name for name in names if name.startswith("optimizer.") and "decoder" in name]
    assert len(moments) == 2 * sum(path.startswith("decoder") for path in state.parameters)
    assert len(losses(undisturbed.run_dir)) == len(set(undisturbed.batches)) == STEPS
    unchanged = {name for name in before if before[name] == after[name]}
    # The first mix of all has a single source: nothing to learn.
    assert {name for name in unchanged if "segments.0.layers.0.mixer_residual" not in name} == {"nonfinite_steps"}


def test_a_run_compiles_its_step_and_its_evaluation_once(undisturbed: Undisturbed) -> None:
    assert undisturbed.compiled.count("jit(train_step)") == 1
    assert undisturbed.compiled.count("jit(on_device)") == 1
    assert len(evaluations(undisturbed.run_dir)) == 2
    assert {record["compilations"] for record in read_lines(undisturbed.run_dir / "metrics.jsonl")} == {1}


def test_a_finished_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    undisturbed: Undisturbed, compiled: None, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    run_dir = shutil.copytree(undisturbed.run_dir, tmp_path / "run")
    damage(run_dir, 20)
    code, observed = run(run_dir)
    captured = capfd.readouterr()
    assert code == 0 and observed.batches == undisturbed.batches[15:]
    assert f"checkpoint {run_dir}/checkpoints/20: damaged" in captured.err and "resumed after step 15" in captured.out
    assert arrays(run_dir, 20) == arrays(undisturbed.run_dir, 20)
    assert losses(run_dir) == losses(undisturbed.run_dir)
    assert evaluations(run_dir) == evaluations(undisturbed.run_dir)


def test_with_every_checkpoint_damaged_the_run_says_so_and_keeps_all_it_found(
    undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    run_dir = shutil.copytree(undisturbed.run_dir, tmp_path / "run")
    for step in steps_saved(run_dir):
        damage(run_dir, step)
    before = {path.name.removeprefix("damaged-"): contents(path) for path in run_dir.iterdir()}
    for _ in range(2):
        assert run(run_dir)[0] == 4
        assert_one_message(capfd, "found     only damaged steps (damaged-10, damaged-15, damaged-20)")
    after = {path.name: contents(path) for path in run_dir.iterdir()}
    # It names the folder, which was copied.
    del before["config.yaml"], after["config.yaml"]
    before["checkpoints"] = {f"damaged-{name}": content for name, content in before["checkpoints"].items()}
    assert after == before


def damage(run_dir: Path, step: int) -> None:
    """Turn one byte in the largest file of a checkpoint."""
    largest = max(
        (run_dir / "checkpoints" / str(step)).rglob("*"), key=lambda path: path.stat().st_size * path.is_file()
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def contents(path: Path) -> Any:
    """All that a file or folder holds."""
    return {entry.name: contents(entry) for entry in path.iterdir()} if path.is_dir() else path.read_bytes()


def test_blank_pictures_give_other_losses_of_the_same_questions(
    undisturbed: Undisturbed, compiled: None, tmp_path: Path
) -> None:
    code, observed = run(tmp_path / "run", "--data.images", "blank", change=stop_at(3))
    assert code == EXIT_INTERRUPTED
    kept, blank = read_lines(undisturbed.run_dir / "metrics.jsonl")[:3], read_lines(tmp_path / "run/metrics.jsonl")
    assert [record["supervised_tokens"] for record in blank] == [record["supervised_tokens"] for record in kept]
    assert all(abs(one["loss"] - other["loss"]) > 1e-6 for one, other in zip(blank, kept, strict=True))
    assert not set(observed.batches) & set(undisturbed.batches)


def test_batches_of_text_of_pictures_and_of_both_run_through_one_program(
    compiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["text"] * 8 + ["picture"] * 8 + ["text", "picture"] * 4
    write_records(tmp_path, kinds)
    # In the order of the file, each in a row of its own.
    for module in (order, packing):
        monkeypatch.setattr(module, "permutation", lambda count, *_: np.arange(count))
    shares = []

    def watch(number: int, batch: Batch) -> None:
        shares.append(float(np.mean(np.any(batch.feature_index >= 0, axis=1))))
        stop_at(7)(number, batch)

    code, observed = run(
        tmp_path / "run", *source(tmp_path), "--data.packing-window", "1", "--data.balance-rows", "1", change=watch
    )
    assert code == EXIT_INTERRUPTED
    assert shares == [0, 1, 0.5, 0, 1, 0.5, 0, 1]
    assert all(np.isfinite(loss) for _, loss in losses(tmp_path / "run")) and len(losses(tmp_path / "run")) == 7
    assert not any("step" in name or "on_device" in name for name in observed.compiled)


def test_a_picture_broken_in_mid_run_saves_the_steps_before_and_is_named_again_by_the_next_start(
    compiled: None, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path, ["picture"] * 40)
    whole = (tmp_path / "27.png").read_bytes()
    (tmp_path / "27.png").write_bytes(whole[: len(whole) - 40])
    for module in (order, packing):
        monkeypatch.setattr(module, "permutation", lambda count, *_: np.arange(count))
    options = [*source(tmp_path), "--data.packing-window", "1", "--data.balance-rows", "1"]
    for _ in range(2):
        assert run(tmp_path / "run", *options)[0] == 3
        assert steps_saved(tmp_path / "run") == [3]
        assert len(losses(tmp_path / "run")) == 3
        assert_one_message(capfd, "line 28, image '27.png'")
    (tmp_path / "27.png").write_bytes(whole)
    assert run(tmp_path / "run", *options, change=stop_at(2))[0] == EXIT_INTERRUPTED
    assert len(losses(tmp_path / "run")) == 5


def write_records(folder: Path, kinds: list[str]) -> None:
    """`records.jsonl` of these conversations, about a picture each or of text alone."""
    random = np.random.default_rng(0)
    lines = []
    for number, kind in enumerate(kinds):
        record: dict[str, Any] = {"messages": [{"role": "user", "content": f"how many, {number}?"}]}
        if kind == "picture":
            PIL.Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"{number}.png")
            record = {"messages": [{"role": "user", "content": "<image>how many?"}], "images": [f"{number}.png"]}
        record["messages"].append({"role": "assistant", "content": str(number)})
        lines.append(json.dumps(record) + "\n")
    (folder / "records.jsonl").write_text("".join(lines))


def source(folder: Path) -> list[str]:
    return ["--data.source", str(folder / "records.jsonl")]


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(undisturbed: Undisturbed, compiled: None) -> None:
    config = saved.load(undisturbed.run_dir / "config.yaml")
    mesh = make_mesh(config.mesh)
    state = loop.init_state(config, mesh)
    batch = first_batch(config)
    broken = batch._replace(patches=np.full_like(batch.patches, np.nan))
    changed, metrics = undisturbed.kept["compile_step"](state, loop.place_batch(broken, mesh))
    assert not metrics["is_finite"] and not np.isfinite(metrics["loss"])
    before = undisturbed.kept["init_state"]
    for name in ("parameters", "router_biases", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(changed, name)), getattr(before, name))
    assert (int(changed.step), int(changed.nonfinite_steps)) == (1, 1)


def first_batch(config: RunConfig) -> Batch:
    return loop.Loader(config.data, config.model.vision, config.seed, "train").batch(0)


def test_steps_not_finite_are_skipped_and_counted_and_a_row_of_them_stops_the_run_before_it_saves_any(
    compiled: None, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    def spoil(number: int, batch: Batch) -> Batch | None:
        return batch._replace(patches=np.full_like(batch.patches, np.nan)) if number == 1 or number >= 5 else None

    assert run(tmp_path / "run", "--checkpoint.every-steps", "2", change=spoil)[0] == 5
    assert_one_message(capfd, "error: step 8", "decoder layer 0 was the first", "3 such steps in a row")
    assert [step for step, loss in losses(tmp_path / "run") if loss is None] == [2, 6, 7, 8]
    assert steps_saved(tmp_path / "run") == [4]


def test_the_layer_whose_parameter_is_not_a_number_is_named(
    compiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    init_state = loop.init_state

    def planted(*arguments: Any) -> Any:
        state, name = init_state(*arguments), "decoder.segments.1.layers.0.mixer.output"
        return dataclasses.replace(
            state, parameters={**state.parameters, name: state.parameters[name] * np.float32(np.nan)}
        )

    monkeypatch.setattr(loop, "init_state", planted)
    assert run(tmp_path / "run")[0] == 5
    assert_one_message(capfd, "decoder layer 1 was the first whose output was not finite")
    assert steps_saved(tmp_path / "run") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_full_in_mid_run_ends_it_with_one_message_and_costs_no_earlier_checkpoint(
    undisturbed: Undisturbed, compiled: None, small_disk: Path, capfd: pytest.CaptureFixture
) -> None:
    run_dir = shutil.copytree(undisturbed.run_dir, small_disk / "run")
    shutil.rmtree(run_dir / "checkpoints" / "20")
    before = contents(run_dir / "checkpoints")

    def fill(number: int, _: Batch) -> None:
        if number == 1:
            (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))

    # Metrics of steps are written long before the next checkpoint is.
    assert run(run_dir, change=fill)[0] == 4
    assert_one_message(capfd, "No space left on device", "free space", str(run_dir))
    assert contents(run_dir / "checkpoints") == before
    (small_disk / "filler").unlink()
    assert run(run_dir)[0] == 0
    assert arrays(run_dir, 20) == arrays(undisturbed.run_dir, 20)
    assert losses(run_dir) == losses(undisturbed.run_dir)


def test_a_checkpoint_that_finds_no_room_ends_the_run_with_one_message(
    compiled: None, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(number: int, _: Batch) -> None:
        if number == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    try:
        assert run(tmp_path / "run", "--checkpoint.every-steps", "3", change=limit)[0] == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_one_message(capfd, "checkpoints/3", "disk or quota full", "complete steps: none")
    assert steps_saved(tmp_path / "run") == []


def assert_one_message(capfd: pytest.CaptureFixture, *parts: str) -> None:
    """What the command said of its failure holds these parts, and it failed with nothing else."""
    error = capfd.readouterr().err
    assert all(part in error for part in parts), error
    # JAX and the run itself may have said something before.
    assert error.count("error: ") <= 1 and "Traceback" not in error and "never retrieved" not in error, error
