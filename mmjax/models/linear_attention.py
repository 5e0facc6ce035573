"""Kimi Delta Attention (KDA): short convolutions, decay gate, delta rule, gated norm of each head."""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mmjax.axes import TENSOR
from mmjax.config import ModelConfig
from mmjax.models.cache import DeltaCache, next_tail
from mmjax.models.layers import at_least_float32, normal, ones, parameter, project, use
from mmjax.parallel import context
from mmjax.parallel.fsdp import make_varying
from pallas_kernels.linear_attention.api import affine_delta_rule, convolution_tail, delta_rule, short_convolution
from pallas_kernels.linear_attention.gates import DecayGate


class Row(Protocol):
    """The recurrent parts of a linear attention over this device's tokens."""

    def convolve(
        self, inputs: Sequence[jax.Array], taps: Sequence[jax.Array], norm_scales: Sequence[float | None]
    ) -> list[jax.Array]: ...

    def recur(
        self, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, gate: DecayGate
    ) -> jax.Array: ...


class WholeRow:
    """Rows that begin here, document by document."""

    def __init__(self, segment_ids: jax.Array, chunk_tokens: int):
        self._segment_ids, self._chunk_tokens = segment_ids, chunk_tokens

    def convolve(
        self, inputs: Sequence[jax.Array], taps: Sequence[jax.Array], norm_scales: Sequence[float | None]
    ) -> list[jax.Array]:
        return [
            short_convolution(array, tap, self._segment_ids, norm_scale=scale)
            for array, tap, scale in zip(inputs, taps, norm_scales, strict=True)
        ]

    def recur(
        self, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, gate: DecayGate
    ) -> jax.Array:
        arrays = query, key, value, decay, beta, self._segment_ids
        return delta_rule(*arrays, gate=gate, chunk_tokens=self._chunk_tokens)[0]


class SplitRow:
    """Rows split over the context axis: two chunks of each row are here, as rows of their own [2 b, s / 2].

    A chunk goes on with the document of the chunk before if both have the same id where they meet.
    """

    def __init__(self, segment_ids: jax.Array, chunk_tokens: int):
        self._segment_ids, self._chunk_tokens = _chunks(segment_ids), chunk_tokens

    def convolve(
        self, inputs: Sequence[jax.Array], taps: Sequence[jax.Array], norm_scales: Sequence[float | None]
    ) -> list[jax.Array]:
        width, chunks = taps[0].shape[0], [_chunks(array) for array in inputs]
        tails = [convolution_tail(array, self._segment_ids, width) for array in chunks]
        # One exchange: the id goes with the values, in a dtype that holds it.
        last = self._segment_ids[:, -1:].astype(at_least_float32(inputs[0].dtype))
        parts = [last, *(tail.reshape(tail.shape[0], -1).astype(last.dtype) for tail in tails)]
        before = context.from_chunk_before(_by_row(jnp.concatenate(parts, axis=-1)))
        first = self._segment_ids[:, 0].reshape(before.shape[:2])
        self._continues = before[..., 0] == first.astype(before.dtype)
        before = jnp.where(self._continues[..., None], before, 0).reshape(len(last), -1)
        ends = np.cumsum([part.shape[1] for part in parts])
        before = [
            part.reshape(tail.shape) for part, tail in zip(jnp.split(before, ends[:-1], axis=1)[1:], tails, strict=True)
        ]
        return [
            _join(short_convolution(array, tap, self._segment_ids, initial_tail=tail, norm_scale=scale))
            for array, tap, tail, scale in zip(chunks, taps, before, norm_scales, strict=True)
        ]

    def recur(
        self, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, gate: DecayGate
    ) -> jax.Array:
        query, key, value, decay, beta = map(_chunks, (query, key, value, decay, beta))
        arrays = query, key, value, decay, beta, self._segment_ids
        parts = affine_delta_rule(*arrays, gate=gate, chunk_tokens=self._chunk_tokens)
        transition, state = _by_row(parts.transition), _by_row(parts.state)
        entering = context.entering_states(transition, state, self._continues)
        carried = jnp.einsum(
            "bshk,bhkv->bshv",
            parts.reach,
            entering.reshape(parts.state.shape).astype(parts.reach.dtype),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=entering.dtype,
        )
        mixed = (parts.output.astype(carried.dtype) + carried).astype(value.dtype)
        return _join(mixed)


