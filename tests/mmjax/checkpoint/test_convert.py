import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from mmjax import train
from mmjax.checkpoint.codecs import decode_mxfp4
from mmjax.checkpoint.convert import Progress, convert
from mmjax.checkpoint.export import converted_arrays, export, run_arrays
from mmjax.checkpoint.released_files import open_released
from mmjax.checkpoint.store import Store
from mmjax.checkpoint.weights import load_step, load_weights, read_contents, read_model
from mmjax.config import MeshConfig, RunConfig
from mmjax.errors import CheckpointError
from mmjax.models.families import family_of
from mmjax.models.families.released import from_released
from mmjax.models.layout import Relayout
from mmjax.parallel.mesh import make_mesh
from mmjax.training.step import abstract_state, init_state, make_value_and_gradient, place_batch


def _progress(remarks: list[str] | None = None) -> Progress:
    return Progress(lambda size: None, (remarks if remarks is not None else []).append)


def _in(source: Path, target: Path, remarks: list[str] | None = None, **options) -> Path:
    convert(open_released(source), target, _progress(remarks), **options)
    return target


def _out(folder: Path, target: Path, **options) -> Path:
    export(folder, *converted_arrays(folder), target, _progress(), **options)
    return target


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _whole_arrays(folder: Path, dtype: str | None = None) -> dict[str, jax.Array]:
    place = NamedSharding(make_mesh(MeshConfig()), PartitionSpec())
    contents = read_contents(folder)["arrays"]
    return load_weights(
        folder,
        {
            path: jax.ShapeDtypeStruct(
                entry["shape"], entry["dtype"] if entry["dtype"] == "uint8" else dtype or entry["dtype"], sharding=place
            )
            for path, entry in contents.items()
        },
    )


def test_tiny_k3_comes_in_as_its_family_reads_it_and_goes_out_as_the_same_files(tmp_path, releases):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((releases.golden / name).read_bytes())
    folder = _in(source, tmp_path / "ours")
    config = json.loads((source / "config.json").read_text())
    expected = family_of(config).released_tensors(read_model(folder))
    parameters, biases = from_released(read_model(folder), expected, load_file(source / "model.safetensors"))
    arrays = _whole_arrays(folder)
    assert arrays.keys() == (parameters | biases).keys()
    for path, array in (parameters | biases).items():
        assert np.asarray(arrays[path]).tobytes() == array.tobytes(), path
    assert _files(_out(folder, tmp_path / "back")) == _files(source)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_packed_experts_stay_packed_and_every_file_comes_back_as_it_was(tmp_path, releases, num_shards):
    config = releases.k3_config(packed=True)
    source = releases.write(tmp_path / "source", config, releases.random_tensors(config), num_shards=num_shards)
    folder = _in(source, tmp_path / "ours")
    assert read_model(folder).moe.expert_storage == "mxfp4"
    assert _files(_out(folder, tmp_path / "back")) == _files(source)


def test_decoded_experts_are_the_numbers_of_the_codes_and_are_packed_again_exactly(tmp_path, releases):
    config = releases.k3_config(packed=True)
    tensors = releases.random_tensors(config)
    source = releases.write(tmp_path / "source", config, tensors)
    packed, decoded = _in(source, tmp_path / "packed"), _in(source, tmp_path / "decoded", keeps_packed=False)
    assert read_model(decoded).moe.expert_storage == "dense"
    codes, numbers = _whole_arrays(packed), _whole_arrays(decoded)
    for path in [path.removesuffix("_codes") for path in codes if path.endswith("_codes")]:
        expected = decode_mxfp4(np.asarray(codes[f"{path}_codes"]), np.asarray(codes[f"{path}_scales"]))
        assert np.array_equal(np.asarray(numbers[path]), expected.swapaxes(-1, -2)), path
    assert _files(_out(decoded, tmp_path / "back")) == _files(source)
    for folder in (packed, decoded):
        plain = _out(folder, tmp_path / f"plain-{folder.name}", keeps_packed=False)
        assert "quantization_config" not in (plain / "config.json").read_text()
        expert = "language_model.model.layers.2.block_sparse_moe.experts.11.w2"
        expected = decode_mxfp4(tensors[f"{expert}.weight_packed"], tensors[f"{expert}.weight_scale"])
        assert np.array_equal(_tensors(plain)[f"{expert}.weight"], expected)


