"""Kimi-K3 and K3.1 with 0, 1 and 3 pictures a sample against a definition in torch that gives the recorded values.

Logits, loss, the gradient of the embeddings and of every released tensor, in float64; packed and padded rows.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.models.families import kimi_k3
from mmjax.models.families.released import from_released
from mmjax.models.multimodal import define
from tests.mmjax.models.families.picture_samples import Sample, batch_of, join
from tests.mmjax.models.families.test_kimi_k3 import GOLDEN, NUM_TOKENS, golden_batch, real_tokens

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.numpy").load_file

VALUES = 3 * 6 * 6
SIZES = {"values": VALUES, "patches_per_feature": 4}
START, END = 181, 182
# Rows and columns of patches: smaller and larger than the position table of 6 x 4 and equal to it; no square one.
GRIDS = ((2, 6), (6, 4), (8, 2), (4, 2))
INDEXER = {"num_heads": 2, "head_dim": 6}


def recorded(indexer: dict | None = None, *, is_whole: bool = True) -> tuple[dict, dict]:
    """(config.json, tensors) of the recorded model, with an indexer of random weights if its settings are given.

    Not whole it has three layers in two residual blocks: dense KDA, KDA, full attention (that of layer 7).
    """
    config = json.loads((GOLDEN / "config.json").read_text())
    tensors = load_file(GOLDEN / "model.safetensors")
    text = config["text_config"]
    if not is_whole:
        text |= {"num_hidden_layers": 3, "attn_res_block_size": 2}
        text["linear_attn_config"] |= {"full_attn_layers": [3], "kda_layers": [1, 2]}
        layer = f"{kimi_k3.ROOT}model.layers."
        attention = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{layer}7.self_attn.")}
        away = (f"{layer}2.self_attn.", *(f"{layer}{number}." for number in range(3, 9)))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(away)}
        tensors |= {name.replace(".7.", ".2."): tensor for name, tensor in attention.items()}
    if indexer:
        config["model_type"], text["dsa_config"] = "kimi_k31", indexer
        random = np.random.default_rng(5)
        heads, width = indexer["num_heads"], indexer["head_dim"]
        shapes = {"wq_b.weight": (heads * width, 24), "wk.weight": (width, 64), "weights_proj.weight": (heads, 64)}
        for layer in text["linear_attn_config"]["full_attn_layers"]:
            here = f"{kimi_k3.ROOT}model.layers.{layer - 1}.self_attn.indexer."
            tensors |= {here + name: random.normal(size=shape, scale=0.3) for name, shape in shapes.items()}
            tensors |= {f"{here}k_norm.weight": 1 + 0.2 * random.normal(size=width)}
            tensors |= {f"{here}k_norm.bias": 0.2 * random.normal(size=width)}
    return config, tensors


def picture(patches: np.ndarray, rows: int, columns: int) -> Sample:
    """Patches [rows * columns, values], row-major, in the order of windows."""
    windows = [(row, column) for row in range(0, rows, 2) for column in range(0, columns, 2)]
    places = [(row + i, column + j) for row, column in windows for i in (0, 1) for j in (0, 1)]
    return Sample(
        tokens=np.full(len(windows), 180, np.int32),
        feature=np.arange(len(windows)),
        patches=np.stack([patches[row * columns + column] for row, column in places]),
        segment=np.ones(len(patches), np.int32),
        position=np.asarray([(0, *place) for place in places], np.int32),
        grid=np.tile(np.asarray([(1, rows, columns)], np.int32), (len(patches), 1)),
    )


def with_features(batch):
    """Every window is a feature of its own, as in all but clips."""
    windows = batch.patch_segment_ids[:, ::4] > 0
    numbers = np.broadcast_to(np.arange(windows.shape[1], dtype=np.int32), windows.shape)
    return batch._replace(patch_feature=np.where(windows, numbers, -1))


def test_the_definition_gives_the_recorded_values():
    from tests.mmjax.models.families.k3_definition import KimiK3

    inputs, expected = np.load(GOLDEN / "inputs.npz"), np.load(GOLDEN / "expected.npz")
    pictures, offset = [[] for _ in NUM_TOKENS], 0
    for grid, sample in zip(inputs["grid_thws"], inputs["image_sample"], strict=True):
        patches = inputs["pixel_values"][offset : (offset := offset + int(np.prod(grid)))]
        pictures[sample].append((tuple(map(int, grid)), patches.reshape(len(patches), -1).astype(np.float64)))
    model = KimiK3(*recorded())
    ids, mask = (torch.tensor(inputs[name]).long() for name in ("input_ids", "attention_mask"))
    logits = model(ids, mask, pictures).logits
    assert np.abs(logits[mask.bool()].detach().numpy() - expected["logits"]).max() < 1e-6
    labels = torch.tensor(inputs["labels"]).long()[:, 1:]
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for name in (name.removeprefix("grad.") for name in expected.files if name.startswith("grad.")):
        theirs = expected[f"grad.{name}"]
        # The recorded program keeps the padding token's row from learning.
        assert np.abs(model[name].grad.numpy() - theirs).max() <= 1e-6 * np.abs(theirs).max(), name


def test_an_indexer_that_may_take_all_keys_leaves_the_recorded_values(one_device):
    expected = np.load(GOLDEN / "expected.npz")
    config, tensors = recorded(INDEXER | {"top_k": 87})
    with jax.enable_x64(True):
        model = dataclasses.replace(kimi_k3.read_config(config), parameter_dtype="float64", compute_dtype="float64")
        batch, definition = golden_batch(is_packed=True), define(model)
        arrays = from_released(model, kimi_k3.released_tensors(model), tensors)

        def forward(parameters, biases, batch):
            network = definition.assemble(parameters, biases)
            hidden, _ = network(batch)
            return jnp.einsum("bsd,dw->bsw", hidden, network.decoder.head_weights(hidden.dtype))

        logits = jax.jit(one_device(forward))(*arrays, batch)
    assert np.abs(real_tokens(logits, batch) - expected["logits"]).max() < 1e-6


@pytest.mark.parametrize(
    ("top_k", "is_whole"),
    [
        pytest.param(0, False, id="K3"),
        pytest.param(0, True, id="K3, all layers", marks=pytest.mark.slow),
        pytest.param(6, False, id="K3.1 of 6 keys"),
        pytest.param(6, True, id="K3.1 of 6 keys, all layers", marks=pytest.mark.slow),
        pytest.param(64, False, id="K3.1 of all keys", marks=pytest.mark.slow),
    ],
)
def test_samples_with_0_1_and_3_pictures_equal_the_definition(top_k, is_whole, picture_parity):
    from tests.mmjax.models.families.k3_definition import KimiK3

    theirs = KimiK3(*recorded(INDEXER | {"top_k": top_k} if top_k else None, is_whole=is_whole))
    random = np.random.default_rng(0)
    patches = [random.normal(size=(rows * columns, VALUES)) for rows, columns in GRIDS]
    first, second, third, fourth = (picture(p, *grid) for p, grid in zip(patches, GRIDS, strict=True))
    samples = [
        join([[5, START], first, [END, 4, START], second, [END, START], third, [END, 8, 9, 7]], **SIZES),
        join([[3, 12, 17, 5, 6, 90, 14, 30, 2]], **SIZES),
        join([[9, START], fourth, [END, 13, 14, 15, 101]], **SIZES),
    ]
    options = {"row_tokens": 28, "row_patches": 56, **SIZES}
    alone = with_features(batch_of([[sample] for sample in samples], **options))
    packed = with_features(batch_of([samples[1:], samples[:1], []], **options))
    seen = [((1, *grid), one) for grid, one in zip(GRIDS, patches, strict=True)]
    inputs = {"pictures": [seen[:3], [], seen[3:]]}
    model = picture_parity(kimi_k3, theirs, alone, inputs, packed, [(1, 0), (0, 0), (0, 9)])
    assert model.full_attention.indexer.top_k == top_k or not top_k
