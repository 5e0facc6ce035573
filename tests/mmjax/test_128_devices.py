"""Many virtual devices: `--mesh 4x2x16` (pipe, tensor, expert) gives the numbers of one device, `1x2x16` trains."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmjax.monitor.metrics import read_lines

ROOT = Path(__file__).parents[2]
SETTINGS = """
model:
  width: 16
  num_layers: 4
  vocabulary_size: 264
  full_attention_layers: [1, 3]
  residual_block_layers: 2
  linear_attention: {num_heads: 2, key_width: 4, value_width: 4, decay_rank: 4, chunk_tokens: 16}
  full_attention: {num_heads: 2, query_rank: 8, latent_width: 8, nope_width: 4, shared_key_width: 4, value_width: 4}
  moe: {num_experts: 16, experts_per_token: 2, expert_width: 8, latent_width: 8, dense_width: 16, num_dense_layers: 0}
  vision: {num_layers: 1, width: 8, num_heads: 1, head_width: 8, hidden_width: 16}
  parameter_dtype: float64
  compute_dtype: float64
data: {rows: 64, row_tokens: 48, row_patches: 32, image_max_patches: 16, packing_window: 4, eval_samples: 8}
optimizer: {warmup_steps: 2}
checkpoint: {every_steps: 0}
training: {steps: 2, accumulation: 4, eval_every_steps: 0}
"""


def train(folder: Path, devices: int, *options: str) -> list[dict]:
    """The metrics of each step."""
    folder.mkdir()
    (folder / "tiny.yaml").write_text(SETTINGS)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "mmjax.train", "--config", str(folder / "tiny.yaml")]
    command += ["--run-dir", str(folder / "run"), *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return read_lines(folder / "run" / "metrics.jsonl")


@pytest.mark.slow  # 5 minutes on 2 cores, half of them compiling
def test_the_mesh_4x2x16_on_128_devices_trains_as_one_device_does(tmp_path):
    alone, together = train(tmp_path / "one", 1), train(tmp_path / "many", 128, "--mesh", "4x2x16")
    assert len(alone) == len(together) == 2
    # The second step's loss tells of the first one's update.
    for one, many in zip(alone, together, strict=True):
        for name in ("loss", "gradient_norm", "moe_load_max_over_mean", "real_tokens", "supervised_tokens"):
            assert abs(one[name] - many[name]) <= 1e-9 * abs(one[name]), name


@pytest.mark.slow
def test_thirty_two_devices_train_on_a_mesh_of_1x2x16(tmp_path):
    options = """
        --mesh 1x2x16 --model.width 32 --model.moe.num-experts 32 --model.linear-attention.decay-rank 16
        --model.full-attention.latent-width 16 --model.full-attention.query-rank 16 --model.vision.width 16
        --data.rows 16 --training.accumulation 1 --training.steps 3
    """
    records = train(tmp_path / "many", 32, *options.split())
    assert len(records) == 3 and all(math.isfinite(record["loss"]) for record in records)
    assert {record["compilations"] for record in records} == {1}