def test_experts_keep_their_order_where_names_sort_otherwise(tmp_path, releases):
    config = releases.k3_config(num_experts=23)
    tensors = releases.random_tensors(config, np.float32)
    kinds = {"w1": ("gate", 1), "w3": ("up", 2), "w2": ("down", 3)}
    for name, tensor in tensors.items():
        if ".experts." in name:
            layer, expert, kind = int(name.split(".")[3]), int(name.split(".")[6]), name.split(".")[7]
            tensor[:] = layer * 32 + expert + kinds[kind][1] / 4
    folder = _in(releases.write(tmp_path / "source", config, tensors, num_shards=2), tmp_path / "ours")
    arrays = _whole_arrays(folder, "float32")
    found = set()
    for kind, number in kinds.values():
        for path in [path for path in arrays if path.endswith(f"mlp.{kind}") and arrays[path].ndim == 4]:
            values = np.asarray(arrays[path])
            assert (values == values[..., :1, :1]).all() and (np.diff(values[..., 0, 0]) == 1).all(), path
            found |= set(values[..., 0, 0].reshape(-1) - number / 4)
    assert found == {layer * 32.0 + expert for layer in (1, 2, 3) for expert in range(23)}


def test_orbax_restores_the_arrays_on_a_mesh(tmp_path, releases):
    config = releases.k3_config(packed=True)
    folder = _in(releases.write(tmp_path / "source", config, releases.random_tensors(config)), tmp_path / "ours")
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    abstract = {}
    for path, entry in read_contents(folder)["arrays"].items():
        spec = PartitionSpec(*(["fsdp" if size % 2 == 0 else None for size in entry["shape"][:1]]))
        abstract[path] = jax.ShapeDtypeStruct(entry["shape"], entry["dtype"], sharding=NamedSharding(mesh, spec))
    restored = ocp.StandardCheckpointer().restore(folder / "arrays", abstract)
    for path, array in load_weights(folder, abstract).items():
        assert array.sharding == restored[path].sharding
        assert np.asarray(array).tobytes() == np.asarray(restored[path]).tobytes(), path


def test_weights_are_cast_and_split_over_any_mesh(tmp_path, releases):
    config = releases.k3_config()
    folder = _in(releases.write(tmp_path / "source", config, releases.random_tensors(config)), tmp_path / "ours")
    whole = _whole_arrays(folder)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, expert=2))
    wanted = {}
    for path, array in whole.items():
        axes = [axis if size % 2 == 0 else None for axis, size in zip(("fsdp", "expert", "tensor"), array.shape[::-1])]  # noqa: B905
        place = NamedSharding(mesh, PartitionSpec(*([None] * (array.ndim - len(axes))), *axes[::-1]))
        wanted[path] = jax.ShapeDtypeStruct(array.shape, "float32", sharding=place)
    for path, array in load_weights(folder, wanted).items():
        assert array.sharding == wanted[path].sharding and array.dtype == "float32"
        assert np.array_equal(np.asarray(array), np.asarray(whole[path]).astype(np.float32)), path


def test_a_flipped_bit_and_a_foreign_array_are_named(tmp_path, releases):
    config = releases.llama_config()
    folder = _in(releases.write(tmp_path / "source", config, releases.random_tensors(config)), tmp_path / "ours")
    place = NamedSharding(make_mesh(MeshConfig()), PartitionSpec())
    wanted = {
        path: jax.ShapeDtypeStruct(entry["shape"], entry["dtype"], sharding=place)
        for path, entry in read_contents(folder)["arrays"].items()
    }
    strange = {"more": wanted["decoder.norm"]} | {path: w for path, w in wanted.items() if path != "decoder.norm"}
    with pytest.raises(CheckpointError, match=r"decoder.norm is there and not wanted; more is wanted and not there"):
        load_weights(folder, strange)
    file = folder / "arrays" / "decoder.embedding" / "0.0"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"decoder\.embedding"):
        load_weights(folder, wanted)


