"""Stable order of rows by group: counting sort for experts and for the devices that hold them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Grouping(NamedTuple):
    """A stable order of rows by group. Rows outside all groups come last."""

    order: jax.Array
    """[N] int32: the row that stands n-th."""
    counts: jax.Array
    """[G] int32: rows of each group."""
    rank: jax.Array
    """[N] int32: a row's place among the rows of its own group."""


def group_rows(group: jax.Array, num_groups: int) -> Grouping:
    """Sort rows by `group` [N] int32, stably; -1 is outside all groups."""
    num_rows = group.shape[0]
    group = jnp.where(group < 0, num_groups, group)
    if (num_groups + 1) * num_rows < 2**31:
        # Group and row in one key: several times faster than a stable sort of pairs.
        order = jnp.sort(group * num_rows + jnp.arange(num_rows, dtype=jnp.int32)) % num_rows
    else:
        order = jnp.argsort(group, stable=True).astype(jnp.int32)
    counts = jnp.zeros((num_groups + 1,), jnp.int32).at[group].add(1)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
    return Grouping(order, counts[:num_groups], place - starts(counts)[group])


def starts(counts: jax.Array) -> jax.Array:
    """Where each group begins when groups of these sizes lie one after the other."""
    return jnp.cumsum(counts) - counts
