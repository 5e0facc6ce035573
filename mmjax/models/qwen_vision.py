"""Qwen3-VL's vision tower, its mergers to the text width, and the positions of its tokens.

A row of a batch has P patch slots that hold its pictures (or frames of a clip) one after the other, each with a segment
number of its own, every 4 consecutive patches one 2x2 window; pixels are the flattened [C, frames per patch, p, p].
Window w of a row gives feature w.

Source: Qwen3-VL technical report, arXiv:2511.21631; DeepStack, arXiv:2406.04334.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mmjax.config import VisionConfig
from mmjax.data.batch import Batch
from mmjax.models.encoder import EncoderLayer
from mmjax.models.layers import LayerNorm, add_bias, at_least_float32, normal, parameter, project, use, zeros
from mmjax.models.rotary import Rotation
from mmjax.models.stack import part_of_stack, scan_stack, stacked
from mmjax.models.vision import interpolated_position


class QwenTower(nnx.Module):
    """Patches to hidden values of the last layer and of `deep_layers`."""

    def __init__(self, vision: VisionConfig, initializer_range: float, dtype: jax.typing.DTypeLike):
        initializer, width = normal(initializer_range), vision.width
        table_shape = (vision.table_rows, vision.table_columns, width)
        self.vision = vision
        self.patch_embedding = parameter(initializer, (vision.patch_values, width), (None, "model_weight"), dtype)
        self.patch_bias = zeros((width,), (None,), dtype)
        self.position_table = parameter(initializer, table_shape, (None, None, "model_weight"), dtype)
        self.layers = stacked(EncoderLayer(vision, initializer, dtype), vision.num_layers)

    def __call__(
        self, patches: jax.Array, segment_ids: jax.Array, position: jax.Array, grid: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """[b, P, values], [b, P], [b, P, 3], [b, P, 3] -> [b, P, width] and as many for each of `deep_layers`."""
        dtype = patches.dtype
        is_patch = (segment_ids > 0)[..., None]
        # Numbers in padding slots must not reach a sum, so even a NaN there does no harm.
        patches = jnp.where(is_patch, patches, 0)
        position, grid = jnp.where(is_patch, position, 0), jnp.where(is_patch, grid, 1)
        hidden = add_bias(project("bpi,id->bpd", patches, self.patch_embedding), self.patch_bias)
        table = use(self.position_table, at_least_float32(dtype))
        hidden += interpolated_position(table, position, grid, corners="aligned").astype(dtype)
        rotation = row_column_rotation(position, self.vision.head_width, self.vision.rope_base, dtype)

        def run_layer(layer: EncoderLayer, hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(hidden, segment_ids, rotation), None

        depth, deep = 0, []
        for end in (*(layer + 1 for layer in self.vision.deep_layers), self.vision.num_layers):
            if end > depth:
                hidden, _ = scan_stack(part_of_stack(self.layers, depth, end), hidden, run_layer)
            depth = end
            deep.append(hidden)
        return hidden, tuple(deep[:-1])


def row_column_rotation(position: jax.Array, head_width: int, base: float, dtype: jax.typing.DTypeLike) -> Rotation:
    """Rotation [b, P, K/2] whose first K/4 pairs turn with the row, the others with the column: base^(-4i/K) a step."""
    wide = at_least_float32(dtype)
    frequencies = base ** (-4 * jnp.arange(head_width // 4, dtype=wide) / head_width)
    angles = position[..., 1:, None].astype(wide) * frequencies[None, None, None]
    angles = angles.reshape(*position.shape[:2], head_width // 2)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


class QwenMerger(nnx.Module):
    """2x2 windows to features of the text width, and those of the deep layers by mergers of their own."""

    def __init__(self, vision: VisionConfig, model_width: int, initializer_range: float, dtype: jax.typing.DTypeLike):
        make = partial(WindowMerger, vision, model_width, initializer_range, dtype)
        self.merger = make(norm="patches")
        self.deep = stacked(make(norm="windows"), len(vision.deep_layers)) if vision.deep_layers else None

    def __call__(self, hidden: jax.Array, deep: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        """[b, P, width] and those of the deep layers -> features [b, P/4, D] and [deep layers, b, P/4, D]."""
        features = self.merger(hidden)
        if self.deep is None:
            return features, None
        merge = lambda merger, carry, hidden: (carry, merger(hidden))  # noqa: E731
        return features, scan_stack(self.deep, None, merge, jnp.stack(deep))[1]


class WindowMerger(nnx.Module):
    """4 consecutive patches joined, normalised before or after, then linear, GELU (erf), linear."""

    def __init__(
        self,
        vision: VisionConfig,
        model_width: int,
        initializer_range: float,
        dtype: jax.typing.DTypeLike,
        *,
        norm: Literal["patches", "windows"],
    ):
        initializer, merged = normal(initializer_range), vision.merged_width
        self.norms_windows = norm == "windows"
        self.norm = LayerNorm(merged if norm == "windows" else vision.width, vision.projector_norm_epsilon, dtype)
        self.up = parameter(initializer, (merged, merged), ("model_weight", None), dtype)
        self.up_bias = zeros((merged,), (None,), dtype)
        self.down = parameter(initializer, (merged, model_width), ("model_weight", None), dtype)
        self.down_bias = zeros((model_width,), (None,), dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[b, P, width] -> [b, P/4, D]."""
        hidden = hidden if self.norms_windows else self.norm(hidden)
        windows = hidden.reshape(hidden.shape[0], hidden.shape[1] // 4, -1)
        windows = self.norm(windows) if self.norms_windows else windows
        bent = jax.nn.gelu(add_bias(project("bpm,mn->bpn", windows, self.up), self.up_bias), approximate=False)
        return add_bias(project("bpn,nd->bpd", bent, self.down), self.down_bias)


def token_positions(batch: Batch) -> jax.Array:
    """Frame, row and column of each token, [3, b, s] int32, counted from 0 in each document.

    A text token is one further than what lies before it, in all three. A picture's features share its frame and have
    the row and column of their window, from where the picture begins; it is as long as its longer side, in windows.

    Source: interleaved MRoPE, Qwen3-VL technical report, section 2.1.
    """
    is_image = batch.feature_index >= 0
    first_patch = jnp.where(is_image, 4 * batch.feature_index, 0)[..., None]
    place, sides = (
        jnp.take_along_axis(field, first_patch, axis=1)[..., 1:] // 2
        for field in (batch.patch_position, batch.patch_grid)
    )
    place = jnp.where(is_image[..., None], place, 0)
    is_last = is_image & jnp.all(place == sides - 1, axis=-1)
    length = jnp.where(is_image, jnp.where(is_last, jnp.max(sides, axis=-1), 0), 1)
    before = jnp.cumsum(length, axis=1) - length
    # What lies before the first token of the document; it never falls along a row.
    start = lax.cummax(jnp.where(batch.positions == 0, before, 0), axis=1)
    frame = before - start
    return jnp.stack([frame, frame + place[..., 0], frame + place[..., 1]])
