"""The experts' MLP over rows sorted into blocks of one expert each."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_activation.api import Activation, gated_activation
from pallas_kernels.moe.grouping import group_rows, starts
from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize


def block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block: half an expert's mean number of rows, rounded down to a power of two, within 16 to 128."""
    half_mean = num_rows // (2 * num_experts)
    return min(128, max(16, 1 << max(0, half_mean.bit_length() - 1)))


def expert_mlp(
    rows: jax.Array,
    expert: jax.Array,
    gate: jax.Array | PackedWeight,
    up: jax.Array | PackedWeight,
    down: jax.Array | PackedWeight,
    *,
    activation: Activation,
    beta: float,
    linear_beta: float,
    adapters: Mapping[str, tuple[jax.Array, jax.Array]] | None = None,
) -> jax.Array:
    """See `api.expert_mlp`. Memory: N + E * block rows, and one copy of an expert's weights per block."""
    num_rows, num_experts = rows.shape[0], jax.tree.leaves(gate)[0].shape[0]
    wide = np.promote_types(rows.dtype, np.float32)
    block = block_rows(num_rows, num_experts)
    # Every expert's rows padded to whole blocks: at most block - 1 more for each.
    num_blocks = (num_rows + num_experts * (block - 1)) // block
    num_slots = num_blocks * block

    grouping = group_rows(expert, num_experts)
    padded_counts = -(-grouping.counts // block) * block
    first_slot = starts(padded_counts)
    is_filled = expert >= 0
    slot = jnp.where(is_filled, first_slot[expert] + grouping.rank, num_slots)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    # An empty slot reads beyond the rows, each at its own place, so that indices are unique and give zero.
    row = (num_rows + slots).at[slot].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    expert_of_block = jnp.sum((first_slot + padded_counts)[None, :] <= slots[::block, None], axis=1, dtype=jnp.int32)
    expert_of_block = jnp.minimum(expert_of_block, num_experts - 1)

    def weight_of_block(weight: jax.Array | PackedWeight) -> jax.Array:
        if isinstance(weight, dict):
            packed: PackedWeight = jax.tree.map(lambda array: array[expert_of_block], weight)
            return jnp.swapaxes(dequantize(packed, rows.dtype), 1, 2)
        # Copied in at least float32, so that the blocks' gradients are summed in it.
        return weight.astype(wide)[expert_of_block].astype(rows.dtype)

    blocks = rows.at[row].get(mode="fill", fill_value=0, unique_indices=True).reshape(num_blocks, block, -1)

    def product(name: str, inputs: jax.Array, weight: jax.Array | PackedWeight) -> jax.Array:
        """[n, b, out] in at least float32."""
        result = jnp.einsum("nbi,nio->nbo", inputs, weight_of_block(weight), preferred_element_type=wide)
        for first, second in [adapters[name]] if adapters and name in adapters else []:
            narrow = jnp.einsum("nbi,niz->nbz", inputs, weight_of_block(first), preferred_element_type=wide)
            narrow = narrow.astype(rows.dtype)
            result += jnp.einsum("nbz,nzo->nbo", narrow, weight_of_block(second), preferred_element_type=wide)
        return result

    hidden = gated_activation(
        product("gate", blocks, gate),
        product("up", blocks, up),
        kind=activation,
        beta=beta,
        linear_beta=linear_beta,
    ).astype(rows.dtype)
    outputs = product("down", hidden, down).astype(rows.dtype).reshape(num_slots, -1)
    # Rows of no expert read beyond the slots: zero.
    outside = num_slots + jnp.arange(num_rows, dtype=jnp.int32)
    return outputs.at[jnp.where(is_filled, slot, outside)].get(mode="fill", fill_value=0, unique_indices=True)
