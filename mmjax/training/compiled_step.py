"""The training step compiled for a described cluster without any of its GPUs, and what the program says of itself."""

import contextlib
import dataclasses
import json
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding

from mmjax.config import RunConfig, describe_mesh
from mmjax.data.batch import Batch
from mmjax.data.packing import fill
from mmjax.errors import writing
from mmjax.models.fused_attention import for_described_gpus
from mmjax.parallel.described import described_mesh
from mmjax.planner.hardware import Cluster
from mmjax.planner.memory import num_expert_devices
from mmjax.planner.units import format_bytes, format_flops, format_seconds
from mmjax.training.compiled_program import LargeResult, read_program
from mmjax.training.exchanges import Exchange, ExchangeReader, Timeline, hidden_share
from mmjax.training.peak_memory import AtPeak, alive_at_peak, dump_options
from mmjax.training.step import TrainState, abstract_state, batch_specs, make_train_step

# What arrays at rest are for: the first pattern that is found in a path counts.
_GROUPS = (
    ("towers", r"^(vision|audio|projector|audio_projector)\b"),
    ("shared experts and dense MLPs", r"\.mlp\.(shared|gate|up|down)\b"),
    ("routers and latent projections", r"\.mlp\."),
    ("attention", r"\.mixer\."),
    ("tables", r"\b(embedding|head)$"),
)
# Machine code that nobody runs need not be good: memory, exchanges and their order are settled before it is made.
_COMPILE_FAST: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
# How many of the largest arrays are shown.
_NUM_LARGEST = 10
# The last word of an adapter's factor, behind the name of its weight; `mlp.down` alone is a weight.
_FACTOR = re.compile(r"(?<!\.mlp)(?<!\.shared)\.(down|up)$")


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """One compiled step on one device of the mesh; bytes and seconds of a step."""

    cluster: str
    mesh: str
    compile_seconds: float
    """Tracing and lowering included."""
    device_memory: dict[str, int]
    """arguments, outputs, aliased (outputs that take the place of arguments), temporaries, peak (of the compiler's own
    account), total = arguments + outputs - aliased + temporaries."""
    host_memory: dict[str, int]
    at_rest: dict[str, int]
    """Bytes of arguments by what they are for."""
    exchanges: list[Exchange]
    hidden_share: float
    at_peak: list[AtPeak]
    """Arrays that are there when most is, by what makes them."""
    largest: list[LargeResult]
    """The largest arrays that the program makes; they are not all there at one time."""
    flops: float
    """Of matrix products in a step, what is computed again included."""
    timeline: Timeline

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """As JSON."""
        with writing(path):
            path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each number, for printing."""
        device, host = self.device_memory, self.host_memory
        rows = [
            ("compiled in", format_seconds(self.compile_seconds)),
            ("memory of a device", format_bytes(device["total"])),
            *((f"  at rest: {name}", format_bytes(size)) for name, size in self.at_rest.items()),
            ("  activations and temporaries", format_bytes(device["temporaries"])),
            *(
                (f"    at the peak: {kind.made_by}", f"{format_bytes(kind.num_bytes)} in {kind.count}")
                for kind in self.at_peak[:_NUM_LARGEST]
            ),
            *(
                (f"    as large as {result.shape}", f"{format_bytes(result.num_bytes)} {result.operation}")
                for result in self.largest
            ),
            ("  arguments", format_bytes(device["arguments"])),
            (
                "  outputs",
                f"{format_bytes(device['outputs'])}, {format_bytes(device['aliased'])} in place of arguments",
            ),
            ("memory of its host", format_bytes(sum(host.values()))),
            ("FLOPs of matrix products, on a device", format_flops(self.flops)),
            ("estimated computing", format_seconds(self.timeline.compute)),
            ("estimated waiting for exchanges", format_seconds(self.timeline.exposed)),
            ("share of exchanged bytes that computing hides", f"{self.hidden_share:.1%}"),
        ]
        for exchange in self.exchanges:
            label = f"  {exchange.kind} over {', '.join(exchange.mesh_axes)}"
            value = (
                f"{exchange.count:g} x, {format_bytes(exchange.num_bytes)}, {format_seconds(exchange.seconds)}, "
                f"{exchange.hidden_bytes / max(1.0, exchange.num_bytes):.0%} hidden"
            )
            rows.append((label, value + (", under a condition" if exchange.is_conditional else "")))
        return rows


def compile_step(
    config: RunConfig, cluster: Cluster, *, options: Mapping[str, Any] | None = None, text_file: Path | None = None
) -> CompiledStep:
    """Compile the training step of `config` for `cluster`. `text_file` keeps the text of the program.

    Raises:
      ConfigurationError: there is no compiler for GPUs, or the mesh does not fit.
    """
    mesh = described_mesh(config.mesh, cluster)
    state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as reports:
        # Kernels are chosen by the device that the abstract mesh names.
        with _compiling_only(), for_described_gpus(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = make_train_step(config, mesh).lower(state, batch)
            compiled = lowered.compile(
                compiler_options=_COMPILE_FAST | dump_options(Path(reports)) | dict(options or {})
            )
        seconds = time.perf_counter() - begun
        text = compiled.as_text() or ""
        if text_file is not None:
            with writing(text_file):
                text_file.write_text(text, encoding="utf-8")
        return describe(config, cluster, state, batch, text, compiled.memory_analysis(), seconds, Path(reports))


@contextlib.contextmanager
def _compiling_only() -> Iterator[None]:
    """Settings of JAX for programs that nobody runs.

    Operations do not say where they were traced: XLA spends minutes on these notes in a large program. The persistent
    cache is left alone: it could not read such a program again.
    """
    quiet = {"jax_traceback_in_locations_limit": 0, "jax_enable_compilation_cache": False}
    before = {name: getattr(jax.config, name) for name in quiet}
    for name, value in quiet.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def describe(
    config: RunConfig,
    cluster: Cluster,
    state: TrainState,
    batch: Batch,
    text: str,
    memory: Any,
    compile_seconds: float,
    reports: Path,
) -> CompiledStep:
    """What a compiled step's text, its memory analysis and the reports that XLA wrote say."""
    # Buffers of an exchange are as full as their capacity allows on average; kernels skip the rest.
    is_exchanged = num_expert_devices(config) > 1 and config.model.moe.num_dense_layers < config.model.num_layers
    filled = min(1.0, 1 / config.model.moe.capacity_factor) if is_exchanged else 1.0
    program = read_program(text, filled_share=filled)
    reader = ExchangeReader(program, config.mesh, cluster)
    exchanges = reader.exchanges()
    return CompiledStep(
        cluster=cluster.name,
        mesh=describe_mesh(config.mesh),
        compile_seconds=compile_seconds,
        device_memory=_memory(memory, ""),
        host_memory=_memory(memory, "host_"),
        at_rest=bytes_at_rest(state, batch),
        exchanges=exchanges,
        hidden_share=hidden_share(exchanges),
        at_peak=alive_at_peak(reports, program),
        largest=program.largest_results(_NUM_LARGEST),
        flops=program.flops(),
        timeline=reader.timeline(),
    )


