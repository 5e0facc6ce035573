"""Definition of the experts' MLP: every expert over all rows, keeping its own."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_activation.api import Activation, gated_activation
from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize


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
    """See `api.expert_mlp`."""
    wide = np.promote_types(rows.dtype, np.float32)
    gate, up, down = (
        jnp.swapaxes(dequantize(weight, rows.dtype), 1, 2) if isinstance(weight, dict) else weight
        for weight in (gate, up, down)
    )

    def product(name: str, inputs: jax.Array, weight: jax.Array, e: int) -> jax.Array:
        result = jnp.matmul(inputs, weight[e], preferred_element_type=wide)
        for first, second in [adapters[name]] if adapters and name in adapters else []:
            narrow = jnp.matmul(inputs, first[e], preferred_element_type=wide).astype(rows.dtype)
            result += jnp.matmul(narrow, second[e], preferred_element_type=wide)
        return result

    outputs = jnp.zeros(rows.shape, wide)
    for e in range(gate.shape[0]):
        is_own = (expert == e)[:, None]
        own = jnp.where(is_own, rows, 0)
        hidden = gated_activation(
            product("gate", own, gate, e),
            product("up", own, up, e),
            kind=activation,
            beta=beta,
            linear_beta=linear_beta,
        ).astype(rows.dtype)
        outputs = jnp.where(is_own, product("down", hidden, down, e), outputs)
    return outputs.astype(rows.dtype)
