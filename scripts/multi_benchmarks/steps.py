"""A training step of adapters: its speed, what hides its exchanges, and whether its first gradients are those meant."""

import concurrent.futures
import dataclasses
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench_train import PEAK_FLOPS, draw_batch
from flax import nnx
from multi_benchmarks import gradients, shapes
from multi_benchmarks.overlap import read_overlap
from multi_benchmarks.session import Session

from mmjax.checkpoint.adapters import define_run
from mmjax.config import MeshConfig, RunConfig, parse_mesh
from mmjax.models.layers import LoraFactor, normal
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.topology import read_cluster
from mmjax.training.compiled_program import read_program
from mmjax.training.compiled_step import abstract_batch
from mmjax.training.dry_run import estimate
from mmjax.training.exchanges import ExchangeReader, hidden_share
from mmjax.training.optimizer import make_optimizer
from mmjax.training.step import TrainState, abstract_state, make_train_step, place_batch

# Steps of a run, within so many seconds; the first two are not timed.
FEWEST_STEPS, MOST_STEPS, MOST_SECONDS = 4, 18, 9.0


def run(
    session: Session,
    name: str,
    *,
    experiment: str,
    mesh: str,
    changes: dict[str, Any] | None = None,
    base: str = "",
) -> None:
    """Time the step of `experiment` spread over `mesh`; with `changes` gradients are compared with those of `base`."""
    changes = dict(changes or {})
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
    if (is_latency_hidden := changes.pop("is_latency_hidden", None)) is not None:
        options["xla_gpu_enable_latency_hiding_scheduler"] = is_latency_hidden
    jax.config.update("jax_optimization_level", changes.pop("optimization_level", "UNKNOWN"))
    start = shapes.experiment(experiment, is_tiny=session.is_tiny)
    mesh_config = parse_mesh(mesh) if mesh else MeshConfig()
    config = shapes.settled(shapes.changed(shapes.spread(start, mesh_config, session.num_devices), **changes))
    devices = make_mesh(config.mesh)
    abstract = abstract_state(config, devices)
    begun = time.perf_counter()
    lowered = [
        make_draw(config, devices).lower(),
        make_train_step(config, devices).lower(abstract, abstract_batch(config, devices)),
    ]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        fast = {"xla_backend_optimization_level": 0}
        draw, step = threads.map(lambda one, given: one.compile(compiler_options=given), lowered, (fast, options))
    compile_seconds = time.perf_counter() - begun

    with tempfile.TemporaryDirectory() as directory:
        with session.turn():
            state, batch = draw(), place_batch(draw_batch(config), devices)
            losses, seconds = [], []
            first: dict[str, Any] = {}
            most = FEWEST_STEPS if session.is_tiny else MOST_STEPS
            while len(losses) < FEWEST_STEPS or (len(losses) < most and sum(seconds) < MOST_SECONDS):
                begun = time.perf_counter()
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
                seconds.append(time.perf_counter() - begun)
                first = first or gradients.on_host(first_moments(state))
            step_seconds = statistics.median(seconds[2:])
            memory = devices.devices.flat[0].memory_stats() or {}
            session.report(
                num_devices=config.mesh.num_devices,
                compile_seconds=compile_seconds,
                step_seconds=step_seconds,
                **rates(config, estimate(config, abstract).training_step_flops, step_seconds),
                losses=losses,
                peak_bytes=memory.get("peak_bytes_in_use", 0),
                compiled_bytes=compiled_bytes(step),
                rounds=float(metrics["exchange_rounds"]),
                load=float(metrics["moe_load_max_over_mean"]),
            )
            with jax.profiler.trace(directory):
                jax.block_until_ready(step(state, batch))
            del state
        if (overlap := read_overlap(Path(directory))) is not None:
            session.report(traced=dataclasses.asdict(overlap) | {"hidden_share": overlap.hidden_share})
    if base:
        found = gradients.difference(first, gradients.load(session.shared / f"{base}.npz"))
        session.report(gradients=dataclasses.asdict(found))
    else:
        gradients.save(session.shared / f"{name}.npz", first)
    reader = ExchangeReader(read_program(step.as_text()), config.mesh, read_cluster(f"1x{session.num_devices}xh200"))
    exchanges, timeline = reader.exchanges(), reader.timeline()
    session.report(
        scheduled={
            "hidden_share": hidden_share(exchanges),
            "exchanged_bytes": sum(exchange.num_bytes for exchange in exchanges if not exchange.is_conditional),
            **dataclasses.asdict(timeline),
        }
    )


