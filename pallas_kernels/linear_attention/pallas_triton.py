"""The gated delta rule on NVIDIA GPUs, forward and backward, by the kernels of `chunk_kernels` and `scan_kernels`.

Each chunk by itself: `prepare` makes the matrices of pairs of tokens, inverts one, and makes what the tokens read from
the state and write into it. `scan` carries the state over chunks and writes the output, or, for the backward pass, the
states and what each token writes; `scan_back` carries the state's gradient from the last chunk to the first;
`gradients`, each chunk by itself, finishes. At widths of 128 the kernels of the modules `hopper...` take their places,
but for chunks in which one of the decays a channel is deeper in a tile than `DEEPEST`; with one decay a head, the two
scans of the backward pass share a launch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import launcher
from pallas_kernels.linear_attention.chunk_kernels import CHUNK
from pallas_kernels.linear_attention.documents import document_starts, per_value_head, starting_state
from pallas_kernels.linear_attention.gates import DecayGate, Form
from pallas_kernels.linear_attention.launches import Launches, Settings

WIDTHS = (64, 128)
MOST_BLOCKS = 65535
"""Of a launch's grid along its second or third axis: rows, heads or chunks."""


def reason_against(
    query: Float[Array, "B S G K"], key: Float[Array, "B S G K"], value: Float[Array, "B S H V"]
) -> str | None:
    """Why these kernels cannot take such arrays; None if they can."""
    if not launcher.is_hopper():
        return "needs a Hopper GPU (compute capability 9.0)"
    if any(array.dtype != jnp.bfloat16 for array in (query, key, value)):
        return f"needs bfloat16 queries, keys and values, got {query.dtype}, {key.dtype} and {value.dtype}"
    widths = query.shape[3], value.shape[3]
    if any(width not in WIDTHS for width in widths):
        return f"needs key and value widths of {' or '.join(map(str, WIDTHS))}, got {widths[0]} and {widths[1]}"
    batch, _, heads, _ = value.shape
    if batch > MOST_BLOCKS or heads > MOST_BLOCKS:
        return f"takes up to {MOST_BLOCKS} rows and heads, got {batch} rows of {heads} heads"
    return None


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
    settings: Settings = Settings(),  # noqa: B008  (immutable)
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H K V"]]:
    """See `api.delta_rule`: query, key and value in bfloat16, the rest computed in float32.

    The kernels compute a gate of one decay a channel from its input in bfloat16; another stands in front of them, which
    is logged once.

    Rows of more than `MOST_BLOCKS` chunks are taken in pieces, one after the other.

    Keeps its arguments for the backward pass, sums of the decays in the place of given ones or beside what goes into a
    gate, two matrices [64, 64] a chunk and what its tokens read and write: four arrays like `value`. They are gone when
    the backward pass needs most memory.
    """
    if gate is not None and (reason := _reason_against_gate(decay)):
        launcher.log_once(f"delta_rule: the decay gate is computed in front of the kernels ({reason})")
        decay, gate = gate(decay), None
    length, heads = value.shape[1:3]
    state = starting_state(initial_state, per_value_head(query, heads), value, key, decay, beta).astype(jnp.float32)
    # The tail neither decays, writes nor starts a document.
    tail = ((0, 0), (0, -length % CHUNK))

    def filled(array: jax.Array, number: float = 0) -> jax.Array:
        return jnp.pad(array, (*tail, *((0, 0) for _ in array.shape[2:])), constant_values=number)

    decay = filled(decay.astype(jnp.float32)) if gate is None else filled(decay, float(jnp.finfo(decay.dtype).min))
    tokens = [filled(query), filled(key), filled(value), decay, filled(beta.astype(jnp.float32))]
    of_gate = () if gate is None else (gate.limited_log_rate().astype(jnp.float32), gate.bias.astype(jnp.float32))
    starts = filled(document_starts(segment_ids))
    query, key, value, decay, beta, starts, state, *of_gate = launcher.vary_together(*tokens, starts, state, *of_gate)
    tokens = [query, key, value, decay, beta, *_document_bounds(starts)]
    outputs = []
    most = MOST_BLOCKS * CHUNK
    cuts = list(range(most, query.shape[1], most))
    for piece in zip(*(jnp.split(array, cuts, axis=1) for array in tokens), strict=True):
        results: Any = _delta_rule(settings, gate and gate.form, *piece, state, tuple(of_gate))
        outputs.append(results[0])
        state = results[1]
    return jnp.concatenate(outputs, axis=1)[:, :length], state


