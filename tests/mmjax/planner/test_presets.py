"""Parameters and FLOPs of every preset, found rather than listed, are those counted from the model's own arrays."""

import importlib
import inspect
import math
import pkgutil
from collections import Counter

import pytest

import mmjax.presets
from mmjax.axes import holds_experts
from mmjax.config import ModelConfig
from mmjax.models.multimodal import define
from mmjax.planner.cost import WEIGHTLESS_PARTS, forward_flops, vision_forward_flops
from mmjax.planner.parameters import num_active_parameters, num_parameters

PRESETS = {
    name: preset
    for module in pkgutil.iter_modules(mmjax.presets.__path__)
    for name, preset in inspect.getmembers(importlib.import_module(f"mmjax.presets.{module.name}"), inspect.isfunction)
    if not name.startswith("_") and preset.__annotations__.get("return") is ModelConfig
}
# Arrays with several axes that multiply no input: tables (the head's apart), biases and factors by head.
NO_PRODUCTS = ("embedding", "position_table", "sinusoids", "decay_bias")


def sizes_of_model(model: ModelConfig) -> Counter:
    """Entries by (tower or decoder, last word of the name, whether it is one of routed experts, number of its axes)."""
    definition, found = define(model), Counter()
    for path, variable in (definition.parameters | definition.router_biases).items():
        array_axes = variable.get_metadata()["array_axes"]
        words = path.split(".")
        found[words[0], words[-1], holds_experts(array_axes), len(array_axes)] += math.prod(variable.get_value().shape)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_and_flops_of_a_preset_are_those_of_its_arrays(name):
    model = PRESETS[name]()
    sizes, moe = sizes_of_model(model), model.moe
    assert num_parameters(model) == sum(sizes.values())
    entries = active = 0.0
    for (tower, word, is_expert, num_axes), size in sizes.items():
        if tower != "decoder":
            continue
        used = size * moe.experts_per_token / moe.num_experts if is_expert else size
        is_table = word == "embedding" and not model.tied_head
        active += 0 if is_table or (word == "bias" and num_axes == 1 and _is_correction(model)) else used
        is_product = num_axes > 1 and word not in NO_PRODUCTS and not word.endswith(("norm", "bias"))
        # Streams of hyper-connections are mixed besides: counted by hand elsewhere.
        if word == "projection":
            continue
        entries += used if is_product or (word == "embedding" and model.tied_head) else 0
    row_tokens = 4096
    flops = forward_flops(model, row_tokens)
    indexer = model.full_attention.indexer
    has_indexer = model.full_attention_kind == "latent" and indexer.stage != "none" and model.full_attention_layers
    scores = len(model.full_attention_layers) * indexer.num_heads * indexer.head_width * (row_tokens + 1)
    of_weights = sum(value for part, value in flops.items() if part not in WEIGHTLESS_PARTS)
    assert of_weights - (scores if has_indexer else 0) == 2 * entries
    assert num_active_parameters(model) == active


def _is_correction(model: ModelConfig) -> bool:
    """Whether one-axis arrays called `bias` are correction biases of routers, not of LayerNorms."""
    return model.norm == "rms"


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset().vision.is_present])
def test_flops_of_a_preset_s_patches_are_those_of_its_tower(name):
    model = PRESETS[name]()
    vision, entries = model.vision, 0.0
    for (tower, word, _, num_axes), size in sizes_of_model(model).items():
        is_product = num_axes > 1 and word not in NO_PRODUCTS and not word.endswith(("norm", "bias", "newline"))
        if not is_product or tower not in ("vision", "projector"):
            continue
        # Of CLIP's layers those up to the deepest features run.
        is_layer = word not in ("patch_embedding",) and vision.kind == "clip" and tower == "vision"
        run = max(vision.feature_depths) / vision.num_layers if is_layer else 1.0
        entries += size * run / (vision.patches_per_feature if tower == "projector" else 1)
    num_patches = 1 + vision.table_rows * vision.table_columns if vision.kind == "clip" else 1024
    num_layers = max(vision.feature_depths) if vision.kind == "clip" else vision.num_layers
    layers = 0 if vision.kind == "fuyu" else num_layers
    scores = layers * 4 * vision.num_heads * vision.head_width * num_patches
    assert vision_forward_flops(model, num_patches) == pytest.approx(2 * entries + scores, rel=1e-12)
