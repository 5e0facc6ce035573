"""GGUF files, read within the bounds of the file; tensors are named and laid out as in transformers."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mmjax.checkpoint.gguf_blocks import BLOCK_TYPES, BlockType
from mmjax.checkpoint.manifest import listed
from mmjax.checkpoint.safetensors_files import MappedFiles, StoredTensor, check_name
from mmjax.checkpoint.strict_json import what_it_is
from mmjax.errors import CheckpointError

_MAGIC = b"GGUF"
_MOST_TENSORS = 1_000_000
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Metadata of the model itself that says nothing about its numbers.
_IGNORED = ("context_length", "vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length")


@dataclass(frozen=True)
class _Entry:
    """A tensor as the file lists it."""

    kind: BlockType
    shape: tuple[int, ...]
    offset: int


class _Cursor:
    """Reads values one after the other; nothing is read or made that the rest of the file cannot hold."""

    def __init__(self, file: Path, content: mmap.mmap):
        self._file, self._content = file, content
        self.position = 0

    def refuse(self, found: str, expected: str = "what the format says", remedy: str = "") -> NoReturn:
        raise CheckpointError(
            f"{self._file}: byte {self.position:,}",
            found=found,
            expected=expected,
            remedy=remedy or "download the file again",
        )

    def take(self, size: int, what: str) -> bytes:
        rest = len(self._content) - self.position
        if size > rest:
            self.refuse(f"{what} of {size:,} bytes", f"{rest:,} at most: so much is left of the file")
        self.position += size
        return self._content[self.position - size : self.position]

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("<Q", f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            # Some vocabularies hold single bytes of longer characters.
            return raw.decode("utf-8", errors="replace")

    def value(self, what: str) -> Any:
        kind = self.number("<I", f"the type of {what}")
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self._scalars(kind, 1, what)[0]
        if kind != _ARRAY:
            self.refuse(f"{what} of type {kind}", "a type from 0 to 12")
        kind, count = self.number("<I", f"the type of {what}"), self.number("<Q", f"the length of {what}")
        if kind == _STRING:
            if count * 8 > len(self._content) - self.position:
                self.refuse(f"{what} of {count:,} texts", "fewer: the file ends before")
            return [self.text(what) for _ in range(count)]
        if kind not in _SCALARS:
            self.refuse(f"{what}, an array of type {kind}", "texts or numbers")
        return self._scalars(kind, count, what)

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()


class GgufFile:
    """A GGUF file of a Llama, as released tensors of transformers' Llama.

    Raises:
      CheckpointError: the file is no sound GGUF, or of another architecture.
    """

    def __init__(self, file: Path):
        self.file = file
        self._files = MappedFiles()
        self._known: set[str] = set()
        size = file.stat().st_size
        if size < 24:
            raise CheckpointError(
                str(file), found=f"{size} bytes", expected="a GGUF file", remedy="download the file again"
            )
        with file.open("rb") as stream:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(file, content)
        if (magic := cursor.take(4, "the magic")) != _MAGIC:
            cursor.refuse(f"{magic!r}", f"{_MAGIC!r}", what_it_is(content[:512]))
        if (version := cursor.number("<I", "the version")) not in (2, 3):
            cursor.refuse(f"version {version}", "version 2 or 3, little-endian", "convert it with a newer llama.cpp")
        num_tensors, num_values = cursor.number("<Q", "a count"), cursor.number("<Q", "a count")
        # An entry takes 24 bytes of a tensor and 13 of a value at least.
        if num_tensors > min(_MOST_TENSORS, size // 24) or num_values > size // 13:
            cursor.refuse(f"{num_tensors:,} tensors and {num_values:,} values", f"what {size:,} bytes can hold")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text("a key")
            if key in self.metadata:
                cursor.refuse(f"the key {key[:80]!r} twice", "each key once")
            self.metadata[key] = cursor.value(f"the value of {key[:80]!r}")
        entries = self._read_entries(cursor, num_tensors)
        content.close()
        self._check_architecture()
        self.tensors = self._name(entries)

    def _read_entries(self, cursor: _Cursor, num_tensors: int) -> dict[str, _Entry]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & alignment - 1:
            cursor.refuse(f"general.alignment {alignment!r}", "a power of two")
        listed_entries: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = cursor.text("a tensor's name")
            check_name(name, str(self.file))
            if name in listed_entries:
                cursor.refuse(f"tensor {name} twice", "each tensor once")
            if (rank := cursor.number("<I", f"the rank of {name}")) > 4:
                cursor.refuse(f"tensor {name} with {rank} axes", "4 at most")
            shape = tuple(reversed([cursor.number("<Q", f"the shape of {name}") for _ in range(rank)]))
            kind = cursor.number("<I", f"the type of {name}")
            if kind not in BLOCK_TYPES:
                known = ", ".join(sorted(block.name for block in BLOCK_TYPES.values()))
                cursor.refuse(f"tensor {name} of ggml type {kind}", f"one of {known}", "take another quantisation")
            listed_entries[name] = (BLOCK_TYPES[kind], shape, cursor.number("<Q", f"the offset of {name}"))
        start = -(-cursor.position // alignment) * alignment
        size, end, entries = self.file.stat().st_size, start, {}
        for name, (kind, shape, offset) in sorted(listed_entries.items(), key=lambda item: item[1][2]):
            num_values = math.prod(shape)
            if (shape[-1] if shape else 1) % kind.num_values:
                cursor.refuse(f"tensor {name} with rows of {shape[-1]} values", f"whole blocks of {kind.num_values}")
            first, last = start + offset, start + offset + num_values // kind.num_values * kind.num_bytes
            if offset % alignment or first < end or last > size:
                cursor.refuse(
                    f"tensor {name} from byte {first:,} to {last:,}",
                    f"a place of its own between {end:,} and {size:,}, aligned to {alignment}",
                    "the download was cut off: repeat it" if last > size else "",
                )
            entries[name], end = _Entry(kind, shape, first), last
        return {name: entries[name] for name in listed_entries}

    def _check_architecture(self) -> None:
        if (found := self.metadata.get("general.architecture")) != "llama":
            self._refuse(f"general.architecture {found!r}", "llama", "take the safetensors of this model instead")

    def _name(self, entries: dict[str, _Entry]) -> dict[str, StoredTensor]:
        self._entries: dict[str, _Entry] = {}
        unknown = []
        for name, entry in entries.items():
            released = _NAMES.get(name)
            if (parts := name.split("."))[0] == "blk" and len(parts) == 4 and parts[1].isdecimal():
                _, layer, what, kind = parts
                if what in _LAYER_NAMES and kind == "weight":
                    released = f"model.layers.{int(layer)}.{_LAYER_NAMES[what]}.weight"
            if released is None:
                unknown.append(name)
            else:
                self._entries[released] = entry
        if unknown:
            self._refuse(f"tensors {listed(unknown)}", "those of a Llama", "take the safetensors of this model instead")
        return {
            name: StoredTensor(name, self.file, entry.kind.dtype, entry.shape, entry.offset, entry.kind.name)
            for name, entry in self._entries.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The numbers of a tensor, as transformers lays them out: queries and keys in two halves, not in pairs."""
        entry = self._entries[name]
        num_blocks = math.prod(entry.shape) // entry.kind.num_values
        raw = self._files.bytes_of(self.file, entry.offset, num_blocks * entry.kind.num_bytes)
        values = np.empty((num_blocks, entry.kind.num_values), entry.kind.dtype)
        step = max(1, (1 << 22) // entry.kind.num_bytes)
        for first in range(0, num_blocks, step):
            part = raw[first * entry.kind.num_bytes : (first + step) * entry.kind.num_bytes]
            values[first : first + step] = entry.kind.decode(part.reshape(-1, entry.kind.num_bytes))
        values = values.reshape(entry.shape)
        for released, heads in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
            if name.endswith(f".self_attn.{released}.weight"):
                num_heads = self._number(f"attention.{heads}", self._number("attention.head_count"))
                pairs = values.reshape(num_heads, -1, 2, entry.shape[-1])
                return pairs.swapaxes(1, 2).reshape(entry.shape)
        return values

    def config(self) -> dict[str, Any]:
        """config.json of the model.

        Raises:
          CheckpointError: the metadata lacks something, or holds what is not understood.
        """
        width, num_heads = self._number("embedding_length"), self._number("attention.head_count")
        if (embedding := self.tensors.get("model.embed_tokens.weight")) is None or len(embedding.shape) != 2:
            self._refuse("no token embeddings", "token_embd.weight", "take a GGUF of a whole model")
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._number("attention.head_count_kv", num_heads),
            "head_dim": self._number("attention.key_length", width // max(num_heads, 1)),
            "max_position_embeddings": self._number("context_length", 2048),
            # A float32 of the file, in the fewest digits that give it back.
            "rms_norm_eps": float(str(np.float32(self._number("attention.layer_norm_rms_epsilon")))),
            "rope_theta": float(self._number("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "vocab_size": embedding.shape[0],
            "torch_dtype": "float32",
        }
        for name in ("bos", "eos"):
            if (token := self.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                config[f"{name}_token_id"] = token
        heads = {"rope.dimension_count": config["head_dim"], "attention.value_length": config["head_dim"]}
        for key, expected in heads.items():
            if self._number(key, expected) != expected:
                self._refuse(f"llama.{key} {self._number(key)}", str(expected), "such heads are not built")
        own = {key for key in self.metadata if key.startswith("llama.")}
        if unknown := sorted(own - {f"llama.{name}" for name in (*self._known, *_IGNORED)}):
            self._refuse(f"metadata {listed(unknown)}", "metadata that is understood", "update mmjax")
        return config

    def _number(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        value = self.metadata.get(f"llama.{name}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1 << 40:
            self._refuse(f"llama.{name} {value!r}", "a positive number", "take a sound GGUF")
        return value

    def _refuse(self, found: str, expected: str, remedy: str) -> NoReturn:
        raise CheckpointError(str(self.file), found=found, expected=expected, remedy=remedy)
