"""The gated delta rule, with a decay per channel (Kimi Delta Attention) or per head (Gated DeltaNet), and the small
operations around it."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import launcher
from pallas_kernels.linear_attention import convolution, pallas_triton, reference, xla
from pallas_kernels.linear_attention.documents import document_index, wide_dtype
from pallas_kernels.linear_attention.gates import DecayGate

Implementation = Literal["auto", "pallas", "xla", "reference"]

# Up to this many numbers in a head's state a CPU is faster token by token, and compiles it in a third of the time.
# Forward and backward, 8 rows of 256 tokens, 4 heads, one core: 20 against 88 ms at key and value width 16, 84 against
# 182 at 32, 348 against 310 at 64; one row of 2048 at 16: 27 against 81.
SMALL_STATE = 1024


def delta_rule(
    query: Float[Array, "B S G K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S H V"],
    decay: Float[Array, "B S H K"] | Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    segment_ids: Int[Array, "B S"],
    *,
    gate: DecayGate | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    chunk_tokens: int = 64,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H K V"]]:
    """Linear attention whose state forgets and corrects what it holds for a key; and its last state.

        S' = diag(exp(decay_t)) S_{t-1}
        S_t = S' + beta_t key_t (value_t - S'^T key_t)^T
        output_t = S_t^T query_t

    `decay`, a logarithm, is one number a key channel (Kimi Delta Attention) or one a head (Gated DeltaNet). With a
    `gate` it is what goes into that, which `pallas` computes inside its kernels where it is a channel's in bfloat16.
    Each head of `query` and `key` serves H / G consecutive heads of `value`. `query` and `key` arrive normalised and
    scaled.

    S is zero at the first token of each document (a token whose id in `segment_ids` differs from the one before it);
    `initial_state`, zeros if None, belongs to the first document of each row, and the state returned to the last,
    padding included. Computed in at least float32; the output has the dtype of `value`, the state the wide one.

    The log decay is finite and at most 0, of any size: nothing overflows however fast or slow the decay.
    `xla` takes `chunk_tokens` at once, `reference` one, `pallas` 64 whatever is asked. "auto" is `pallas` where it can,
    else `reference` for small states on a CPU, else `xla`, and says once which.

    Raises:
      ValueError: `chunk_tokens` is not 16 times a power of two, H no multiple of G, or the named implementation cannot
        take these arguments; the message says why.

    Source: Kimi Linear, arXiv:2510.26692, equations 1 and 3; Kimi K3 technical report, arXiv:2607.24653; Gated Delta
    Networks, arXiv:2412.06464.
    """
    if value.shape[2] % key.shape[2]:
        raise ValueError(f"value has {value.shape[2]} heads, no multiple of the {key.shape[2]} of query and key")
    if chunk_tokens < xla.TILE or chunk_tokens & (chunk_tokens - 1):
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be {xla.TILE} times a power of two, such as 64")
    reason = pallas_triton.reason_against(query, key, value)
    if implementation == "auto":
        implementation = "pallas"
        if reason is not None:
            is_small = key.shape[-1] * value.shape[-1] <= SMALL_STATE
            implementation = "reference" if is_small and jax.default_backend() == "cpu" else "xla"
        launcher.log_once(f"delta_rule: {implementation}" + (f" (pallas {reason})" if reason else ""))
    if gate is not None and implementation != "pallas":
        decay = gate(decay)
    arrays = query, key, value, decay, beta, segment_ids
    match implementation:
        case "pallas":
            if reason is not None:
                raise ValueError(f"implementation 'pallas' of delta_rule {reason}; 'auto' takes one that can")
            return pallas_triton.delta_rule(*arrays, gate=gate, initial_state=initial_state)
        case "xla":
            return xla.delta_rule(*arrays, initial_state=initial_state, chunk_tokens=chunk_tokens)
        case "reference":
            return reference.delta_rule(*arrays, initial_state=initial_state)


class AffineDeltaRule(NamedTuple):
    """What `delta_rule` gives for any state S that the first document of a row starts with.

    output + S^T reach (of each token),    state + transition S
    """

    output: Float[Array, "B S H V"]
    reach: Float[Array, "B S H K"]
    """Zero behind the first document."""
    state: Float[Array, "B H K V"]
    transition: Float[Array, "B H K K"]
    """Zero if the first document ends before the row does."""


def affine_delta_rule(
    query: Float[Array, "B S G K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S H V"],
    decay: Float[Array, "B S H K"] | Float[Array, "B S H"],
    beta: Float[Array, "B S H"],
    segment_ids: Int[Array, "B S"],
    *,
    gate: DecayGate | None = None,
    chunk_tokens: int = 64,
    implementation: Implementation = "auto",
) -> AffineDeltaRule:
    """`delta_rule` of rows whose initial state is not known yet: parts of a longer row, computed side by side.

    All it gives is affine in that state: further values of zero with the identity as their state make the linear part.
    Dtypes, limits and errors are those of `delta_rule`; `reach` has the dtype of `value`, `transition` that of `state`.

    Source: Kimi K3 technical report, arXiv:2607.24653, section 5.1.2 and equation 17.
    """
    key_width, value_width = key.shape[-1], value.shape[-1]
    tokens, dtype = (decay, beta, segment_ids), wide_dtype(query, key, value, decay, beta)
    identity = jnp.broadcast_to(jnp.eye(key_width, dtype=dtype), (value.shape[0], value.shape[2], key_width, key_width))
    if implementation in ("auto", "pallas") and pallas_triton.reason_against(query, key, value) is None:
        # Its kernels take no values as wide as both parts together.
        rule = functools.partial(delta_rule, gate=gate, implementation="pallas")
        output, state = rule(query, key, value, *tokens)
        nothing = jnp.zeros((*value.shape[:3], key_width), value.dtype)
        reach, transition = rule(query, key, nothing, *tokens, initial_state=identity)
        return AffineDeltaRule(output, reach, state, transition)
    output, state = delta_rule(
        query,
        key,
        jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key_width))),
        *tokens,
        gate=gate,
        initial_state=jnp.pad(identity, ((0, 0), (0, 0), (0, 0), (value_width, 0))),
        chunk_tokens=chunk_tokens,
        implementation=implementation,
    )
    output, reach = jnp.split(output, [value_width], axis=-1)
    state, transition = jnp.split(state, [value_width], axis=-1)
    return AffineDeltaRule(output, reach, state, transition)


def short_convolution(
    inputs: Float[Array, "B S ..."],
    taps: Float[Array, "W ..."],
    segment_ids: Int[Array, "B S"],
    *,
    initial_tail: Float[Array, "B W-1 ..."] | None = None,
    norm_scale: float | None = None,
    implementation: Literal["auto", "pallas", "xla"] = "auto",
) -> Float[Array, "B S ..."]:
    """SiLU of a causal convolution of each channel by itself, which never reaches into another document.

        output_t = silu(sum_w taps_w inputs_{t - (W - 1) + w}),  the last tap on the token itself

    With `norm_scale` the last axis, a head's channels, is then normalised as `l2_normalise` does, times that scale.
    `initial_tail` are the inputs in front of the row, of its first document; zeros if None (see `convolution_tail`).
    Computed in at least float32, returned in the dtype of `inputs`. "auto" is `pallas` where it can, else `xla`.

    Raises:
      ValueError: `pallas` is asked for and cannot take these arguments; the message says why.

    Source: Kimi Linear, arXiv:2510.26692, section 3.
    """
    reason = convolution.reason_against(inputs, taps)
    if implementation == "pallas" and reason is not None:
        raise ValueError(f"implementation 'pallas' of short_convolution {reason}; 'auto' takes one that can")
    if implementation != "xla" and reason is None:
        return convolution.short_convolution(
            inputs, taps, segment_ids, initial_tail=initial_tail, norm_scale=norm_scale
        )
    if implementation == "auto":
        launcher.log_once(f"short_convolution: xla (pallas {reason})")
    output = xla.short_convolution(inputs, taps, segment_ids, initial_tail=initial_tail)
    return output if norm_scale is None else l2_normalise(output) * norm_scale


def convolution_tail(
    inputs: Float[Array, "B S ..."],
    segment_ids: Int[Array, "B S"],
    width: int,
    *,
    initial_tail: Float[Array, "B T ..."] | None = None,
) -> Float[Array, "B T ..."]:
    """The `width - 1` inputs that `short_convolution` needs to go on behind this row, zero where another document's.

    `initial_tail` is the one this row began with.
    """
    documents = jnp.pad(document_index(segment_ids), ((0, 0), (width - 1, 0)))
    is_last = documents[:, inputs.shape[1] :] == documents[:, -1:]
    tail = xla.behind(initial_tail, inputs, width)[:, inputs.shape[1] :]
    return jnp.where(is_last.reshape(*is_last.shape, *(1,) * (inputs.ndim - 2)), tail, 0)


def l2_normalise(inputs: Float[Array, "*T K"]) -> Float[Array, "*T K"]:
    """`inputs / sqrt(sum(inputs^2) + 1e-6)` over the last axis, in at least float32, returned in the dtype of `inputs`.

    The epsilon is added to the sum of squares, not to their mean.
    """
    wide = inputs.astype(wide_dtype(inputs))
    squares = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + 1e-6)).astype(inputs.dtype)
