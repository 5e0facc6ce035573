"""Layers of one kind as one module whose variables have a leading axis, run one after the other by a scan."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from mmjax.parallel.conditions import together

Layer = TypeVar("Layer", bound=nnx.Module)
Tree = TypeVar("Tree")


@jax.custom_vjp
def gradients_together(tree: Tree) -> Tree:
    """`tree` as it is. In the backward pass no leaf's gradient goes on before those of all the others are there.

    Left alone, XLA computes gradients of weights as late as it likes, and what they are made of stays in memory.
    """
    return tree


gradients_together.defvjp(lambda tree: (tree, None), lambda _, gradients: (together(gradients),))


def stacked(layer: Layer, num_repeats: int, stack_axis: str | None = None, num_used: int | None = None) -> Layer:
    """The described module `layer` as a stack of `num_repeats` of them: each variable gains a leading axis.

    `array_axes` go on naming the axes of one layer; `stack_axis` names the leading one. `num_used`: the
    layers behind so many are held and never run, so the optimizer leaves them as they are.
    """

    is_partly_used = num_used is not None and num_used < num_repeats

    def add_axis(variable: nnx.Variable) -> nnx.Variable:
        one = variable.get_value()
        described = jax.ShapeDtypeStruct((num_repeats, *one.shape), one.dtype)
        more = {"num_used": num_used} if is_partly_used else {}
        return variable.replace(described, stack_axis=stack_axis, **more)

    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(add_axis, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


class InStack(NamedTuple):
    """A layer, told by the stack that it lies in: each array [repeats, ...] and the layer's number."""

    stack: Any
    number: jax.Array

    def take(self) -> Any:
        """Its arrays."""
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, self.number, keepdims=False), self.stack)


def part_of_stack(stack: nnx.Module, start: int, stop: int) -> nnx.Module:
    """Layers `start` to `stop` of a stack, as a stack."""
    graph, state = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda array: array[start:stop], state))


def every_nth(stack: Layer, start: int, step: int, number: int) -> Layer:
    """The layers `start`, `start + step`, ... of a stack, `number` of them, as a stack."""
    graph, state = nnx.split(stack)
    stop = start + (number - 1) * step + 1
    return nnx.merge(graph, jax.tree.map(lambda array: array[start:stop:step], state))


def scan_stack(
    stack: nnx.Module,
    carry: Any,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    xs: Any = None,
    *,
    remat: bool = True,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body(layer, carry, x) -> (carry, y)` over the layers of a stack and the leading axis of `xs`.

    Under `remat` the backward pass keeps each layer's carry and computes the rest again.
    Inside `shard_map` the carry must enter varying over the mesh axes that it leaves with.
    """
    graph, state = nnx.split(stack)

    def step(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        layer_state, x = layer
        return body(nnx.merge(graph, layer_state), carry, x)

    if remat:
        # A scan already keeps the forward and backward loops apart: no barrier against merging them is needed.
        step = jax.checkpoint(step, prevent_cse=False)
    return jax.lax.scan(step, carry, (state, xs))
