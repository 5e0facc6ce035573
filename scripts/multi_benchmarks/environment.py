"""Versions, driver, links between the GPUs, and settings that exchanges depend on."""

import importlib.metadata
import os
import platform
import subprocess

from multi_benchmarks.session import Session

from mmjax.planner.machine import discover
from mmjax.planner.topology import machine_cluster

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "flax")
VARIABLES = ("XLA_FLAGS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "JAX_OPTIMIZATION_LEVEL")


def run(session: Session, name: str) -> None:
    versions = {"python": platform.python_version()} | {
        package: version for package in PACKAGES if (version := version_of(package))
    }
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(("NCCL_", "XLA_PYTHON"))}
    variables |= {key: os.environ[key] for key in VARIABLES if key in os.environ}
    session.report(versions=versions, variables=variables, cores=os.cpu_count())
    machine = discover()
    if not machine.gpus:
        return
    session.report(
        gpus=list(machine.gpus),
        links=[list(row) for row in machine.links],
        faults=machine.faults(),
        planned_link=machine_cluster(machine).inside.bandwidth,
        driver=driver(),
    )


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
