"""Released checkpoints as they lie on disk: what there is, from headers alone, and tensors one by one."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mmjax.checkpoint.gguf import GgufFile
from mmjax.checkpoint.gguf_tokenizer import tokenizer_files
from mmjax.checkpoint.manifest import listed
from mmjax.checkpoint.safetensors_files import MappedFiles, StoredTensor, read_header
from mmjax.checkpoint.strict_json import read_json
from mmjax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = (*_PICKLES, ".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".tflite", ".ot")
_LARGEST_COPIED_BYTES = 256 << 20


@dataclass(frozen=True)
class ReleasedFile:
    """A file of tensors: names in the order of its header."""

    name: str
    tensors: tuple[str, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class ReleasedFiles:
    """A released checkpoint; only headers have been read."""

    place: Path
    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, StoredTensor]
    files: tuple[ReleasedFile, ...]
    read: Callable[[str], np.ndarray]
    """A tensor by name, good until the next is read."""
    copied: tuple[Path, ...]
    """Files that belong to the model and are not weights: tokenizer, processor, template, licence."""
    written: Mapping[str, str]
    """Such files that the weights' file holds inside, as text by name."""
    remarks: tuple[str, ...]
    """What a person should know of it."""

    def write_companions(self, folder: Path) -> None:
        """Write the files that are not weights into a new folder."""
        folder.mkdir(parents=True)
        for file in self.copied:
            # Content only: a link becomes a file, and a read-only one can be replaced later.
            shutil.copyfile(file, folder / file.name)
        for name, text in self.written.items():
            (folder / name).write_text(text, encoding="utf-8")


def open_released(place: Path) -> ReleasedFiles:
    """A folder as Hugging Face has it, or a GGUF file, or a folder with one of those.

    Raises:
      CheckpointError: it is none, or its files do not belong together or cannot be trusted. Pickles are never read.
    """
    if not place.exists():
        _refuse(place, "nothing", "a folder with safetensors, or a GGUF file", "check the path")
    if place.is_dir():
        inside = sorted(file.name for file in place.iterdir() if file.is_file())
        if any(name.endswith(".safetensors") or name == INDEX for name in inside):
            return _open_folder(place, inside)
        if len(ggufs := [name for name in inside if name.endswith(".gguf")]) == 1:
            return _open_gguf(place / ggufs[0])
        if ggufs:
            _refuse(place, f"several GGUF files: {listed(ggufs)}", "one", "give the path of one of them")
        if pickles := [name for name in inside if name.endswith(_PICKLES)]:
            _refuse_pickle(place / pickles[0])
        _refuse(place, "no weights", f"{SINGLE}, {INDEX} or a GGUF file", "check the path")
    if place.suffix in _PICKLES:
        _refuse_pickle(place)
    if place.suffix == ".safetensors":
        _refuse(place, "one file", "the folder it lies in, with config.json", f"give {place.parent}")
    return _open_gguf(place)


def _open_folder(folder: Path, inside: list[str]) -> ReleasedFiles:
    if "adapter_config.json" in inside and "config.json" not in inside:
        _refuse(folder, "an adapter (adapter_config.json)", "a whole model", "give the folder of its base model")
    config = read_json(_confined(folder, "config.json"), largest_bytes=10 << 20)
    remarks: list[str] = []
    if INDEX in inside:
        tensors, files = _open_shards(folder, remarks)
    else:
        names = [name for name in inside if name.endswith(".safetensors")]
        if SINGLE in names:
            names = [SINGLE]
        if len(names) > 1:
            _refuse(folder, f"{listed(names)} and no {INDEX}", "the index of the shards", f"download {INDEX} too")
        tensors, metadata = read_header(_confined(folder, names[0]))
        files = (ReleasedFile(names[0], tuple(tensors), metadata),)
    mapped = MappedFiles()
    copied = []
    for name in inside:
        is_other_index = name.endswith(".index.json") and name != INDEX
        if name.endswith(_WEIGHTS) or is_other_index or name.startswith("."):
            continue
        if (file := _confined(folder, name)).stat().st_size > _LARGEST_COPIED_BYTES:
            remarks.append(f"{name} is not taken along: it is too large for what it is called")
        else:
            copied.append(file)
    return ReleasedFiles(
        place=folder,
        config=config,
        tensors=tensors,
        files=files,
        read=lambda name: mapped.read(tensors[name]),
        copied=tuple(copied),
        written={},
        remarks=tuple(remarks),
    )


def _open_shards(folder: Path, remarks: list[str]) -> tuple[dict[str, StoredTensor], tuple[ReleasedFile, ...]]:
    index_file = _confined(folder, INDEX)
    index = read_json(index_file)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(shard, str) for shard in places.values()):
        _refuse(index_file, "no weight_map of texts", "the shard of each tensor", "download it again")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            _refuse(index_file, f"the shard {shard[:80]!r}", "names of files beside it", "do not use this checkpoint")
    if missing := [shard for shard in shards if not (folder / shard).exists()]:
        _refuse(folder, f"no {listed(missing)}", f"the {len(shards)} shards that {INDEX} names", "download the rest")
    tensors: dict[str, StoredTensor] = {}
    files, differences = [], []
    for shard in shards:
        inside, metadata = read_header(_confined(folder, shard))
        for name in inside:
            if name in tensors:
                differences.append(f"{name} is in {tensors[name].file.name} and in {shard}")
            elif places.get(name) != shard:
                differences.append(f"{name} is in {shard}, the index says {places.get(name, 'nothing of it')}")
        tensors |= inside
        files.append(ReleasedFile(shard, tuple(inside), metadata))
    differences += [f"{name} is in no shard" for name in places if name not in tensors]
    if differences:
        _refuse(index_file, listed(differences, "; "), "an index that agrees with its shards", "download both again")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(tensor.num_bytes for tensor in tensors.values())
    if total is not None and total != found:
        remarks.append(f"{INDEX} speaks of {total} bytes, the shards hold {found}")
    return tensors, tuple(files)


def _open_gguf(file: Path) -> ReleasedFiles:
    gguf = GgufFile(file)
    config = gguf.config()
    written, remarks = tokenizer_files(gguf.metadata, config)
    return ReleasedFiles(
        place=file,
        config=config,
        tensors=gguf.tensors,
        files=(ReleasedFile(SINGLE, tuple(gguf.tensors), {"format": "pt"}),),
        read=gguf.read,
        copied=(),
        written=written,
        remarks=tuple(remarks),
    )


def _confined(folder: Path, name: str) -> Path:
    """A regular file of `folder`. A link may lead out only to the `blobs` of the Hugging Face cache it lies in."""
    file = folder / name
    home = folder.resolve()
    target = file.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if target.parent != home and target.parent != blobs:
        _refuse(file, f"a link to {target}", "a file of the folder", "do not use this checkpoint, or copy the file")
    if not target.is_file():
        _refuse(file, "no regular file" if file.exists() else "no such file", "a file", "download it")
    return file


def _refuse_pickle(file: Path) -> NoReturn:
    _refuse(
        file,
        "a pickle, which can run any code when it is read",
        "safetensors or GGUF",
        "ask for safetensors, or convert it where nothing can be harmed",
    )


def _refuse(where: Path, found: str, expected: str, remedy: str) -> NoReturn:
    raise CheckpointError(str(where), found=found, expected=expected, remedy=remedy)
