"""Bad weights, configs, tokenizers, templates and adapters of all kinds through the commands: time and memory.

One process takes them all, one after the other, and measures each: seconds of a processor, its own and its children's,
and the most memory held. Each ends in one message and an exit code, and nothing is written or changed.
"""

import hashlib
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmjax import convert
from mmjax.checkpoint.manifest import write_manifest
from tests.mmjax.checkpoint import test_gguf
from tests.mmjax.checkpoint.conftest import k3_config, llama_config, random_tensors, write_release
from tests.mmjax.checkpoint.test_released_files import BAD_JSON, BAD_SAFETENSORS
from tests.mmjax.data import test_prompts

ROOT = Path(__file__).parents[2]
SECONDS, BYTES = 10, 10**9
TALK = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
INDEX = "model.safetensors.index.json"
PROGRAM = """
import contextlib, io, json, resource, sys, time, traceback
from mmjax import convert, generate, train

def spent():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime

for line in sys.stdin:
    name, command, arguments = json.loads(line)
    # Where this is not allowed, the most memory is that of all cases so far.
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    said, begun = io.StringIO(), spent()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = {"convert": convert, "generate": generate, "train": train}[command].main(arguments)
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = -1
    seconds = spent() - begun
    peak = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps([name, code, seconds, 1024 * peak, 1024 * child, said.getvalue()]), flush=True)
"""


class Case:
    """A command that is to be refused, and what its message says."""

    def __init__(self, command: str, arguments: list, codes: tuple[int, ...], parts: tuple[str, ...]):
        self.command, self.arguments, self.codes, self.parts = command, list(map(str, arguments)), codes, parts


def conversion(folder: Path, *parts: str, source: Path | None = None) -> Case:
    return Case("convert", [source or folder, folder.with_name(f"{folder.name}-ours")], (2, 3, 4), parts)


def plain(message: str) -> str:
    """What a message has that a pattern of it names last."""
    return message.replace("\\", "").split(".*")[-1]


def safetensors_cases(place: Path):
    for kind, (content, message) in BAD_SAFETENSORS.items():
        folder = write_release(place / kind, llama_config(), {})
        (folder / "model.safetensors").write_bytes(content)
        yield kind, conversion(folder, "model.safetensors", plain(message))
    folder = write_release(place / "many tensors", llama_config(), {})
    header = json.dumps(
        {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(16_000)}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    yield "many tensors", conversion(folder, "t0")
    for kind, value in (("a NaN", np.nan), ("an infinity", np.inf)):
        tensors = random_tensors(llama_config())
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
        folder = write_release(place / kind, llama_config(), tensors)
        yield kind, conversion(folder, "model.layers.1.mlp.up_proj.weight", "1 of 8192 numbers are NaN or infinite")


def pickle_cases(place: Path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(place / "canary"),))

    for kind, content in (("reduce", pickle.dumps(Trap())), ("random", np.random.default_rng(0).bytes(100_000))):
        folder = write_release(place / kind, llama_config(), {})
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)
        yield kind, conversion(folder, "pytorch_model.bin", "a pickle")
        yield f"{kind} alone", conversion(place / f"{kind}-alone", "a pickle", source=folder / "pytorch_model.bin")


def index_cases(place: Path):
    def sharded(kind: str) -> tuple[Path, dict]:
        folder = write_release(place / kind, llama_config(), random_tensors(llama_config()), num_shards=3)
        return folder, json.loads((folder / INDEX).read_text())

    def shard(number: int) -> str:
        return f"model-{number:05}-of-00003.safetensors"

    folder, index = sharded("a shard is missing")
    (folder / shard(1)).unlink()
    (folder / shard(3)).unlink()
    yield folder.name, conversion(folder, shard(1), shard(3))
    for kind, name in (("upwards", f"../{shard(1)}"), ("absolute", "/etc/passwd")):
        folder, index = sharded(kind)
        (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"lm_head.weight": name}}))
        yield kind, conversion(folder, "names of files beside it")
    folder, _ = sharded("a link out")
    (folder / shard(2)).rename(place / "outside.safetensors")
    (folder / shard(2)).symlink_to(place / "outside.safetensors")
    yield folder.name, conversion(folder, "a link to")
    folder, index = sharded("a tensor elsewhere")
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"lm_head.weight": shard(3)}}))
    yield folder.name, conversion(folder, "lm_head.weight is in")
    folder, _ = sharded("a tensor twice")
    save_file(load_file(folder / shard(1)) | load_file(folder / shard(2)), folder / shard(2))
    yield folder.name, conversion(folder, f"and in {shard(2)}")
    folder, index = sharded("another model's shard")
    other = llama_config() | {"intermediate_size": 96}
    foreign = write_release(place / "foreign", other, random_tensors(other), num_shards=3)
    name = index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / name).write_bytes((foreign / name).read_bytes())
    yield folder.name, conversion(folder, "expected", "[128, 64]")