def make_draw(config: RunConfig, mesh: jax.sharding.Mesh):
    """Jitted `() -> TrainState` of arbitrary weights: one program, which compiles within seconds.

    Norms, biases and the like start as in a run; adapters do not, so that all have gradients in the first step.
    """
    definition, abstract = define_run(config), abstract_state(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.training.steps, definition.parameters)

    def draw() -> TrainState:
        def arrays(variables: dict) -> dict[str, jax.Array]:
            return {path: array(path, variable) for path, variable in variables.items()}

        def array(path: str, variable: nnx.Variable) -> jax.Array:
            described, metadata = variable.get_value(), variable.get_metadata()
            if described.dtype == jnp.uint8:
                # Scales of 2^-8 and 2^-7, with which packed numbers are as large as others.
                bits = random_bits(path, described.shape)
                return (119 + bits % 2 if path.endswith("_scales") else bits % 256).astype(jnp.uint8)
            initializer, deviation = metadata["initializer"], config.model.initializer_range
            is_factor = isinstance(variable, LoraFactor)
            if is_factor or initializer is normal(deviation):
                return noise(path, described.shape, deviation).astype(described.dtype)
            return initializer(jax.random.key(0), described.shape, described.dtype)

        parameters = arrays(definition.parameters)
        return TrainState(
            parameters=parameters,
            router_biases=arrays(definition.router_biases),
            frozen=arrays(definition.frozen),
            optimizer=optimizer.init(parameters),
            step=jnp.zeros((), jnp.int32),
            nonfinite_steps=jnp.zeros((), jnp.int32),
        )

    return jax.jit(draw, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))


def noise(path: str, shape: tuple[int, ...], deviation: float) -> jax.Array:
    """float32, uniform around 0; what each place holds depends on the path and the place alone."""
    return (random_bits(path, shape).astype(jnp.float32) * 2.0**-31 - 1) * (3**0.5 * deviation)


def random_bits(path: str, shape: tuple[int, ...]) -> jax.Array:
    """uint32. JAX's own generator takes minutes to compile for hundreds of arrays."""
    bits = jnp.full(shape, zlib.crc32(path.encode()), jnp.uint32)
    for axis in range(len(shape)):
        # Odd numbers without a common pattern.
        bits += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32((2654435769 * (2 * axis + 1)) % 2**32)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x45D9F3B)
    return bits ^ (bits >> 16)


def first_moments(state: TrainState) -> dict[str, jax.Array]:
    """What AdamW or Muon has summed up, by path: after the first step the gradients, clipped, times a number."""
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    return {
        path[-1].key: leaf
        for path, leaf in leaves
        if any(getattr(key, "name", "") == "mu" for key in path) and hasattr(path[-1], "key")
    }


def rates(config: RunConfig, step_flops: float, step_seconds: float) -> dict[str, float]:
    """Of one device."""
    tokens = config.data.rows * config.data.row_tokens / config.mesh.num_devices
    flops = step_flops / config.mesh.num_devices
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / step_seconds,
        "flops": flops,
        "mfu": flops / step_seconds / PEAK_FLOPS,
    }


def compiled_bytes(step: Any) -> int:
    """Memory of one device by the compiler's account."""
    memory = step.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
