"""MoonViT-V2 vision tower at native resolution, with clips, and the projector to the text width.

A row of a batch has P patch slots that hold its images one after the other, every 4 consecutive patches one 2x2 window:

    patches [b, P, C*p*p]     pixels of a patch, the flattened [C, p, p]
    segment_ids [b, P]        int32; 0 = padding, images (or clips) of the row 1, 2, ...
    position [b, P, 3]        int32; frame, row, column of the patch in its image
    grid [b, P, 3]            int32; frames, rows, columns of its image
    feature [b, P/4]          int32; feature slot of the row that a window goes to, one for all frames; -1 = padding

Source: Kimi K3 technical report, arXiv:2607.24653, section 2.4.
"""

from functools import partial, reduce
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mmjax.config import VisionConfig
from mmjax.models import layers
from mmjax.models.layers import Initializer, at_least_float32, normal, parameter, project, use
from mmjax.models.stack import scan_stack, stacked
from pallas_kernels.sparse_attention.api import attention

# Base of the frequencies of the fixed time table; released configurations do not name it.
TIME_BASE = 10000.0


class VisionTower(nnx.Module):
    """Patches to merged features. Runs whole on every device of the tensor axis."""

    def __init__(self, vision: VisionConfig, initializer_range: float, dtype: jax.typing.DTypeLike):
        initializer = normal(initializer_range)
        patch_values = vision.channels * vision.patch_pixels**2
        table_shape = (vision.table_rows, vision.table_columns, vision.width)
        self.vision = vision
        self.patch_embedding = parameter(initializer, (patch_values, vision.width), (None, "model_weight"), dtype)
        self.position_table = parameter(normal(1.0), table_shape, (None, None, "model_weight"), dtype)
        self.layers = stacked(VisionLayer(vision, initializer, dtype), vision.num_layers)
        self.final_norm = layers.ones(vision.width, dtype)

    def __call__(
        self, patches: jax.Array, segment_ids: jax.Array, position: jax.Array, grid: jax.Array, feature: jax.Array
    ) -> jax.Array:
        """Features [b, P/4, 4 * width] in the dtype of `patches`; feature f of a row in slot f, unused slots zero.

        The 4 patches of a window are joined in the order they arrive; features are means over frames.
        """
        dtype = patches.dtype
        is_patch = (segment_ids > 0)[..., None]
        # Numbers in padding slots must not reach a sum, so even a NaN there does no harm.
        patches = jnp.where(is_patch, patches, 0)
        position, grid = jnp.where(is_patch, position, 0), jnp.where(is_patch, grid, 1)
        hidden = project("bpi,id->bpd", patches, self.patch_embedding)
        hidden += interpolated_position(use(self.position_table, at_least_float32(dtype)), position, grid).astype(dtype)
        hidden += time_position(position, grid, self.vision.width, dtype)
        rotation = rotary_angles(position, self.vision.head_width, self.vision.rope_base, dtype)

        def run_layer(layer: VisionLayer, hidden: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(hidden, segment_ids, rotation), None

        hidden, _ = scan_stack(self.layers, hidden, run_layer)
        hidden = wide_rms_norm(hidden, self.final_norm, self.vision.norm_epsilon)
        return merge_windows(hidden, grid, feature)


class VisionLayer(nnx.Module):
    """Attention inside each image, then an MLP; both pre-normed, no biases."""

    def __init__(self, vision: VisionConfig, initializer: Initializer, dtype: jax.typing.DTypeLike):
        make = partial(parameter, initializer, dtype=dtype)
        heads = (vision.num_heads, vision.head_width)
        self.epsilon = vision.norm_epsilon
        self.attention_norm = layers.ones(vision.width, dtype)
        self.query_key_value = make((vision.width, 3, *heads), ("model_weight", None, None, None))
        self.output = make((*heads, vision.width), (None, None, "model_weight"))
        self.mlp_norm = layers.ones(vision.width, dtype)
        self.up = make((vision.width, vision.hidden_width), ("model_weight", None))
        self.down = make((vision.hidden_width, vision.width), (None, "model_weight"))

    def __call__(self, hidden: jax.Array, segment_ids: jax.Array, rotation: jax.Array) -> jax.Array:
        """`hidden` [b, P, D] -> the same; `rotation` [b, P, K/2] angles."""
        dtype = hidden.dtype
        normed = wide_rms_norm(hidden, self.attention_norm, self.epsilon)
        query, key, value = project("bpd,dchk->cbphk", normed, self.query_key_value)
        mixed = attention(
            rotate_pairs(query, rotation),
            rotate_pairs(key, rotation),
            value,
            segment_ids,
            scale=query.shape[-1] ** -0.5,
            is_causal=False,
        )
        hidden += project("bphk,hkd->bpd", mixed.astype(dtype), self.output)
        normed = wide_rms_norm(hidden, self.mlp_norm, self.epsilon)
        bent = jax.nn.gelu(project("bpd,df->bpf", normed, self.up), approximate=True)
        return hidden + project("bpf,fd->bpd", bent, self.down)


class Projector(nnx.Module):
    """Merged features [b, P/4, 4 * width] to the text width: linear, GELU (erf), linear, RMSNorm; no biases."""

    def __init__(self, vision: VisionConfig, model_width: int, dtype: jax.typing.DTypeLike):
        merged = vision.merged_width
        deviation = (2 / merged) ** 0.5
        # Cut at +-2 itself, as torch's `trunc_normal_` does, not at two standard deviations.
        initializer = jax.nn.initializers.truncated_normal(deviation, lower=-2 / deviation, upper=2 / deviation)
        self.epsilon = vision.projector_norm_epsilon
        self.up = parameter(initializer, (merged, merged), ("model_weight", None), dtype)
        self.down = parameter(initializer, (merged, model_width), ("model_weight", None), dtype)
        self.norm = layers.ones(model_width, dtype)

    def __call__(self, features: jax.Array) -> jax.Array:
        """`features` [b, P/4, 4 * width] -> [b, P/4, D] of the same dtype; zero stays zero."""

        bent = jax.nn.gelu(project("bpm,mn->bpn", features, self.up), approximate=False)
        return wide_rms_norm(project("bpn,nd->bpd", bent, self.down), self.norm, self.epsilon)


def wide_rms_norm(inputs: jax.Array, scale: nnx.Variable, epsilon: float) -> jax.Array:
    """RMSNorm over the last axis; unlike the text's, the scale multiplies in at least float32, before the cast back."""
    wide = at_least_float32(inputs.dtype)
    return layers.rms_norm(inputs.astype(wide), use(scale, wide), epsilon).astype(inputs.dtype)


def interpolated_position(
    table: jax.Array, position: jax.Array, grid: jax.Array, *, corners: Literal["half_pixel", "aligned"] = "half_pixel"
) -> jax.Array:
    """The learned `table` [rows, columns, D] resized to each patch's image, at that patch: [b, P, D].

        half_pixel: source = clip((index + 1/2) * table_size / image_size - 1/2, 0, table_size - 1)
        aligned:    source = index * (table_size - 1) / max(image_size - 1, 1)

    and the four entries around it mixed linearly, in at least float32, which the table should be in, so that gradients
    of all images add up unrounded. Bilinear, no antialiasing, edges clamped: an image of the table's size gets the
    table itself. Equal to torch's `interpolate(mode="bilinear")` with
    `align_corners` False and True.
    """
    wide = at_least_float32(table.dtype)

    def neighbours(axis: int) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """(index, share) of the entry before and after a patch, along rows (0) or columns (1)."""
        size = table.shape[axis]
        index, image_size = position[..., axis + 1].astype(wide), grid[..., axis + 1].astype(wide)
        if corners == "half_pixel":
            source = jnp.clip((index + 0.5) * (size / image_size) - 0.5, 0, size - 1)
        else:
            source = index * ((size - 1) / jnp.maximum(image_size - 1, 1))
        before = jnp.floor(source)
        after_share = source - before
        before = before.astype(jnp.int32)
        return (before, 1 - after_share), (jnp.minimum(before + 1, size - 1), after_share)

    weighted = [
        (row_share * column_share)[..., None] * table[row, column].astype(wide)
        for row, row_share in neighbours(0)
        for column, column_share in neighbours(1)
    ]
    return reduce(jnp.add, weighted).astype(table.dtype)


def time_position(position: jax.Array, grid: jax.Array, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[b, P, width]: sines, then cosines, of frame * TIME_BASE^(-2i/width); zero for a single frame."""
    wide = at_least_float32(dtype)
    frequencies = TIME_BASE ** (-2 * jnp.arange(width // 2, dtype=wide) / width)
    angles = position[..., 0, None].astype(wide) * frequencies[None, None, :]
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.where(grid[..., 0, None] > 1, table, 0).astype(dtype)


def rotary_angles(position: jax.Array, head_width: int, base: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Angles [b, P, K/2] of the 2-D rotary embedding: pair 2i turns with the column, pair 2i + 1 with the row.

    Both by base^(-4i/K) per step. In at least float32.
    """
    wide = at_least_float32(dtype)
    frequencies = base ** (-4 * jnp.arange(head_width // 4, dtype=wide) / head_width)
    column_row = position[..., 2:0:-1].astype(wide)
    angles = column_row[:, :, None, :] * frequencies[None, None, :, None]
    return angles.reshape(*position.shape[:2], head_width // 2)


def rotate_pairs(inputs: jax.Array, angles: jax.Array) -> jax.Array:
    """`inputs` [b, P, H, K] with its neighbouring pairs (0, 1), (2, 3), ... turned by `angles` [b, P, K/2]."""
    pairs = inputs.astype(angles.dtype).reshape(*inputs.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cosine, sine = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    turned = jnp.stack([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
    return turned.reshape(inputs.shape).astype(inputs.dtype)


def merge_windows(hidden: jax.Array, grid: jax.Array, feature: jax.Array) -> jax.Array:
    """Join every 4 consecutive patches of `hidden` [b, P, D], then average each feature's frames: [b, P/4, 4 D]."""
    num_windows = feature.shape[1]
    windows = hidden.reshape(*feature.shape, -1).astype(at_least_float32(hidden.dtype))
    windows = windows / grid[:, ::4, :1].astype(windows.dtype)
    # A slot past the end is dropped; a negative one would count from the end.
    slots = jnp.where(feature < 0, num_windows, feature)
    add = jax.vmap(partial(jax.ops.segment_sum, num_segments=num_windows))
    return add(windows, slots).astype(hidden.dtype)
