"""Names of mesh axes, names of array axes, and the shape letters of the project. No JAX.

Shape letters: CAPITAL is the size over the whole mesh, small the size on one device (inside `shard_map`).

    B rows (packed sequences)      S positions of a row         T tokens (= rows x positions)
    D model width                  F hidden width               R latent width
    H query heads                  G key/value heads            K key head width    V value head width
    E experts                      A experts taken per token    C chunk             W vocabulary
    Z residual sources             P image patches of a row     J indexer heads     N repeats of a layer pattern
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

# Slowest link first. All six are always present; an unused one has size 1.
PIPE = "pipe"
REPLICA = "replica"
FSDP = "fsdp"
CONTEXT = "context"
EXPERT = "expert"
TENSOR = "tensor"
MESH_AXES = (PIPE, REPLICA, FSDP, CONTEXT, EXPERT, TENSOR)

# Mesh axes over which tokens differ: rows over the first three, positions over the last.
ROW_AXES = (REPLICA, FSDP, EXPERT)
DATA_AXES = (*ROW_AXES, CONTEXT)
# Mesh axes over which dense weights rest split, to be gathered at use.
WEIGHT_AXES = (FSDP, EXPERT)

# The array axis of routed experts and the mesh axes it is split over, by the setting `moe.expert_axes`.
ARRAY_AXIS_OF_EXPERTS = {"expert": "experts", "context_and_expert": "spread_experts"}
MESH_AXES_OF_EXPERTS = {"expert": (EXPERT,), "context_and_expert": (CONTEXT, EXPERT)}


def holds_experts(array_axes: Iterable[str | None]) -> bool:
    """Whether an array with these axes is one of routed experts."""
    return not set(ARRAY_AXIS_OF_EXPERTS.values()).isdisjoint(array_axes)


# Array axis -> those of the mesh axes it is split over that a layer gathers before it uses the weight.
GATHERED_AT_USE: dict[str, tuple[str, ...]] = {
    "model_weight": WEIGHT_AXES,
    "rank_weight": WEIGHT_AXES,
    "expert_hidden": (FSDP,),
}


def resting_axes(
    array_axis: str, split_over: Sequence[str], size: int, mesh_sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Those of the mesh axes `split_over` that an array axis of `size` rests split over.

    What is gathered at use is split as far as `size` allows: over the subset with the largest product that divides it,
    of equal ones the one with the faster links. Other mesh axes are always taken, whether they divide or not.
    """
    gathered = GATHERED_AT_USE.get(array_axis, ())
    left_out = [axes for number in range(len(gathered) + 1) for axes in combinations(gathered, number)]
    choices = [tuple(axis for axis in split_over if axis not in axes) for axes in left_out]

    def num_parts(choice: Sequence[str]) -> int:
        return math.prod(mesh_sizes[axis] for axis in choice)

    return max((choice for choice in choices if size % num_parts(choice) == 0), key=num_parts, default=choices[-1])
