"""Losses of transformers + peft and ours from the same files: tiny models in float32, a few steps."""

import importlib.util
from pathlib import Path

import pytest

for name in ("torch", "transformers", "peft"):
    pytest.importorskip(name)

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_losses.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("model", ["llava", "kimi_linear"])
def test_losses_of_both_sides_agree_in_float32(model, tmp_path):
    spec = importlib.util.spec_from_file_location("compare_losses", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.train_theirs(model, tmp_path, is_tiny=True, steps=4)
    assert script.compare(model, tmp_path, is_tiny=True, steps=4) < 2e-6
