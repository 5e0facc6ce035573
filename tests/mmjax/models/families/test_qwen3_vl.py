"""Qwen3-VL, dense and with experts, against transformers in float64: logits, loss, all gradients, names, positions."""

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.models.families import qwen3_vl, qwen3_vl_moe
from mmjax.models.families.released import from_released
from tests.mmjax.models.families.picture_samples import Sample, batch_of, join

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IMAGE, START, END = 36, 37, 38
PATCH = 2
VALUES = 3 * 2 * PATCH**2
TEXT = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 4,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 24,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 35, "vision_start_token_id": START, "vision_end_token_id": END}
MOE = {"num_experts": 13, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
# Rows and columns of patches: smaller and larger than the position table, square and not.
GRIDS = ((2, 6), (6, 4), (2, 2), (8, 2))


def picture(patches, rows, columns):
    windows = [(row, column) for row in range(0, rows, 2) for column in range(0, columns, 2)]
    places = [(0, row + i, column + j) for row, column in windows for i in (0, 1) for j in (0, 1)]
    return Sample(
        tokens=np.full(len(windows), IMAGE, np.int32),
        feature=np.arange(len(windows)),
        patches=patches,
        segment=np.ones(len(patches), np.int32),
        position=np.asarray(places, np.int32),
        grid=np.tile(np.asarray([(1, rows, columns)], np.int32), (len(patches), 1)),
    )


@pytest.fixture
def check(in_float64, randomise, picture_parity):
    def run(family, kind, config, module, **options):
        from transformers import modeling_rope_utils, vision_utils

        in_float64(module, modeling_rope_utils, vision_utils)
        # Made after that: frequencies are computed when a model is made.
        theirs = randomise(kind(config))
        return picture_parity(family, theirs, *qwen_case(), **options)

    return run


def qwen_case():
    """(batch of a sample a row, what transformers gets beside its tokens, the samples packed, where they lie)."""
    random = np.random.default_rng(0)
    patches = [random.normal(size=(rows * columns, VALUES)) for rows, columns in GRIDS]
    pictures = [picture(*pair) for pair in ((p, *grid) for p, grid in zip(patches, GRIDS, strict=True))]
    sizes = {"values": VALUES, "patches_per_feature": 4}
    samples = [
        join([[5, START], pictures[0], [END, 4, START], pictures[1], [END, START], pictures[2], [END, 8]], **sizes),
        join([[3, 12, 17, 5, 6]], **sizes),
        join([[9, START], pictures[3], [END, 13, 14, 15]], **sizes),
    ]
    alone = batch_of([[sample] for sample in samples], row_tokens=24, row_patches=44, **sizes)
    packed = batch_of([samples[1:], samples[:1], []], row_tokens=24, row_patches=44, **sizes)
    inputs = {
        "pixel_values": torch.tensor(np.concatenate(patches)),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in GRIDS]),
        "mm_token_type_ids": torch.tensor((alone.feature_index >= 0).astype(np.int64)),
    }
    return alone, inputs, packed, [(1, 0), (0, 0), (0, 5)]


def test_qwen3_vl_equals_transformers(check):
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    config = transformers.Qwen3VLConfig(text_config=dict(TEXT), vision_config=dict(VISION), **TOKENS)
    model = check(qwen3_vl, transformers.Qwen3VLForConditionalGeneration, config, modeling_qwen3_vl)
    assert model.vision.deep_layers == (0, 2) and not model.tied_head


def in_vendors_layout(tensors):
    return {
        name: tensor.swapaxes(1, 2) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else tensor
        for name, tensor in tensors.items()
    }


def test_qwen3_vl_moe_equals_transformers(check):
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

    settings = {**TEXT, **MOE}
    config = transformers.Qwen3VLMoeConfig(
        text_config=settings, vision_config=dict(VISION), tie_word_embeddings=True, **TOKENS
    )
    config.text_config._experts_implementation = "eager"
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    model = check(qwen3_vl_moe, kind, config, modeling_qwen3_vl_moe, vendor=in_vendors_layout)
    assert model.moe.num_dense_layers == 1 and model.tied_head


def test_experts_are_read_in_either_order_of_their_axes(tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    config = transformers.Qwen3VLMoeConfig(text_config={**TEXT, **MOE}, vision_config=dict(VISION), **TOKENS)
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path)
    model = qwen3_vl_moe.read_config(config.to_dict())
    saved, expected = load_file(tmp_path / "model.safetensors"), list(qwen3_vl_moe.released_tensors(model))
    (one, _), (other, _) = (from_released(model, expected, tensors) for tensors in (saved, in_vendors_layout(saved)))
    assert all(np.array_equal(one[path], other[path]) for path in one)


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}, {}),
        ({"rope_parameters": {**TEXT["rope_parameters"], "mrope_interleaved": False}}, {}),
        ({}, {"deepstack_visual_indexes": [0, 9]}),
        ({}, {"num_position_embeddings": 24}),
        ({}, {"out_hidden_size": 23}),
        ({}, {"spatial_merge_size": 3}),
        ({"new_field": 1}, {}),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused(text, vision):
    config = transformers.Qwen3VLConfig(text_config=dict(TEXT), vision_config=dict(VISION), **TOKENS).to_dict()
    qwen3_vl.read_config(config)
    config["text_config"].update(text)
    config["vision_config"].update(vision)
    with pytest.raises(ConfigurationError):
        qwen3_vl.read_config(config)