def _chunks(array: jax.Array) -> jax.Array:
    """[b, s, ...] -> [2 b, s / 2, ...]."""
    return array.reshape(2 * array.shape[0], -1, *array.shape[2:])


def _join(chunks: jax.Array) -> jax.Array:
    """The way back."""
    return chunks.reshape(chunks.shape[0] // 2, -1, *chunks.shape[2:])


def _by_row(array: jax.Array) -> jax.Array:
    """Something of each chunk, [2 b, ...] -> [b, 2, ...]."""
    return array.reshape(-1, 2, *array.shape[1:])


class ContinuedRow:
    """Tokens at `slots` [b, s], behind those that a cache holds: one document a row, then padding."""

    def __init__(self, slots: jax.Array, cache: DeltaCache, chunk_tokens: int):
        self._slots, self._cache, self._chunk_tokens = slots, cache, chunk_tokens
        self._document = jnp.ones_like(slots)
        self._tails: tuple[jax.Array, ...] = ()
        self._state = cache.state

    def convolve(
        self, inputs: Sequence[jax.Array], taps: Sequence[jax.Array], norm_scales: Sequence[float | None]
    ) -> list[jax.Array]:
        tails = self._cache.tails
        self._tails = tuple(next_tail(tail, array, self._slots) for tail, array in zip(tails, inputs, strict=True))
        return [
            short_convolution(array, tap, self._document, initial_tail=tail, norm_scale=scale)
            for array, tap, tail, scale in zip(inputs, taps, tails, norm_scales, strict=True)
        ]

    def recur(
        self, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, gate: DecayGate
    ) -> jax.Array:
        # Padding leaves the state as it is: it neither decays nor writes.
        is_real, log_decay = (self._slots >= 0)[..., None], gate(decay)
        mixed, self._state = delta_rule(
            query,
            key,
            value,
            jnp.where(is_real.reshape(*is_real.shape, *(1,) * (log_decay.ndim - 3)), log_decay, 0),
            jnp.where(is_real, beta, 0),
            self._document,
            initial_state=self._cache.state,
            chunk_tokens=self._chunk_tokens,
            # A chunk of a single token is nothing but padding.
            implementation="reference" if query.shape[1] == 1 else "auto",
        )
        return mixed

    @property
    def cache(self) -> DeltaCache:
        """Once everything has run: of these tokens too."""
        return DeltaCache(self._state, self._tails)


def row_of(segment_ids: jax.Array, chunk_tokens: int) -> Row:
    """Rows that are whole on this device, or split over several."""
    return (SplitRow if context.is_split() else WholeRow)(segment_ids, chunk_tokens)


def uniform_taps(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Taps [W, ...] of a convolution, uniform within 1 / sqrt(W)."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def log_uniform_rate(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """ln U(1, 16), for the softplus gate."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def inverse_softplus_of_steps(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Decay bias whose softplus is log-uniform in 1e-3 to 1e-1, as in Mamba-2 and Gated DeltaNet."""
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, np.log(1e-3), np.log(1e-1)))
    return steps + jnp.log(-jnp.expm1(-steps))