def gguf_cases(place: Path):
    def written(kind: str, content: bytes) -> Path:
        (place / kind).mkdir(parents=True)
        (place / kind / "model.gguf").write_bytes(content)
        return place / kind

    for kind, (content, message) in test_gguf.BAD.items():
        yield kind, conversion(written(kind, content), "model.gguf", message)
    # The array of 129 seconds.
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 1 << 40)
    yield "long array", conversion(written("long array", head + b"\0" * 900_000), "1,099,511,627,776 texts")
    sound = test_gguf._write(place / "sound.gguf", test_gguf.METADATA, test_gguf._tensors()).read_bytes()
    yield "cut", conversion(written("cut", sound[:-5000]), "cut off")
    content, name = bytearray(sound), test_gguf._text("blk.0.ffn_down.weight")
    struct.pack_into("<Q", content, content.index(name) + len(name) + 24, 1 << 62)
    yield "far", conversion(written("far", bytes(content)), "blk.0.ffn_down.weight from byte")


def config_cases(place: Path):
    for name in ("config.json", INDEX):
        for kind, (text, message) in BAD_JSON.items():
            folder = write_release(place / f"{name} {kind}", llama_config(), {}, num_shards=1)
            (folder / name).write_text(text)
            yield f"{name} {kind}", conversion(folder, name, message)
    for kind, change, parts in (
        ("misspelt", {"hidden_sise": 64}, ("hidden_sise", "hidden_size")),
        ("a family", {"model_type": "lama"}, ("did you mean 'llama'?",)),
        ("a text", {"hidden_size": "64"}, ("hidden_size",)),
        ("negative", {"num_hidden_layers": -3}, ("num_layers",)),
        ("endless layers", {"num_hidden_layers": 10**9}, ("num_hidden_layers",)),
        ("undivided", {"num_key_value_heads": 3}, ("num_key_heads",)),
        ("a long number", {"vocab_size": 10**30}, ("31 digits",)),
    ):
        folder = write_release(place / kind, llama_config() | change, random_tensors(llama_config()))
        yield kind, conversion(folder, *parts)


def tokenizer_cases(place: Path):
    from tests.mmjax.checkpoint.test_released_files import _tokenizer

    for kind, files, fields, part in (
        ("empty", {"tokenizer.json": ""}, {}, "tokenizer.json"),
        ("nothing", {"tokenizer.json": "{}"}, {}, "do not parse"),
        ("html", {"tokenizer.json": "<html>"}, {}, "HTML page"),
        ("magic", {"tokenizer.json": '{"model": {"type": "Magic"}}'}, {}, "do not parse"),
        ("nested", {"tokenizer.json": "[" * 200_000}, {}, "tokenizer.json"),
        ("too many tokens", {"tokenizer.json": _tokenizer(400)}, {}, "ids below 320"),
        ("no end", {"tokenizer.json": _tokenizer(), "tokenizer_config.json": '{"eos_token": "<no>"}'}, {}, "'<no>'"),
    ):
        folder = write_release(place / kind, llama_config() | fields, random_tensors(llama_config()))
        for name, text in files.items():
            (folder / name).write_text(text)
        yield kind, conversion(folder, part)
    config = k3_config()
    for kind, number, part in (("a word for pictures", 5, "the word 'w5'"), ("no token for pictures", 30, "no token")):
        changed = config | {"media_placeholder_token_id": number}
        folder = write_release(place / kind, changed, random_tensors(config))
        (folder / "tokenizer.json").write_text(_tokenizer())
        yield kind, conversion(folder, part)


def template_cases(place: Path, converted: Path):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for kind, text, part in (
        ("a shell", "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}", "forbidden access"),
        ("classes", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "forbidden access"),
        ("endless", loop, "runs longer than 5 seconds"),
        ("much memory", "{{ 'a' * 10**10 }}", "MemoryError"),
        ("much text", "{% for i in range(90000) %}{{ 'a' * 10000 }}{% endfor %}", "more than 16,777,216 characters"),
        ("broken", "{% if %}", "line 1"),
    ):
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"{kind}.jinja"
        file.write_text(text.replace("CANARY", str(place / "canary")))
        arguments = [converted, "--prompt", "x", "--chat-template", file]
        yield kind, Case("generate", arguments, (3,), (file.name, part))


