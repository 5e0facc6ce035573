"""Kernels that carry the state of the gated delta rule over chunks, in Pallas for Triton; letters as in `xla`."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.linear_attention.chunk_kernels import CHUNK, dot


def _kept(kept_ref, chunk):
    """How much of the state a chunk keeps, [K or 1, 1]."""
    kept = kept_ref[chunk]
    return kept if kept.ndim == 0 else kept[:, None]


def scan(
    from_state_ref, from_value_ref, reading_ref, writing_ref, kept_ref, products_ref, state_ref, *outputs,
    keep_states, interpret,
):  # fmt: skip
    del interpret
    dtype = from_value_ref.dtype

    def step(chunk, state):
        rows = pl.ds(chunk * CHUNK, CHUNK)
        narrow = state.astype(dtype)
        written = from_value_ref[rows, :].astype(jnp.float32) - dot(from_state_ref[rows, :], narrow)
        written = written.astype(dtype)
        if keep_states:
            states_ref, written_ref = outputs
            states_ref[chunk] = narrow
            written_ref[rows, :] = written
        else:
            output = dot(reading_ref[rows, :], narrow) + dot(products_ref[chunk], written)
            outputs[0][rows, :] = output.astype(dtype)
        return state * _kept(kept_ref, chunk) + dot(writing_ref[rows, :], written, transpose_a=True)

    state = lax.fori_loop(0, kept_ref.shape[0], step, state_ref[...])
    if not keep_states:
        outputs[1][...] = state


def carry(from_state_ref, from_value_ref, writing_ref, kept_ref, state_ref, last_ref, *, interpret):
    """The last state alone."""
    del interpret
    dtype = from_value_ref.dtype

    def step(chunk, state):
        rows = pl.ds(chunk * CHUNK, CHUNK)
        written = from_value_ref[rows, :].astype(jnp.float32) - dot(from_state_ref[rows, :], state.astype(dtype))
        return state * _kept(kept_ref, chunk) + dot(writing_ref[rows, :], written.astype(dtype), transpose_a=True)

    last_ref[...] = lax.fori_loop(0, kept_ref.shape[0], step, state_ref[...])


def carry_identity(from_state_ref, writing_ref, kept_ref, identity_ref, last_ref, *, interpret):
    """What becomes of a state to which nothing is added: some columns of the transition."""
    del interpret
    dtype = from_state_ref.dtype

    def step(chunk, state):
        rows = pl.ds(chunk * CHUNK, CHUNK)
        erased = dot(from_state_ref[rows, :], state.astype(dtype)).astype(dtype)
        return state * _kept(kept_ref, chunk) - dot(writing_ref[rows, :], erased, transpose_a=True)

    last_ref[...] = lax.fori_loop(0, kept_ref.shape[0], step, identity_ref[...])


def scan_back(
    from_state_ref, reading_ref, writing_ref, kept_ref, products_ref, inverse_ref, output_gradient_ref,
    last_gradient_ref, state_gradients_ref, solved_ref, first_gradient_ref,
    *, interpret,
):  # fmt: skip
    del interpret
    dtype, chunks = output_gradient_ref.dtype, kept_ref.shape[0]

    def step(index, gradient):
        chunk = chunks - 1 - index
        rows = pl.ds(chunk * CHUNK, CHUNK)
        narrow = gradient.astype(dtype)
        state_gradients_ref[chunk] = narrow
        output_gradient = output_gradient_ref[rows, :]
        written = dot(products_ref[chunk], output_gradient, transpose_a=True) + dot(writing_ref[rows, :], narrow)
        written = written.astype(dtype)
        solved_ref[rows, :] = dot(inverse_ref[chunk], written, transpose_a=True).astype(dtype)
        read = dot(reading_ref[rows, :], output_gradient, transpose_a=True)
        return gradient * _kept(kept_ref, chunk) + (read - dot(from_state_ref[rows, :], written, transpose_a=True))

    first_gradient_ref[...] = lax.fori_loop(0, chunks, step, last_gradient_ref[...])


def carry_back(
    from_state_ref, reading_ref, writing_ref, kept_ref, products_ref, output_gradient_ref, last_gradient_ref,
    first_gradient_ref,
    *, interpret,
):  # fmt: skip
    """The gradient of the first state alone."""
    del interpret
    dtype, chunks = output_gradient_ref.dtype, kept_ref.shape[0]

    def step(index, gradient):
        chunk = chunks - 1 - index
        rows = pl.ds(chunk * CHUNK, CHUNK)
        output_gradient = output_gradient_ref[rows, :]
        written = dot(products_ref[chunk], output_gradient, transpose_a=True)
        written += dot(writing_ref[rows, :], gradient.astype(dtype))
        read = dot(reading_ref[rows, :], output_gradient, transpose_a=True)
        erased = dot(from_state_ref[rows, :], written.astype(dtype), transpose_a=True)
        return gradient * _kept(kept_ref, chunk) + (read - erased)

    first_gradient_ref[...] = lax.fori_loop(0, chunks, step, last_gradient_ref[...])
