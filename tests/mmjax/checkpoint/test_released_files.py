"""Bad files of every kind: refused with file, finding and remedy; nothing is run, read whole or written."""

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmjax.checkpoint.released_files import open_released
from mmjax.checkpoint.safetensors_files import read_header, write_file
from mmjax.errors import CheckpointError, MmjaxError


def _file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(start: int = 0, stop: int = 16, *, dtype: str = "F32", shape: object = (4,)) -> dict:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, stop]}


TWO = {"a": _entry(0, 16), "b": _entry(16, 32)}
BAD_SAFETENSORS = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "huge header": (struct.pack("<Q", 1 << 63) + b"{}", "a header of 9,223,372,036,854,775,808 bytes"),
    "cut header": (_file({"a": _entry()}, length=1_000_000), "download was cut off"),
    "not utf-8": (_file(b"\xff\xfe{}"), "UTF-8"),
    "not json": (_file(b"hello there"), "does not parse"),
    "list": (_file(b"[1]"), "a list"),
    "nested": (_file(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "cut data": (_file(TWO, b"\0" * 25), "cut off"),
    "trailing": (_file(TWO, b"\0" * 40), "appended"),
    "overlap": (_file({"a": _entry(0, 16), "b": _entry(8, 24)}, b"\0" * 24), "b: .*overlaps a"),
    "hole": (_file({"a": _entry(0, 16), "b": _entry(20, 36)}, b"\0" * 36), "leaves a hole after a"),
    "reversed": (_file({"a": _entry(16, 0)}, b"\0" * 16), r"data_offsets \[16, 0\]"),
    "negative": (_file({"a": _entry(-16, 0)}, b"\0" * 16), "not negative"),
    "far": (_file({"a": _entry(1 << 62, (1 << 62) + 16)}, b"\0" * 16), "not negative"),
    "shape": (_file({"a": _entry(shape=(5,))}, b"\0" * 16), "16 bytes for F32"),
    "overflow": (_file({"a": _entry(shape=(1 << 33, 1 << 33))}, b"\0" * 16), "16 bytes for F32"),
    "fraction": (_file({"a": _entry(shape=[4.0])}, b"\0" * 16), "whole numbers"),
    "truth": (_file({"a": _entry(shape=[True])}, b"\0" * 16), "whole numbers"),
    "dtype": (_file({"a": _entry(dtype="Q9")}, b"\0" * 16), "Q9"),
    "field": (_file({"a": _entry() | {"more": 1}}, b"\0" * 16), "not dtype, shape and data_offsets"),
    "axes": (_file({"a": _entry(0, 4, shape=(1,) * 9)}, b"\0" * 4), "9 axes"),
    "twice": (_file(b'{"a":%b,"a":%b}' % ((json.dumps(_entry()).encode(),) * 2), b"\0" * 16), "'a' twice"),
    "path": (_file({"../../etc/x": _entry()}, b"\0" * 16), r"named '\.\./\.\./etc/x'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
    "pickle": (pickle.dumps({"weights": list(range(100))}, protocol=4), "pickle"),
    "torch": (b"PK\x03\x04" + b"\0" * 100, "pickle"),
}


@pytest.mark.parametrize("kind", BAD_SAFETENSORS)
def test_a_bad_file_of_safetensors_is_refused_by_name(tmp_path, releases, kind):
    content, message = BAD_SAFETENSORS[kind]
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(releases.llama_config()))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_released(folder)
    assert "model.safetensors" in caught.value.where and caught.value.remedy


def test_a_header_of_spaces_beyond_the_limit_is_refused_unread(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 101_000_000))
        stream.truncate(101_000_008)
    with pytest.raises(CheckpointError, match="101,000,000"):
        read_header(file)


def test_a_pickle_is_never_loaded(tmp_path, releases, run_convert, capsys):
    canary = tmp_path / "canary"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(canary),))

    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(releases.llama_config()))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    for source in (folder, folder / "pytorch_model.bin"):
        assert run_convert(source, tmp_path / "ours") == 4
        assert "pytorch_model.bin" in (text := capsys.readouterr().err) and "pickle" in text
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    assert run_convert(folder, tmp_path / "ours") == 4
    assert not canary.exists() and not (tmp_path / "ours").exists()


