"""The loop around a step of three lines: what it promises does not depend on the model."""

import dataclasses
import errno
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.checkpoint import store
from mmjax.checkpoint.store import Store
from mmjax.config import CheckpointConfig, DataConfig, MeshConfig, RunConfig, TrainingConfig
from mmjax.data.evaluation import EvaluationAnswer
from mmjax.errors import EXIT_INTERRUPTED, CheckpointError, ConfigurationError, DataError, NonFiniteError
from mmjax.monitor.metrics import RunMonitor, read_lines
from mmjax.parallel.mesh import make_mesh
from mmjax.training import loop
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.evaluation import EvaluationResult, GivenAnswer
from mmjax.training.step import TrainState


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    """Made by the first test that asks: machines without two devices collect this file too."""
    return make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])


class Line:
    """A line to be fitted, in place of the data; `before(step)` is called before a batch is given out."""

    before: Callable[[int], Any] = staticmethod(lambda step: None)
    seed = num_left_out = 0
    tokenizer = SimpleNamespace(vocabulary_size=1)

    def __init__(self, *_: object, **__: object):
        pass

    def iterate(self, start_step: int, **_: object) -> Iterator[np.ndarray]:
        for step in range(start_step, 10**6):
            factor = Line.before(step)
            inputs = np.random.default_rng((Line.seed, step)).normal(size=(4, 3)).astype(np.float32)
            yield inputs if factor is None else inputs * np.float32(factor)

    def counters(self) -> dict[str, float]:
        return {"samples": 1}

    def fingerprint(self) -> dict[str, int]:
        return {"seed": Line.seed}

    def position(self, step: int) -> dict[str, int]:
        return {"step": step}

    def resume(self, position: dict[str, int]) -> None:
        pass


class Answers:
    """Right in one of two answers, and from step 6 on in none."""

    def __init__(self, *_: object):
        pass

    def __call__(self, state: TrainState) -> EvaluationResult:
        asked = [
            EvaluationAnswer(
                number=number, row=0, start=1, budget=1, question="?", reference=text, kind="digit", picture=None
            )
            for number, text in enumerate("12")
        ]
        given = "1" if int(state.step) < 6 else "3"
        return EvaluationResult(tuple(GivenAnswer(one, given, is_finished=True) for one in asked), num_left_out=3)


@dataclasses.dataclass
class NoEstimate:
    def rows(self) -> list[tuple[str, str]]:
        return [("parameters", "3")]


def _new_state() -> TrainState:
    return TrainState(
        parameters={"weight": jnp.ones((4, 3))},
        router_biases={},
        optimizer={"momentum": jnp.zeros((4, 3), jnp.bfloat16)},
        step=jnp.int32(0),
        nonfinite_steps=jnp.int32(0),
    )


def _abstract_state(*_: object) -> TrainState:
    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("fsdp") if leaf.shape else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(_mesh(), spec))

    return jax.tree.map(place, jax.eval_shape(_new_state))


def _init_state(*_: object) -> TrainState:
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), _new_state(), _abstract_state())


def _make_train_step(*_: object) -> Callable:
    def train_step(state: TrainState, inputs: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.sum(w * inputs, axis=1) - 3) ** 2))(
            state.parameters["weight"]
        )
        is_finite = jnp.isfinite(loss)
        momentum = state.optimizer["momentum"] * 0.5 + gradient.astype(jnp.bfloat16)
        update = jnp.where(is_finite, momentum, 0).astype(jnp.float32)
        metrics = dict.fromkeys(("learning_rate", "moe_load_max_over_mean", "dropped_rows", "indexer_loss"), loss * 0)
        metrics |= {"loss": loss, "gradient_norm": jnp.max(gradient), "is_finite": is_finite}
        metrics |= {"supervised_tokens": jnp.int32(2), "real_tokens": jnp.int32(4)}
        metrics |= {"first_nonfinite_layer": jnp.int32(5), "first_nonfinite_gradient": jnp.int32(-1)}
        state = TrainState(
            parameters={"weight": state.parameters["weight"] - 0.01 * update},
            router_biases={},
            optimizer={"momentum": jnp.where(is_finite, momentum, state.optimizer["momentum"])},
            step=state.step + 1,
            nonfinite_steps=jnp.where(is_finite, 0, state.nonfinite_steps + 1),
        )
        return state, metrics

    shardings = jax.tree.map(lambda leaf: leaf.sharding, _abstract_state())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(_mesh(), PartitionSpec())))


