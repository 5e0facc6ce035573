"""Fuyu against transformers in float64: logits, loss, all gradients, names; older flat configs."""

import numpy as np
import pytest

from mmjax.errors import ConfigurationError
from mmjax.models.families import fuyu
from tests.mmjax.models.families.picture_samples import TEXT, Sample, batch_of, join

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IMAGE, NEWLINE = 39, 38
PATCH = 2
VALUES = 3 * PATCH**2
PERSIMMON = {
    "model_type": "persimmon",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
# Rows and columns of patches.
GRIDS = ((2, 3), (1, 4), (3, 1), (2, 2))


def config_of(**settings):
    return transformers.FuyuConfig(text_config=dict(PERSIMMON), patch_size=PATCH, image_token_id=IMAGE, **settings)


def picture(patches, rows, columns):
    number = np.pad(np.arange(rows * columns).reshape(rows, columns), ((0, 0), (0, 1)), constant_values=TEXT).reshape(
        -1
    )
    return Sample(
        tokens=np.where(number == TEXT, NEWLINE, IMAGE).astype(np.int32),
        feature=number,
        patches=patches,
        segment=np.ones(len(patches), np.int32),
        position=np.asarray([(0, row, column) for row in range(rows) for column in range(columns)], np.int32),
        grid=np.tile(np.asarray([(1, rows, columns)], np.int32), (len(patches), 1)),
    )


def test_fuyu_equals_transformers(in_float64, randomise, picture_parity):
    from transformers import modeling_rope_utils
    from transformers.models.persimmon import modeling_persimmon

    in_float64(modeling_persimmon, modeling_rope_utils)
    theirs = randomise(transformers.FuyuForCausalLM(config_of()))
    alone, inputs, packed, places = fuyu_case()
    picture_parity(fuyu, theirs, alone, inputs, packed, places)


def fuyu_case():
    """(batch of a sample a row, what transformers gets beside its tokens, the samples packed, where they lie)."""
    random = np.random.default_rng(0)
    patches = [random.normal(size=(rows * columns, VALUES)) for rows, columns in GRIDS]
    pictures = [picture(p, *grid) for p, grid in zip(patches, GRIDS, strict=True)]
    samples = [
        join([[5, 7], pictures[0], [11], pictures[1], pictures[2], [6, 8]], values=VALUES),
        join([[3, 12, 17, 5, 6]], values=VALUES),
        join([pictures[3], [9, 13, 14, 15]], values=VALUES),
    ]
    options = {"values": VALUES, "patches_per_feature": 1, "row_patches": 20}
    alone = batch_of([[sample] for sample in samples], row_tokens=28, **options)
    packed = batch_of([samples[1:], samples[:1], []], row_tokens=28, **options)
    # One row of patches for all samples: transformers puts them in the order of the placeholders.
    inputs = {"pixel_values": torch.tensor(np.concatenate(patches))[None]}
    return alone, inputs, packed, [(1, 0), (0, 0), (0, 5)]


def test_without_rotary_settings_the_base_is_that_of_transformers():
    config = config_of()
    theirs = transformers.FuyuConfig(text_config={n: v for n, v in PERSIMMON.items() if n != "rope_parameters"})
    released = config.to_dict()
    del released["text_config"]["rope_parameters"]
    rotary = fuyu.read_config(released).grouped_attention.rotary
    expected = theirs.text_config.rope_parameters
    assert (rotary.base, rotary.width / 8) == (expected["rope_theta"], expected["partial_rotary_factor"])


def test_the_fields_of_the_text_model_may_lie_among_those_of_the_whole():
    nested = fuyu.read_config(config_of().to_dict())
    flat = {name: value for name, value in PERSIMMON.items() if name not in ("model_type", "rope_parameters")}
    flat |= {"model_type": "fuyu", "patch_size": PATCH, "layer_norm_eps": 1e-5, "rope_theta": 500.0}
    assert fuyu.read_config(flat | {"partial_rotary_factor": 0.5, "image_size": 300, "num_channels": 3}) == nested


@pytest.mark.parametrize(
    "change", [{"new_field": 1}, {"hidden_act": "gelu"}, {"qk_layernorm": False}, {"attention_dropout": 0.1}], ids=str
)
def test_a_config_that_is_not_understood_is_refused(change):
    config = config_of().to_dict()
    with pytest.raises(ConfigurationError):
        fuyu.read_config(config | {"text_config": config["text_config"] | change})
    with pytest.raises(ConfigurationError):
        fuyu.read_config(config | {"new_field": 1})
