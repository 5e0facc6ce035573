"""Gradients by path: kept in a file for other cases, and how far two sets of them are apart."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Of a larger array every n-th number is kept.
LARGEST = 1 << 22
FLOAT32_BOUND = 1e-4
"""Largest difference of a mesh's float32 gradients from one GPU's, over the largest value of each leaf."""
STEP_BOUND = 5e-2
"""Of bfloat16 gradients, where they are usually nearer: norm of the difference over the norm of each leaf. Sums in
another order round otherwise, and a token whose experts' scores are close may choose another one."""


def bound_of(usual: float) -> float:
    """Of a mesh's bfloat16 gradients from one GPU's, which are `usual` from float32, of each leaf's norm.

    Two such roundings may be twice as far apart, and what `tensor` splits is rounded once more before it is added up.
    A step in another way is so compared with its base, which is `usual` from itself after one more rounding.
    """
    return max(STEP_BOUND, 3 * usual)


@dataclass(frozen=True)
class Difference:
    """Of one set of gradients from another, over the leaves."""

    largest: float
    """Largest difference over the largest value of the leaf, of the worst leaf."""
    norm: float
    """Norm of the difference over the norm of the leaf, of the worst leaf."""
    leaf: str
    """The worst one by `norm`."""
    num_nonfinite: int
    """Numbers that are not finite."""


def on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """As float32, or wider if they are; of large arrays a part."""
    found = {}
    for path, array in arrays.items():
        values = np.asarray(jax.device_get(array))
        values = values.reshape(-1)[:: -(-values.size // LARGEST)] if values.size > LARGEST else values
        found[path] = values.astype(np.promote_types(values.dtype, np.float32))
    return found


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    np.savez(path, **arrays)


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def distances(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """By path: norm of the difference over the norm of `theirs`; infinite where ours is not finite."""
    return {path: _relative(np.linalg.norm, ours[path], theirs[path]) for path in theirs}


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> Difference:
    """
    Raises:
      ValueError: other paths.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"gradients of other arrays: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    norms = distances(ours, theirs)
    largest = (_relative(lambda values: np.abs(values).max(initial=0), ours[path], theirs[path]) for path in theirs)
    leaf = max(norms, key=norms.__getitem__)
    num_nonfinite = sum(int((~np.isfinite(values)).sum()) for values in ours.values())
    return Difference(max(largest), norms[leaf], leaf, num_nonfinite)


def beside(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], usual: Mapping[str, float]
) -> dict[str, Any]:
    """`difference`, but `norm` and `leaf` are of the leaf that is worst beside its bound, with its `usual`."""
    apart = distances(ours, theirs)
    worst = max(apart, key=lambda path: apart[path] / bound_of(usual[path]))
    found = dataclasses.asdict(difference(ours, theirs))
    return found | {"norm": apart[worst], "usual": usual[worst], "leaf": worst}


def _relative(size: Any, ours: np.ndarray, theirs: np.ndarray) -> float:
    if not np.isfinite(ours).all():
        return float("inf")
    # Where theirs is nothing but zeros, so must ours be.
    scale = float(size(theirs.astype(np.float64)))
    found = float(size(ours.astype(np.float64) - theirs.astype(np.float64)))
    return found / scale if scale else (0.0 if not found else float("inf"))
