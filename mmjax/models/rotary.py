"""Rotary position embedding: frequencies and their stretching, one position or three of a token, both pair styles."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.config import RotaryConfig
from mmjax.models.layers import at_least_float32


class Rotation(NamedTuple):
    """Cosines and sines of a row's angles, `[b, s, width / 2]` each, in at least float32, times `attention_factor`."""

    cosine: jax.Array
    sine: jax.Array


def frequencies(config: RotaryConfig) -> np.ndarray:
    """Angle per position of each pair, float64 [width / 2].

        none:    f = base^(-2 i / width)
        linear:  f / factor
        llama3:  f where a turn takes fewer than P / high positions, f / factor where more than P / low, between them
                 (1 - m) f / factor + m f,  m = (P / turn - low) / (high - low)          (P original_positions)
        yarn:    f / factor * ramp + f * (1 - ramp), ramp from 0 at the pair that turns beta_fast times in P positions
                 to 1 at the one that turns beta_slow times

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; llama3: the Llama 3.1 release.
    """
    pairs = np.arange(config.width // 2, dtype=np.float64)
    plain = config.base ** (-2 * pairs / config.width)
    match config.scaling:
        case "none":
            return plain
        case "linear":
            return plain / config.factor
        case "llama3":
            turns = config.original_positions * plain / (2 * math.pi)
            low, high = config.low_frequency_factor, config.high_frequency_factor
            mix = np.clip((turns - low) / (high - low), 0, 1)
            return (1 - mix) * plain / config.factor + mix * plain
        case "yarn":
            slowest, fastest = _pair_that_turns(config, config.beta_fast), _pair_that_turns(config, config.beta_slow)
            if config.truncate:
                slowest, fastest = math.floor(slowest), math.ceil(fastest)
            slowest, fastest = max(slowest, 0), min(fastest, config.width - 1)
            ramp = np.clip((pairs - slowest) / ((fastest - slowest) or 0.001), 0, 1)
            return plain / config.factor * ramp + plain * (1 - ramp)


def _pair_that_turns(config: RotaryConfig, times: float) -> float:
    """Which pair (a fraction) makes so many turns in the original positions."""
    turns = math.log(config.original_positions / (times * 2 * math.pi))
    return config.width * turns / (2 * math.log(config.base))


def section_of_pair(config: RotaryConfig) -> np.ndarray:
    """Which of the three positions of a token (frame, row, column) turns each pair: int [width / 2].

    `blocks`: the first sections[0] pairs by frame, the next by row, then by column. `interleaved`: frame, row, column,
    frame, ... as long as a section has pairs left; all that remain by frame.
    """
    if config.section_order == "blocks":
        return np.repeat(np.arange(len(config.sections)), config.sections)
    sections = np.zeros(config.width // 2, np.int64)
    for number in range(1, len(config.sections)):
        sections[number : len(config.sections) * config.sections[number] : len(config.sections)] = number
    return sections


def rotation(config: RotaryConfig, positions: jax.Array, dtype: jax.typing.DTypeLike) -> Rotation:
    """The rotation of tokens at `positions` [b, s], or [3, b, s] (frame, row, column), in at least float32.

    With `sections`, positions [b, s] count for all three.
    """
    wide = at_least_float32(dtype)
    angle_per_position = jnp.asarray(frequencies(config), wide)
    places = positions.astype(wide)
    # [b, s, 1], or [b, s, width / 2]: each pair's own.
    places = places[..., None] if places.ndim == 2 else jnp.moveaxis(places[section_of_pair(config)], 0, -1)
    angles = places * angle_per_position[None, None]
    return Rotation(jnp.cos(angles) * config.attention_factor, jnp.sin(angles) * config.attention_factor)


def rotate(inputs: jax.Array, turned: Rotation, config: RotaryConfig) -> jax.Array:
    """`inputs` [b, s, ..., K] with its first `width` entries rotated in pairs; the dtype stays.

    (a, b) -> (a cos - b sin, b cos + a sin),  pairs (i, i + width / 2) if `half`, (2 i, 2 i + 1) if `interleaved`
    """
    heads = tuple(range(2, inputs.ndim - 1))
    cosine, sine = (jnp.expand_dims(part, heads) for part in turned)
    head, rest = jnp.split(inputs, [config.width], axis=-1)
    head = head.astype(cosine.dtype)
    if config.pairs == "half":
        first, second = jnp.split(head, 2, axis=-1)
    else:
        first, second = head[..., 0::2], head[..., 1::2]
    turned_pairs = (first * cosine - second * sine, second * cosine + first * sine)
    if config.pairs == "half":
        head = jnp.concatenate(turned_pairs, axis=-1)
    else:
        head = jnp.stack(turned_pairs, axis=-1).reshape(head.shape)
    return jnp.concatenate([head.astype(inputs.dtype), rest], axis=-1)