def _reason_against_gate(raw: jax.Array) -> str | None:
    """Why the kernels do not compute a gate of this input; None if they do."""
    if raw.ndim == 3:
        return "one decay a head is too little work to matter"
    return None if raw.dtype == jnp.bfloat16 else f"its input is {raw.dtype}, not bfloat16"


def _document_bounds(starts: Bool[Array, "B S"]) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Place in its chunk of the first token of each token's document, -1 if in an earlier chunk; and of the last."""
    starts = starts.reshape(starts.shape[0], -1, CHUNK)
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None, None]
    first = lax.cummax(jnp.where(starts, place, -1), axis=2)
    ends = jnp.pad(starts[..., 1:], ((0, 0), (0, 0), (0, 1)))
    last = lax.cummin(jnp.where(ends, place, CHUNK - 1), axis=2, reverse=True)
    return first.reshape(starts.shape[0], -1), last.reshape(starts.shape[0], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(
    settings: Settings, form: Form | None, query, key, value, decay, beta, first, last, state, of_gate
) -> tuple[jax.Array, jax.Array]:
    return _forward(settings, form, query, key, value, decay, beta, first, last, state, of_gate)[0]


def _forward(settings, form, query, key, value, decay, beta, first, last, state, of_gate):
    call = Launches(settings, query, value, decay, form)
    gated = (form.rows(*of_gate),) if form else ()
    products, inverse, sums, depths, parts = call.prepare(query, key, value, decay, beta, first, last, *gated)
    transition, entering = call.split(parts, state)
    results = call.scan(parts, products, entering)
    if call.is_exact:  # what is written is made again, to more digits
        parts = parts._replace(from_value=None)
    saved = query, key, value, beta, first, last, transition, entering, products, inverse, sums, depths, parts
    return results, (saved, (decay, *of_gate) if form else ())


def _backward(settings, form, saved, gradients):
    (query, key, value, beta, first, last, transition, entering, products, inverse, sums, depths, parts), gated = saved
    output_gradient, state_gradient = gradients
    call = Launches(settings, query, value, sums, form)
    leaving = call.split_back(parts, products, output_gradient, transition, state_gradient)
    arguments = parts, products, inverse, value, beta, output_gradient, entering, leaving
    (state_gradients, solved, initial_gradient, *of_value), (states, written, *low) = call.scan_both_ways(*arguments)
    tokens = query, key, sums, depths, beta, first, last
    of_chunks = states, state_gradients, written, solved, output_gradient, *low
    if form:
        raw, log_rate, bias = gated
        gated = raw, form.rows(log_rate, bias)
    query_gradient, key_gradient, decay_gradient, by_key, *by_gate = call.gradients(*tokens, *of_chunks, gated=gated)
    of_gate = ()
    if form:
        by_bias, by_rate = by_gate
        by_rate = form.finish_rate(jnp.sum(by_rate, axis=(0, 1)), log_rate)
        of_gate = by_rate, jnp.sum(by_bias, axis=(0, 1, 3))
    if call.is_exact:
        value_gradient, by_value = of_value
        beta_gradient = by_key + by_value
    else:
        value_gradient, beta_gradient = call.value_gradients(value, beta, solved, by_key)
    query_gradient, key_gradient = (_sum_groups(array, query) for array in (query_gradient, key_gradient))
    of_tokens = query_gradient, key_gradient, value_gradient, decay_gradient, beta_gradient
    return *of_tokens, None, None, initial_gradient, of_gate


_delta_rule.defvjp(_forward, _backward)


def _sum_groups(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """[B, S, H, K] -> [B, S, G, K]: the sum over the value heads that a key head serves."""
    if gradient.shape == like.shape:
        return gradient
    grouped = gradient.reshape(*like.shape[:3], -1, like.shape[3])
    return jnp.sum(grouped, axis=3, dtype=jnp.float32).astype(like.dtype)
