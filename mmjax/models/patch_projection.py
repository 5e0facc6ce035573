"""Fuyu's reading of pictures: every patch projected straight to the text width.

A row of a batch has P slots that hold the patches of its pictures, row by row; pixels are the flattened [p, p, C]. Slot
p gives feature p. The newlines between rows of patches are tokens of the text.

Source: Fuyu-8B, Adept, 2023.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mmjax.config import VisionConfig
from mmjax.models.layers import add_bias, normal, parameter, project, zeros


class PatchProjection(nnx.Module):
    """One linear layer with a bias."""

    def __init__(self, vision: VisionConfig, model_width: int, initializer_range: float, dtype: jax.typing.DTypeLike):
        shape = (vision.patch_values, model_width)
        self.patch_embedding = parameter(normal(initializer_range), shape, (None, "model_weight"), dtype)
        self.patch_bias = zeros((model_width,), (None,), dtype)

    def __call__(self, patches: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[b, P, p*p*C], [b, P] -> [b, P, D] in the dtype of `patches`."""
        # Numbers in padding slots must not reach a sum, so even a NaN there does no harm.
        patches = jnp.where((segment_ids > 0)[..., None], patches, 0)
        return add_bias(project("bpi,id->bpd", patches, self.patch_embedding), self.patch_bias)