def _head(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    embedding = tensors["model.embed_tokens.weight"]
    return tensors | {"absent": {}, "copy": {"lm_head.weight": embedding}, "own": {"lm_head.weight": -embedding}}[kind]


@pytest.mark.parametrize(("tied", "head"), [(True, "absent"), (True, "copy"), (False, "copy"), (False, "own")])
def test_a_head_comes_and_goes_as_the_configuration_and_the_file_have_it(tmp_path, releases, tied, head):
    config = releases.llama_config(tied=tied)
    tensors = _head(releases.random_tensors(config), head)
    source = releases.write(tmp_path / "source", config, tensors)
    folder = _in(source, tmp_path / "ours")
    assert read_model(folder).tied_head == tied
    assert ("decoder.head" in read_contents(folder)["arrays"]) != tied
    assert _files(_out(folder, tmp_path / "back")) == _files(source)


@pytest.mark.parametrize(
    ("tied", "head", "message"),
    [(True, "own", r"lm_head.weight: found a head that differs"), (False, "absent", r"missing.*tie_word_embeddings")],
)
def test_a_head_that_contradicts_the_configuration_is_refused(tmp_path, releases, tied, head, message):
    config = releases.llama_config(tied=tied)
    source = releases.write(tmp_path / "source", config, _head(releases.random_tensors(config), head))
    with pytest.raises(CheckpointError, match=message):
        _in(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_buffers_that_some_files_hold_come_back(tmp_path, releases):
    config = releases.llama_config()
    tensors = releases.random_tensors(config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(8, dtype=np.float32)
    source = releases.write(tmp_path / "source", config, tensors)
    assert _files(_out(_in(source, tmp_path / "ours"), tmp_path / "back")) == _files(source)


def test_fp8_blocks_become_bfloat16_and_leave_so(tmp_path, releases):
    config = releases.llama_config()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    tensors = releases.random_tensors(config)
    name = "model.layers.1.mlp.down_proj.weight"
    values = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.0123]], np.float32)
    tensors |= {name: values, f"{name}_scale_inv": scale}
    folder = _in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours")
    back = _out(folder, tmp_path / "back")
    expected = (values.astype(np.float32) * scale[0, 0]).astype(ml_dtypes.bfloat16)
    assert np.array_equal(_tensors(back)[name], expected)
    assert _tensors(back).keys() == tensors.keys() - {f"{name}_scale_inv"}
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_without_the_word_of_the_configuration_nothing_is_unpacked(tmp_path, releases):
    config = releases.k3_config(packed=True)
    tensors = releases.random_tensors(config)
    del config["text_config"]["quantization_config"]
    with pytest.raises(CheckpointError, match=r"packed as mxfp4; config.json has no quantization_config"):
        _in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours")


def test_missing_foreign_and_misshapen_tensors_are_all_named(tmp_path, releases):
    config = releases.llama_config()
    tensors = releases.random_tensors(config)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    tensors["foreign.weight"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(65, np.float32)
    with pytest.raises(CheckpointError, match=r"q_proj.*foreign\.weight.*model\.norm\.weight has shape \[65\]"):
        _in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_with_their_count(tmp_path, releases, value):
    config = releases.llama_config()
    tensors = releases.random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5:7] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*2 of 8192 numbers"):
        _in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_outliers_and_tensors_of_zeros_are_remarked(tmp_path, releases):
    config = releases.llama_config()
    tensors = releases.random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -2e4
    tensors["model.layers.0.mlp.up_proj.weight"][:] = 0
    remarks: list[str] = []
    _in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours", remarks)
    assert len(remarks) == 2 and "layers.1.mlp.up_proj" in remarks[0] and "layers.0.mlp.up_proj" in remarks[1]


