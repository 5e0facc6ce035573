"""A whole tiny Kimi-K3 (text, images) against recorded logits, hidden values and gradients of a public implementation.

How the recorded values were made stands in tests/golden/k3_tiny/README.md.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mmjax.checkpoint.convert import Progress, convert
from mmjax.checkpoint.export import export, run_arrays
from mmjax.checkpoint.released_files import open_released
from mmjax.checkpoint.store import Store
from mmjax.checkpoint.weights import load_weights
from mmjax.config import MeshConfig, RunConfig
from mmjax.data.batch import Batch
from mmjax.errors import ConfigurationError
from mmjax.models.families.kimi_k3 import canonical_name, read_config, released_tensors
from mmjax.models.families.released import from_released, to_released
from mmjax.models.layers import use
from mmjax.models.layout import layer_address
from mmjax.models.multimodal import define
from mmjax.parallel.mesh import make_mesh
from mmjax.presets.kimi_k3 import kimi_k3, kimi_k3_tiny, kimi_k31
from mmjax.training.step import abstract_state, make_value_and_gradient, place_batch

GOLDEN = Path(__file__).parents[3] / "golden" / "k3_tiny"
NUM_TOKENS = (37, 50)


def golden_batch(*, is_packed: bool) -> Batch:
    """The two recorded samples as two padded rows, or packed in one."""
    inputs = np.load(GOLDEN / "inputs.npz")
    rows, patches_of = [], []
    for sample, length in enumerate(NUM_TOKENS):
        labels = np.append(inputs["labels"][sample, 1:length], -100)
        rows.append((inputs["input_ids"][sample, :length], labels))
        patches_of.append([])
    offset = 0
    for (_, height, width), sample in zip(inputs["grid_thws"], inputs["image_sample"], strict=True):
        pixels = inputs["pixel_values"][offset : offset + height * width].reshape(height, width, -1)
        offset += height * width
        order = [
            (r + i, c + j) for r in range(0, height, 2) for c in range(0, width, 2) for i in (0, 1) for j in (0, 1)
        ]
        patches_of[sample].append((np.stack([pixels[r, c] for r, c in order]), order, (1, height, width)))
    layout = [[0, 1]] if is_packed else [[0], [1]]
    row_tokens = 87 if is_packed else 50
    num_rows, row_patches = len(layout), 64
    batch = Batch(
        tokens=np.full((num_rows, row_tokens), 191, np.int32),
        targets=np.zeros((num_rows, row_tokens), np.int32),
        loss_weight=np.zeros((num_rows, row_tokens), np.float32),
        segment_ids=np.zeros((num_rows, row_tokens), np.int32),
        positions=np.zeros((num_rows, row_tokens), np.int32),
        feature_index=np.full((num_rows, row_tokens), -1, np.int32),
        patches=np.full((num_rows, row_patches, 108), 3.0, np.float32),
        patch_segment_ids=np.zeros((num_rows, row_patches), np.int32),
        patch_position=np.zeros((num_rows, row_patches, 3), np.int32),
        patch_grid=np.ones((num_rows, row_patches, 3), np.int32),
        patch_feature=np.full((num_rows, row_patches // 4), -1, np.int32),
        spectrograms=np.zeros((num_rows, 0, 0, 0), np.float32),
        sound_index=np.full((num_rows, row_tokens), -1, np.int32),
    )
    for row, samples in enumerate(layout):
        token, patch, image = 0, 0, 0
        for document, sample in enumerate(samples, start=1):
            tokens, labels = rows[sample]
            here = slice(token, token + len(tokens))
            batch.tokens[row, here] = tokens
            batch.targets[row, here] = np.maximum(labels, 0)
            batch.loss_weight[row, here] = labels != -100
            batch.segment_ids[row, here] = document
            batch.positions[row, here] = np.arange(len(tokens))
            placeholders = token + np.flatnonzero(tokens == 180)
            batch.feature_index[row, placeholders] = patch // 4 + np.arange(len(placeholders))
            for pixels, order, grid in patches_of[sample]:
                image += 1
                there = slice(patch, patch + len(pixels))
                batch.patches[row, there] = pixels
                batch.patch_segment_ids[row, there] = image
                batch.patch_position[row, there, 1:] = order
                batch.patch_grid[row, there] = grid
                batch.patch_feature[row, patch // 4 : (patch + len(pixels)) // 4] = np.arange(
                    patch // 4, (patch + len(pixels)) // 4
                )
                patch += len(pixels)
            token += len(tokens)
    return batch


def golden_run(dtype: str) -> RunConfig:
    model = dataclasses.replace(kimi_k3_tiny(), parameter_dtype=dtype, compute_dtype=dtype, loss_chunk_tokens=64)
    return RunConfig(model=model)


def real_tokens(values: jax.Array, batch: Batch) -> np.ndarray:
    return np.asarray(values)[batch.segment_ids > 0]


@pytest.mark.parametrize(
    ("dtype", "is_packed", "value_bound", "gradient_bound"),
    [
        ("float64", True, 1e-6, 1e-6),
        ("float32", True, 5e-4, 1e-3),
        pytest.param("float64", False, 1e-6, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_tiny_k3_gives_the_recorded_values_and_gradients(one_device, dtype, is_packed, value_bound, gradient_bound):
    check_golden(one_device, dtype, is_packed, value_bound, gradient_bound)


@pytest.mark.slow
def test_eight_devices_give_the_recorded_loss_and_gradients_and_the_same_files_back(tmp_path):
    """Converted from its released layout, loaded on fsdp=2 x expert=4, and out again from what lies on that mesh."""
    expected, source, folder = np.load(GOLDEN / "expected.npz"), tmp_path / "source", tmp_path / "ours"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, source / name)
    told = Progress(lambda size: None, lambda text: None)
    convert(open_released(source), folder, told)
    with jax.enable_x64(True):
        config, batch = golden_run("float64"), golden_batch(is_packed=False)
        # Two rows of documents, six of nothing: a row for each device.
        batch = Batch(*(np.concatenate([array, np.zeros((6, *array.shape[1:]), array.dtype)]) for array in batch))
        batch.patch_grid[2:] = 1
        mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
        abstract = abstract_state(config, mesh)
        loaded = load_weights(folder, abstract.parameters | abstract.router_biases)
        parameters, biases = (
            {path: loaded[path] for path in part} for part in (abstract.parameters, abstract.router_biases)
        )
        # Its latent width of 20 is divided by one of the two axes, its query rank of 24 by both.
        mixer = "decoder.segments.2.layers.0.mixer"
        for name, size in (("key_up", 20 // 4), ("query_up", 24 // 8)):
            array = parameters[f"{mixer}.{name}"]
            assert array.sharding.shard_shape(array.shape)[1] == size
        value_and_gradient = jax.jit(make_value_and_gradient(config, mesh))
        loss, _, counts, gradients = value_and_gradient(parameters, biases, place_batch(batch, mesh))
        with Store(tmp_path / "checkpoints") as store:
            store.save(1, {"parameters": parameters, "router_biases": biases, "frozen": {}}, {})
    assert int(counts["supervised_tokens"]) == 65 and int(counts["real_tokens"]) == 87
    assert abs(float(loss) - float(expected["loss_float64"])) < 1e-6
    check_gradients(config, gradients, biases, expected, 1e-6)
    export(folder, *run_arrays(tmp_path / "checkpoints" / "1"), tmp_path / "back", told)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "value_bound", "gradient_bound"), [("float64", 1e-6, 1e-6), ("float32", 5e-4, 1e-3)])
def test_a_gpu_gives_the_recorded_values_and_gradients_too(one_device, dtype, value_bound, gradient_bound):
    # The recorded float32 bounds are those of full products, not of TensorFloat-32.
    with jax.default_matmul_precision("highest"):
        check_golden(one_device, dtype, True, value_bound, gradient_bound)


def check_golden(one_device, dtype, is_packed, value_bound, gradient_bound) -> None:
    expected = np.load(GOLDEN / "expected.npz")
    with jax.enable_x64(dtype == "float64"):
        config, batch = golden_run(dtype), golden_batch(is_packed=is_packed)
        parameters, biases = from_released(
            config.model, released_tensors(config.model), load_file(GOLDEN / "model.safetensors")
        )
        definition = define(config.model)

        def forward(parameters, biases, batch):
            model = definition.assemble(parameters, biases)
            hidden, records = model(batch, keep_hidden=True)
            logits = jnp.einsum("bsd,dw->bsw", hidden, use(model.decoder.head, hidden.dtype))
            values = {"logits": logits, "image_features": model.picture_features(batch).features}
            for index, segment in enumerate(records):
                for position, record in enumerate(segment):
                    values[f"hidden.{index}.{position}"] = record.hidden
            return values

        values = jax.jit(one_device(forward))(parameters, biases, batch)
        assert np.abs(real_tokens(values["logits"], batch) - expected["logits"]).max() < value_bound
        check_hidden_values(config, values, batch, expected, value_bound)

        mesh = make_mesh(MeshConfig())
        value_and_gradient = jax.jit(make_value_and_gradient(config, mesh))
        loss, _, counts, gradients = value_and_gradient(parameters, biases, place_batch(batch, mesh))
    assert int(counts["supervised_tokens"]) == 65 and int(counts["real_tokens"]) == 87
    assert abs(float(loss) - float(expected["loss_float64"])) < value_bound
    check_gradients(config, gradients, biases, expected, gradient_bound)


def check_hidden_values(config, values, batch, expected, bound) -> None:
    names = {"prefix_sum": "running_sum", "attention_out": "mixer_output", "mlp_out": "mlp_output"}
    for name in expected.files:
        kind, _, layer = name.rpartition(".")
        if kind not in names:
            continue
        address = layer_address(config.model, int(layer))
        ours = getattr(values[f"hidden.{address.segment}.{address.position}"], names[kind])[address.repeat]
        scale = np.abs(expected[name]).max()
        assert np.abs(real_tokens(ours, batch) - expected[name]).max() < bound * scale, name


def check_gradients(config, gradients, biases, expected, bound) -> None:
    arrays = {path: np.asarray(g, np.float64) for path, g in gradients.items()}
    released = to_released(
        released_tensors(config.model), arrays | {path: np.zeros_like(b) for path, b in biases.items()}
    )
    for name in (n for n in expected.files if n.startswith("grad.")):
        theirs = expected[name]
        ours = released[name.removeprefix("grad.")]
        assert np.abs(ours - theirs).max() <= bound * max(np.abs(theirs).max(), 1e-30), name
    names = [str(name) for name in expected["gradient_names"]]
    assert len(names) == len(released) - len(biases_of(released))
    for name, norm, dot in zip(names, expected["gradient_norm"], expected["gradient_dot"], strict=True):
        ours = released[name].reshape(-1)
        weights = np.cos(0.7 * np.arange(ours.size) + 0.3)
        assert abs(np.linalg.norm(ours) - norm) <= bound * norm, name
        assert abs(ours @ weights - dot) <= bound * max(norm, abs(dot)), name


def biases_of(released) -> list[str]:
    return [name for name in released if name.endswith("e_score_correction_bias")]


def test_released_tensors_come_back_byte_for_byte():
    model = kimi_k3_tiny()
    tensors = load_file(GOLDEN / "model.safetensors")
    parameters, biases = from_released(model, released_tensors(model), tensors)
    back = to_released(released_tensors(model), parameters | biases)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape and back[name].tobytes() == tensor.tobytes(), name


def test_a_missing_and_a_foreign_tensor_are_both_named():
    tensors = load_file(GOLDEN / "model.safetensors")
    tensors["foreign"] = tensors.pop("language_model.lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head.*foreign"):
        from_released(kimi_k3_tiny(), released_tensors(kimi_k3_tiny()), tensors)


def test_the_recorded_configuration_gives_the_preset():
    config = json.loads((GOLDEN / "config.json").read_text())
    assert read_config(config) == kimi_k3_tiny()


def test_the_released_configuration_gives_kimi_k3_with_all_its_tensors():
    assert dataclasses.replace(read_config(RELEASED), compute_dtype="bfloat16") == kimi_k3()
    tensors = list(released_tensors(kimi_k3()))
    experts = [tensor for tensor in tensors if ".experts." in tensor.name]
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert (len(tensors) - len(experts), len(experts)) == (2_628, 247_296)
    # The parameters of the report, and 32 zeros behind each of 69 lists of decay rates.
    assert sum(math.prod(tensor.shape) for tensor in tensors) == 2_779_931_834_976 + 69 * 32


@pytest.mark.parametrize(
    "spelling",
    [
        {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048},
        {"n_heads": 32, "head_dim": 128, "topk": 2048, "layers": [*range(4, 93, 4), 93]},
        {"num_heads": 32, "head_dim": 128, "top_k": 2048, "dsa_layers": [*range(4, 93, 4), 93], "rope_dim": 0},
    ],
)
def test_an_indexer_is_read_however_its_fields_are_spelt(spelling):
    text = RELEASED["text_config"] | {"dsa_config": spelling}
    model = read_config(RELEASED | {"model_type": "kimi_k31", "text_config": text})
    assert dataclasses.replace(model, compute_dtype="bfloat16") == kimi_k31()
    assert sum(".indexer." in tensor.name for tensor in released_tensors(model)) == 24 * 5


@pytest.mark.parametrize(
    ("change", "message"), [({"layers": [4, 8]}, "layers"), ({"rope_dim": 64}, "rope_dim"), ({"kpool": 4}, "kpool")]
)
def test_an_indexer_of_another_kind_is_refused(change, message):
    indexer = {"num_heads": 32, "head_dim": 128, "top_k": 2048} | change
    text = RELEASED["text_config"] | {"dsa_config": indexer}
    with pytest.raises(ConfigurationError, match=message):
        read_config(RELEASED | {"text_config": text})


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "language_model.lm_head.weight", "language_model.language_model.lm_head.weight"],
)
def test_roots_that_were_dropped_or_doubled_are_mended(name):
    assert canonical_name(name) == "language_model.lm_head.weight"


RELEASED = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "ignore_index": -100,
    "media_placeholder_token_id": 163_605,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": 163_840,
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "intermediate_size": 33_792,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "max_position_embeddings": 1_048_576,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "attn_res_block_size": 12,
        "use_grouped_topk": True,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        },
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    },
    "vision_config": {
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "vt_num_hidden_layers": 27,
        "vt_hidden_size": 1024,
        "vt_num_attention_heads": 12,
        "qkv_hidden_size": 1536,
        "vt_intermediate_size": 4096,
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmergerv2",
        "projector_ln_eps": 1e-5,
        "mm_hidden_size": 1024,
        "text_hidden_size": 7168,
    },
}
