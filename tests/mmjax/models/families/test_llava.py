"""LLaVA and LLaVA-NeXT against transformers, in float64: logits, loss, all gradients, names; packed and padded rows."""

import dataclasses

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.models.families import llava, llava_next
from mmjax.presets.llava import best_tiling, llava_1_5_7b, llava_next_vicuna_7b, tile_slots
from tests.mmjax.models.families.picture_samples import Sample, batch_of, join

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IMAGE = 39
SIDE, PATCH = 12, 4
PATCHES = (SIDE // PATCH) ** 2
VALUES = 3 * PATCH**2
TEXT = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
# (height, width) that the processor may fit a picture to.
SIZES = [[12, 24], [24, 12], [24, 24], [12, 36]]
NEXT = {"image_grid_pinpoints": SIZES}


def widened(in_float64):
    from transformers import modeling_rope_utils
    from transformers.models.clip import modeling_clip
    from transformers.models.llama import modeling_llama

    in_float64(modeling_clip, modeling_llama, modeling_rope_utils)


def config_of(kind, **settings):
    return kind(text_config=dict(TEXT), vision_config=dict(VISION), image_token_index=IMAGE, **settings)


def slots_of(tiles):
    """Slots of tiles [n, 3, SIDE, SIDE]: before each one's patches one with arbitrary numbers, for its class token."""
    cells = tiles.reshape(len(tiles), 3, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    patches = cells.transpose(0, 2, 4, 1, 3, 5).reshape(len(tiles), PATCHES, VALUES)
    patches = np.concatenate([np.full((len(tiles), 1, VALUES), 3.0), patches], axis=1).reshape(-1, VALUES)
    places = [(0, -1, -1)] + [(0, row, column) for row in range(SIDE // PATCH) for column in range(SIDE // PATCH)]
    return {
        "patches": patches,
        "segment": np.repeat(np.arange(1, len(tiles) + 1), 1 + PATCHES),
        "position": np.tile(np.asarray(places, np.int32), (len(tiles), 1)),
        "grid": np.tile(np.asarray([(1, SIDE // PATCH, SIDE // PATCH)], np.int32), (len(tiles) * (1 + PATCHES), 1)),
    }


def picture(pixels, *, keep_class):
    feature = np.arange(0 if keep_class else 1, 1 + PATCHES)
    return Sample(tokens=np.full(len(feature), IMAGE, np.int32), feature=feature, **slots_of(pixels[None]))


def tiled_picture(tiles, size, vision):
    feature = tile_slots(*size, vision, best_tiling(*size, vision.tilings, SIDE))
    return Sample(tokens=np.full(len(feature), IMAGE, np.int32), feature=feature, **slots_of(tiles))


def batches(samples, *, row_tokens, row_patches):
    options = {"values": VALUES, "patches_per_feature": 1}
    alone = batch_of([[s] for s in samples], row_tokens=row_tokens, row_patches=row_patches, **options)
    # Of the same shapes, so that one program does for both.
    packed = batch_of([samples[1:], samples[:1], []], row_tokens=row_tokens, row_patches=row_patches, **options)
    starts = np.cumsum([0] + [len(sample.tokens) for sample in samples[1:]])
    return alone, packed, [(1, 0), *((0, int(start)) for start in starts[:-1])]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": [-1, 0, -2],
            "multimodal_projector_bias": False,
        },
    ],
    ids=["released", "class token, three depths, no bias"],
)
def test_llava_equals_transformers(settings, in_float64, randomise, picture_parity):
    widened(in_float64)
    theirs = randomise(transformers.LlavaForConditionalGeneration(config_of(transformers.LlavaConfig, **settings)))
    alone, inputs, packed, places = llava_case(keep_class="vision_feature_layer" in settings)
    picture_parity(llava, theirs, alone, inputs, packed, places)


def test_llava_next_equals_transformers(in_float64, randomise, picture_parity):
    widened(in_float64)
    config = config_of(transformers.LlavaNextConfig, **NEXT)
    theirs = randomise(transformers.LlavaNextForConditionalGeneration(config))
    alone, inputs, packed, places = llava_next_case(config)
    picture_parity(llava_next, theirs, alone, inputs, packed, places)


def llava_case(*, keep_class):
    """(batch of a sample a row, what transformers gets beside its tokens, the samples packed, where they lie)."""
    random = np.random.default_rng(0)
    pixels = random.normal(size=(4, 3, SIDE, SIDE))
    pictures = [picture(p, keep_class=keep_class) for p in pixels]
    samples = [
        join([[5, 7, 9], pictures[0], [11, 4], pictures[1], pictures[2], [6, 8]], values=VALUES),
        join([[3, 12, 17, 5, 6]], values=VALUES),
        join([pictures[3], [9, 13, 14, 15]], values=VALUES),
    ]
    alone, packed, places = batches(samples, row_tokens=42, row_patches=40)
    return alone, {"pixel_values": torch.tensor(pixels)}, packed, places


def llava_next_case(config):
    vision = llava_next.read_config(config.to_dict()).vision
    # Wide, tall and square ones; padding above and below, left and right, and none.
    sizes = [(20, 31), (40, 9), (30, 30), (7, 50)]
    num_tiles = [1 + np.prod(best_tiling(*size, vision.tilings, SIDE)) for size in sizes]
    assert num_tiles == [5, 3, 5, 4]
    random = np.random.default_rng(0)
    tiles = [random.normal(size=(number, 3, SIDE, SIDE)) for number in num_tiles]
    pictures = [tiled_picture(*pair, vision) for pair in zip(tiles, sizes, strict=True)]
    samples = [
        join([[5, 7], pictures[0], [11], pictures[1], pictures[2], [6, 8]], values=VALUES),
        join([[3, 12, 17, 5, 6]], values=VALUES),
        join([pictures[3], [9, 13, 14, 15]], values=VALUES),
    ]
    alone, packed, places = batches(samples, row_tokens=130, row_patches=132)
    padded = np.zeros((4, 5, 3, SIDE, SIDE))
    for number, one in enumerate(tiles):
        padded[number, : len(one)] = one
    return alone, {"pixel_values": torch.tensor(padded), "image_sizes": torch.tensor(sizes)}, packed, places


def test_a_released_config_that_is_silent_means_a_llama_7b_and_a_large_clip():
    released = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": {}}
    model = llava.read_config(released)
    assert (model.width, model.num_layers, model.moe.dense_width) == (4096, 32, 11008)
    assert (model.vision.num_layers, model.vision.feature_depths, model.vision.table_rows) == (24, (23,), 24)


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": {"model_type": "gemma"}},
        {"text_config": {"model_type": "mistral", "sliding_window": 4096}},
        {"vision_config": {"model_type": "siglip_vision_model"}},
        {"vision_feature_layer": -40},
        {"new_field": 1},
        {"vision_config": {"new_field": 1}},
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused(change):
    with pytest.raises(ConfigurationError):
        llava.read_config({"model_type": "llava", "text_config": {}, "vision_config": {}} | change)


def test_a_tower_with_class_tokens_cannot_be_tiled():
    with pytest.raises(ConfigurationError, match="vision_feature_select_strategy"):
        llava_next.read_config({"vision_feature_select_strategy": "full", "text_config": {}, "vision_config": {}})


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("vision_tower.vision_model.pre_layrnorm.weight", "vision_tower.pre_layrnorm.weight"),
        ("model.vision_tower.vision_model.pre_layrnorm.weight", "vision_tower.pre_layrnorm.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("model.image_newline", "image_newline"),
        ("language_model.model.norm.weight", "language_model.model.norm.weight"),
    ],
)
def test_files_of_other_versions_name_the_same_tensors(name, canonical):
    assert llava_next.canonical_name(name) == llava.canonical_name(name) == canonical


def test_the_preset_is_what_a_released_config_says():
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    clip = {"model_type": "clip_vision_model", "projection_dim": 768, "vocab_size": 32000}
    released = {"text_config": text, "vision_config": clip, "ignore_index": -100, "image_token_index": 32000}
    in_bfloat16 = {"parameter_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    assert dataclasses.replace(llava.read_config(released), **in_bfloat16) == llava_1_5_7b()
    next_one = llava_next.read_config(released | {"use_image_newline_parameter": True})
    assert dataclasses.replace(next_one, **in_bfloat16) == llava_next_vicuna_7b()
