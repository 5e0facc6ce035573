"""A whole run, top to bottom: restore or begin, compile once, train, evaluate, save, and say what came of it."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mmjax.checkpoint.adapters import base_of, check_base, matched_projections
from mmjax.checkpoint.store import Store
from mmjax.checkpoint.weights import RELEASED
from mmjax.config import RunConfig, saved
from mmjax.data.batch import Batch
from mmjax.data.evaluation import majority_baseline
from mmjax.data.loader import INDEX_FOLDER, Loader, check_fingerprint, patch_sizes
from mmjax.data.microbatch import BufferPool, DeviceFeed
from mmjax.data.sources.open_source import has_held_out
from mmjax.errors import EXIT_INTERRUPTED, ConfigurationError, DataError, writing
from mmjax.models.lora import matched_lines
from mmjax.monitor.dashboard import AnsweredQuestion, write_sheet
from mmjax.monitor.metrics import EVALUATIONS, METRICS, RunMonitor, memory_bytes, read_lines
from mmjax.parallel.processes import check_same, is_stop_agreed, wait_for_all
from mmjax.parallel.sharding import spec
from mmjax.resilience.gradient_guard import GradientGuard
from mmjax.resilience.interruption import Interruption
from mmjax.resilience.run_folder import sole_user
from mmjax.training import dry_run
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.evaluation import EvaluationResult, Evaluator
from mmjax.training.step import (
    TrainState,
    abstract_state,
    compiler_options,
    init_state,
    make_train_step,
    place_batch,
    saved_part,
    with_base,
)

CHECKPOINTS = "checkpoints"
SHEET = "answers.png"


def run(config: RunConfig, mesh: Mesh, *, is_evaluation_only: bool = False) -> int:
    """Train until `training.steps` are done; the same run_dir again goes on from its latest complete checkpoint.

    `is_evaluation_only` answers the held-out questions as the steps done so far would, also if there are none.

    Returns the exit code: 0, or EXIT_INTERRUPTED when SIGTERM or Ctrl-C stopped it and the steps done are saved.

    Raises:
      MmjaxError: data, checkpoints or numbers stop the run. Complete checkpoints stay as they are; a run that its data
        stops has saved the steps done.
    """
    if config.training.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.training.compilation_cache)
    run_dir = Path(config.run_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sole_user(run_dir, settled=(saved.FILE_NAME, INDEX_FOLDER)))
        if jax.process_index() == 0:
            saved.check_same_run(config)
        interruption = stack.enter_context(Interruption(handles_sigterm=jax.process_count() == 1))
        compilations = stack.enter_context(CompilationCounter("train_step"))
        keep = {"keep_last": config.checkpoint.keep_last, "keep_best": config.checkpoint.keep_best}
        checkpoints = stack.enter_context(Store(run_dir / CHECKPOINTS, **keep))
        # All data is looked at before anything that takes long.
        loader = open_loader(config)
        check_vocabulary(config, loader)
        check_same("data", json.dumps(loader.fingerprint(), sort_keys=True), "give all hosts the same files")
        evaluator = open_evaluator(config, mesh)
        if is_evaluation_only and evaluator is None:
            raise ConfigurationError(
                "data.eval_source",
                found="nothing held out",
                expected="questions to evaluate on",
                remedy="give --data.eval-source, or leave --evaluate-only out",
            )
        abstract = abstract_state(config, mesh)
        state, progress = restore_or_begin(config, mesh, checkpoints, loader, abstract)
        if jax.process_index() == 0:
            print(f"settings saved to {saved.save(config)}")
        num_steps = progress.steps if is_evaluation_only else config.training.steps
        monitor = stack.enter_context(
            RunMonitor(run_dir, first_step=progress.steps, num_steps=num_steps, is_silent=jax.process_index() != 0)
        )
        monitor.say(f"resumed after step {progress.steps}" if progress.steps else "new run")
        if config.lora.rank:
            monitor.table("adapters", adapted(config))
        monitor.table("data", {name.replace("_", " "): f"{value:,.6g}" for name, value in loader.counters().items()})
        monitor.table("estimate", dict(dry_run.estimate(config, abstract).rows()))
        held_out = HeldOut(evaluator, run_dir, monitor, first_step=progress.steps)
        saver = Saver(config, checkpoints, loader, progress)
        guard = GradientGuard(
            config.training.max_nonfinite_steps, tuple(abstract.parameters), int(state.nonfinite_steps)
        )
        recorder = Recorder(config, monitor, progress, compilations, guard)

        data_failure: DataError | None = None
        if progress.steps < num_steps:
            batches = feed(loader, progress.steps, mesh, config.data.rows)
            batch = recorder.time_data(lambda: next(batches))
            step_program = StepPrograms(config, mesh, recorder)
            step_program.warm_up(state)
        recorder.restart_clock()
        is_stopping = False
        while progress.steps < num_steps and not is_stopping and data_failure is None:
            state, metrics = step_program(state, batch)
            progress.steps += 1
            # While the devices compute: the next batch, and the numbers of the step before.
            if progress.steps < num_steps:
                try:
                    batch = recorder.time_data(lambda: next(batches))
                except DataError as error:
                    # Alone with it, a process could not save: it ends at once, and the others with it.
                    if jax.process_count() > 1:
                        raise
                    data_failure = error
            recorder.put(progress.steps, metrics)
            checkpoints.check()
            is_stopping = interruption.is_requested or is_stop_agreed(progress.steps)
            is_save_due = is_due(progress.steps, config.checkpoint.every_steps)
            is_evaluation_due = is_due(progress.steps, config.training.eval_every_steps)
            if progress.steps < num_steps and (is_save_due or is_evaluation_due):
                recorder.flush()
                # In a row of steps that were not finite the state may be lost: it must not push out a sound one.
                is_sound = guard.in_a_row == 0
                if is_sound and (is_save_due or is_stopping):
                    # First: an evaluation may take longer than there is time, and may fail.
                    saver.save(state)
                is_best = is_evaluation_due and held_out.evaluate(progress.steps, state)
                if is_sound and (is_save_due or (is_best and config.checkpoint.keep_best)):
                    saver.save(state, held_out.scores.get(progress.steps))
                recorder.restart_clock()
        recorder.flush()

        if progress.steps < num_steps:
            saver.save(state)
            checkpoints.wait()
            if data_failure is not None:
                raise data_failure
            monitor.say(f"stopped after step {progress.steps}; the same command goes on from there")
            return EXIT_INTERRUPTED
        saver.save(state)
        held_out.evaluate(progress.steps, state)
        saver.save(state, held_out.scores.get(progress.steps))
        checkpoints.wait()
        latest = {"latest checkpoint": str(run_dir / CHECKPOINTS / str(progress.steps)) if progress.steps else "none"}
        rows = recorder.summary() | held_out.summary() | latest
        if held_out.result is not None and jax.process_index() == 0:
            write_answers(run_dir, held_out.result)
            rows["answers"] = str(run_dir / SHEET)
        monitor.table("finished", rows)
    return 0


def check_vocabulary(config: RunConfig, loader: Loader) -> None:
    """Refuse tokens that the embedding has no row for, and those that the weights do not know: both would train."""
    released = Path(config.weights) / RELEASED / "tokenizer.json"
    if config.weights and config.data.tokenizer == "bytes" and released.exists():
        raise ConfigurationError(
            "data.tokenizer",
            found="bytes, for weights that were trained with another tokenizer",
            expected=f"theirs: {released}",
            remedy=f"give --data.tokenizer {released} with --data.end-token, --data.image-token, and "
            f"--data.chat-template {released.parent} or --data.start-token",
        )
    needed = loader.tokenizer.vocabulary_size
    if needed > config.model.vocabulary_size:
        raise ConfigurationError(
            "model.vocabulary_size",
            found=f"{config.model.vocabulary_size}",
            expected=f"at least the {needed} tokens of data.tokenizer={config.data.tokenizer}",
            remedy=f"give --model.vocabulary-size {-(-needed // 64) * 64}",
        )


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclasses.dataclass
class Progress:
    """How far a run has come; kept in its checkpoints."""

    steps: int = 0
    real_tokens: int = 0
    supervised_tokens: int = 0
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite."""


