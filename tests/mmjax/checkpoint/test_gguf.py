"""GGUF files made here, byte by byte; block types compared with the gguf package, whole models with transformers."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from mmjax.checkpoint.gguf import GgufFile
from mmjax.checkpoint.gguf_blocks import BLOCK_TYPES
from mmjax.checkpoint.released_files import open_released
from mmjax.errors import CheckpointError

UINT32, FLOAT32, STRING, ARRAY, UINT64 = 4, 6, 8, 9, 10


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", ARRAY, 5, len(value), *value)
    raise TypeError(value)


METADATA = {
    "general.architecture": "llama",
    "general.license": "mit",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<end>", *"abcdefgh", "ab", "Ġ"],
    "tokenizer.ggml.token_type": [3] + [1] * 10,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def _tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (11, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _write(file: Path, metadata: dict, tensors: dict[str, np.ndarray]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        head += _text(name) + struct.pack("<I", tensor.ndim) + struct.pack(f"<{tensor.ndim}Q", *tensor.shape[::-1])
        head += struct.pack("<IQ", 0, len(data))
        data += tensor.tobytes() + b"\0" * (-tensor.nbytes % 32)
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return file


def test_queries_and_keys_are_unpaired_and_all_else_is_as_it_was(tmp_path):
    tensors = _tensors()
    gguf = GgufFile(_write(tmp_path / "model.gguf", METADATA, tensors))
    names = {
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    for name, released in names.items():
        assert np.array_equal(gguf.read(released), tensors[name])
    key = gguf.read("model.layers.0.self_attn.k_proj.weight")
    for head in range(2):
        for half in range(2):
            for pair in range(4):
                assert np.array_equal(
                    key[8 * head + 4 * half + pair], tensors["blk.0.attn_k.weight"][8 * head + 2 * pair + half]
                )
    config = gguf.config()
    assert config["tie_word_embeddings"] and config["vocab_size"] == 11 and config["rms_norm_eps"] == 1e-5


def test_tokenizer_template_and_licence_come_out_of_the_file(tmp_path):
    released = open_released(_write(tmp_path / "model.gguf", METADATA, _tensors()))
    released.write_companions(tmp_path / "files")
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "files" / "tokenizer.json"))
    assert tokenizer.encode("abc<end>").ids == [9, 3, 0] and tokenizer.decode([9, 3]) == "abc"
    assert json.loads((tmp_path / "files" / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
    assert (tmp_path / "files" / "chat_template.jinja").read_text() == METADATA["tokenizer.chat_template"]


def test_an_unknown_tokenizer_is_remarked_and_not_guessed(tmp_path):
    released = open_released(_write(tmp_path / "m.gguf", METADATA | {"tokenizer.ggml.pre": "strange"}, _tensors()))
    assert "strange" in released.remarks[0] and "tokenizer.json" not in released.written


@pytest.mark.parametrize("block", [block for block in BLOCK_TYPES.values() if block.name not in ("F32", "F16", "BF16")])
def test_blocks_hold_what_the_gguf_package_reads_in_them(block):
    gguf = pytest.importorskip("gguf")
    raw = np.random.default_rng(0).integers(0, 256, (40, block.num_bytes)).astype(np.uint8)
    # Keeps every float16 in it finite.
    raw[:, 1::2] &= 0xBF
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[block.name])
    assert np.array_equal(block.decode(raw), expected)


def _head(num_tensors: int = 0, num_values: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_values) + b"\0" * 64


BAD = {
    "empty": (b"", "0 bytes"),
    "magic": (_head(magic=b"GGML"), "GGML"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html>not found</html>", "HTML page"),
    "version": (_head(version=99), "version 99"),
    "tensors": (_head(num_tensors=1 << 40), "1,099,511,627,776 tensors"),
    "values": (_head(num_values=1 << 40), "1,099,511,627,776 values"),
    "key": (_head(0, 1)[:24] + struct.pack("<Q", 1 << 60) + b"\0" * 64, "1,152,921,504,606,846,976 bytes"),
    "texts": (
        _head(0, 1)[:24] + _text("a") + struct.pack("<IIQ", ARRAY, STRING, 1 << 40) + b"\0" * 64,
        "1,099,511,627,776 texts",
    ),
    "numbers": (
        _head(0, 1)[:24] + _text("a") + struct.pack("<IIQ", ARRAY, UINT64, 1 << 40) + b"\0" * 64,
        "8,796,093,022,208 bytes",
    ),
    "kind": (_head(0, 1)[:24] + _text("a") + struct.pack("<I", 77) + b"\0" * 64, "type 77"),
    "nested": (_head(0, 1)[:24] + _text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 3) + b"\0" * 64, "array of type 9"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_header_is_refused_with_its_place(tmp_path, kind):
    content, message = BAD[kind]
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_released(tmp_path / "model.gguf")
    assert "model.gguf" in caught.value.where


def _changed(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    extra = np.zeros((32, 32), np.float32)
    match kind:
        case "unknown":
            return tensors | {"blk.0.ffn_gate_inp.weight": extra}
        case "name":
            return tensors | {"../../etc/x": extra}
    return tensors


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("unknown", {}, "blk.0.ffn_gate_inp.weight"),
        ("name", {}, r"a tensor named '\.\./\.\./etc/x'"),
        ("", {"general.architecture": "mamba"}, "mamba"),
        ("", {"llama.expert_count": 8}, "llama.expert_count"),
        ("", {"llama.embedding_length": 0}, "embedding_length 0"),
        ("", {"general.alignment": 3}, "general.alignment 3"),
        ("", {"tokenizer.ggml.merges": ["a bc"]}, "tokenizer"),
        ("", {"tokenizer.ggml.eos_token_id": 99}, "99 of 11"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, kind, metadata, message):
    file = _write(tmp_path / "model.gguf", METADATA | metadata, _changed(_tensors(), kind))
    with pytest.raises(CheckpointError, match=message):
        open_released(file)


@pytest.mark.parametrize("cut", [7, 5000])
def test_a_cut_file_is_refused_by_the_tensor_that_lacks(tmp_path, cut):
    file = _write(tmp_path / "model.gguf", METADATA, _tensors())
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"ffn_down.*cut off"):
        open_released(file)


@pytest.mark.parametrize("offset", [1 << 62, (1 << 64) - 32, 32, 3], ids=["far", "wrapped", "shared", "unaligned"])
def test_a_tensor_that_lies_nowhere_or_on_another_is_refused(tmp_path, offset):
    file = _write(tmp_path / "model.gguf", METADATA, _tensors())
    content = bytearray(file.read_bytes())
    # Behind its name stand the number of axes, two axes, the type, and then where it begins.
    place = content.index(_text("blk.0.ffn_down.weight")) + len(_text("blk.0.ffn_down.weight")) + 4 + 2 * 8 + 4
    struct.pack_into("<Q", content, place, offset)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight from byte .* expected a place of its own"):
        open_released(file)
