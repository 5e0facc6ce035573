"""Time the training step of an experiment on the device that is here: `python scripts/bench_train.py EXPERIMENT`.

Weights are drawn, so is the batch: each row one document that fills it, with one picture behind its eighth token if the
model reads pictures, and a loss on all that follows. What is printed:

    tokens/s        positions of a batch over the median of the steps' times, the first two left out
    model TFLOP/s   what the model has to compute, not what the program does: forward of every position (causal
                    attention: half of the pairs) and of every patch, the gradients by activations once more where
                    something below is trained, those by weights where they are trained; nothing computed again counts
    MFU             those over 989.5 TFLOP/s, the vendor's figure for bfloat16 on an H100 or H200 SXM
    memory          the largest that was in use, as the allocator counts it, and the compiler's own account
    by part         time of the GPU's kernels in one traced step, by their names
"""

import argparse
import dataclasses
import gzip
import importlib
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from mmjax.config import RunConfig
from mmjax.data.batch import Batch
from mmjax.data.packing import fill
from mmjax.parallel.mesh import make_mesh
from mmjax.training.dry_run import estimate
from mmjax.training.step import abstract_state, init_state, make_train_step, place_batch

PEAK_FLOPS = 989.5e12
PARTS = (  # the first pattern that a kernel's name holds counts
    ("attention", r"fmha|sdpa|flash|cudnn_generated"),
    ("linear attention", r"prepare|scan_back|^scan|parts_of_tokens|gradients"),
    ("experts", r"moe_"),
    ("cross-entropy", r"cross_entropy"),
    ("attention residuals", r"attention_residual"),
    ("products", r"gemm|nvjet|cutlass|xmma|sm90_xmma|dot"),
    ("copies", r"memcpy|copy|memset"),
)


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


def kernel_times(directory: str) -> Counter[str]:
    """Microseconds of kernels on the GPU by name, from a trace that JAX wrote."""
    times: Counter[str] = Counter()
    for path in Path(directory).rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        lanes = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        for event in events:
            if event.get("ph") == "X" and lanes.get((event["pid"], event.get("tid")), "").startswith("Stream"):
                times[event["name"]] += event["dur"]
    return times


def part_of(kernel: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, kernel, re.IGNORECASE)), "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, help="rows of a batch instead of the experiment's")
    parser.add_argument("--keep", nargs="*", help="results that rematerialisation keeps instead of the experiment's")
    parser.add_argument("--no-triton-products", action="store_true", help="all matrix products by cuBLAS: less to try")
    parser.add_argument("--kernels", type=int, default=12, help="how many kernels to list")
    options = parser.parse_args()
    config = importlib.import_module(f"experiments.{options.experiment}").run()
    if options.rows:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, rows=options.rows))
    if options.keep is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat_keep=tuple(options.keep)))
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    flops = estimate(config, abstract_state(config, mesh)).training_step_flops
    begun = time.perf_counter()
    state, batch = init_state(config, mesh), place_batch(draw_batch(config), mesh)
    jax.block_until_ready((state, batch))
    print(f"{options.experiment} on {device.device_kind}, jax {jax.__version__}")
    print(f"weights drawn in {time.perf_counter() - begun:.1f} s", flush=True)
    begun = time.perf_counter()
    compiler_options = {"xla_gpu_enable_triton_gemm": False} if options.no_triton_products else None
    step = make_train_step(config, mesh).lower(state, batch).compile(compiler_options=compiler_options)
    print(f"compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    times, losses = [], []
    for _ in range(options.steps):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times[2:] or times)
    tokens = config.data.rows * config.data.row_tokens
    memory, held = step.memory_analysis(), device.memory_stats() or {}
    program = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    print(f"losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"step {seconds * 1e3:.1f} ms ({' '.join(f'{t * 1e3:.0f}' for t in times)})")
    print(f"{tokens / seconds:,.0f} tokens/s")
    rate = flops / seconds
    print(f"{flops / 1e12:.1f} TFLOP a step, {rate / 1e12:.0f} model TFLOP/s, MFU {rate / PEAK_FLOPS:.1%}")
    print(
        f"memory {held.get('peak_bytes_in_use', 0) / 1e9:.1f} GB in use at most, "
        f"{(program + memory.temp_size_in_bytes) / 1e9:.1f} GB by the compiler's account",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            state, metrics = step(state, batch)
            jax.block_until_ready(state)
        kernels = kernel_times(directory)
    parts: Counter[str] = Counter()
    for kernel, microseconds in kernels.items():
        parts[part_of(kernel)] += microseconds
    for part, microseconds in parts.most_common():
        print(f"  {part:20s} {microseconds / 1e3:8.1f} ms")
    for kernel, microseconds in kernels.most_common(options.kernels):
        print(f"    {microseconds / 1e3:8.1f} ms  {kernel[:100]}")


if __name__ == "__main__":
    main()
