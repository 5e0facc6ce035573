"""Layers of one kind as one module whose variables have a leading axis, run one after the other by a scan."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def init_stack(make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, num_repeats: int) -> nnx.Module:
    """`num_repeats` modules of `make`, each with its own random numbers, as one whose Variables are stacked.

    `array_axes` name the axes of one layer; the leading axis is implied. `make` may build any tree of modules.
    """

    def initial_state(key: jax.Array) -> nnx.State:
        return nnx.state(make(nnx.Rngs(params=key)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    return nnx.merge(graph, jax.vmap(initial_state)(jax.random.split(rngs.params(), num_repeats)))


def scan_stack(
    stack: nnx.Module,
    carry: Any,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    xs: Any = None,
    *,
    remat: bool = True,
    policy: Callable[..., bool] | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body(layer, carry, x) -> (carry, y)` over the layers of a stack and the leading axis of `xs`.

    Under `remat` the backward pass keeps each layer's carry, and what `policy` names, and computes the rest again.
    Inside `shard_map` the carry must enter varying over the mesh axes that it leaves with.
    """
    graph, state = nnx.split(stack)

    def step(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        layer_state, x = layer
        return body(nnx.merge(graph, layer_state), carry, x)

    if remat:
        # A scan already keeps the forward and backward loops apart: no barrier against merging them is needed.
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    return jax.lax.scan(step, carry, (state, xs))
