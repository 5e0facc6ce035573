"""Time the training step of an experiment on the device that is here: `python scripts/bench_train.py EXPERIMENT`.

Weights are drawn, so is the batch: each row one document that fills it, with one picture behind its eighth token if the
model reads pictures, and a loss on all that follows. What is printed:

    tokens/s        positions of a batch, those of pictures' features too, over the median of the steps' times, the
                    first two left out
    model TFLOP/s   what the model has to compute, not what the program does: forward of every position (causal
                    attention: half of the pairs) and of every patch, the gradients by activations once more where
                    something below is trained, those by weights where they are trained; nothing computed again counts.
                    Gradients by what the first layer reads are counted, though adapters need none there: 0.4 % of
                    LLaVA's FLOPs, 1.7 % of those of 8 layers of Kimi-K3
    MFU             those over 989.5 TFLOP/s, the vendor's figure for bfloat16 on an H100 or H200 SXM
    memory          the largest that was in use, as the allocator counts it, and the compiler's own account
    by part         time of the GPU's kernels in one traced step, by their names
    busy            with --run N: of N steps handed over one behind the other, as the loop does, the share of time in
                    which a kernel ran, from a trace; and what a step took, from first to last
    loads           with --loads: steps whose routers' biases are drawn anew before each, so that experts' loads differ
    first step      beside it what comes before: tracing and lowering, compiling (or taking from the compilation cache,
                    if JAX_COMPILATION_CACHE_DIR names one, or loading), and drawing the weights

`--compiler NAME=VALUE` gives XLA an option beside those of `mmjax.training.step.compiler_options`.
`--save-program FILE` compiles for the GPU that is here, or for an H200 where none is, and stops; `--load-program FILE`
takes that program instead of compiling. Compiled without a GPU it lacks cuDNN's graphs, and attention by cuDNN fails.
"""

import argparse
import ast
import dataclasses
import importlib
import pickle
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpu_trace import Kernel, busy_share, part_of, read_kernels
from jax.experimental import serialize_executable

from mmjax.config import RunConfig
from mmjax.data.batch import Batch
from mmjax.data.packing import fill
from mmjax.models.fused_attention import for_described_gpus
from mmjax.parallel.described import described_mesh
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.topology import read_cluster
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.dry_run import estimate
from mmjax.training.step import abstract_state, compiler_options, init_state, make_train_step, place_batch

PEAK_FLOPS = 989.5e12


def draw_batch(config: RunConfig, seed: int = 0) -> Batch:
    """A host batch of full rows."""
    random = np.random.default_rng(seed)
    batch = fill([], config.data, config.model.vision, 0, audio=config.model.audio)
    rows, length = batch.tokens.shape
    batch.tokens[...] = random.integers(0, config.model.vocabulary_size, (rows, length))
    batch.targets[:, :-1] = batch.tokens[:, 1:]
    batch.loss_weight[:, :-1] = 1
    batch.segment_ids[...] = 1
    batch.positions[...] = np.arange(length)
    vision = config.model.vision
    if vision.is_present:
        assert vision.kind == "clip", f"pictures of {vision.kind} are not drawn here"
        num_rows, num_columns = vision.table_rows, vision.table_columns
        num_features = num_rows * num_columns
        slots = slice(0, 1 + num_features)
        batch.patches[:, slots] = random.normal(size=(rows, 1 + num_features, batch.patches.shape[2]))
        batch.patch_segment_ids[:, slots] = 1
        place = np.stack(np.divmod(np.arange(num_features), num_columns), axis=1)
        batch.patch_position[:, 0] = (0, -1, -1)
        batch.patch_position[:, 1 : 1 + num_features, 1:] = place
        batch.patch_grid[:, slots] = (1, num_rows, num_columns)
        batch.feature_index[:, 8 : 8 + num_features] = np.arange(1, 1 + num_features)
        batch.loss_weight[:, : 8 + num_features] = 0
    return batch


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels of what `run` does."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run())
        return read_kernels(Path(directory))