def adapter_cases(place: Path, converted: Path):
    """Of two layers of the model: `down_proj` of rank 2."""
    talks = place / "talks.jsonl"
    talks.write_text(json.dumps(TALK) + "\n")
    weights = {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights |= {f"{module}.lora_A.weight": np.ones((2, 48), np.float32)}
        weights |= {f"{module}.lora_B.weight": np.ones((32, 2), np.float32)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"]}

    def started(kind: str, part: str, tensors: dict, settings: dict, *options: str) -> Case:
        folder = place / kind
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / "adapter_model.safetensors")
        fixed = ["--weights", converted, "--lora.start", folder, "--lora.rank", "2", "--lora.targets", "down_proj"]
        fixed += ["--data.source", talks, "--data.rows", "1", "--data.row-tokens", "64", "--run-dir", f"{folder}-run"]
        fixed += ["--data.tokenizer", converted / "released" / "tokenizer.json", "--data.end-token", "<|im_end|>"]
        fixed += ["--data.start-token", "<|im_start|>", "--data.image-token", ""]
        return Case("train", [*fixed, *options], (2, 4), (part,))

    first = next(iter(weights))
    yield "rank", started("rank", "r=3", weights, config | {"r": 3})
    yield "shapes", started("shapes", "one rank", weights | {first: np.ones((3, 48), np.float32)}, config)
    yield "no scale", started("no scale", "a scale of 0", weights, config | {"lora_alpha": 0})
    yield "a target too few", started("few", first, {n: w for n, w in weights.items() if n != first}, config)
    other = {name.replace("down_proj", "side_proj"): weight for name, weight in weights.items()}
    yield "another target", started("other", "side_proj", other, config)
    yield "NaN", started("NaN", "NaN or infinite", weights | {first: np.full((2, 48), np.nan, np.float32)}, config)
    yield "no target", started("none", "side_proj", weights, config, "--lora.targets", "side_proj")
    base = {"base": {"weights": "elsewhere", "digest": "0" * 64}}
    for kind, part, manifest in (
        ("another base", "an adapter of elsewhere", base | {"files": {}}),
        ("no list of files", "names no files", base),
        ("a lost file", "file more is missing", base | {"files": {"more": {"bytes": 1, "digest": None}}}),
    ):
        yield kind, started(kind, part, weights, config)
        write_manifest(place / kind, manifest)


def contents(place: Path) -> dict[str, str]:
    """A digest of each file of a folder."""
    files = {str(file.relative_to(place)): file for file in sorted(place.rglob("*")) if file.is_file()}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    place = tmp_path_factory.mktemp("sound")
    config = llama_config() | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 264, "eos_token_id": 258}
    write_release(place / "released", config, random_tensors(config))
    test_prompts.write_release(place / "released", **{"config.json": None, "generation_config.json": None})
    assert convert.main([str(place / "released"), str(place / "ours")]) == 0
    return place / "ours"


KINDS: dict[str, Callable] = {
    "safetensors": safetensors_cases,
    "pickles": pickle_cases,
    "indices": index_cases,
    "gguf": gguf_cases,
    "configs": config_cases,
    "tokenizers": tokenizer_cases,
    "templates": template_cases,
    "adapters": adapter_cases,
}


def test_every_bad_release_is_refused_within_ten_seconds_and_a_gigabyte(tmp_path, converted):
    cases = {}
    for kind, make in KINDS.items():
        (tmp_path / kind).mkdir()
        needed = (converted,) if kind in ("templates", "adapters") else ()
        cases |= {f"{kind}: {name}": case for name, case in make(tmp_path / kind, *needed)}
    # The first is none of them: it pays for what all need.
    first = conversion(tmp_path / "warm", "nothing", source=tmp_path / "absent")
    asked = [("warm", first), *cases.items()]
    before, before_converted = contents(tmp_path), contents(converted)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps([name, case.command, case.arguments]) + "\n" for name, case in asked),
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in answers] == [name for name, _ in asked]
    faults, slowest, largest = [], (0.0, ""), (0, "")
    for name, code, seconds, peak, child, said in answers[1:]:
        case = cases[name]
        slowest, largest = max(slowest, (seconds, name)), max(largest, (max(peak, child), name))
        if code not in case.codes or "Traceback" in said or not all(part in said for part in case.parts):
            faults.append(f"{name}: exit {code}, wanted {case.parts}: {said[-600:]}")
        if seconds > SECONDS or max(peak, child) > BYTES:
            faults.append(f"{name}: {seconds:.1f} s, {peak:,} bytes, {child:,} in a child")
    print(f"{len(cases)} cases; slowest {slowest}, largest {largest}")
    assert not faults, "\n".join(faults)
    assert contents(tmp_path) == before and contents(converted) == before_converted
    assert not [*tmp_path.glob("*/canary"), *tmp_path.glob("*/*-run")]
