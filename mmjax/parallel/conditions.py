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