@pytest.fixture(autouse=True)
def _tiny_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "seed", 0)
    monkeypatch.setattr(loop, "Loader", Line)
    monkeypatch.setattr(loop, "Evaluator", Answers)
    monkeypatch.setattr(loop, "abstract_state", _abstract_state)
    monkeypatch.setattr(loop, "init_state", _init_state)
    monkeypatch.setattr(loop, "make_train_step", _make_train_step)
    monkeypatch.setattr(
        loop, "place_batch", lambda batch, mesh: jax.device_put(batch, NamedSharding(mesh, PartitionSpec("fsdp")))
    )
    inputs = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(_mesh(), PartitionSpec("fsdp")))
    monkeypatch.setattr(loop, "abstract_batch", lambda *_: inputs)
    monkeypatch.setattr(loop.dry_run, "estimate", lambda *_: NoEstimate())


def _config(run_dir: Path, **training: Any) -> RunConfig:
    return RunConfig(
        run_dir=str(run_dir),
        checkpoint=CheckpointConfig(every_steps=4, keep_last=2),
        training=TrainingConfig(**{"steps": 12, "eval_every_steps": 5, "max_nonfinite_steps": 3, **training}),
    )


def _run(run_dir: Path, before: Callable[[int], Any] = lambda step: None, **training: Any) -> int:
    Line.before = staticmethod(before)
    run_dir.mkdir(exist_ok=True)
    return loop.run(_config(run_dir, **training), _mesh())


def _final_state(run_dir: Path) -> tuple[int, list[bytes]]:
    with Store(run_dir / "checkpoints", read_only=True) as checkpoints:
        state, metadata = checkpoints.restore_latest(_abstract_state())
    return metadata["progress"]["steps"], [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def _losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_lines(run_dir / "metrics.jsonl")]


