"""The train command in two and four processes on loopback: one process's numbers, an end together, clear refusals."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmjax.monitor.metrics import read_lines
from tests.mmjax import tiny_run

ROOT = Path(__file__).parents[2]
STEPS = 6
SETTINGS = f"""{tiny_run.SETTINGS}
mesh: {{fsdp: 2, expert: 2}}
checkpoint: {{every_steps: 3}}
training: {{steps: 6, eval_every_steps: 3}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(run_dir: Path, devices: int, *options: str) -> subprocess.Popen[str]:
    settings = run_dir.parent / "tiny.yaml"
    settings.write_text(SETTINGS)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Programs that are not optimised compile in a third of the time.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "COLUMNS": "300",
    }
    command = [sys.executable, "-m", "mmjax.train", "--config", str(settings), "--run-dir", str(run_dir), *options]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def start_all(
    run_dir: Path, counts: Sequence[int], *options: str, port: int = 0, devices: int = 2
) -> list[subprocess.Popen[str]]:
    """One process for each of `counts`: how many processes it believes there are."""
    port = port or free_port()
    return [
        start(
            run_dir,
            devices,
            "--launch.coordinator",
            f"127.0.0.1:{port}",
            "--launch.num-processes",
            str(count),
            "--launch.process-index",
            str(index),
            *options,
        )
        for index, count in enumerate(counts)
    ]


def ends(processes: Sequence[subprocess.Popen[str]], seconds: float = 1800) -> list[tuple[int, str]]:
    """(exit code, output) of each."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_lines(run_dir / "metrics.jsonl")]


def scores(run_dir: Path) -> list[float]:
    return [record["exact_match"] for record in read_lines(run_dir / "evaluations.jsonl")]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The run folder of one process with four devices."""
    run_dir = tmp_path_factory.mktemp("alone") / "one"
    [(code, output)] = ends([start(run_dir, 4)])
    assert code == 0, output
    return run_dir


@pytest.mark.slow
def test_four_processes_of_one_device_train_as_one(tmp_path, one_process):
    for code, output in ends(start_all(tmp_path / "four", (4, 4, 4, 4), devices=1)):
        assert code == 0, output
    assert len(losses(tmp_path / "four")) == STEPS
    assert losses(tmp_path / "four") == pytest.approx(losses(one_process), rel=1e-5)
    assert scores(tmp_path / "four") == scores(one_process)


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_and_go_on_together(tmp_path, one_process):
    processes = start_all(tmp_path / "two", (2, 2))
    metrics = tmp_path / "two" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n")):
        time.sleep(0.1)
    # To one of them only: both stop at the same step.
    processes[1].send_signal(signal.SIGTERM)
    first = ends(processes)
    assert [code for code, _ in first] == [75, 75] or [code for code, _ in first] == [0, 0], first
    if first[0][0] == 75:
        second = ends(start_all(tmp_path / "two", (2, 2)))
        assert [code for code, _ in second] == [0, 0], second
    assert len(losses(tmp_path / "two")) == STEPS
    assert losses(tmp_path / "two") == pytest.approx(losses(one_process), rel=1e-5)
    assert scores(tmp_path / "two") == scores(one_process)


@pytest.mark.parametrize(
    ("counts", "options", "messages"),
    [
        ((2, 3), (), ["3 processes"]),
        ((3, 3), ("--launch.start-timeout-seconds", "3"), ["no process 2 of 3"]),
    ],
)
def test_processes_that_cannot_meet_say_why_and_end(tmp_path, counts, options, messages):
    for code, output in ends(start_all(tmp_path / "run", counts, *options), 60):
        assert code == 2 and all(message in output for message in messages), output
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_told(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        options = ("--launch.start-timeout-seconds", "2")
        ((code, output),) = ends(start_all(tmp_path / "run", (2,), *options, port=port), 60)
    assert code == 2 and f"port {port}" in output