def restore_or_begin(
    config: RunConfig, mesh: Mesh, checkpoints: Store, loader: Loader, abstract: TrainState
) -> tuple[TrainState, Progress]:
    """The state of the latest complete checkpoint, which must be of the same data; a fresh one where there is none."""
    found = checkpoints.restore_latest(saved_part(config, abstract))
    if found is None:
        return init_state(config, mesh), Progress()
    state, metadata = found
    check_fingerprint(metadata["data"], loader.fingerprint())
    loader.resume(metadata["data_position"])
    if config.lora.rank:
        check_base(config, metadata["base"])
    return with_base(config, abstract, state), Progress(**metadata["progress"])


def adapted(config: RunConfig) -> dict[str, str]:
    """What gets adapters, by path, for printing."""
    matched = matched_projections(config.model, config.lora, config.weights)
    frozen = config.weights or f"random numbers of seed {config.seed}"
    return {"frozen model": frozen} | dict(matched_lines(config.model, config.lora, matched))


def open_loader(config: RunConfig) -> Loader:
    """The training samples; their index, quarantine and lost sources stay in the run's folder."""
    return Loader(
        config.data,
        config.model.vision,
        config.seed,
        "train",
        model=config.model,
        folder=Path(config.run_dir),
        num_hosts=jax.process_count(),
        host=jax.process_index(),
    )