def _at(step: int, action: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda current: action() if current == step else None


def _raise(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps that nothing disturbed."""
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def undisturbed(whole: Path) -> Path:
    if not whole.exists():
        assert _run(whole) == 0
    return whole


def test_a_run_leaves_metrics_curves_checkpoints_and_the_sheet(undisturbed: Path) -> None:
    names = {"config.yaml", "metrics.jsonl", "evaluations.jsonl", "tensorboard", "checkpoints", "answers.png"}
    assert {path.name for path in undisturbed.iterdir()} == names
    records = read_lines(undisturbed / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert {record["compilations"] for record in records} == {1}
    evaluations = [(record["step"], record["exact_match"]) for record in read_lines(undisturbed / "evaluations.jsonl")]
    assert evaluations == [(5, 0.5), (10, 0.0), (12, 0.0)]
    # The last two, and the best evaluation, which is of no regular step.
    assert sorted(os.listdir(undisturbed / "checkpoints"), key=int) == ["5", "8", "12"]
    manifest = json.loads((undisturbed / "checkpoints" / "12" / "manifest.json").read_text())
    assert manifest["metadata"]["progress"] == {
        "steps": 12,
        "real_tokens": 48,
        "supervised_tokens": 24,
        "skipped_steps": 0,
    }


def test_a_run_can_be_evaluated_before_its_first_step_and_after_any(tmp_path: Path, monkeypatch, capsys) -> None:
    def evaluate() -> list[tuple[int, float]]:
        assert loop.run(_config(run_dir), _mesh(), is_evaluation_only=True) == 0
        records = read_lines(run_dir / "evaluations.jsonl")
        return [(record["step"], record["exact_match"]) for record in records]

    run_dir = tmp_path / "run"
    assert evaluate() == [(0, 0.5)]
    assert not read_lines(run_dir / "metrics.jsonl") and not list(run_dir.glob("checkpoints/[0-9]*"))
    assert _run(run_dir, steps=6, eval_every_steps=0) == 0
    assert evaluate() == [(0, 0.5), (6, 0.0)]
    shown = capsys.readouterr().out
    assert "held-out exact match" in shown and "2 questions (3 left out)" in shown
    assert _final_state(run_dir)[0] == 6
    monkeypatch.setattr(loop, "open_evaluator", lambda *_: None)
    with pytest.raises(ConfigurationError, match="eval_source"):
        evaluate()


def test_processes_with_other_held_out_questions_are_refused(tmp_path: Path, monkeypatch) -> None:
    compared = []
    monkeypatch.setattr(loop, "Evaluator", lambda *_: None)
    monkeypatch.setattr(loop, "check_same", lambda what, text, _: compared.append((what, text)))
    for name, value in (("seed", 0), ("seed", 1), ("num_left_out", 1)):
        monkeypatch.setattr(Line, name, value)
        loop.open_evaluator(RunConfig(), _mesh())
    assert {what for what, _ in compared} == {"held-out data"} and len({text for _, text in compared}) == 3


def test_scores_that_a_crashed_start_left_of_later_steps_count_in_no_process(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"step": 4, "exact_match": 0.5}\n{"step": 8, "exact_match": 1.0}\n')
    # Of several processes the first alone drops them from the file.
    with RunMonitor(tmp_path, first_step=6, num_steps=9, is_silent=True) as monitor:
        assert loop.HeldOut(None, tmp_path, monitor, first_step=6).scores == {4: 0.5}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_resumed_run_is_bitwise_the_undisturbed_one(
    undisturbed: Path, tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture
) -> None:
    assert _run(tmp_path, _at(7, lambda: os.kill(os.getpid(), number))) == EXIT_INTERRUPTED
    assert _final_state(tmp_path)[0] == 7
    assert _run(tmp_path) == 0
    assert "resumed after step 7" in capfd.readouterr().out
    assert _final_state(tmp_path) == _final_state(undisturbed)
    assert _losses(tmp_path) == _losses(undisturbed)
    assert {record["compilations"] for record in read_lines(tmp_path / "metrics.jsonl")} == {1}


def test_a_crash_costs_the_steps_since_the_last_checkpoint_and_nothing_else(undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        _run(tmp_path, _at(11, _raise(RuntimeError("crash"))))
    assert _final_state(tmp_path)[0] == 8
    assert _run(tmp_path) == 0
    assert _final_state(tmp_path) == _final_state(undisturbed) and _losses(tmp_path) == _losses(undisturbed)


@pytest.mark.parametrize("fails_at", [5, 8, 12])
def test_what_was_trained_is_saved_before_it_is_evaluated(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    class Failing(Answers):
        def __call__(self, state: TrainState) -> EvaluationResult:
            if int(state.step) == fails_at:
                raise MemoryError
            return super().__call__(state)

    # Asked to stop at a step that is evaluated, saved at another one, and at the end.
    every, stop = (5, _at(5, lambda: os.kill(os.getpid(), signal.SIGTERM))) if fails_at == 5 else (4, lambda step: None)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Evaluator", Failing)
        with pytest.raises(MemoryError):
            _run(tmp_path, stop, eval_every_steps=every)
    assert _final_state(tmp_path)[0] == fails_at
    assert _run(tmp_path, eval_every_steps=every) == 0
    assert _final_state(tmp_path) == _final_state(undisturbed)
    manifests = sorted(tmp_path.glob("checkpoints/*/manifest.json"), key=lambda path: int(path.parent.name))
    scores = [json.loads(path.read_text())["score"] for path in manifests]
    assert scores == {5: [0.0, 0.0], 8: [0.5, None, 0.0], 12: [0.5, 0.0, 0.0]}[fails_at]


def test_bad_data_in_mid_run_saves_what_was_trained(undisturbed: Path, tmp_path: Path) -> None:
    error = DataError("train.jsonl:7", found="a broken image", expected="an image", remedy="remove it")
    with pytest.raises(DataError, match=r"train\.jsonl:7"):
        _run(tmp_path, _at(6, _raise(error)))
    assert _final_state(tmp_path)[0] == 6
    assert _run(tmp_path) == 0
    assert _final_state(tmp_path) == _final_state(undisturbed)


def test_a_full_disk_ends_the_run_with_its_error_and_the_next_start_goes_on(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write_manifest

    def write_if_there_is_room(path: Path, manifest: dict[str, Any]) -> None:
        if path.name == "8":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_manifest", write_if_there_is_room)
        with pytest.raises(CheckpointError, match="disk or quota full"):
            _run(tmp_path)
    assert _final_state(tmp_path)[0] == 5
    assert _run(tmp_path) == 0
    assert _final_state(tmp_path) == _final_state(undisturbed)


def test_nonfinite_steps_are_skipped_and_too_many_in_a_row_stop_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert _run(tmp_path / "some", lambda step: np.inf if step in (3, 4, 7) else None) == 0
    assert capfd.readouterr().out.count("update skipped") == 3
    with pytest.raises(NonFiniteError, match=r"step 11: .*decoder layer 5 was the first"):
        _run(tmp_path / "many", lambda step: np.inf if step >= 8 else None)
    assert _final_state(tmp_path / "many")[0] == 8


def test_bytes_are_refused_for_weights_that_came_with_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "released").mkdir()
    config = RunConfig(weights=str(tmp_path))
    loop.check_vocabulary(config, Line())
    (tmp_path / "released" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="trained with another tokenizer"):
        loop.check_vocabulary(config, Line())
    own = dataclasses.replace(config.data, tokenizer=str(tmp_path / "released" / "tokenizer.json"))
    loop.check_vocabulary(dataclasses.replace(config, data=own), Line())


def test_other_data_than_the_checkpoints_are_refused_and_the_settings_stay(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (undisturbed / "config.yaml").read_bytes()
    monkeypatch.setattr(Line, "seed", 1)
    with pytest.raises(DataError, match="seed"):
        _run(undisturbed, steps=99)
    assert (undisturbed / "config.yaml").read_bytes() == settings


def test_a_finished_run_started_again_trains_no_step_and_compiles_none(
    undisturbed: Path, capfd: pytest.CaptureFixture
) -> None:
    before = _final_state(undisturbed), (undisturbed / "metrics.jsonl").read_text()
    assert _run(undisturbed, _raise(AssertionError("no batch is needed"))) == 0
    assert (_final_state(undisturbed), (undisturbed / "metrics.jsonl").read_text()) == before
    assert len(read_lines(undisturbed / "evaluations.jsonl")) == 3
    assert "exact match" in capfd.readouterr().out


def test_more_steps_extend_a_finished_run(tmp_path: Path) -> None:
    assert _run(tmp_path, steps=3) == 0
    assert _run(tmp_path, steps=5) == 0
    assert [step for step, _ in _losses(tmp_path)] == [1, 2, 3, 4, 5]


def test_without_held_out_samples_the_run_says_so(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    config = _config(tmp_path, steps=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="train.jsonl"))
    Line.before = staticmethod(lambda step: None)
    assert loop.run(config, _mesh()) == 0
    assert "nothing held out" in capfd.readouterr().out
    assert not (tmp_path / "answers.png").exists()


def test_warm_up_compiles_for_every_declared_size_of_a_batch_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[int] = []
    said: list[str] = []

    class Listener:
        num_cached = 3
        say = staticmethod(said.append)

    def compile_step(config: Any, mesh: Any, state: str, batch: Any, recorder: Any) -> Callable:
        compiled.append(batch.patches.shape[1])
        Listener.num_cached += len(compiled) == 2
        return lambda state, batch: (state, {})

    monkeypatch.setattr(loop, "compile_step", compile_step)
    monkeypatch.setattr(loop, "abstract_batch", abstract_batch)
    config = RunConfig(data=DataConfig(row_patches=64, image_max_patches=64, patch_buckets=3))
    programs: Any = loop.StepPrograms(config, _mesh(), cast(Any, Listener))
    programs.warm_up("")
    assert compiled == [64, 32, 16]
    assert "3 shapes" in said[0] and ", 1 from the compilation cache" in said[0]
    programs("", abstract_batch(config, _mesh(), 32))
    assert len(compiled) == 3


def test_the_step_is_compiled_once_for_each_shape_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple] = []

    def compile_step(config: Any, mesh: Any, state: str, batch: dict[str, np.ndarray], recorder: Any) -> Callable:
        shape = batch["patches"].shape
        compiled.append(shape)
        return lambda state, batch: (state + str(len(batch["patches"])), shape)

    monkeypatch.setattr(loop, "compile_step", compile_step)
    program: Any = loop.StepPrograms(RunConfig(), _mesh(), cast(Any, None))
    program.prepare("", {"patches": np.zeros(8)})
    state = ""
    for size in np.random.default_rng(0).choice([4, 8, 16], 200).tolist():
        state, shape = program(state, {"patches": np.zeros(size)})
        assert shape == (size,)
    assert sorted(compiled) == [(4,), (8,), (16,)]
