"""Definition of the experts' MLP: every expert over all rows, keeping its own."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_activation.api import Activation, gated_activation


def expert_mlp(
    rows: jax.Array,
    expert: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: Activation,
    beta: float,
    linear_beta: float,
) -> jax.Array:
    """See `api.expert_mlp`."""
    wide = np.promote_types(rows.dtype, np.float32)
    outputs = jnp.zeros(rows.shape, wide)
    for e in range(gate.shape[0]):
        is_own = (expert == e)[:, None]
        own = jnp.where(is_own, rows, 0)
        hidden = gated_activation(
            jnp.matmul(own, gate[e], preferred_element_type=wide),
            jnp.matmul(own, up[e], preferred_element_type=wide),
            kind=activation,
            beta=beta,
            linear_beta=linear_beta,
        ).astype(rows.dtype)
        outputs = jnp.where(is_own, jnp.matmul(hidden, down[e], preferred_element_type=wide), outputs)
    return outputs.astype(rows.dtype)
