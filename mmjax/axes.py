"""Names of mesh axes, names of array axes, and the shape letters of the project. No JAX.

Shape letters: CAPITAL is the size over the whole mesh, small the size on one device (inside `shard_map`).

    B rows (packed sequences)      S positions of a row         T tokens (= rows x positions)
    D model width                  F hidden width               R latent width
    H query heads                  G key/value heads            K key head width    V value head width
    E experts                      A experts taken per token    C chunk             W vocabulary
    Z residual sources             P image patches of a row     J indexer heads     N repeats of a layer pattern
"""

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
