"""Gated activations of MLPs: SiTU-GLU and SwiGLU, which may be clipped."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Activation = Literal["situ", "silu", "clipped_silu"]


def gated_activation(
    gate: Float[Array, "*T F"],
    up: Float[Array, "*T F"],
    *,
    kind: Activation,
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Float[Array, "*T F"]:
    """Gate one half of an MLP's hidden values by the other.

        situ: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)
        silu: gate sigmoid(gate) * up
        clipped_silu: silu of min(gate, linear_beta) and of up within -linear_beta and linear_beta

    Computed in at least float32, returned in the dtype of `gate`. |situ| <= beta * linear_beta.

    Source: SiTU-GLU, Kimi K3 technical report, arXiv:2607.24653; SwiGLU, arXiv:2002.05202; clipped: GLM-5.
    """
    wide = np.promote_types(gate.dtype, np.float32)
    gate_wide, up_wide = gate.astype(wide), up.astype(wide)
    match kind:
        case "situ":
            bent = beta * jnp.tanh(gate_wide / beta) * jax.nn.sigmoid(gate_wide)
            result = bent * linear_beta * jnp.tanh(up_wide / linear_beta)
        case "silu":
            result = jax.nn.silu(gate_wide) * up_wide
        case "clipped_silu":
            result = jax.nn.silu(jnp.minimum(gate_wide, linear_beta)) * jnp.clip(up_wide, -linear_beta, linear_beta)
    return result.astype(gate.dtype)
