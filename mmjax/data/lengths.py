"""Streams of frames or values brought to a length: padded, cut, resampled or averaged, with what of it is real."""

import math

import numpy as np

from mmjax.config import LengthConfig


def fitted_length(length: int, rule: LengthConfig) -> tuple[int, int]:
    """(length, real values, which come first) of a stream of `length` values, at least 1, by the rule."""
    if not rule.length or length == rule.length:
        return length, length
    if length > rule.length:
        return rule.length, rule.length
    match rule.shorter:
        case "keep":
            return length, length
        case "pad":
            return rule.length, length
        case "bilinear":
            return rule.length, min(rule.length, math.floor(length * rule.largest_stretch))


def fit_length(values: np.ndarray, rule: LengthConfig) -> tuple[np.ndarray, np.ndarray]:
    """`values` [n, ...] -> (float32 [m, ...], bool [m]: which of them are real, not padding).

        longer:  cut to m;  means of m windows [floor(i n / m), ceil((i + 1) n / m));  or bilinear
        shorter: kept;  padded at the end to m;  or bilinear to at most `largest_stretch` n, then padded to m

    Bilinear in time: value i is read at (i + 1/2) n / m - 1/2, between its two neighbours, and at the ends at the end.
    """
    length, num_real = fitted_length(len(values), rule)
    values = values.astype(np.float32)
    if len(values) > length and rule.longer == "truncate":
        real = values[:length]
    elif len(values) > length and rule.longer == "mean":
        real = _means(values, length)
    elif num_real != len(values):
        real = _bilinear(values, num_real)
    else:
        real = values
    padded = np.full((length, *values.shape[1:]), rule.pad_value, np.float32)
    padded[:num_real] = real
    return padded, np.arange(length) < num_real


def _means(values: np.ndarray, length: int) -> np.ndarray:
    starts = [number * len(values) // length for number in range(length)]
    stops = [-(-(number + 1) * len(values) // length) for number in range(length)]
    return np.stack([values[start:stop].mean(axis=0) for start, stop in zip(starts, stops, strict=True)])


def _bilinear(values: np.ndarray, length: int) -> np.ndarray:
    places = np.clip((np.arange(length) + 0.5) * (len(values) / length) - 0.5, 0, len(values) - 1)
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, len(values) - 1)
    share = (places - below).astype(np.float32).reshape(-1, *(1,) * (values.ndim - 1))
    return values[below] + (values[above] - values[below]) * share
