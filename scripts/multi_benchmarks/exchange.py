"""The experts' exchange alone, by each transport, with experts that give back their rows: Kimi K3's sizes."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from multi_benchmarks.session import Session
from multi_benchmarks.shapes import CAPACITY_FACTOR

from mmjax.axes import EXPERT
from mmjax.config import MeshConfig
from mmjax.errors import ConfigurationError
from mmjax.parallel.expert import ExpertExchange, check_transport, exchange_experts
from mmjax.parallel.mesh import make_mesh

TRANSPORTS = ("all_to_all", "ring", "ragged", "by_node")


def run(session: Session, name: str) -> None:
    """Time forward, and forward and backward."""
    tokens, width, choices = (16, 8, 2) if session.is_tiny else (8192, 3584, 16)
    mesh = make_mesh(MeshConfig(expert=session.num_devices))
    num_experts = 112 * session.num_devices
    programs: dict[str, dict[str, Callable]] = {}
    random = np.random.default_rng(0)
    sharding = NamedSharding(mesh, PartitionSpec(EXPERT))
    arrays = (
        random.normal(size=(tokens * session.num_devices, width)).astype(jnp.bfloat16),
        random.integers(0, num_experts, (tokens * session.num_devices, choices), np.int32),
        random.random((tokens * session.num_devices, choices), np.float32),
    )
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in arrays]
    for transport in TRANSPORTS:
        try:
            check_transport(transport, (EXPERT,), mesh)
        except ConfigurationError as error:
            session.report(transport=transport, refused=f"{error.found}: {error.expected}")
            continue
        exchange = make_exchange(transport, num_experts, mesh)
        programs[transport] = {
            kind: jax.jit(function).lower(*shapes).compile()
            for kind, function in (("forward", exchange), ("step", jax.grad(summed(exchange), argnums=(0, 2))))
        }
    with session.turn():
        placed = [jax.device_put(array, sharding) for array in arrays]
        for transport, kinds in programs.items():
            seconds = {kind: median_seconds(program, *placed) for kind, program in kinds.items()}
            num_bytes = sent_bytes(transport, tokens, choices, width, session.num_devices)
            session.report(
                transport=transport,
                forward_seconds=seconds["forward"],
                step_seconds=seconds["step"],
                sent_bytes=num_bytes,
                bandwidth=num_bytes / seconds["forward"],
            )


def make_exchange(transport: str, num_experts: int, mesh: jax.sharding.Mesh) -> Callable:
    # All devices are of one node.
    exchange = ExpertExchange(
        num_experts=num_experts, capacity_factor=CAPACITY_FACTOR, transport=transport, node_devices=mesh.size
    )

    def on_device(rows: jax.Array, index: jax.Array, weight: jax.Array) -> jax.Array:
        def apply(_: tuple, rows: jax.Array, expert: jax.Array) -> jax.Array:
            return jnp.where((expert >= 0)[:, None], rows, jnp.zeros_like(rows))

        return exchange_experts(rows, index, weight, apply, exchange).mixed

    specs = PartitionSpec(EXPERT)
    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs, specs, specs), out_specs=specs)


def summed(exchange: Callable) -> Callable:
    return lambda rows, index, weight: jnp.sum(jnp.square(exchange(rows, index, weight)).astype(jnp.float32))


def sent_bytes(transport: str, tokens: int, choices: int, width: int, num_devices: int) -> float:
    """What one device sends to others in a forward pass, there and back: rows in bfloat16, a ring's sums in float32."""
    if transport == "ring":
        return float((num_devices - 1) * tokens * width * (2 + 4))
    rows = tokens * choices * (num_devices - 1) / num_devices
    return 2 * 2 * width * rows * (CAPACITY_FACTOR if transport == "all_to_all" else 1.0)


def median_seconds(program: Callable, *arguments: jax.Array, repeats: int = 10) -> float:
    jax.block_until_ready(program(*arguments))
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
