"""Kimi Delta Attention: the gated delta rule with a decay per channel, and the small operations around it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_attention import reference, xla
from pallas_kernels.linear_attention.documents import document_index, wide_dtype

Implementation = Literal["auto", "xla", "reference"]
Decay = Literal["bounded", "softplus"]

# Up to this many numbers in a head's state a CPU is faster token by token, and compiles it in a third of the time.
# Forward and backward, 8 rows of 256 tokens, 4 heads, one core: 20 against 88 ms at key and value width 16, 84 against
# 182 at 32, 348 against 310 at 64; one row of 2048 at 16: 27 against 81.
SMALL_STATE = 1024


def delta_rule(
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S H K"],
    value: Float[Array, "B S H V"],
    log_decay: Float[Array, "B S H K"],
    beta: Float[Array, "B S H"],
    segment_ids: Int[Array, "B S"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    chunk_tokens: int = 64,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H K V"]]:
    """Linear attention whose state forgets by channel and corrects what it holds for a key; and its last state.

        S' = diag(exp(log_decay_t)) S_{t-1}
        S_t = S' + beta_t key_t (value_t - S'^T key_t)^T
        output_t = S_t^T query_t

    `query` and `key` arrive normalised and scaled. S is zero at the first token of each document (a token whose id in
    `segment_ids` differs from the one before it); `initial_state`, zeros if None, belongs to the first document of
    each row, and the state returned to the last, padding included. Computed in at least float32; the output has the
    dtype of `value`, the state the wide one.

    `log_decay` is finite and at most 0, of any size: nothing overflows however fast or slow the decay.
    `xla` takes `chunk_tokens` at once, `reference` one. "auto" is `reference` for small states on a CPU, else `xla`.

    Raises:
      ValueError: `chunk_tokens` is not 16 times a power of two.

    Source: Kimi Linear, arXiv:2510.26692, equations 1 and 3; Kimi K3 technical report, arXiv:2607.24653.
    """
    if chunk_tokens < xla.TILE or chunk_tokens & (chunk_tokens - 1):
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be {xla.TILE} times a power of two, such as 64")
    if implementation == "auto":
        is_small = key.shape[-1] * value.shape[-1] <= SMALL_STATE
        implementation = "reference" if is_small and jax.default_backend() == "cpu" else "xla"
    arrays = (query, key, value, log_decay, beta, segment_ids)
    match implementation:
        case "xla":
            return xla.delta_rule(*arrays, initial_state=initial_state, chunk_tokens=chunk_tokens)
        case "reference":
            return reference.delta_rule(*arrays, initial_state=initial_state)


def short_convolution(
    inputs: Float[Array, "B S ..."], taps: Float[Array, "W ..."], segment_ids: Int[Array, "B S"]
) -> Float[Array, "B S ..."]:
    """SiLU of a causal convolution of each channel by itself, which never reaches into another document.

        output_t = silu(sum_w taps_w inputs_{t - (W - 1) + w}),  the last tap on the token itself

    Computed in at least float32, returned in the dtype of `inputs`.

    Source: Kimi Linear, arXiv:2510.26692, section 3.
    """
    width, length = taps.shape[0], inputs.shape[1]
    wide = wide_dtype(inputs, taps)
    channels = (1,) * (inputs.ndim - 2)
    # -1 in front of the row: no document.
    documents = jnp.pad(document_index(segment_ids), ((0, 0), (width - 1, 0)), constant_values=-1)
    padded = jnp.pad(inputs.astype(wide), ((0, 0), (width - 1, 0), *((0, 0) for _ in channels)))
    total = taps[-1].astype(wide)[None, None] * padded[:, width - 1 :]
    for tap in range(width - 1):
        is_same = documents[:, tap : tap + length] == documents[:, width - 1 :]
        earlier = jnp.where(is_same.reshape(*is_same.shape, *channels), padded[:, tap : tap + length], 0)
        total = total + taps[tap].astype(wide)[None, None] * earlier
    return jax.nn.silu(total).astype(inputs.dtype)


def decay_gate(
    raw: Float[Array, "B S H K"],
    log_rate: Float[Array, " H"],
    bias: Float[Array, "H K"],
    *,
    kind: Decay,
    lower_bound: float = -5.0,
) -> Float[Array, "B S H K"]:
    """Log decay of each token and channel, at most 0, in at least float32.

        bounded:  lower_bound * sigmoid(exp(log_rate) (raw + bias))
        softplus: -exp(log_rate) softplus(raw + bias)

    Value and gradient are finite for any finite arguments: a rate beyond e^60 counts as e^60.

    Source: Kimi K3 technical report, arXiv:2607.24653, equation 2 (bounded); Kimi Linear, arXiv:2510.26692 (softplus).
    """
    wide = wide_dtype(raw, log_rate, bias)
    shifted = raw.astype(wide) + bias.astype(wide)[None, None]
    rate = jnp.exp(jnp.minimum(log_rate.astype(wide), 60.0))[None, None, :, None]
    match kind:
        case "bounded":
            return lower_bound * jax.nn.sigmoid(rate * shifted)
        case "softplus":
            return -rate * jax.nn.softplus(shifted)


def l2_normalise(inputs: Float[Array, "*T K"]) -> Float[Array, "*T K"]:
    """`inputs / sqrt(sum(inputs^2) + 1e-6)` over the last axis, in at least float32, returned in the dtype of `inputs`.

    The epsilon is added to the sum of squares, not to their mean.
    """
    wide = inputs.astype(wide_dtype(inputs))
    squares = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + 1e-6)).astype(inputs.dtype)
