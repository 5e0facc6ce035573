import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmjax.monitor.metrics import RunMonitor, memory_bytes, read_lines

VALUES = {
    "loss": 2.5,
    "tokens_per_second": 1234.5,
    "step_seconds": 0.25,
    "gradient_norm": 0.75,
    "learning_rate": 3e-4,
    "moe_load_max_over_mean": 1.5,
    "memory_bytes": 2**30,
    "dropped_rows": 0.0,
}


def _write(run_dir: Path, first_step: int, last_step: int, loss: float, **options: bool) -> None:
    with RunMonitor(run_dir, first_step=first_step, num_steps=6, **options) as monitor:
        for step in range(first_step + 1, last_step + 1):
            monitor.step(step, {**VALUES, "loss": loss})
        monitor.evaluation(last_step, {"exact_match": loss / 10})


def test_a_resumed_run_reads_as_one_run_in_files_and_tensorboard(tmp_path: Path) -> None:
    _write(tmp_path, 0, 5, 1.0)
    _write(tmp_path, 3, 6, 2.0)
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [
        (s, 1.0 if s <= 3 else 2.0) for s in range(1, 7)
    ]
    assert read_lines(tmp_path / "evaluations.jsonl") == [{"step": 6, "exact_match": 0.2}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (record["step"], record["loss"]) for record in records
    ]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    _write(tmp_path, 0, 2, 1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    _write(tmp_path, 2, 3, 2.0)
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_every_line_is_json_even_when_the_loss_is_not_a_number(tmp_path: Path) -> None:
    _write(tmp_path, 0, 1, float("nan"))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)["loss"] is None


def test_a_step_prints_one_line_with_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _write(tmp_path, 0, 1, 2.5)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines == [
        "step 1/6  loss 2.5000  1,234 tokens/s  0.250 s  gradient 0.75  lr 3.00e-04  "
        "MoE max/mean 1.50  memory 1,024 MiB"
    ]


def test_a_silent_process_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _write(tmp_path, 0, 1, 2.5, is_silent=True)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_memory_is_counted_in_bytes() -> None:
    assert 2**26 < memory_bytes() < 2**38


def test_the_monitor_loads_neither_tensorflow_nor_torch() -> None:
    code = "import sys, mmjax.monitor.metrics; assert not {'tensorflow', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