def _sharded(tmp_path: Path, releases) -> tuple[Path, dict]:
    config = releases.llama_config()
    folder = releases.write(tmp_path / "source", config, releases.random_tensors(config), num_shards=3)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


def _write_index(folder: Path, index: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_all_missing_shards_are_named_first(tmp_path, releases):
    folder, _ = _sharded(tmp_path, releases)
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.*model-00003-of-00003"):
        open_released(folder)


@pytest.mark.parametrize("shard", ["../model-00001-of-00003.safetensors", "/etc/passwd", "model.bin", ""])
def test_a_shard_elsewhere_is_refused(tmp_path, releases, shard):
    folder, index = _sharded(tmp_path, releases)
    _write_index(folder, index | {"weight_map": index["weight_map"] | {"lm_head.weight": shard}})
    with pytest.raises(CheckpointError, match="names of files beside it"):
        open_released(folder)


def test_a_link_out_of_the_folder_is_refused_but_for_the_cache_of_the_hub(tmp_path, releases):
    folder, _ = _sharded(tmp_path, releases)
    cache = tmp_path / "hub" / "snapshots" / "0123"
    blobs = tmp_path / "hub" / "blobs"
    cache.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (cache / file.name).symlink_to(blobs / file.name)
    assert len(open_released(cache).tensors) == len(open_released(folder).tensors)
    shard = folder / "model-00002-of-00003.safetensors"
    outside = shard.rename(tmp_path / shard.name)
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match="a link to"):
        open_released(folder)


def test_what_index_and_shards_say_differently_is_listed(tmp_path, releases):
    folder, index = _sharded(tmp_path, releases)
    places = index["weight_map"]
    first = next(iter(places))
    moved = next(name for name in places if places[name] != places[first])
    changed = {name: shard for name, shard in places.items() if name != first} | {"more": places[first]}
    changed[moved] = places[first]
    _write_index(folder, {"weight_map": changed})
    with pytest.raises(CheckpointError) as caught:
        open_released(folder)
    for text in (f"{first} is in", "the index says nothing of it", f"{moved} is in", "more is in no shard"):
        assert text in caught.value.found
    _write_index(folder, index)
    shard = folder / places[first]
    tensors = load_file(shard)
    save_file(tensors | {moved: np.zeros(3, np.float32)}, shard)
    with pytest.raises(CheckpointError, match=f"{moved} is in"):
        open_released(folder)


def test_a_shard_of_another_model_is_seen_by_its_shapes(tmp_path, releases, run_convert, capsys):
    folder, index = _sharded(tmp_path, releases)
    other = releases.llama_config() | {"intermediate_size": 96}
    foreign = releases.write(tmp_path / "other", other, releases.random_tensors(other), num_shards=3)
    shard = index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / shard).write_bytes((foreign / shard).read_bytes())
    assert run_convert(folder, tmp_path / "ours") == 4
    assert "expected [128, 64]" in capsys.readouterr().err


def test_a_total_that_is_wrong_is_remarked(tmp_path, releases):
    folder, index = _sharded(tmp_path, releases)
    _write_index(folder, index | {"metadata": {"total_size": 1}})
    assert "speaks of 1 bytes" in open_released(folder).remarks[0]


