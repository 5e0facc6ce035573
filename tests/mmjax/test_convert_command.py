"""The convert command as a process: memory, kills, exit codes, and what transformers makes of what it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mmjax.convert import main, parse_size
from mmjax.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "k3_tiny"
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def _llama(**fields: object) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    } | fields


def _write_large(folder: Path, config: dict, num_shards: int) -> int:
    """A sharded Llama of bfloat16 numbers, written shard by shard; returns its bytes."""
    from mmjax.models.families import family_of

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    tensors = list(family.released_tensors(family.read_config(config)))
    places, total = {}, 0
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        shard = {}
        for tensor in tensors[number::num_shards]:
            places[tensor.name] = name
            bits = np.random.default_rng(len(places)).integers(0x3C00, 0x3E00, tensor.shape, np.uint16)
            shard[tensor.name] = bits.view(ml_dtypes.bfloat16)
            total += bits.nbytes
        save_file(shard, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mmjax.convert", *map(str, arguments)]


def _limited(limit: str, command: list[str]) -> list[str]:
    """`command` under a limit of the shell's ulimit, in units of 1024 bytes."""
    return ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command]


def _peak_bytes(*arguments: object) -> int:
    """Peak memory of the command, mapped files included."""
    # Not `ru_maxrss`, which begins with what the parent held.
    script = (
        "import sys; from mmjax.convert import main; code = main(sys.argv[1:]);"
        "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return 1024 * int(done.stdout.splitlines()[-1])


def _killed(source: Path, target: Path, delay: float) -> bool:
    """Kill a conversion so many seconds after it has begun to write; whether that was before its end."""
    process = subprocess.Popen(_command(source, target), env=ENVIRONMENT, cwd=ROOT)
    unfinished = target.with_name(f"{target.name}.unfinished")
    while process.poll() is None and not (unfinished.is_dir() and any(unfinished.iterdir())):
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return not target.exists()


def test_a_conversion_killed_at_several_moments_leaves_nothing_that_looks_whole_and_starts_over(tmp_path):
    _write_large(tmp_path / "source", _llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=8), 3)
    source, ours, back = tmp_path / "source", tmp_path / "ours", tmp_path / "back"
    for start, target in ((source, ours), (ours, back)):
        kills = 0
        for delay in (0.0, 0.03, 0.1, 0.3):
            if not _killed(start, target, delay):
                break
            kills += 1
            # Neither name passes for a whole one.
            for half in (target, target.with_name(f"{target.name}.unfinished")):
                assert main([str(half), str(tmp_path / "further")]) != 0 and not (tmp_path / "further").exists()
        assert kills
        if not target.exists():
            subprocess.run(_command(start, target), env=ENVIRONMENT, check=True, cwd=ROOT)
        assert not target.with_name(f"{target.name}.unfinished").exists()
    for file in source.iterdir():
        assert (back / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    "gigabytes", [pytest.param(0.3, id="small"), pytest.param(6.0, id="6GB", marks=pytest.mark.slow)]
)
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, gigabytes):
    layer_bytes = 2 * (4 * 1024**2 + 3 * 1024 * 4096)
    tiny = _llama(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=16)
    num_layers = int(gigabytes * 1e9 / layer_bytes)
    _write_large(tmp_path / "one", tiny | {"num_hidden_layers": 1}, 1)
    total = _write_large(tmp_path / "source", tiny | {"num_hidden_layers": num_layers}, 8)
    least = _peak_bytes(tmp_path / "one", tmp_path / "one-ours")
    peak = _peak_bytes(tmp_path / "source", tmp_path / "ours")
    back = _peak_bytes(tmp_path / "ours", tmp_path / "back")
    print(f"{total:,} bytes: peak {peak:,} in, {back:,} out; one layer {least:,}")
    # A model as large in memory would show.
    assert peak < least + 0.2e9 and back < least + 0.25e9


def test_transformers_loads_what_goes_out_and_verification_agrees(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{k: v for k, v in _llama().items() if k not in ("architectures", "model_type")})
    network = transformers.LlamaForCausalLM(config).eval()
    network.save_pretrained(tmp_path / "source")
    assert main([str(tmp_path / "source"), str(tmp_path / "ours"), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "same likeliest token" in text and "KL divergence" in text
    assert main([str(tmp_path / "ours"), str(tmp_path / "back"), "--max-shard", "100kB"]) == 0
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(again(tokens).logits, network(tokens).logits)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("7", 7), (" 2 TiB ", 2 << 40)]
)
def test_sizes_have_units(text, size):
    assert parse_size(text, "--max-memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "4 parsecs", "1e9", "inf"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigurationError, match="--max-memory"):
        parse_size(text, "--max-memory")


def test_too_little_memory_and_one_place_for_both_are_refused(tmp_path, capsys):
    assert main([str(GOLDEN), str(tmp_path / "ours"), "--max-memory", "1MB"]) == 4
    assert "--max-memory" in capsys.readouterr().err
    assert main([str(GOLDEN), str(GOLDEN)]) == 4
    assert main([str(tmp_path / "nothing"), str(tmp_path / "ours")]) == 4
    assert not (tmp_path / "ours").exists()


def test_where_nothing_more_can_be_written_nothing_is_left(tmp_path):
    done = subprocess.run(
        _limited("-f 39", _command(GOLDEN, tmp_path / "ours")),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 4 and "a place that can be written" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
