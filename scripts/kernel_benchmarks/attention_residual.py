"""Attention residuals at the widths of Kimi K3, half of it and Kimi-Linear, alone and with the norm that follows."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_residual.api import attention_residual

SHAPES = {
    f"N{tokens} D{width} L{sources}": (tokens, width, sources)
    for tokens, width, sources in ((8192, 7168, 9), (8192, 7168, 4), (16384, 4096, 8), (16384, 2304, 5))
}
EPSILON = 1e-5


def draw(tokens, width, num_sources, seed=0):
    """(sources, norm's scale, query, scale of the norm that follows), gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), num_sources + 4)
    *sources, gradient = (jax.random.normal(key, (tokens, width), jnp.bfloat16) for key in keys[: num_sources + 1])
    scale, query, output_scale = (jax.random.normal(key, (width,), jnp.float32) for key in keys[num_sources + 1 :])
    return (tuple(sources), scale, query * width**-0.5, output_scale), gradient


def forward(sources, scale, query, output_scale, *, is_normed, implementation):
    options = {"output_scale": output_scale if is_normed else None, "implementation": implementation}
    return attention_residual(sources, scale, query, epsilon=EPSILON, **options)


def step(arrays, gradient, **options):
    result, transpose = jax.vjp(partial(forward, **options), *arrays)
    return result, transpose(gradient)


def check(width, num_sources, is_normed):
    arrays, gradient = draw(333, width, num_sources, seed=1)
    got = jax.jit(partial(step, is_normed=is_normed, implementation="pallas"))(arrays, gradient)
    with jax.enable_x64(True):
        wide, wide_gradient = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (arrays, gradient))
        want = step(wide, wide_gradient, is_normed=is_normed, implementation="xla")
    errors = [
        np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other)) / np.linalg.norm(np.asarray(other))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        if np.any(np.asarray(other))
    ]
    print(f"check D{width} L{num_sources}{', normed' * is_normed}: errors up to {max(errors):.1e}", flush=True)
    assert max(errors) < 8e-3


def run(only, median_seconds, report):
    if not only:
        for is_normed in (False, True):
            check(7168, 9, is_normed)
            check(4096, 8, is_normed)
    for name, (tokens, width, num_sources) in SHAPES.items():
        row = 2 * tokens * width
        arrays, gradient = draw(tokens, width, num_sources)
        for is_normed, implementation in itertools.product((False, True), ("pallas", "xla")):
            case = f"{name}{', normed' * is_normed}, {implementation}"
            if only not in case:
                continue
            options = {"is_normed": is_normed, "implementation": implementation}
            once = jax.jit(partial(forward, **options)).lower(*arrays).compile()
            both = jax.jit(partial(step, **options)).lower(arrays, gradient).compile()
            seconds = median_seconds(once, *arrays)
            report(f"forward {case}", seconds, 0, (num_sources + 1) * row, once)
            # With a norm the mix is kept too.
            seconds = median_seconds(both, arrays, gradient)
            report(f"step {case}", seconds, 0, (3 * num_sources + 2 + 2 * is_normed) * row, both)
