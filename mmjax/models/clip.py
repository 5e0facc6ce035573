"""CLIP's vision tower and LLaVA's projector to the text width.

A row of a batch has P slots that hold its pictures (or tiles) one after the other, each of them as

    one slot for its class token: position (0, -1, -1), whatever pixels
    its patches, row by row: position (0, row, column), the flattened pixels [C, p, p]

with a segment number of its own. Every slot gives the feature of its own number; feature P is the learned newline.

Source: Learning Transferable Visual Models, arXiv:2103.00020; LLaVA-1.5, arXiv:2310.03744; LLaVA-NeXT, 2024.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mmjax.config import VisionConfig
from mmjax.models.encoder import EncoderLayer
from mmjax.models.layers import LayerNorm, add_bias, at_least_float32, normal, parameter, project, use, zeros
from mmjax.models.stack import part_of_stack, scan_stack, stacked


class ClipTower(nnx.Module):
    """Patches to features of some of its depths; all pictures have the size of the position table.

    Layers after the deepest of them and the final norm are held, as releases do, and not run.
    """

    def __init__(self, vision: VisionConfig, initializer_range: float, dtype: jax.typing.DTypeLike):
        initializer, width = normal(initializer_range), vision.width
        num_positions = 1 + vision.table_rows * vision.table_columns
        self.vision = vision
        self.class_embedding = parameter(normal(width**-0.5), (width,), (None,), dtype)
        self.patch_embedding = parameter(initializer, (vision.patch_values, width), (None, "model_weight"), dtype)
        self.position_table = parameter(initializer, (num_positions, width), (None, "model_weight"), dtype)
        self.input_norm = LayerNorm(width, vision.norm_epsilon, dtype)
        num_used = max(vision.feature_depths)
        self.layers = stacked(EncoderLayer(vision, initializer, dtype), vision.num_layers, num_used=num_used)
        self.final_norm = LayerNorm(width, vision.norm_epsilon, dtype)

    def __call__(self, patches: jax.Array, segment_ids: jax.Array, position: jax.Array) -> jax.Array:
        """[b, P, C*p*p], [b, P], [b, P, 3] -> [b, P, depths * width] in the dtype of `patches`."""
        is_slot = (segment_ids > 0)[..., None]
        row, column = (jnp.where(is_slot, position, 0)[..., axis] for axis in (1, 2))
        is_class = row < 0
        # Numbers in padding slots must not reach a sum, so even a NaN there does no harm.
        embedded = project("bpi,id->bpd", jnp.where(is_slot & ~is_class[..., None], patches, 0), self.patch_embedding)
        # In at least float32, so that the gradients of all pictures add up unrounded.
        wide = at_least_float32(patches.dtype)
        class_embedding = jnp.broadcast_to(use(self.class_embedding, wide), embedded.shape).astype(patches.dtype)
        embedded += jnp.where(is_class[..., None], class_embedding, 0)
        entry = jnp.where(is_class, 0, 1 + row * self.vision.table_columns + column)
        embedded += jnp.take(use(self.position_table, wide), entry, axis=0).astype(patches.dtype)

        def run_layer(layer: EncoderLayer, hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(hidden, segment_ids), None

        hidden, depth, found = self.input_norm(embedded), 0, {}
        for wanted in sorted(set(self.vision.feature_depths)):
            if wanted > depth:
                hidden, _ = scan_stack(part_of_stack(self.layers, depth, wanted), hidden, run_layer)
            depth, found[wanted] = wanted, hidden
        return jnp.concatenate([found[wanted] for wanted in self.vision.feature_depths], axis=-1)


class ClipProjector(nnx.Module):
    """Features to the text width: linear, GELU (erf), linear; and the learned newline."""

    def __init__(self, vision: VisionConfig, model_width: int, initializer_range: float, dtype: jax.typing.DTypeLike):
        initializer = normal(initializer_range)
        joined = len(vision.feature_depths) * vision.width
        self.up = parameter(initializer, (joined, model_width), ("model_weight", None), dtype)
        self.down = parameter(initializer, (model_width, model_width), ("model_weight", None), dtype)
        self.up_bias = zeros((model_width,), (None,), dtype) if vision.projector_bias else None
        self.down_bias = zeros((model_width,), (None,), dtype) if vision.projector_bias else None
        if vision.newline == "learned":
            self.newline = parameter(normal(model_width**-0.5), (model_width,), (None,), dtype)
        else:
            self.newline = None

    def __call__(self, features: jax.Array) -> jax.Array:
        """[b, P, depths * width] -> [b, P, D], or [b, P + 1, D] in at least float32 with the newline at the end."""
        hidden = project("bpi,id->bpd", features, self.up)
        hidden = jax.nn.gelu(hidden if self.up_bias is None else add_bias(hidden, self.up_bias), approximate=False)
        hidden = project("bpi,id->bpd", hidden, self.down)
        hidden = hidden if self.down_bias is None else add_bias(hidden, self.down_bias)
        if self.newline is None:
            return hidden
        # So that the gradients of all the tokens that it stands for add up unrounded.
        wide = at_least_float32(hidden.dtype)
        newline = jnp.broadcast_to(use(self.newline, wide), (hidden.shape[0], 1, hidden.shape[2]))
        return jnp.concatenate([hidden.astype(wide), newline], axis=1)
