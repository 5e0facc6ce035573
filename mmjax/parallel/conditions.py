"""Conditions inside a program: what runs under one adds to its results in place, and what is ordered stays so."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from mmjax.parallel.fsdp import varying_like

Tree = TypeVar("Tree")

# `lax.optimization_barrier` would have all arrays vary over the mesh axes that any of them varies over.
_barrier = Primitive("barrier")
_barrier.multiple_results = True
_barrier.def_impl(lambda *arrays: arrays)
_barrier.def_abstract_eval(lambda *arrays: arrays)
mlir.register_lowering(_barrier, lambda _, *arrays: stablehlo.OptimizationBarrierOp(arrays).results)


def together(tree: Tree) -> Tree:
    """`tree` as it is, once all of its arrays are there. Not differentiable."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _barrier.bind(*leaves))


@jax.custom_vjp
def in_order(tree: Tree) -> Tree:
    """`together`, whose gradients do not wait for each other."""
    return together(tree)


in_order.defvjp(lambda tree: (together(tree), None), lambda _, gradients: (gradients,))


def run_once(
    flag: jax.Array,
    operate: Callable[[Any, Any], Any],
    state: Tree,
    operands: Any = (),
    share: tuple[int, int] = (1, 1),
) -> Tree:
    """`operate(state, operands)` where `flag` (bool scalar) holds, else `state`; not differentiable.

    A loop that runs once or not at all: it changes the state in place, where a conditional's results are buffers of
    their own, copied back. `share`: it runs so many times of so many that this is reached; whoever reads the compiled
    program counts by that (`compiled_program.Instruction.runs`).
    """

    def once(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        is_left, old = carry
        # Else XLA lifts what is made of operands alone out of the loop, and so out of the condition.
        is_left, held = together((is_left, operands))
        return jnp.zeros_like(is_left), jax.tree.map(varying_like, operate(old, held), old)

    with jax.named_scope(f"runs_{share[0]}_of_{share[1]}"):
        return lax.while_loop(lambda carry: carry[0], once, (flag, state))[1]


def add_rounds(
    total: jax.Array,
    run_round: Callable[[jax.Array, Any, Any], jax.Array],
    num_rounds: jax.Array,
    trained: Any,
    others: Any = (),
) -> jax.Array:
    """`total`, and what `run_round(number, trained, others)` gives for each number from 1 up to `num_rounds`.

    `num_rounds` is an int32 scalar, usually 1: then nothing of a round runs, forward or backward. Gradients go to
    `total` and `trained`; of a round nothing is kept for them. `run_round` closes over no arrays.
    """

    def loop(add: Callable[[jax.Array, Any], Any], state: Any, num_rounds: jax.Array, operands: Any) -> Any:
        def turn(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            number, old = carry
            # Else XLA lifts what is made of operands alone out of the loop.
            number, held = together((number, operands))
            return number + 1, jax.tree.map(lambda leaf, more: leaf + varying_like(more, leaf), old, add(number, held))

        with jax.named_scope("runs_0_of_1"):
            first = varying_like(jnp.ones((), jnp.int32), num_rounds)
            return lax.while_loop(lambda carry: carry[0] < num_rounds, turn, (first, state))[1]

    @jax.custom_vjp
    def run(total: jax.Array, num_rounds: jax.Array, trained: Any, others: Any) -> jax.Array:
        return loop(lambda number, held: run_round(number, *held), total, num_rounds, (trained, others))

    def forward(total: jax.Array, num_rounds: jax.Array, trained: Any, others: Any) -> tuple[jax.Array, tuple]:
        return run(total, num_rounds, trained, others), (num_rounds, trained, others)

    def backward(saved: tuple, gradient: jax.Array) -> tuple:
        num_rounds, trained, others = saved

        def differentiate(number: jax.Array, held: tuple) -> Any:
            trained, others, gradient = held
            return jax.vjp(lambda trained: run_round(number, trained, others), trained)[1](gradient)[0]

        nothing = jax.tree.map(lambda leaf: varying_like(jnp.zeros_like(leaf), leaf), trained)
        of_trained = loop(differentiate, nothing, num_rounds, (trained, others, gradient))
        return gradient, None, of_trained, None

    run.defvjp(forward, backward)
    return run(total, num_rounds, trained, others)
