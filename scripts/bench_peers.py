"""Time other packages' delta rule on the GPU that is here: `python scripts/bench_peers.py [--only TEXT]`.

For shapes that `bench_kernels.py linear_attention` times, with tokens drawn alike: fla-core and the cuDNN frontend,
where they and PyTorch for CUDA are installed. Prints milliseconds of a forward pass and of a step with all gradients,
medians by CUDA's events, and what a step needs beside its arguments.
"""

import argparse
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from delta_rule_cases import WIDTH, WITH_PEERS
from torch.nn import functional


def draw(tokens: int, heads: int, key_heads: int, by_channel: bool, decay: str, document: int):
    """Query, key, value, log decay, beta; gradient of the output; where documents begin and the last one ends."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(1, tokens, *shape, device="cuda", generator=generator)

    query, key = (functional.normalize(normal(key_heads, WIDTH), dim=-1).bfloat16() for _ in range(2))
    raw = normal(heads, *([WIDTH] if by_channel else []))
    log_decay = -5 * torch.sigmoid(raw) if decay == "strong" else -torch.exp(-4.6 + 1.1 * raw).clamp(max=1)
    beta = torch.sigmoid(normal(heads))
    value, gradient = (normal(heads, WIDTH).bfloat16() for _ in range(2))
    bounds = torch.arange(0, tokens + 1, document, dtype=torch.int32, device="cuda")
    return (query, key, value, log_decay, beta), gradient, bounds


def cudnn_rules() -> dict[bool, Callable]:
    """By whether the decay is one a channel."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    # It compiles its kernels with headers of a whole toolkit.
    os.environ.setdefault("CUDA_HOME", str(Path(compiler).resolve().parent.parent))
    from cudnn.linear_attention import kimi_delta_attention

    def by_channel(query, key, value, log_decay, beta, bounds):
        rows = (array[0] for array in (query, key, value, log_decay, beta))
        return kimi_delta_attention(*rows, bounds, plan_name="kda_hopper_cuda")[0][None]

    return {True: by_channel}


def fla_rules() -> dict[bool, Callable]:
    # Its own kernels, not those of another package that it would take.
    os.environ["FLA_FLASH_QLA"] = "0"
    import fla.ops.common.chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    # It refuses the backward pass of one decay a head on Hopper before Triton 3.7.1, whose results are wrong there.
    fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True

    def documents(bounds):
        return {"cu_seqlens": bounds.long()} if len(bounds) > 2 else {}

    def by_channel(*arrays):
        *arrays, bounds = arrays
        return chunk_kda(*arrays, safe_gate=True, lower_bound=-5.0, **documents(bounds))[0]

    def by_head(*arrays):
        *arrays, bounds = arrays
        return chunk_gated_delta_rule(*arrays, **documents(bounds))[0]

    return {True: by_channel, False: by_head}


def median_milliseconds(function: Callable[[], object], least: int = 5, most: int = 25) -> float:
    """Of one call, by events; as many as take about half a second."""

    def timed(count):
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for before, after in pairs:
            before.record()
            function()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in pairs)

    timed(3)  # tuned and compiled by the first one
    return timed(min(most, max(least, int(500 / timed(3)))))


def measure(rule: Callable, case) -> str:
    arrays, gradient, bounds = draw(*case)
    leaves = [array.detach().requires_grad_() for array in arrays]

    def forward():
        with torch.no_grad():
            rule(*leaves, bounds)

    def step():
        torch.autograd.grad(rule(*leaves, bounds), leaves, gradient)

    times = [median_milliseconds(function) for function in (forward, step)]
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    mebibytes = (torch.cuda.max_memory_allocated() - held) / 2**20
    return f"forward {times[0]:7.3f} ms  step {times[1]:7.3f} ms  {mebibytes:6.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the peers and cases whose names contain this")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for peer, rules_of in (("cuDNN", cudnn_rules), ("fla", fla_rules)):
        try:
            rules = rules_of()
        except ImportError as error:
            print(f"{peer}: not installed ({error})")
            continue
        for name, case in WITH_PEERS.items():
            rule = rules.get(case[3])
            if rule is None or options.only not in f"{peer} {name}":
                continue
            try:
                result = measure(rule, case)
            except (AssertionError, RuntimeError, ValueError) as error:  # of a package's own making, one shape alone
                result = f"failed: {error}"
            print(f"{peer:5s} {name:42s} {result}", flush=True)


if __name__ == "__main__":
    main()
