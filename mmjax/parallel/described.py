"""Devices of a described cluster that need not be there: programs can be compiled for them, not run."""

import importlib.util
from typing import Any

import jax
from jax.experimental import topologies

from mmjax.config import MeshConfig
from mmjax.errors import ConfigurationError
from mmjax.parallel.mesh import make_mesh
from mmjax.planner.hardware import Cluster

# What the compiler asks of a GPU: compute capability, multiprocessors, float32 units of one, clock in GHz, shared
# memory of one and of a block, L2 cache and memory in bytes, memory bandwidth in bytes a second.
_GPUS: dict[str, tuple[tuple[int, int], int, int, float, int, int, int, int, float]] = {
    "a100": ((8, 0), 108, 64, 1.41, 167_936, 166_912, 41_943_040, 85_100_068_864, 2.03904e12),
    "h100": ((9, 0), 132, 128, 1.98, 233_472, 232_448, 52_428_800, 84_942_979_072, 3.35232e12),
    "h200": ((9, 0), 132, 128, 1.98, 233_472, 232_448, 52_428_800, 151_397_597_184, 4.8e12),
    "b200": ((10, 0), 148, 128, 1.965, 233_472, 232_448, 132_644_864, 191_514_411_008, 7.67232e12),
}
_NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def described_mesh(mesh: MeshConfig, cluster: Cluster) -> jax.sharding.Mesh:
    """The mesh over the first devices of `cluster`, as the real ones would be numbered.

    Needs the CUDA plug-in of JAX and its compiler (extra `deviceless`), no driver and no GPU.

    Raises:
      ConfigurationError: the extra is not installed, the kind of GPU is not known to the compiler, or the mesh does not
        fit the cluster.
    """
    if mesh.num_devices > cluster.num_devices:
        found = f"a mesh of {mesh.num_devices} devices on {cluster.name}, which has {cluster.num_devices}"
        raise ConfigurationError("--cluster", found=found, expected="a mesh that fits", remedy="describe more nodes")
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        raise ConfigurationError(
            "--cluster",
            found="no CUDA plug-in of JAX",
            expected="a compiler for GPUs; no GPU is needed",
            remedy="pip install -e '.[deviceless]', or leave --cluster out for the arithmetic alone",
        )
    topology = f"1x{cluster.num_nodes}x{cluster.gpus_per_node}"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=_target_text(cluster.gpu.name), topology=topology
        )
    # By version and platform, JAX says with each of these that the plug-in can describe no devices.
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            "--cluster",
            found=" ".join(str(error).split())[:200],
            expected="devices described to JAX's CUDA plug-in",
            remedy="set JAX_PLATFORMS=cpu before the command on a machine without a driver",
        ) from error
    return make_mesh(mesh, described.devices)


def _target_text(gpu: str) -> str:
    """`stream_executor.GpuTargetConfigProto` of a GPU as text.

    Source of the numbers: what OpenXLA's own specifications of these GPUs say.
    """
    if gpu not in _GPUS:
        raise ConfigurationError(
            "--cluster", found=gpu, expected=f"one of {', '.join(_GPUS)}", remedy="describe the nearest of them"
        )
    capability, cores, units, clock, shared, shared_of_block, cache, memory, bandwidth = _GPUS[gpu]
    feature = "ACCELERATED_FEATURES" if capability >= (9, 0) else "NONE"
    limits: dict[str, Any] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": units,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": shared,
        "shared_memory_per_block_optin": shared_of_block,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
        "block_dim_limit_x": 2_147_483_647,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "l2_cache_size": cache,
        "memory_bandwidth": int(bandwidth),
        "device_memory_size": memory,
        "clock_rate_ghz": clock,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in limits.items())
    name = _NAMES[gpu]
    return f"""
gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} feature_extension: {feature} }}
  device_vendor: "NVIDIA Corporation" name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
