"""Attention residuals at the widths of Kimi K3, half of it and Kimi-Linear, by the kernels and by XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_residual import xla
from pallas_kernels.attention_residual.api import attention_residual

SHAPES = {
    f"N{tokens} D{width} L{sources}": (tokens, width, sources)
    for tokens, width, sources in ((8192, 7168, 9), (8192, 7168, 4), (16384, 4096, 8), (16384, 2304, 5))
}
EPSILON = 1e-5


def draw(tokens, width, num_sources, seed=0):
    """(sources, norm's scale, query), gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), num_sources + 3)
    *sources, gradient = (jax.random.normal(key, (tokens, width), jnp.bfloat16) for key in keys[: num_sources + 1])
    scale, query = (jax.random.normal(key, (width,), jnp.float32) for key in keys[num_sources + 1 :])
    return (tuple(sources), scale, query * width**-0.5), gradient


def forward(sources, scale, query, *, implementation):
    return attention_residual(sources, scale, query, epsilon=EPSILON, implementation=implementation)


def step(arrays, gradient, *, implementation):
    result, transpose = jax.vjp(partial(forward, implementation=implementation), *arrays)
    return result, transpose(gradient)


def check(width, num_sources):
    arrays, gradient = draw(333, width, num_sources, seed=1)
    got = jax.jit(partial(step, implementation="pallas"))(arrays, gradient)
    with jax.enable_x64(True):
        wide, wide_gradient = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (arrays, gradient))
        mix = lambda *arrays: xla.mix(*arrays, None, EPSILON)  # noqa: E731
        result, transpose = jax.vjp(mix, *wide)
        want = result, transpose(wide_gradient)
    errors = [
        np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other)) / np.linalg.norm(np.asarray(other))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    print(f"check D{width} L{num_sources}: errors up to {max(errors):.1e}", flush=True)
    assert max(errors) < 8e-3


def run(only, median_seconds, report):
    if not only:
        check(7168, 9)
        check(4096, 8)
    for name, (tokens, width, num_sources) in SHAPES.items():
        row = 2 * tokens * width
        arrays, gradient = draw(tokens, width, num_sources)
        for implementation in ("pallas", "xla"):
            case = f"{name}, {implementation}"
            if only not in case:
                continue
            once = jax.jit(partial(forward, implementation=implementation)).lower(*arrays).compile()
            both = jax.jit(partial(step, implementation=implementation)).lower(arrays, gradient).compile()
            seconds = median_seconds(once, *arrays, calls=20)
            report(f"forward {case}", seconds, 0, (num_sources + 1) * row, once)
            seconds = median_seconds(both, arrays, gradient, calls=20)
            report(f"step {case}", seconds, 0, (3 * num_sources + 2) * row, both)
