"""Check and time kernels on the GPU that is here: `python scripts/bench_kernels.py OPERATION [--only TEXT]`.

Operations are the files of `kernel_benchmarks`. Each checks its kernels first, then prints one line a case:
milliseconds, TFLOP/s of the products that have to be done, the share of the hardware's limit, which is the larger of
those products at 790 TFLOP/s and the bytes that have to move at 4.3 TB/s (both measured on an H200), and memory beside
the arguments.
"""

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax

PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12
ROUND = 0.05
DIRECTORY = Path(__file__).parent / "kernel_benchmarks"


def median_seconds(function: Callable, *arguments, repeats: int = 5, least: int = 5) -> float:
    """Seconds of one call of the compiled function: the median over rounds of `least` calls that wait at the end.

    Of as many more as take about 50 ms, so that it hardly counts what it takes to start the first and hear of the last.
    """

    def round_of(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    round_of(1)  # one after the other: the largest cases leave no memory for two results
    calls = max(least, math.ceil(ROUND / round_of(least)))
    return statistics.median(round_of(calls) for _ in range(repeats))


def report(case: str, seconds: float, flops: float, num_bytes: float, compiled: jax.stages.Compiled) -> None:
    """Print one line: time, rate, share of the limit, and memory beside the arguments."""
    memory = compiled.memory_analysis()
    extra = (memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 2**20
    limit = max(flops / PEAK_FLOPS, num_bytes / PEAK_BYTES)
    print(
        f"{case:44s} {seconds * 1e3:8.3f} ms {flops / seconds / 1e12:6.0f} TFLOP/s "
        f"{limit / seconds:5.0%} of {limit * 1e3:6.3f} ms  {extra:7.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=sorted(path.stem for path in DIRECTORY.glob("*.py")))
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{options.operation} on {device.device_kind}, jax {jax.__version__}")
    spec = importlib.util.spec_from_file_location(options.operation, DIRECTORY / f"{options.operation}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run(options.only, median_seconds, report)


if __name__ == "__main__":
    main()