def _memory(memory: Any, prefix: str) -> dict[str, int]:
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp"}
    sizes = {name: int(getattr(memory, f"{prefix}{word}_size_in_bytes")) for name, word in names.items()}
    if not prefix:
        sizes["total"] = sizes["arguments"] + sizes["outputs"] - sizes["aliased"] + sizes["temporaries"]
        sizes["peak"] = int(getattr(memory, "peak_memory_in_bytes", sizes["total"]))
    return sizes


def abstract_batch(config: RunConfig, mesh: Mesh, row_patches: int | None = None) -> Batch:
    """The batch of a step as shapes, dtypes and shardings; with patch room for `row_patches`, if it is given."""
    shapes = fill(
        [],
        config.data,
        config.model.vision,
        0,
        audio=config.model.audio,
        row_patches=row_patches,
        allocate=lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype),  # pyright: ignore[reportArgumentType]
    )
    return jax.tree.map(
        lambda leaf, leaf_spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf_spec)),
        shapes,
        batch_specs(),
    )


def bytes_at_rest(state: TrainState, batch: Batch) -> dict[str, int]:
    """Bytes that one device is given, by what they are for; packed experts apart from others."""
    sizes: dict[str, int] = defaultdict(int)
    mixtures = {path.removesuffix(".router") for path in state.frozen | state.parameters if path.endswith(".router")}
    for path, leaf in state.frozen.items():
        is_packed = path.endswith(("_codes", "_scales"))
        sizes[f"frozen {group_of(path, mixtures)}{', packed' if is_packed else ''}"] += device_bytes(leaf)
    for path, leaf in state.parameters.items():
        kind = "adapters of" if _FACTOR.search(path) else "trained"
        sizes[f"{kind} {group_of(path, mixtures)}"] += device_bytes(leaf)
    sizes["optimizer"] = sum(map(device_bytes, jax.tree.leaves(state.optimizer)))
    sizes["router biases and counters"] = sum(
        map(device_bytes, [*state.router_biases.values(), state.step, state.nonfinite_steps])
    )
    sizes["batch"] = sum(map(device_bytes, batch))
    return {name: size for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size}


def group_of(path: str, mixtures: Collection[str]) -> str:
    """What an array is for, from its path; an adapter's is that of its weight. `mixtures`: paths of MLPs of experts."""
    weight = _FACTOR.sub("", path)
    if re.search(r"\.mlp\.(gate|up|down)(_codes|_scales)?$", weight) and weight.rsplit(".", 1)[0] in mixtures:
        return "routed experts"
    return next((name for name, pattern in _GROUPS if re.search(pattern, weight)), "norms and others")


def device_bytes(leaf: Any) -> int:
    """Of an array with a sharding, on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
