"""Memory and speed of conversion: a synthetic sharded release comes in and goes out again, each in its own process.

python scripts/bench_convert.py 20 --folder /somewhere/with/room

The release is a DeepSeek-V3 of random bfloat16 numbers with 64 experts a layer, in shards of 1 GB. What is no longer
needed is deleted on the way, so twice the size must be free; the folder is gone at the end. Memory is the peak resident
set of the process, mapped pages of files included.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import disk_usage, rmtree
from typing import Any

import ml_dtypes
import numpy as np

from mmjax.checkpoint.safetensors_files import write_file
from mmjax.models.families import family_of

SHARD_BYTES = 10**9
DTYPE = np.dtype(ml_dtypes.bfloat16)
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# Run in a process of its own. Not `ru_maxrss`, which begins with what the parent held.
CHILD = (
    "import sys; from mmjax.convert import main; code = main(sys.argv[1:]);"
    "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line]); sys.exit(code)"
)


def shapes_of(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the release by name."""
    config = CONFIG | {"num_hidden_layers": num_layers}
    family = family_of(config)
    return {tensor.name: tensor.shape for tensor in family.released_tensors(family.read_config(config))}


def num_bytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * DTYPE.itemsize


def write_release(folder: Path, wanted_bytes: int) -> tuple[int, int]:
    """A release of about `wanted_bytes`, written shard by shard; returns its bytes and those of its largest tensor."""
    one, two = (sum(map(num_bytes, shapes_of(layers).values())) for layers in (2, 3))
    num_layers = max(2, 2 + round((wanted_bytes - one) / (two - one)))
    shapes = shapes_of(num_layers)
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if shards[-1] and size + num_bytes(shape) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes(shape)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    random = np.random.default_rng(0)
    places = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        places |= dict.fromkeys(names, file)

        def values(names=names):
            for name in names:
                words = random.integers(0, 1 << 64, -(-num_bytes(shapes[name]) // 8), np.uint64)
                # Any sign and fraction, magnitudes from 2^-7 to 2^-5.
                bits = words.view(np.uint16)[: int(np.prod(shapes[name]))] & 0x80FF | 0x3C00
                yield name, iter([bits.view(DTYPE)])

        write_file(folder / file, {name: (DTYPE, shapes[name]) for name in names}, values(), {"format": "pt"})
    total = sum(map(num_bytes, shapes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(
        f"release: {total / 1e9:.2f} GB, {len(shapes):,} tensors, {len(shards)} shards, {num_layers} layers", flush=True
    )
    return total, max(map(num_bytes, shapes.values()))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a release."""
    found = {}
    for file in sorted(folder.iterdir()):
        if file.name != "manifest.json":
            with file.open("rb") as stream:
                found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def convert(label: str, source: Path, target: Path, total: int) -> None:
    """Run the command and say what it took."""
    start = time.perf_counter()
    command = [sys.executable, "-c", CHILD, str(source), str(target)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - start
    peak = 1024 * int(done.stdout.splitlines()[-1])
    print(f"{label}: peak {peak / 1e9:.2f} GB, {seconds:.0f} s, {total / seconds / 1e9:.2f} GB/s", flush=True)


def main() -> int:
    """There and back; 1 if a file came back changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    wanted = int(arguments.gigabytes * 1e9)
    if (free := disk_usage(arguments.folder).free) < 2.2 * wanted:
        print(f"{arguments.folder} has {free / 1e9:.1f} GB free, {2.2 * wanted / 1e9:.1f} are needed", file=sys.stderr)
        return 1
    work = Path(tempfile.mkdtemp(prefix="mmjax-bench-convert-", dir=arguments.folder))
    try:
        total, largest = write_release(work / "source", wanted)
        expected = digests(work / "source")
        convert("in", work / "source", work / "ours", total)
        rmtree(work / "source")
        convert("out", work / "ours", work / "back", total)
        rmtree(work / "ours")
        is_equal = digests(work / "back") == expected
    finally:
        rmtree(work)
    print(f"largest tensor {largest / 1e9:.2f} GB; files {'equal' if is_equal else 'DIFFER'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