def save_program(config: RunConfig, given: dict[str, Any], file: Path) -> None:
    """Compile the step for the GPU that is here, or for a described H200 where none is."""
    if jax.default_backend() == "gpu":
        step = compiled_step(config, make_mesh(config.mesh), given)
    else:
        mesh = described_mesh(config.mesh, read_cluster("1xh200"))
        with for_described_gpus(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            step = compiled_step(config, mesh, given)
    file.write_bytes(pickle.dumps(serialize_executable.serialize(step)))


def compiled_step(config: RunConfig, mesh: jax.sharding.Mesh, given: dict[str, Any]) -> jax.stages.Compiled:
    lowered = make_train_step(config, mesh).lower(abstract_state(config, mesh), abstract_batch(config, mesh))
    return lowered.compile(compiler_options=compiler_options(mesh) | given)


class Benchmark:
    """An experiment's step, compiled or loaded, and its state and batch once they are drawn."""

    def __init__(self, name: str, config: RunConfig, given: dict[str, Any], program: Path | None = None):
        self.name, self.config, self.mesh = name, config, make_mesh(config.mesh)
        self.device = self.mesh.devices.flat[0]
        state, batch = abstract_state(config, self.mesh), abstract_batch(config, self.mesh)
        self.flops = estimate(config, state).training_step_flops
        print(f"{name} on {self.device.device_kind}, jax {jax.__version__} {given or ''}", flush=True)
        begun = time.perf_counter()
        if program is not None:
            saved = pickle.loads(program.read_bytes())
            devices = list(self.mesh.devices.flat)
            self.step = serialize_executable.deserialize_and_load(*saved, backend="gpu", execution_devices=devices)
            print(f"program loaded in {time.perf_counter() - begun:.1f} s", flush=True)
            return
        lowered = make_train_step(config, self.mesh).lower(state, batch)
        seconds, begun = time.perf_counter() - begun, time.perf_counter()
        self.step = lowered.compile(compiler_options=compiler_options(self.mesh) | given)
        print(f"traced and lowered in {seconds:.1f} s, compiled in {time.perf_counter() - begun:.1f} s", flush=True)

    def account(self) -> str:
        memory: Any = self.step.memory_analysis()
        program = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return f"{(program + memory.temp_size_in_bytes) / 1e9:.1f} GB by the compiler's account"

    def draw(self) -> None:
        begun = time.perf_counter()
        self.state, self.batch = init_state(self.config, self.mesh), place_batch(draw_batch(self.config), self.mesh)
        jax.block_until_ready((self.state, self.batch))
        print(f"weights drawn in {time.perf_counter() - begun:.1f} s", flush=True)

    def time_steps(self, number: int) -> None:
        """Each by itself, until its loss is on the host."""
        times, losses = [], []
        for _ in range(number):
            begun = time.perf_counter()
            self.state, metrics = self.step(self.state, self.batch)
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - begun)
        seconds = statistics.median(times[2:] or times)
        tokens, rate = self.config.data.rows * self.config.data.row_tokens, self.flops / seconds
        print(f"losses {' '.join(f'{loss:.4f}' for loss in losses)}")
        print(f"first step {times[0]:.2f} s")
        print(f"step {seconds * 1e3:.1f} ms ({' '.join(f'{t * 1e3:.0f}' for t in times)})")
        print(f"{tokens / seconds:,.0f} tokens/s")
        print(f"{self.flops / 1e12:.1f} TFLOP a step, {rate / 1e12:.0f} model TFLOP/s, MFU {rate / PEAK_FLOPS:.1%}")
        held = (self.device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        print(f"memory {held / 1e9:.1f} GB in use at most, {self.account()}", flush=True)

    def run(self, number: int) -> Any:
        """Steps handed over without waiting; the metrics of each are read while the next one runs."""
        metrics = None
        for _ in range(number):
            before = metrics
            self.state, metrics = self.step(self.state, self.batch)
            jax.device_get(before)
        return metrics

    def time_loads(self, number: int) -> None:
        """Steps with biases of routers of several deviations, each drawn anew before it."""
        biases = jax.device_get(self.state.router_biases)
        for deviation in (0.0, 0.01, 0.1, 1.0):
            times, loads = [], []
            for seed in range(number):
                random = np.random.default_rng(seed)
                drawn = {
                    path: jax.device_put(
                        (bias + deviation * random.normal(size=bias.shape)).astype(bias.dtype),
                        self.state.router_biases[path].sharding,
                    )
                    for path, bias in biases.items()
                }
                state = dataclasses.replace(self.state, router_biases=jax.block_until_ready(drawn))
                begun = time.perf_counter()
                self.state, metrics = self.step(state, self.batch)
                loads.append(float(metrics["moe_load_max_over_mean"]))
                times.append(time.perf_counter() - begun)
            print(
                f"biases of deviation {deviation}: largest load {statistics.median(loads):.1f} times the mean, step "
                f"{statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})",
                flush=True,
            )

    def print_parts(self, num_kernels: int) -> None:
        parts, kernels = defaultdict[str, float](float), defaultdict[str, float](float)
        for kernel in traced(lambda: self.run(1)):
            kernels[kernel.name] += kernel.end - kernel.begin
            parts[part_of(kernel.name)] += kernel.end - kernel.begin
        for part, microseconds in sorted(parts.items(), key=lambda item: -item[1]):
            print(f"  {part:20s} {microseconds / 1e3:8.1f} ms")
        for kernel, microseconds in sorted(kernels.items(), key=lambda item: -item[1])[:num_kernels]:
            print(f"    {microseconds / 1e3:8.1f} ms  {kernel[:100]}")

    def print_busy(self, number: int) -> None:
        jax.block_until_ready(self.run(2))
        begun = time.perf_counter()
        jax.block_until_ready(self.run(number))
        seconds = (time.perf_counter() - begun) / number
        share = busy_share(traced(lambda: self.run(number)))
        print(
            f"{number} steps: {seconds * 1e3:.1f} ms each; traced, a kernel ran in {share:.2%} of the time", flush=True
        )


def options_of(texts: Iterable[str]) -> dict[str, Any]:
    """NAME=VALUE, a Python literal or else a word."""
    options = {}
    for name, value in (text.split("=", 1) for text in texts):
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, help="rows of a batch instead of the experiment's")
    parser.add_argument("--keep", nargs="*", help="results that rematerialisation keeps instead of the experiment's")
    parser.add_argument("--compiler", nargs="*", default=[], metavar="NAME=VALUE", help="options of XLA")
    parser.add_argument("--loads", action="store_true", help="also steps with various loads of experts")
    parser.add_argument("--run", type=int, default=0, metavar="N", help="also N steps as the loop hands them over")
    parser.add_argument("--save-program", type=Path, metavar="FILE")
    parser.add_argument("--load-program", type=Path, metavar="FILE")
    parser.add_argument("--kernels", type=int, default=12, help="how many kernels to list")
    options = parser.parse_args()
    config = importlib.import_module(f"experiments.{options.experiment}").run()
    if options.rows:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, rows=options.rows))
    if options.keep is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat_keep=tuple(options.keep)))
    given = options_of(options.compiler)
    if options.save_program:
        save_program(config, given, options.save_program)
        return
    benchmark = Benchmark(options.experiment, config, given, options.load_program)
    benchmark.draw()
    benchmark.time_steps(options.steps)
    benchmark.print_parts(options.kernels)
    if options.loads:
        benchmark.time_loads(6)
    if options.run:
        benchmark.print_busy(options.run)


if __name__ == "__main__":
    main()
