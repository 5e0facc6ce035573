"""Measure what needs several GPUs of one host, in one go: `python scripts/bench_multi.py --output FOLDER`.

    environment   versions, driver, links between the GPUs, settings of NCCL
    links         all-to-all, all-gather, all-reduce and sends through JAX, against the planner's numbers
    meshes        loss and gradients of each mesh against one GPU, in float32 and bfloat16
    tests         the tests that compare meshes with one device, in float64, on the GPUs
    steps         adapters on slices of Kimi K3 and Kimi Linear: tokens/s a GPU, MFU, exchange hidden behind computing
    transports    the three exchanges of experts, alone and in a step
    scheduler     a step with the latency-hiding scheduler on and off, gradients of the first step compared
    offload       results of layers computed again, kept, and kept on the host: time, memory, losses

Each case is a process of its own. All start at once and compile side by side; they use the GPUs one after the other,
the most important first, and those that are timed wait until nothing compiles or --compile-seconds are over. A case
that hangs is ended when its own time is over, and costs no other. FOLDER gets results.json, written after each case,
logs/ and traces/ (the kernels of one step). The tables come last. `--tiny` takes virtual CPU devices and tiny shapes:
it proves the script, its numbers mean nothing.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import jax
from multi_benchmarks.cases import Case, cases_for
from multi_benchmarks.report import print_report
from multi_benchmarks.runner import Outcome, Runner
from multi_benchmarks.session import Session

from mmjax.errors import ConfigurationError
from mmjax.planner.machine import discover

ROOT = Path(__file__).parents[1]
# NVLink multicast stays off: a program that uses it can take the GPUs of a shared host out of service.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# Trying out products would use the GPUs while other cases are timed.
GPU_FLAGS = "--xla_gpu_autotune_level=0"
CPU_FLAGS = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/multi"), help="folder of the results")
    parser.add_argument("--devices", type=int, help="how many; default: all GPUs, or 8 with --tiny")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name or part contains one of these")
    parser.add_argument("--tiny", action="store_true", help="virtual CPU devices and tiny shapes")
    parser.add_argument("--seconds", type=float, default=470.0, help="after which everything is ended")
    parser.add_argument("--compile-seconds", type=float, default=200.0, help="after which timings begin at the latest")
    parser.add_argument("--after", type=Path, help="a file that must be there before anything is timed")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 1) // 4), help="at the same time")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_devices = options.devices or (8 if options.tiny else len(discover().gpus))
    if num_devices < 1:
        parser.error("no GPU is here: give --tiny for virtual CPU devices")
    cases = cases_for(num_devices)
    if options.case:
        run_case(next(case for case in cases if case.name == options.case), options)
        return 0
    chosen = with_needs(cases, options.only)
    if options.list:
        print(*(f"{case.part:12} {case.name}" for case in chosen), sep="\n")
        return 0
    outcomes = run_all(chosen, num_devices, options)
    print_report(outcomes)
    return 0 if all(outcome.status == "done" for outcome in outcomes) else 1


def with_needs(cases: list[Case], only: list[str]) -> list[Case]:
    """The cases that are asked for, by whole names or parts of them, and those that they are compared with."""
    names = {case.name for case in cases}
    asked = {
        case.name
        for case in cases
        if not only or case.name in only or any(word in f"{case.part} {case.name}" for word in {*only} - names)
    }
    asked |= {case.needs for case in cases if case.name in asked}
    return [case for case in cases if case.name in asked]


def run_all(cases: list[Case], num_devices: int, options: argparse.Namespace) -> list[Outcome]:
    for folder in ("logs", "traces"):
        (options.output / folder).mkdir(parents=True, exist_ok=True)
    flags = os.environ.get("XLA_FLAGS", "")
    if "autotune_level" not in flags:
        flags = f"{flags} {CPU_FLAGS if options.tiny else GPU_FLAGS}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags.strip(), "PYTHONPATH": path}
    if options.tiny:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    shared = tempfile.mkdtemp()
    command = [sys.executable, __file__, "--devices", str(num_devices), "--shared", shared]
    command += ["--output", str(options.output)]
    try:
        runner = Runner(
            cases=cases,
            command=[*command, "--tiny"] if options.tiny else command,
            environment=environment,
            logs=options.output / "logs",
            num_processes=options.processes,
            seconds=options.seconds,
            compile_seconds=options.compile_seconds,
            after=options.after,
            # Virtual devices share their cores with all that compiles.
            patience=10.0 if options.tiny else 1.0,
            keep=lambda outcomes: write(outcomes, options.output / "results.json", num_devices),
        )
        return runner.run()
    finally:
        shutil.rmtree(shared)


def write(outcomes: list[Outcome], path: Path, num_devices: int) -> None:
    results = {"command": sys.argv, "num_devices": num_devices, "cases": [outcome.as_dict() for outcome in outcomes]}
    path.write_text(json.dumps(results, indent=1) + "\n")


def run_case(case: Case, options: argparse.Namespace) -> None:
    """What a process of one case does."""
    module = importlib.import_module(f"multi_benchmarks.{case.module}")
    # XLA spends long on notes of where each operation was traced.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    session = Session(options.shared, options.devices, is_tiny=options.tiny, output=options.output)
    try:
        module.run(session, case.name, **case.arguments)
    except ConfigurationError as error:
        raise SystemExit(f"refused: {error.where}: {error.found}; {error.remedy}") from None
    sys.stdout.flush()
    # What JAX and NCCL take down at the end takes seconds.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