BAD_JSON = {
    "empty": ("", "an empty file"),
    "cut": ('{"model_type": "lla', "does not parse"),
    "nan": ('{"model_type": "llama", "rms_norm_eps": NaN}', "the number NaN"),
    "large": ('{"model_type": "llama", "rms_norm_eps": 1e400}', "1e400"),
    "digits": ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "5000 digits"),
    "twice": ('{"model_type": "llama", "model_type": "qwen3"}', "'model_type' twice"),
    "html": ("<html>", "HTML page"),
    "list": ("[]", "a list"),
    "nested": ("[" * 200_000, "nested"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
def test_a_bad_json_file_is_refused_by_name(tmp_path, releases, run_convert, capsys, name, kind):
    folder, _ = _sharded(tmp_path, releases)
    text, message = BAD_JSON[kind]
    (folder / name).write_text(text)
    assert run_convert(folder, tmp_path / "ours") == 4
    error = capsys.readouterr().err
    assert name in error and message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_tokenizer_without_a_limit_is_taken(tmp_path, releases, run_convert):
    folder, _ = _sharded(tmp_path, releases)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert run_convert(folder, tmp_path / "ours") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_sise": 64}, "hidden_sise"),
        ({"model_type": "lama"}, "did you mean 'llama'?"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": [64]}, ""),
        ({"num_hidden_layers": -3}, "num_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 900}, "21 tensors for 900 layers"),
        ({"num_hidden_layers": 3}, "9 tensors missing"),
        ({"vocab_size": 10**30}, "31 digits"),
        ({"vocab_size": 10**15}, "vocab_size"),
        ({"num_attention_heads": 0}, ""),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_heads"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, "magic"),
    ],
)
def test_a_config_that_no_model_fits_is_refused(tmp_path, releases, run_convert, capsys, change, message):
    config = releases.llama_config()
    folder = releases.write(tmp_path / "source", config, releases.random_tensors(config))
    (folder / "config.json").write_text(json.dumps(config | change))
    assert run_convert(folder, tmp_path / "ours") in (2, 4)
    error = capsys.readouterr().err
    assert message in error and "found" in error and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"num_experts_per_token": 99}, ["99 of"]),
        ({"num_experts_per_token": 0}, ["model.moe.experts_per_token"]),
        ({"num_experts": -1}, ["model.moe.num_experts"]),
        ({"hidden_size": 64.5, "kv_lora_rank": "wide"}, ["model.width: 64.5", "latent_width: 'wide'"]),
    ],
)
def test_a_mixture_of_experts_that_cannot_be_is_refused_with_all_its_faults(
    tmp_path, releases, run_convert, capsys, change, messages
):
    config = releases.k3_config()
    folder = releases.write(tmp_path / "source", config, releases.random_tensors(config))
    config["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    assert run_convert(folder, tmp_path / "ours") == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _tokenizer(size: int = 20) -> str:
    import tokenizers

    vocabulary = {f"w{number}": number for number in range(size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer.to_str()


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        ({"tokenizer.json": ""}, {}, "tokenizer.json"),
        ({"tokenizer.json": "{}"}, {}, "do not parse"),
        ({"tokenizer.json": "<html>"}, {}, "HTML page"),
        ({"tokenizer.json": '{"model": {"type": "Magic"}}'}, {}, "do not parse"),
        ({"tokenizer.json": _tokenizer(400)}, {}, "ids below 320"),
        ({"tokenizer.json": _tokenizer(), "tokenizer_config.json": '{"eos_token": "<stop>"}'}, {}, "'<stop>'"),
        ({"tokenizer.json": _tokenizer()}, {"image_token_id": 5}, "the word 'w5'"),
        ({"tokenizer.json": _tokenizer()}, {"image_token_id": 300}, "no token"),
        ({"chat_template.jinja": b"\xff\xfe"}, {}, "UTF-8"),
        ({"chat_template.jinja": "x" * 1_100_000}, {}, "1,100,000"),
    ],
)
def test_a_tokenizer_or_template_that_does_not_fit_is_refused(tmp_path, releases, files, fields, message):
    from mmjax.checkpoint.released_config import check_companions, read_family

    config = releases.llama_config()
    _, model = read_family(config)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MmjaxError, match=message):
        check_companions(tmp_path, config | fields, model)


def test_a_sound_tokenizer_passes(tmp_path, releases):
    from mmjax.checkpoint.released_config import check_companions, read_family

    config = releases.llama_config()
    (tmp_path / "tokenizer.json").write_text(_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    check_companions(tmp_path, config | {"image_token_id": 20}, read_family(config)[1])


def test_a_written_file_is_that_of_the_library(tmp_path):
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros(0, np.int8), "c": np.array(3, np.uint8)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    stored, metadata = read_header(tmp_path / "theirs")
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    write_file(tmp_path / "ours", entries, ((name, iter([tensors[name]])) for name in entries), metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
