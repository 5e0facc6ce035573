"""Gradients of keys and decays of the delta rule by Mosaic GPU, Pallas for Triton and Triton: checked, then timed.

`python scripts/bench_triton_gradients.py`, on a GPU with jax-triton 0.3.1 and Triton 3.6.0 beside JAX. Milliseconds are
those of the kernels alone, by the profiler, at 32,768 tokens and 32 heads.
"""

import collections
import functools
import glob
import gzip
import itertools
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path += [str(Path(__file__).parent / "kernel_benchmarks"), str(Path(__file__).parents[1])]
import linear_attention as bench

from pallas_kernels.linear_attention import hopper, pallas_triton, triton
from pallas_kernels.linear_attention.documents import document_starts


def arguments(tokens, heads, document):
    """Of `hopper.gradients`, in the pass that a step makes."""
    query, key, value, log_decay, beta, segments, gradient, state = bench.draw(
        tokens, heads, heads, True, "strong", document
    )
    first, last = pallas_triton._document_bounds(document_starts(segments))
    call = pallas_triton._Calls(pallas_triton.Settings(), query, value, log_decay)
    products, inverse, sums, depths, parts = call.prepare(query, key, value, log_decay, beta, first, last)
    both = parts, products, inverse, value, beta, gradient, state, state
    (state_gradients, solved, _), (states, written) = call.scan_both_ways(*both)
    return query, key, sums, beta, first, last, states, state_gradients, written, solved, gradient, depths.is_deep


def in_pallas(query, key, sums, beta, first, last, *of_chunks):
    *of_chunks, _ = of_chunks
    call = pallas_triton._Calls(pallas_triton.Settings(), query, of_chunks[2], sums)
    call.is_on_hopper, call.looked_at = False, None
    depths = pallas_triton._Depths(jnp.zeros_like(beta))
    return call.gradients(query, key, sums, depths, beta, first, last, *of_chunks)


def kernel_milliseconds(function, arrays, calls=5):
    jax.block_until_ready(function(*arrays))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready([function(*arrays) for _ in range(calls)])
        totals = collections.Counter()
        for path in glob.glob(f"{directory}/**/*.trace.json.gz", recursive=True):
            events = json.load(gzip.open(path))["traceEvents"]
            devices = {
                event["pid"]
                for event in events
                if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
            }
            for event in events:
                if event.get("ph") == "X" and event["pid"] in devices and "hlo_op" in event.get("args", {}):
                    totals[event["name"]] += event["dur"] / 1000 / calls
    return {name: round(total, 3) for name, total in totals.most_common(4)}


def main():
    forms = {"Mosaic GPU": hopper.gradients, "Pallas for Triton": in_pallas}
    for columns, warps, (block, stages) in itertools.product((16, 32, 64), (4, 8), ((32, 3), (64, 2))):

        def in_triton(*arrays, chosen=(columns, warps, block, stages)):
            triton.COLUMNS, triton.WARPS, triton.BLOCK, triton.STAGES = chosen
            return triton.gradients(*arrays)

        forms[f"Triton, {columns} columns, {warps} warps, {stages} stages of {block}"] = in_triton
    small = jax.jit(functools.partial(arguments, 1024, 2, 60))()
    large = jax.jit(functools.partial(arguments, 32768, 32, 32768))()
    expected = None
    for name, form in forms.items():
        try:
            found = [np.asarray(array, np.float64) for array in jax.jit(form)(*small)]
            expected = expected or found
            apart = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]
            print(f"{name:50s} from the first: " + " ".join(f"{number:.1e}" for number in apart), flush=True)
            print(f"{name:50s} {kernel_milliseconds(jax.jit(form), large)}", flush=True)
        except Exception as error:
            print(f"{name:50s} {type(error).__name__} {str(error)[-300:]}", flush=True)


if __name__ == "__main__":
    main()