class KimiDeltaAttention(nnx.Module):
    """Linear attention whose state forgets by channel; heads are split over the tensor axis.

        q, k, v = silu(convolution(x W))        q = l2(q) / sqrt(K)        k = l2(k)
        log decay = gate(x W_down W_up + bias)  beta = sigmoid(x W_beta)
        y = [sigmoid(gate(x)) * scale * o / rms(o)] W_o,  o = delta_rule(q, k, v, log decay, beta)

    Source: Kimi K3 technical report, arXiv:2607.24653, equations 1 to 6; Kimi Linear, arXiv:2510.26692.
    """

    def __init__(self, model: ModelConfig):
        linear = model.linear_attention
        initializer, dtype = normal(model.initializer_range), model.parameter_dtype
        # Rates, biases and the norm act through exponentials: never below float32.
        wide = at_least_float32(dtype)
        self.config, self.norm_epsilon = linear, model.norm_epsilon
        heads, keys, values = linear.num_heads, linear.key_width, linear.value_width

        def heads_from(width: int, axis: str | None, head_width: int) -> nnx.Variable:
            return parameter(initializer, (width, heads, head_width), (axis, "heads", None), dtype)

        def taps(head_width: int) -> nnx.Variable:
            return parameter(uniform_taps, (linear.convolution_width, heads, head_width), (None, "heads", None), dtype)

        def down(rank: int) -> nnx.Variable:
            return parameter(initializer, (model.width, rank), ("model_weight", None), dtype)

        self.query, self.query_convolution = heads_from(model.width, "model_weight", keys), taps(keys)
        self.key, self.key_convolution = heads_from(model.width, "model_weight", keys), taps(keys)
        self.value, self.value_convolution = heads_from(model.width, "model_weight", values), taps(values)
        # Ranks are small (128 in Kimi-K3): split over hundreds of devices they would not divide.
        self.decay_down, self.decay_up = down(linear.decay_rank), heads_from(linear.decay_rank, None, keys)
        initial_rate = jax.nn.initializers.zeros if linear.decay == "bounded" else log_uniform_rate
        self.log_rate = parameter(initial_rate, (heads,), ("heads",), wide)
        self.decay_bias = parameter(inverse_softplus_of_steps, (heads, keys), ("heads", None), wide)
        self.beta = parameter(initializer, (model.width, heads), ("model_weight", "heads"), dtype)
        if linear.output_gate == "full":
            self.output_gate = heads_from(model.width, "model_weight", values)
        else:
            self.output_gate_down = down(linear.output_gate_rank)
            self.output_gate_up = heads_from(linear.output_gate_rank, None, values)
        self.output_norm = ones(values, wide)
        self.output = parameter(initializer, (heads, values, model.width), ("heads", None, "model_weight"), dtype)

    def __call__(self, inputs: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """`inputs` [b, s, D], normalised, and segments [b, s] -> [b, s, D] of the same dtype."""
        return self._mix(inputs, row_of(segment_ids, self.config.chunk_tokens))

    def extend(
        self, inputs: jax.Array, slots: jax.Array, positions: jax.Array, cache: DeltaCache
    ) -> tuple[jax.Array, DeltaCache]:
        """The same for tokens at `slots` [b, s] behind those that `cache` holds; and the cache of both."""
        row = ContinuedRow(slots, cache, self.config.chunk_tokens)
        return self._mix(inputs, row), row.cache

    def empty_cache(self, rows: int, capacity: int, dtype: jax.typing.DTypeLike) -> DeltaCache:
        """Of `rows` rows that hold nothing yet."""
        config, heads = self.config, self.config.num_heads

        def tail(width: int) -> jax.Array:
            return jnp.zeros((rows, config.convolution_width - 1, heads, width), dtype)

        state = jnp.zeros((rows, heads, config.key_width, config.value_width), at_least_float32(dtype))
        return DeltaCache(state, (tail(config.key_width), tail(config.key_width), tail(config.value_width)))

    def _mix(self, inputs: jax.Array, row: Row) -> jax.Array:
        config, dtype = self.config, inputs.dtype
        wide = at_least_float32(dtype)
        # Once for all projections, so that the backward pass sums over the tensor axis once.
        inputs = make_varying(inputs, (TENSOR,))

        def through(down: nnx.Variable, up: nnx.Variable) -> jax.Array:
            return project("bsr,rhk->bshk", project("bsd,dr->bsr", inputs, down), up)

        query, key, value = row.convolve(
            [project("bsd,dhk->bshk", inputs, weight) for weight in (self.query, self.key, self.value)],
            [use(taps, wide) for taps in (self.query_convolution, self.key_convolution, self.value_convolution)],
            (config.key_width**-0.5, 1.0, None),
        )
        decay = through(self.decay_down, self.decay_up)
        of_gate = use(self.log_rate, wide), use(self.decay_bias, wide)
        gate = DecayGate(*of_gate, kind=config.decay, lower_bound=config.decay_lower_bound)
        beta = jax.nn.sigmoid(project("bsd,dh->bsh", inputs, self.beta).astype(wide))
        mixed = checkpoint_name(row.recur(query, key, value, decay, beta, gate), "attention")

        if config.output_gate == "full":
            output_gate = project("bsd,dhv->bshv", inputs, self.output_gate)
        else:
            output_gate = through(self.output_gate_down, self.output_gate_up)
        mixed = mixed.astype(wide)
        mixed *= jax.lax.rsqrt(jnp.mean(jnp.square(mixed), axis=-1, keepdims=True) + self.norm_epsilon)
        mixed *= use(self.output_norm, wide)[None, None, None] * jax.nn.sigmoid(output_gate.astype(wide))
        return project("bshv,hvd->bsd", mixed.astype(dtype), self.output, is_row=True)