def feed(loader: Loader, start_step: int, mesh: Mesh, num_rows: int) -> DeviceFeed:
    """Batches on the devices, of which this process reads its own rows, in host memory that is used again."""
    indices = NamedSharding(mesh, spec("batch")).addressable_devices_indices_map((num_rows,)).values()
    rows = {row for index in indices if index for row in range(num_rows)[index[0]]}
    is_shared = jax.default_backend() == "cpu"
    pool = BufferPool()

    def place(batch: Batch) -> Batch:
        # The CPU back end would go on reading the host arrays, which the next batches are written into.
        return place_batch(jax.tree.map(np.copy, batch) if is_shared else batch, mesh)

    whole = len(rows) == num_rows
    batches = loader.iterate(start_step, rows=None if whole else rows, pool=pool)
    return DeviceFeed(batches, place, jax.block_until_ready, pool)


class CompilationCounter:
    """While entered, counts how often JAX compiles the jitted function of this name."""

    def __init__(self, function_name: str):
        self.count = self.num_cached = 0
        """`num_cached`: programs of any function that came from the persistent compilation cache."""
        self._name = f"jit({function_name})"

    def __enter__(self) -> "CompilationCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_to_cache)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_to_cache)

    def _listen_to_cache(self, event: str, **_: str | int) -> None:
        self.num_cached += event == "/jax/compilation_cache/cache_hits"

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event.endswith("/backend_compile_duration") and kwargs.get("fun_name") == self._name


