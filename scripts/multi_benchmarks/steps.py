"""A training step of adapters: its speed, what hides its exchanges, and whether its first gradients are those meant."""

import concurrent.futures
import dataclasses
import os
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench_train import PEAK_FLOPS, draw_batch
from flax import nnx
from gpu_trace import read_kernels
from multi_benchmarks import gradients, shapes
from multi_benchmarks.overlap import describe_kernels, overlap_of, save_kernels
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
FEWEST_STEPS, MOST_STEPS, MOST_SECONDS = 4, 14, 6.0


def run(
    session: Session,
    name: str,
    *,
    experiment: str,
    mesh: str,
    changes: dict[str, Any] | None = None,
    base: str = "",
    gpu: int = 0,
) -> None:
    """Time the step of `experiment` spread over `mesh`; with `changes` gradients are compared with those of `base`.

    Without a mesh it runs on GPU number `gpu`.
    """
    if gpu:
        # Before JAX looks for devices.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    changes = dict(changes or {})
    options = {"xla_gpu_enable_triton_gemm": False} | changes.pop("compiler", {})
    jax.config.update("jax_optimization_level", changes.pop("optimization_level", "UNKNOWN"))
    start = shapes.experiment(experiment, is_tiny=session.is_tiny)
    mesh_config = parse_mesh(mesh) if mesh else MeshConfig()
    config = shapes.settled(shapes.changed(shapes.spread(start, mesh_config, session.num_devices), **changes))
    devices = make_mesh(config.mesh)
    abstract = abstract_state(config, devices)
    # Another way must give the gradients of its base as nearly as one more rounding of its embeddings does. Routers as
    # they are drawn give one device more rows than another: what that costs is timed once.
    kinds: list[dict[str, bool]] = [{}]
    if not base and (config.mesh.expert > 1 or session.num_devices == 1):
        kinds.append({"is_rounded": True})
    if not base and config.mesh.expert > 1:
        kinds.append({"is_even": False})
    draws = [make_draw(config, devices, **kind) for kind in kinds]
    begun = time.perf_counter()
    lowered = make_train_step(config, devices).lower(abstract, abstract_batch(config, devices))
    programs = [(lowered, options), *((draw.lower(), {"xla_backend_optimization_level": 0}) for draw in draws)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        step, draw, *others = threads.map(lambda one: one[0].compile(compiler_options=one[1]), programs)
        compile_seconds = time.perf_counter() - begun
        # Before the turn, which it would disturb; what it cannot read is said when all else is.
        schedule = threads.submit(read_schedule, step, config)

    with tempfile.TemporaryDirectory() as directory:
        with session.turn():
            batch = place_batch(draw_batch(config), devices)
            state = draw()
            num_steps = FEWEST_STEPS if session.is_tiny else MOST_STEPS
            state, timed = time_steps(step, state, batch, num_steps)
            memory = devices.devices.flat[0].memory_stats() or {}
            session.report(
                num_devices=config.mesh.num_devices,
                compile_seconds=compile_seconds,
                step_seconds=timed.seconds,
                fastest_seconds=timed.fastest,
                **rates(config, estimate(config, abstract).training_step_flops, timed.seconds),
                losses=timed.losses,
                peak_bytes=memory.get("peak_bytes_in_use", 0),
                compiled_bytes=compiled_bytes(step),
                rounds=float(timed.metrics["exchange_rounds"]),
                load=float(timed.metrics["moe_load_max_over_mean"]),
            )
            profile = jax.profiler.ProfileOptions()
            profile.python_tracer_level = 0
            with jax.profiler.trace(directory, profiler_options=profile):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
            del state
            rounded: dict[str, Any] = {}
            for kind, other in zip(kinds[1:], others, strict=True):
                most = FEWEST_STEPS if "is_rounded" in kind else num_steps
                state, again = time_steps(step, other(), batch, most)
                del state
                if "is_rounded" in kind:
                    rounded = again.first
                else:
                    load = float(again.metrics["moe_load_max_over_mean"])
                    session.report(uneven_seconds=again.seconds, uneven_load=load)
        if base:
            theirs = gradients.load(session.shared / f"{base}.npz")
            usual = gradients.distances(gradients.load(session.shared / f"{base}, rounded.npz"), theirs)
            session.report(gradients=gradients.beside(timed.first, theirs, usual))
        else:
            gradients.save(session.shared / f"{name}.npz", timed.first)
            if rounded:
                gradients.save(session.shared / f"{name}, rounded.npz", rounded)
        if (kernels := read_kernels(Path(directory))) and (overlap := overlap_of(kernels)) is not None:
            session.report(traced=dataclasses.asdict(overlap) | {"hidden_share": overlap.hidden_share})
            print(describe_kernels(kernels))
            if session.output is not None and not base:
                save_kernels(session.output / "traces" / f"{name}.json.gz", kernels)
    session.report(scheduled=schedule.result())


@dataclass(frozen=True)
class Timed:
    """Steps one behind the other."""

    seconds: float
    """Of one: the median."""
    fastest: float
    losses: list[float]
    first: dict[str, Any]
    """`first_moments` of the first step, on the host."""
    metrics: dict[str, jax.Array]
    """Of the last step."""


def time_steps(step: Any, state: TrainState, batch: Any, most: int) -> tuple[TrainState, Timed]:
    """Each begins when the loss of the one before is here."""
    losses, seconds = [], []
    first: dict[str, Any] = {}
    metrics: dict[str, jax.Array] = {}
    while len(losses) < FEWEST_STEPS or (len(losses) < most and sum(seconds[1:]) < MOST_SECONDS):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begun)
        first = first or gradients.on_host(first_moments(state))
    return state, Timed(statistics.median(seconds[2:]), min(seconds[2:]), losses, first, metrics)


def read_schedule(step: Any, config: RunConfig) -> dict[str, float]:
    """What the order that the compiler chose hides."""
    cluster = read_cluster(f"1x{config.mesh.num_devices}xh200")
    reader = ExchangeReader(read_program(step.as_text()), config.mesh, cluster)
    exchanges, timeline = reader.exchanges(), reader.timeline()
    return {
        "hidden_share": hidden_share(exchanges),
        "exchanged_bytes": sum(exchange.num_bytes for exchange in exchanges if not exchange.is_conditional),
        **dataclasses.asdict(timeline),
    }


def make_draw(config: RunConfig, mesh: jax.sharding.Mesh, *, is_even: bool = True, is_rounded: bool = False):
    """Jitted `() -> TrainState` of arbitrary weights: one program, which compiles within seconds.

    Norms, biases and the like start as in a run; adapters do not, so that all have gradients in the first step. Where
    routing `is_even`, routers score one device's experts as they score every other's: then each token's experts are
    shared out evenly over the devices, as if routers were balanced between them, and as uneven as before on each.
    `is_rounded`: half of the embeddings' numbers are one bfloat16 further on.
    """
    moe = config.model.moe
    experts_of_device = moe.num_resident_experts // config.mesh.expert
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
            if is_even and path.endswith(".router"):
                of_device = noise(path, (*described.shape[:-1], experts_of_device), deviation).astype(described.dtype)
                return jnp.concatenate([of_device] * (described.shape[-1] // experts_of_device), axis=-1)
            if is_rounded and path.endswith("embedding"):
                further = 1 + 2.0**-7 * (random_bits(f"{path}, rounded", described.shape) % 2).astype(jnp.float32)
                return (noise(path, described.shape, deviation) * further).astype(described.dtype)
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
