"""What a decoder keeps of the tokens it has seen, so that the next ones need not see them again; fixed sizes.

A row's tokens have slots 0, 1, 2, ...; padding behind its new tokens has slot -1, writes nothing and is seen by none.
Stacked layers have stacked caches: each array gains a leading repeats axis. The same tuples hold the arrays' specs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmjax.axes import DATA_AXES, TENSOR


class DeltaCache(NamedTuple):
    """Of a linear attention: its size does not grow with the row."""

    state: Any
    """[b, H, K, V], at least float32."""
    tails: tuple[Any, ...]
    """[b, width - 1, ...] each: the newest inputs of the convolutions, in their order."""


class LatentCache(NamedTuple):
    """Of a latent attention."""

    key: Any
    """[b, S, R + K]: latents, with the key that all heads share behind them."""
    index_key: Any
    """[b, S, K]: keys of the indexer; None without one."""


class GroupedCache(NamedTuple):
    """Of a grouped-query attention."""

    key: Any
    """[b, S, G, K], rotated."""
    value: Any
    """[b, S, G, V]."""


MixerCache = DeltaCache | LatentCache | GroupedCache


class Earlier(NamedTuple):
    """What one mixer goes on behind."""

    slots: Any
    """[b, s] int32: where its new tokens go; -1 in padding."""
    cache: MixerCache


class DecoderCache(NamedTuple):
    """Of a whole decoder."""

    lengths: Any
    """[b] int32: tokens held of each row."""
    layers: tuple[tuple[MixerCache, ...], ...]
    """Nested as [segment][position in the pattern], as the layers' records are."""

    def slots(self, segment_ids: jax.Array) -> jax.Array:
        """Where the next tokens [b, s] of each row go, -1 in padding (segment 0), which lies behind them."""
        places = self.lengths[:, None] + jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
        return jnp.where(segment_ids > 0, places, -1)


def write(held: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
    """`held` [b, S, ...] with `new` [b, s, ...] at the slots [b, s] of each row; slots -1 and beyond S are left out."""
    places = jnp.where(slots < 0, held.shape[1], slots)
    rows = jnp.arange(held.shape[0], dtype=slots.dtype)[:, None]
    return held.at[rows, places].set(new.astype(held.dtype), mode="drop")


def next_tail(tail: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """The last inputs of a convolution, as many as `tail` [b, W - 1, ...] holds, with `new` [b, s, ...] at `slots`."""
    joined = jnp.concatenate([tail, new.astype(tail.dtype)], axis=1)
    num_new = jnp.sum(slots >= 0, axis=1, dtype=jnp.int32)
    places = num_new[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(joined, places.reshape(*places.shape, *(1,) * (new.ndim - 2)), axis=1)


def extended_cache(cache: DecoderCache, num_new: jax.Array, layers: tuple[tuple[MixerCache, ...], ...]) -> DecoderCache:
    """The cache after `num_new` [b] further tokens of each row, whose layers hold `layers`."""
    return DecoderCache(cache.lengths + num_new, layers)


def cache_specs(cache: DecoderCache) -> DecoderCache:
    """PartitionSpecs of a decoder's cache (shapes suffice): whole rows over all data axes, heads over tensor."""

    def stacked(*axes: Any) -> PartitionSpec:
        return PartitionSpec(None, DATA_AXES, *axes)

    def of_mixer(mixer: MixerCache) -> MixerCache:
        match mixer:
            case DeltaCache():
                heads = tuple(stacked(None, TENSOR) for _ in mixer.tails)
                return DeltaCache(state=stacked(TENSOR), tails=heads)
            case LatentCache():
                return LatentCache(stacked(), None if mixer.index_key is None else stacked())
            case GroupedCache():
                return GroupedCache(stacked(None, TENSOR), stacked(None, TENSOR))

    return DecoderCache(
        lengths=PartitionSpec(DATA_AXES), layers=tuple(tuple(map(of_mixer, segment)) for segment in cache.layers)
    )