class Recorder:
    """Reads the metrics of each step one step late, so that the devices never wait for it."""

    def __init__(
        self,
        config: RunConfig,
        monitor: RunMonitor,
        progress: Progress,
        compilations: CompilationCounter,
        guard: GradientGuard,
    ):
        self._log_every = config.training.log_every_steps
        self._monitor, self._progress, self._compilations, self._guard = monitor, progress, compilations, guard
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._begun = self._clock = time.perf_counter()
        self._data_seconds = self._training_seconds = self._peak_memory_bytes = 0.0
        self._steps = self._tokens = 0
        self._last: dict[str, float] = {}
        self.compile_seconds = 0.0

    def time_data(self, make: Callable[[], Batch]) -> Batch:
        """The batch that `make` gives; the time it took goes into the next record."""
        begun = time.perf_counter()
        batch = make()
        self._data_seconds = time.perf_counter() - begun
        return batch

    def restart_clock(self) -> None:
        """Leave out of the next step's time what happened since the last record."""
        self._clock = time.perf_counter()

    def say(self, text: str) -> None:
        self._monitor.say(text)

    @property
    def num_cached(self) -> int:
        """Programs that came from the persistent compilation cache so far."""
        return self._compilations.num_cached

    def put(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of a step just dispatched; record those of the one before."""
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Wait for the step taken last, and record it.

        Raises:
          NonFiniteError: too many steps in a row were not finite.
        """
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._progress.real_tokens += int(values["real_tokens"])
        self._progress.supervised_tokens += int(values["supervised_tokens"])
        self._progress.skipped_steps += not values["is_finite"]
        self._training_seconds += seconds
        self._steps += 1
        self._tokens += int(values["real_tokens"])
        values |= {
            "tokens_per_second": values["real_tokens"] / seconds,
            "step_seconds": seconds,
            "data_seconds": self._data_seconds,
            "memory_bytes": memory_bytes(),
            "compilations": self._compilations.count,
        }
        self._peak_memory_bytes = max(self._peak_memory_bytes, values["memory_bytes"])
        self._last = values
        self._monitor.step(step, values, is_printed=is_due(step, self._log_every))
        if warning := self._guard.check(step, values):
            self._monitor.say(warning)

    def summary(self) -> dict[str, str]:
        """The rows that a finished run ends with."""
        rows = {"steps": f"{self._progress.steps:,}"}
        if self._last:
            rows |= {
                "last loss": f"{self._last['loss']:.4f}",
                "tokens per second": f"{self._tokens / self._training_seconds:,.0f}",
                "seconds a step": f"{self._training_seconds / self._steps:.3f}",
                "seconds compiling the step": f"{self.compile_seconds:.1f}",
            }
        return rows | {
            "tokens seen": f"{self._progress.real_tokens:,}, of them supervised {self._progress.supervised_tokens:,}",
            "compilations of the step": str(self._compilations.count),
            "steps skipped as not finite": str(self._progress.skipped_steps),
            "largest memory seen": dry_run.format_bytes(self._peak_memory_bytes),
            "seconds in all": f"{time.perf_counter() - self._begun:,.0f}",
        }


class StepPrograms:
    """The compiled step for each shape of a batch: `data.patch_buckets` at most."""

    def __init__(self, config: RunConfig, mesh: Mesh, recorder: Recorder):
        self._config, self._mesh, self._recorder = config, mesh, recorder
        self._programs: dict[tuple, Callable] = {}

    def warm_up(self, state: TrainState) -> None:
        """Compile for every size that batches may have before the first step."""
        begun, cached = time.perf_counter(), self._recorder.num_cached
        for row_patches in patch_sizes(self._config.data):
            self.prepare(state, abstract_batch(self._config, self._mesh, row_patches))
        number, cached = len(self._programs), self._recorder.num_cached - cached
        shapes = f"{number} shapes of a batch" if number > 1 else "the shape of a batch"
        seconds = time.perf_counter() - begun
        self._recorder.say(f"warm-up: compiled for {shapes} in {seconds:.1f} s, {cached} from the compilation cache")

    def prepare(self, state: TrainState, batch: Batch) -> Callable:
        """The program for batches of such shapes, compiled if they are new."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in self._programs:
            self._programs[shapes] = compile_step(self._config, self._mesh, state, batch, self._recorder)
        return self._programs[shapes]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return self.prepare(state, batch)(state, batch)


def compile_step(config: RunConfig, mesh: Mesh, state: TrainState, batch: Batch, recorder: Recorder) -> Callable:
    """The compiled step; a batch of another shape is an error, never a second compilation."""
    recorder.say("compiling the training step ...")
    begun = time.perf_counter()
    program = make_train_step(config, mesh).lower(state, batch).compile(compiler_options=compiler_options(mesh))
    recorder.compile_seconds = time.perf_counter() - begun
    wait_for_all("compiled the training step")
    text = f"compiled in {recorder.compile_seconds:.1f} s"
    if memory := program.memory_analysis():
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        parts = {
            "state and batch": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "in all": needed + memory.temp_size_in_bytes,
        }
        text += "; memory of a device: " + ", ".join(f"{name} {dry_run.format_bytes(n)}" for name, n in parts.items())
    recorder.say(text)
    return program


def open_evaluator(config: RunConfig, mesh: Mesh) -> Evaluator | None:
    """None where nothing is held out."""
    if not has_held_out(config.data):
        return None
    loader = Loader(config.data, config.model.vision, config.seed, "held_out", model=config.model)
    evaluator = Evaluator(config, loader, mesh)
    # With other questions, or pictures that one cannot read, processes would wait for each other for ever.
    seen = json.dumps([loader.fingerprint(), loader.num_left_out], sort_keys=True)
    check_same("held-out data", seen, "give all hosts the same files")
    return evaluator


class HeldOut:
    """Evaluation of a run on its held-out samples, if it has any."""

    def __init__(self, evaluator: Evaluator | None, run_dir: Path, monitor: RunMonitor, *, first_step: int):
        """`first_step` is the number of steps done: what the file says of later ones does not count.

        The first process drops that from the file, and another may read it before: all must know the same best score.
        """
        self._evaluator, self._monitor = evaluator, monitor
        records = read_lines(run_dir / EVALUATIONS)
        self.scores = {record["step"]: record["exact_match"] for record in records if record["step"] <= first_step}
        self.result: EvaluationResult | None = None

    def evaluate(self, step: int, state: TrainState) -> bool:
        """Answer all held-out questions and record the score; whether it is the best so far."""
        if self._evaluator is None:
            return False
        begun = time.perf_counter()
        self.result = self._evaluator(state)
        score, majority = self.result.exact_match, baseline(self.result)["all"]
        is_best = score > max((old for other, old in self.scores.items() if other != step), default=-1.0)
        if step not in self.scores:
            self._monitor.evaluation(step, {"exact_match": score, "majority": majority})
        self.scores[step] = score
        left_out = f" ({self.result.num_left_out} left out)" if self.result.num_left_out else ""
        self._monitor.say(
            f"step {step}: exact match {score:.3f}, majority guess {majority:.3f}, "
            f"{len(self.result.answers)} questions{left_out} in {time.perf_counter() - begun:.1f} s"
        )
        return is_best

    def summary(self) -> dict[str, str]:
        if self.result is None:
            return {"held-out exact match": "nothing held out (data.eval_source)"}
        scores = {"held-out exact match": f"{self.result.exact_match:.3f}"}
        return scores | {"majority guess": f"{baseline(self.result)['all']:.3f}"}


def baseline(result: EvaluationResult) -> dict[str, float]:
    return majority_baseline(answer.asked for answer in result.answers)


class Saver:
    """Starts a checkpoint of the run, once for each step."""

    def __init__(self, config: RunConfig, checkpoints: Store, loader: Loader, progress: Progress):
        self._config, self._checkpoints, self._loader, self._progress = config, checkpoints, loader, progress
        self._saved_step = progress.steps
        self._base = base_of(config) if config.lora.rank else {}

    def save(self, state: TrainState, score: float | None = None) -> None:
        """Save the steps done, unless they are saved; what is saved gets the score alone."""
        if self._progress.steps == self._saved_step:
            if score is not None:
                self._checkpoints.set_score(self._saved_step, score)
            return
        metadata = {
            "config": dataclasses.asdict(self._config),
            "mesh": self._config.mesh.sizes,
            "data": self._loader.fingerprint(),
            "data_position": self._loader.position(self._progress.steps),
            "progress": dataclasses.asdict(self._progress),
        }
        if self._config.lora.rank:
            metadata["base"] = self._base
        self._checkpoints.save(self._progress.steps, saved_part(self._config, state), metadata, score=score)
        self._saved_step = self._progress.steps


def write_answers(run_dir: Path, result: EvaluationResult) -> None:
    """The sheet of the last evaluation, with the curves of the whole run."""
    answers = [
        AnsweredQuestion(
            question=answer.asked.question,
            reference=answer.asked.reference,
            given=answer.given,
            kind=answer.asked.kind,
            picture=answer.asked.picture,
        )
        for answer in result.answers
    ]
    losses = [(record["step"], record["loss"]) for record in read_lines(run_dir / METRICS)]
    scores = [(record["step"], record["exact_match"]) for record in read_lines(run_dir / EVALUATIONS)]
    with writing(run_dir / SHEET):
        write_sheet(run_dir / SHEET, str(run_dir), answers, losses, scores, baseline(result))