def test_arrays_of_mixed_dtypes_hold_all_and_come_back_as_they_were(tmp_path, releases):
    config = releases.llama_config()
    tensors = releases.random_tensors(config)
    for layer, dtype in ((0, np.float16), (1, np.float32)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(np.float32).astype(dtype)
    source = releases.write(tmp_path / "source", config, tensors)
    assert _files(_out(_in(source, tmp_path / "ours"), tmp_path / "back")) == _files(source)


def test_small_shards_are_indexed_and_load_as_one(tmp_path, releases):
    config = releases.llama_config()
    source = releases.write(tmp_path / "source", config, releases.random_tensors(config))
    back = _out(_in(source, tmp_path / "ours"), tmp_path / "back", shard_bytes=60_000)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    there, expected = _tensors(back), _tensors(source)
    assert len(set(index["weight_map"].values())) > 2 and index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        assert there[name].dtype == tensor.dtype and there[name].tobytes() == tensor.tobytes(), name
        assert name in load_file(back / index["weight_map"][name])


def test_only_what_was_written_here_is_replaced(tmp_path, releases):
    config = releases.llama_config()
    source = releases.write(tmp_path / "source", config, releases.random_tensors(config))
    folder = _in(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="--overwrite"):
        _in(source, folder)
    first = (folder / "manifest.json").stat().st_ino
    _in(source, folder, overwrite=True)
    assert (folder / "manifest.json").stat().st_ino != first
    users = tmp_path / "users"
    users.mkdir()
    (users / "thesis.txt").write_text("mine")
    save_file({"a": np.zeros(1)}, users / "manifest.json")
    with pytest.raises(CheckpointError, match="move these files away"):
        _in(source, users, overwrite=True)
    assert (users / "thesis.txt").read_text() == "mine"


def test_int4_groups_become_bfloat16(tmp_path, releases):
    config = releases.llama_config()
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    tensors = releases.random_tensors(config)
    random = np.random.default_rng(0)
    stem = "model.layers.1.mlp.down_proj"
    shape = tensors.pop(f"{stem}.weight").shape
    whole = random.integers(-8, 8, shape)
    words = (whole + 8).astype(np.uint32).reshape(shape[0], -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    scales = random.random((shape[0], shape[1] // 32)).astype(ml_dtypes.bfloat16)
    tensors |= {
        f"{stem}.weight_packed": np.bitwise_or.reduce(words, axis=-1).view(np.int32),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": np.array(shape, np.int64),
    }
    back = _out(_in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours"), tmp_path / "back")
    expected = whole * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(_tensors(back)[f"{stem}.weight"], expected.astype(ml_dtypes.bfloat16))


def test_the_weights_of_a_run_leave_in_the_dtypes_and_files_of_the_release(tmp_path, releases):
    config = releases.k3_config()
    tensors = releases.random_tensors(config)
    source = releases.write(tmp_path / "source", config, tensors, num_shards=2)
    folder = _in(source, tmp_path / "ours")
    arrays = _whole_arrays(folder, "float32")
    biases = {path: array for path, array in arrays.items() if path.endswith("mlp.bias")}
    state = {
        "parameters": {path: array for path, array in arrays.items() if path not in biases},
        "router_biases": biases,
        "frozen": {},
        "optimizer": {"moment": {"decoder.norm": arrays["decoder.norm"]}},
    }
    with Store(tmp_path / "checkpoints") as store:
        store.save(3, state, {})
    read, paths = run_arrays(tmp_path / "checkpoints" / "3")
    export(folder, read, paths, tmp_path / "back", _progress())
    assert _files(tmp_path / "back") == _files(source)
    with pytest.raises(CheckpointError, match=r"arrays of another model.*decoder\.norm"):
        export(folder, read, paths - {"decoder.norm"}, tmp_path / "other", _progress())


@pytest.mark.parametrize("damage", ["missing chunk", "cut chunk", "missing file", "manifest", "other manifest"])
def test_a_damaged_checkpoint_is_never_loaded(tmp_path, releases, damage):
    config = releases.llama_config()
    folder = _in(releases.write(tmp_path / "source", config, releases.random_tensors(config)), tmp_path / "ours")
    place = NamedSharding(make_mesh(MeshConfig()), PartitionSpec())
    wanted = {
        path: jax.ShapeDtypeStruct(entry["shape"], entry["dtype"], sharding=place)
        for path, entry in read_contents(folder)["arrays"].items()
    }
    chunk = folder / "arrays" / "decoder.embedding" / "0.0"
    match damage:
        case "missing chunk":
            chunk.unlink()
        case "cut chunk":
            chunk.write_bytes(chunk.read_bytes()[:-9])
        case "missing file":
            (folder / "released" / "tensors.json").unlink()
        case "manifest":
            (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace("320", "321", 1))
        case "other manifest":
            (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"decoder\.embedding|tensors\.json|manifest\.json"):
        load_weights(folder, wanted)
    with pytest.raises(CheckpointError, match=r"decoder\.embedding|tensors\.json|manifest\.json"):
        _out(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("root", ["", "language_model.language_model."])
def test_names_whose_root_was_dropped_or_doubled_come_back_as_they_were(tmp_path, releases, root):
    config = releases.k3_config(packed=True)
    tensors = releases.random_tensors(config)
    renamed = {
        root + name.removeprefix("language_model.") if name.startswith("language_model.") else name: tensor
        for name, tensor in tensors.items()
    }
    source = releases.write(tmp_path / "source", config, renamed)
    assert _files(_out(_in(source, tmp_path / "ours"), tmp_path / "back")) == _files(source)


@pytest.mark.parametrize(
    ("wide", "options", "expected"),
    [
        ((), ["--lora.rank", "4"], "bfloat16"),
        ((), [], "float32"),
        ((), ["--lora.rank", "4", "--model.parameter-dtype", "float32"], "float32"),
        # One array that bfloat16 would round.
        (("model.norm.weight",), ["--lora.rank", "4"], "float32"),
    ],
    ids=["adapters", "all of it", "asked for", "mixed"],
)
def test_a_frozen_base_rests_in_the_dtype_it_was_released_in(tmp_path, releases, wide, options, expected):
    config = releases.llama_config()
    tensors = releases.random_tensors(config)
    tensors |= {name: tensors[name].astype(np.float32) for name in wide}
    folder = _in(releases.write(tmp_path / "source", config, tensors), tmp_path / "ours")
    settings = train.read_command(["--weights", str(folder), *options]).settings
    assert settings.model.parameter_dtype == expected


def test_a_base_in_bfloat16_gives_the_loss_and_gradients_of_one_in_float32(tmp_path, releases, make_batch):
    config = releases.llama_config()
    folder = _in(releases.write(tmp_path / "source", config, releases.random_tensors(config)), tmp_path / "ours")
    mesh, found = make_mesh(MeshConfig()), {}
    for dtype in ("bfloat16", "float32"):
        options = ["--weights", str(folder), "--lora.rank", "4", "--model.parameter-dtype", dtype]
        # Computed in float64, where nothing but the base's own numbers can tell the two apart.
        run = train.read_command([*options, "--model.compute-dtype", "float64"]).settings
        with jax.enable_x64(True):
            state, batch = init_state(run, mesh), make_batch(run.model, rows=2)
            assert state.frozen["decoder.embedding"].dtype == dtype
            # B starts at zero, which would hide the gradient of A.
            random, factors = np.random.default_rng(0), {}
            for path, array in sorted(state.parameters.items()):
                factors[path] = jnp.asarray(random.normal(size=array.shape, scale=0.1), array.dtype)
            step = jax.jit(make_value_and_gradient(run, mesh))
            loss, _, _, gradients = step(factors, state.router_biases, place_batch(batch, mesh), state.frozen)
        found[dtype] = {"loss": loss} | gradients
    for name, value in found["float32"].items():
        scale = np.abs(value).max()
        assert np.abs(np.asarray(found["bfloat16"][name]) - np.asarray(value)).max() <= 1e-6 * scale, name


def test_weights_load_onto_the_stages_of_a_pipeline_and_a_run_there_goes_out_as_the_same_tensors(tmp_path, releases):
    config = releases.k3_config()
    folder = _in(releases.write(tmp_path / "source", config, releases.random_tensors(config)), tmp_path / "ours")
    model = read_model(folder)
    staged = dataclasses.replace(model, pipeline_stages=(1, 3))
    run = RunConfig(model=staged, mesh=MeshConfig(pipe=2, expert=1, fsdp=2))
    abstract = abstract_state(run, make_mesh(run.mesh))
    loaded = load_weights(folder, abstract.parameters | abstract.router_biases, staged)
    relayout = Relayout(model, staged)
    expected = relayout.apply(jax.device_get(_whole_arrays(folder)), loaded, np)
    for path, array in loaded.items():
        np.testing.assert_array_equal(np.asarray(array), expected[path].astype(array.dtype), path)
    assert any(None in (relayout.rows(path) or ()) for path in loaded)

    with Store(tmp_path / "checkpoints") as store:
        groups = {"parameters": abstract.parameters, "router_biases": abstract.router_biases}
        store.save(1, {group: {path: loaded[path] for path in paths} for group, paths in groups.items()}, {})
    step = tmp_path / "checkpoints" / "1"
    export(folder, *run_arrays(step, staged), tmp_path / "back", _progress())
    source, back = _tensors(tmp_path / "source"), _tensors(tmp_path / "back")
    assert source.keys() == back.keys()
    for name, tensor in source.items():
        np.testing.assert_array_equal(tensor, back[name], name)
    plain = abstract_state(RunConfig(model=model), make_mesh(MeshConfig())).parameters
    wanted = {f"parameters.{path}": leaf for path, leaf in plain.items()}
    whole = load_step(step, wanted, Relayout(staged, model))
    for path, array in _whole_arrays(folder, "float32").items():
        if path in plain:
            np.testing.assert_array_equal(np.asarray(whole[f"parameters.{path}"]), np.asarray(array), path)
