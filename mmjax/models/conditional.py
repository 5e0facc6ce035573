"""A part of a model under a condition, with gradients; and backward passes apart from the arrays that they take."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.parallel.conditions import run_once
from mmjax.parallel.fsdp import make_varying, varying_like


@jax.tree_util.register_static
@dataclass(frozen=True)
class Pullback:
    """How something goes backward, without the arrays that it takes."""

    structure: Any
    sources: tuple[int | None, ...]
    """Of each of its arrays, which one of those known in the backward pass it is; None: it is kept."""

    def call(self, known: Any, kept: list[jax.Array], gradients: Any) -> tuple:
        leaves, following = jax.tree.leaves(known), iter(kept)
        arrays = [next(following) if source is None else leaves[source] for source in self.sources]
        return jax.tree.unflatten(self.structure, arrays)(gradients)


def without_known(pullback: Any, known: Any) -> tuple[Pullback, list[jax.Array]]:
    """`pullback` of `jax.vjp`, and those of its arrays that are none of `known`."""
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(known))}
    arrays, structure = jax.tree.flatten(pullback)
    sources = tuple(places.get(id(array)) for array in arrays)
    return Pullback(structure, sources), [array for array in arrays if id(array) not in places]


def zeros_of(described: Any, leading: tuple[int, ...] = (), mesh_axes: Iterable[str] = ()) -> Any:
    """Zeros like what `jax.eval_shape` gives, varying over the mesh as that does, and over `mesh_axes`."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        varying = leaf.manual_axis_type.varying  # pyright: ignore[reportAttributeAccessIssue]
        return make_varying(jnp.zeros((*leading, *leaf.shape), leaf.dtype), tuple(sorted({*varying, *mesh_axes})))

    return jax.tree.map(zeros, described)


def run_where(
    flag: jax.Array,
    operate: Callable[[Any, Any], Any],
    trained: Any,
    others: Any,
    otherwise: Any,
    share: tuple[int, int] = (1, 1),
) -> Any:
    """`operate(trained, others)` where `flag` (bool scalar) holds, else `otherwise`. Gradients go to it and `trained`.

    Nothing of `operate` runs where `flag` does not hold, forward or backward. It closes over no arrays.
    """

    @jax.custom_vjp
    def run(flag: jax.Array, trained: Any, others: Any, otherwise: Any) -> Any:
        return run_once(flag, lambda _, held: operate(*held), otherwise, (trained, others), share)

    def forward(flag: jax.Array, trained: Any, others: Any, otherwise: Any) -> tuple[Any, tuple]:
        pullbacks = []

        # Jitted so that it is traced once.
        @jax.jit
        def run_and_keep(trained: Any, others: Any) -> tuple[Any, list[jax.Array]]:
            output, pullback = jax.vjp(lambda trained: operate(trained, others), trained)
            pullback, kept = without_known(pullback, (trained, others))
            pullbacks.append(pullback)
            return output, kept

        _, kept = zeros_of(jax.eval_shape(run_and_keep, trained, others))
        output, kept = run_once(flag, lambda _, held: run_and_keep(*held), (otherwise, kept), (trained, others), share)
        return output, (flag, trained, others, kept, pullbacks[0])

    def backward(saved: tuple, cotangent: Any) -> tuple:
        flag, trained, others, kept, pullback = saved

        def differentiate(_: Any, held: tuple) -> Any:
            known, kept, cotangent = held
            return pullback.call(known, kept, cotangent)[0]

        nothing = jax.tree.map(lambda leaf: varying_like(jnp.zeros_like(leaf), leaf), trained)
        gradients = run_once(flag, differentiate, nothing, ((trained, others), kept, cotangent), share)
        of_otherwise = jax.tree.map(lambda leaf: jnp.where(flag, jnp.zeros_like(leaf), leaf), cotangent)
        return None, gradients, None, of_otherwise

    run.defvjp(forward, backward)
    return run(flag, trained, others, otherwise)


def real_leaves(tree: Any) -> list[jax.Array]:
    """Those leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
