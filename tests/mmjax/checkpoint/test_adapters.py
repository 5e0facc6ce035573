"""Adapters of a packed Kimi-K3 from its released files: trained on a mesh, stopped, taken up, exported, merged."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from mmjax import convert, train
from mmjax.checkpoint import safetensors_files
from mmjax.checkpoint.arrays import ArrayReader
from mmjax.checkpoint.codecs import decode_mxfp4
from mmjax.checkpoint.manifest import write_manifest
from mmjax.checkpoint.peft import CONFIG, WEIGHTS
from mmjax.config import MeshConfig, RunConfig, from_yaml, saved
from mmjax.models.families import kimi_k3
from mmjax.models.families.released import to_released
from mmjax.models.layers import initial_arrays
from mmjax.models.multimodal import define
from mmjax.monitor.metrics import read_lines
from mmjax.parallel.mesh import make_mesh
from mmjax.training import loop
from mmjax.training.step import init_state, make_value_and_gradient, place_batch
from pallas_kernels.moe.mxfp4 import quantize

GOLDEN = Path(__file__).parents[2] / "golden" / "k3_tiny" / "config.json"
SETTINGS = """
mesh: {fsdp: 2, expert: 4}
lora: {rank: 4, alpha: 8.0, targets: [q_proj, kv_b_proj, o_proj, w1, w2], expert_rank: 2}
data: {source: FOLDER/talks.jsonl, rows: 8, row_tokens: 24, row_patches: 4, image_max_patches: 4, packing_window: 4}
optimizer: {warmup_steps: 1, learning_rate: 0.03}
checkpoint: {every_steps: 1, keep_last: 9, keep_best: false}
training: {steps: 2}
"""


def released_config() -> dict:
    """A Kimi-K3 of two layers; two devices of fsdp share the codes of its packed experts, but not their scales."""
    config = json.loads(GOLDEN.read_text())
    text = config["text_config"]
    text |= {"vocab_size": 264, "hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    text |= {"intermediate_size": 16, "attn_res_block_size": 1, "num_experts": 8, "num_experts_per_token": 2}
    text |= {"q_lora_rank": 8, "kv_lora_rank": 8}
    linear = {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 8}
    text["linear_attn_config"] |= linear
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "input_activations": None}},
    }
    config["vision_config"] |= {"text_hidden_size": 16, "vt_num_hidden_layers": 1, "patch_size": 4}
    return config


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A converted checkpoint of it, experts packed."""
    place = tmp_path_factory.mktemp("k3")
    config = released_config()
    model = kimi_k3.read_config(config)
    definition = define(model)
    arrays = initial_arrays(definition.parameters | definition.router_biases, jax.random.key(1))
    arrays = {path: np.asarray(array) for path, array in arrays.items()}
    tensors = {}
    for name, tensor in to_released(kimi_k3.released_tensors(model), arrays).items():
        if ".experts." not in name:
            tensors[name] = np.ascontiguousarray(tensor)
            continue
        packed = quantize(tensor)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.weight_packed": packed["codes"], f"{module}.weight_scale": packed["scales"]}
    (place / "released").mkdir()
    (place / "released" / "config.json").write_text(json.dumps(config))
    (place / "released" / "tokenizer_config.json").write_text("{}")
    safetensors_files.write_file(
        place / "released" / "model.safetensors",
        {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        ((name, iter([tensor])) for name, tensor in tensors.items()),
        {"format": "pt"},
    )
    assert convert.main([str(place / "released"), str(place / "converted")]) == 0
    return place / "converted"


@pytest.fixture(scope="module")
def runs(weights, tmp_path_factory) -> Path:
    """`whole`: two steps at one go; `halves`: the same, whose second step was lost and done again."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "settings.yaml").write_text(SETTINGS.replace("FOLDER", str(folder)))
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        for text in ("ab", "cd", "ef", "gh")
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in 8 * talks))

    def start(name: str) -> int:
        fixed = ["--config", str(folder / "settings.yaml"), "--weights", str(weights)]
        return train.main([*fixed, "--run-dir", str(folder / name)])

    assert start("whole") == 0
    shutil.copytree(folder / "whole", folder / "halves")
    shutil.rmtree(folder / "halves" / loop.CHECKPOINTS / "2")
    assert start("halves") == 0
    return folder


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_lines(run / "metrics.jsonl")]


def saved_arrays(step: Path) -> dict[str, np.ndarray]:
    reader = ArrayReader(step)
    return {name: reader.read(name) for name in reader.names}


def test_a_run_that_was_taken_up_is_the_run_at_one_go(runs):
    assert losses(runs / "whole") == losses(runs / "halves")
    one, other = (saved_arrays(runs / name / loop.CHECKPOINTS / "2") for name in ("whole", "halves"))
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_a_checkpoint_holds_adapters_and_names_its_base(runs, weights):
    step = runs / "whole" / loop.CHECKPOINTS / "2"
    names = set(saved_arrays(step))
    assert not [name for name in names if name.startswith(("frozen", "router_biases"))]
    assert {name.rsplit(".", 1)[-1] for name in names if name.startswith("parameters.")} == {"down", "up"}
    metadata = json.loads((step / "manifest.json").read_text())["metadata"]
    assert metadata["base"]["weights"] == str(weights)
    assert metadata["base"]["digest"] == json.loads((weights / "manifest.json").read_text())["digest"]
    size = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
    assert size < sum(file.stat().st_size for file in weights.rglob("*") if file.is_file()) * 3


def test_another_base_is_refused(runs, weights, tmp_path, capsys):
    shutil.copytree(runs / "whole", tmp_path / "run")
    shutil.copytree(weights, tmp_path / "other")
    manifest = json.loads((tmp_path / "other" / "manifest.json").read_text())
    write_manifest(tmp_path / "other", {**{k: v for k, v in manifest.items() if k != "digest"}, "note": 1})
    options = ["--weights", str(tmp_path / "other"), "--run-dir", str(tmp_path / "run"), "--training.steps", "3"]
    assert train.main(["--config", str(runs / "settings.yaml"), *options]) == 4
    assert "those that the adapters were trained on" in capsys.readouterr().err


def test_the_step_after_export_and_reload_is_the_one_the_run_itself_took(runs, tmp_path):
    """Step 1 of a run leaves as peft files and starts a run anew: its loss and gradients are those of step 2."""
    shutil.copytree(runs / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / loop.CHECKPOINTS / "2")
    assert convert.main([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    config = saved.load(runs / "whole" / "config.yaml")
    lora = dataclasses.replace(config.lora, start=str(tmp_path / "adapter"))
    # On one device, so that the mesh of the run is compared too.
    started = dataclasses.replace(config, lora=lora, run_dir=str(tmp_path / "started"), mesh=MeshConfig())
    mesh = make_mesh(started.mesh)
    state, batch = init_state(started, mesh), loop.open_loader(started).batch(1)
    value_and_gradient = jax.jit(make_value_and_gradient(started, mesh))
    placed = place_batch(batch, mesh)
    loss, _, _, gradients = value_and_gradient(state.parameters, state.router_biases, placed, state.frozen)

    record = list(read_lines(runs / "whole" / "metrics.jsonl"))[1]
    norm = float(optax.tree.norm(gradients))
    np.testing.assert_allclose(float(loss), record["loss"], rtol=1e-6)
    np.testing.assert_allclose(norm, record["gradient_norm"], rtol=1e-5)
    # The gradient that the run took is what its first moments moved by:   m' = b m + (1 - b) g
    before, after = (saved_arrays(runs / "whole" / loop.CHECKPOINTS / step) for step in ("1", "2"))
    beta, kept = config.optimizer.beta1, min(1.0, config.optimizer.max_gradient_norm / norm)
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    for path, gradient in gradients.items():
        (name,) = (name for name in after if name.endswith(f".mu.{path}"))
        taken = (after[name] - beta * before[name]) / (1 - beta)
        assert np.abs(taken).max() > 0, path
        np.testing.assert_allclose(kept * np.asarray(gradient), taken, rtol=0, atol=1e-5 * largest, err_msg=path)


def test_exported_adapters_start_a_run_with_the_same_factors(runs, weights, tmp_path):
    assert convert.main([str(runs / "halves"), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert (tmp_path / "adapter" / "tokenizer_config.json").exists()
    assert not (tmp_path / "adapter" / "config.json").exists()
    header, _ = safetensors_files.read_header(tmp_path / "adapter" / WEIGHTS)
    root = "base_model.model.language_model.model.layers"
    assert f"{root}.1.block_sparse_moe.experts.7.w2.lora_A.weight" in header
    assert f"{root}.0.self_attn.q_proj.lora_B.weight" in header
    described = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert described["target_modules"] == ["kv_b_proj", "o_proj", "q_proj", "w1", "w2"]

    config = saved.load(runs / "halves" / "config.yaml")
    started = dataclasses.replace(config, lora=dataclasses.replace(config.lora, start=str(tmp_path / "adapter")))
    state = init_state(started, make_mesh(config.mesh))
    trained = saved_arrays(runs / "halves" / loop.CHECKPOINTS / "2")
    for path, array in state.parameters.items():
        np.testing.assert_array_equal(np.asarray(array), trained[f"parameters.{path}"], err_msg=path)


def test_merging_changes_what_was_adapted_and_nothing_else(runs, weights, tmp_path):
    assert convert.main([str(runs / "whole"), str(tmp_path / "merged"), "--merge"]) == 0
    before, _ = safetensors_files.read_header(weights.parent / "released" / "model.safetensors")
    after, files = {}, safetensors_files.MappedFiles()
    for file in sorted((tmp_path / "merged").glob("*.safetensors")):
        after |= safetensors_files.read_header(file)[0]
    changed = {
        name
        for name in before.keys() & after.keys()
        if files.read(before[name]).tobytes() != files.read(after[name]).tobytes()
    }
    # Adapted projections of attention, those of linear attention among them; experts came unpacked.
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "kv_b_proj", "o_proj"}
    assert {name.split(".")[3] for name in changed if "o_proj" in name} == {"0", "1"}
    assert {name.split(".")[3] for name in changed if name.endswith("self_attn.q_proj.weight")} == {"0"}
    assert not [name for name in after if name.endswith("_packed")]
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    # What is merged converts and is one of our models again.
    assert convert.main([str(tmp_path / "merged"), str(tmp_path / "again")]) == 0
    reader, step = ArrayReader(tmp_path / "again" / "arrays"), saved_arrays(runs / "whole" / loop.CHECKPOINTS / "2")
    path = "decoder.segments.0.layers.0.mixer.query"
    down, up = step[f"parameters.{path}.down"], step[f"parameters.{path}.up"]
    base = ArrayReader(weights / "arrays").read(path)
    expected = base + 2.0 * np.einsum("ndr,nrhk->ndhk", down, up)
    np.testing.assert_allclose(reader.read(path), expected, rtol=1e-6, atol=1e-7)
    # Experts: the numbers of the codes, and the adapters' share of them, rounded once.
    packed = ArrayReader(weights / "arrays")
    (codes,) = (name for name in packed.names if name.endswith("mlp.down_codes"))
    path = codes.removesuffix("_codes")
    plain = decode_mxfp4(packed.read(codes), packed.read(f"{path}_scales")).swapaxes(-1, -2).astype(np.float32)
    down, up = step[f"parameters.{path}.down"], step[f"parameters.{path}.up"]
    merged = plain + 2.0 * np.einsum("neir,nero->neio", down, up)
    assert np.abs(merged - plain).max(axis=(-1, -2)).min() > 0
    actual, expected = reader.read(path), merged.astype(reader.read(path).dtype)
    # A sum of float32 in another order may round to the neighbour in bfloat16, in one number of thousands.
    assert (actual != expected).mean() < 1e-3
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), rtol=2**-7)


def test_a_run_says_which_export_it_needs(runs, tmp_path, capsys):
    assert convert.main([str(runs / "whole"), str(tmp_path / "out")]) == 2
    assert "add --merge for the whole model or --adapter for peft files" in capsys.readouterr().err


def test_the_matched_projections_are_printed_and_saved_settings_hold_the_adapters(runs):
    assert "block_sparse_moe" not in (runs / "whole" / "config.yaml").read_text()
    config = from_yaml((runs / "whole" / "config.yaml").read_text(), "config.yaml")
    assert isinstance(config, RunConfig) and config.lora.targets == ("q_proj", "kv_b_proj", "o_proj", "w1", "w2")


def test_all_of_a_model_is_trained_from_released_weights_too(weights, tmp_path):
    assert convert.main([str(weights.parent / "released"), str(tmp_path / "dense"), "--packed", "decode"]) == 0
    command = train.read_command(["--weights", str(tmp_path / "dense"), "--model.parameter-dtype", "float32"])
    config = dataclasses.replace(command.settings, mesh=MeshConfig(fsdp=2))
    assert config.model.moe.expert_storage == "dense" and config.model.width == 16
    state, reader = init_state(config, make_mesh(config.mesh)), ArrayReader(tmp_path / "dense" / "arrays")
    for path, array in (state.parameters | state.router_biases).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(array), reader.read(path).astype(np.float32), err_msg=path)
    assert not state.frozen


def test_a_base_that_is_gone_is_one_message(runs, tmp_path, capsys):
    settings = (runs / "settings.yaml").read_text() + f"\nweights: {tmp_path / 'gone'}\n"
    (tmp_path / "settings.yaml").write_text(settings)
    assert train.main(["--config", str(tmp_path / "settings.yaml"), "--run-dir", str(tmp_path / "run")]) in (2, 4)
    assert "gone" in capsys.readouterr().err
