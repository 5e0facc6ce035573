"""The train command: how settings come together, what a wrong one says, and with which exit code."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmjax import train
from mmjax.config import MeshConfig, RunConfig, saved, to_yaml
from mmjax.parallel import processes
from mmjax.parallel.launch import Placement
from mmjax.presets.kimi_k3 import kimi_k3

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch, tmp_path):
    """No message is broken over lines, and run folders lie in a temporary folder."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)


def settings(*arguments: str) -> RunConfig:
    return train.read_command(arguments).settings


def test_options_override_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 7\noptimizer: {learning_rate: 1e-4}\nmodel: {moe: {num_experts: 32}}\n")
    config = settings("--config", str(file), "--model.moe.num-experts", "64", "--mesh", "fsdp=2,expert=64")
    assert (config.seed, config.optimizer.learning_rate, config.model.moe.num_experts) == (7, 1e-4, 64)
    assert config.mesh == MeshConfig(fsdp=2, expert=64)


def test_the_saved_settings_of_a_run_repeat_it():
    config = dataclasses.replace(train.find_experiment("digits_cpu"), seed=3)
    Path("run.yaml").write_text(to_yaml(config))
    assert settings("--config=run.yaml") == config


def test_what_an_experiment_says_of_the_run_outlives_the_weights_model():
    described = train.find_experiment("k3_lora").model
    # A converted checkpoint says what was released, not in which dtype to compute.
    released = dataclasses.replace(kimi_k3(), compute_dtype="float32")
    model = train.with_run_settings(released, described)
    assert (model.layer_loops, model.moe.capacity_factor, model.full_attention.query_chunk_tokens) == (
        "whole",
        1.25,
        128,
    )
    assert model.compute_dtype == "bfloat16"
    router = dataclasses.replace(described.moe.router, balance_coefficient=0.1, balance_over="document", sign_rate=0.5)
    balanced = dataclasses.replace(described, moe=dataclasses.replace(described.moe, router=router))
    balanced = train.with_run_settings(released, balanced).moe.router
    assert (balanced.balance_coefficient, balanced.balance_over, balanced.sign_rate) == (0.1, "document", 0.5)
    may_change = {name.removeprefix("model.") for name in saved._MAY_CHANGE if name.startswith("model.")}
    assert may_change <= set(train._OF_A_RUN)
    # What the model is stays the checkpoint's: how experts are stored, and an indexer that it does not have.
    assert (model.moe.expert_storage, model.full_attention.indexer.stage) == (released.moe.expert_storage, "none")
    assert train.with_run_settings(described, described) == described
    warmed = train.find_experiment("indexer_warmup").model
    assert train.with_run_settings(described, warmed).full_attention.indexer.stage == "dense"
    indexer = dataclasses.replace(warmed.full_attention.indexer, score_dtype="float8_e4m3fn")
    rounded = dataclasses.replace(warmed, full_attention=dataclasses.replace(warmed.full_attention, indexer=indexer))
    assert train.with_run_settings(described, rounded).full_attention.indexer.score_dtype == "float8_e4m3fn"
    staged = dataclasses.replace(released, pipeline_stages=(40, 53))
    assert train.with_run_settings(released, staged) == staged


def test_mesh_is_read_whole_or_axis_by_axis():
    assert settings("--mesh=1x2x16").mesh == MeshConfig(tensor=2, expert=16)
    assert settings("--mesh.fsdp", "-1", "--mesh.tensor", "2").mesh == MeshConfig(fsdp=-1, tensor=2)


def test_an_override_takes_the_name_with_underscores_and_lists():
    config = settings("--model.full_attention_layers", "1", "2", "--checkpoint.keep-best", "False")
    assert config.model.full_attention_layers == (1, 2)
    assert not config.checkpoint.keep_best


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--mesh", "fsp=2"], ["--mesh", "fsdp"]),
        (["--mesh", "4x2"], ["pipe x tensor x expert"]),
        (["--experiment", "digit_cpu"], ["did you mean 'digits_cpu'"]),
        (["--experiment", "../x"], ["one of digits_cpu"]),
        (["--experiment", "digits_cpu", "--config", "x.yaml"], ["leave one out"]),
        (["--config", "absent.yaml"], ["absent.yaml", "No such file"]),
        (["--model.moe.num-expert", "4"], ["--model.moe.num-experts"]),
        (["--optimizer.name", "sgd"], ["adamw", "muon"]),
        (["--model.width", "wide"], ["--model.width"]),
        (["--seed"], ["--seed"]),
        (
            ["--model.width", "-3", "--optimizer.beta1", "nan", "--training.steps", "0"],
            ["settings: 3 faults", "model.width", "optimizer.beta1", "training.steps"],
        ),
        (["--mesh", "4x2x16"], ["pipe=4 expert=16 tensor=2 needs 128 devices", "8 are there (cpu)", "--dry-run"]),
        (["--mesh", "fsdp=3,expert=-1"], ["8 devices (cpu), which the other axes do not divide"]),
        (["--mesh", "fsdp=-1", "--dry-run"], ["give every axis a size"]),
    ],
)
def test_a_wrong_command_line_is_one_message_and_exit_code_2(arguments: list[str], parts: list[str], capsys):
    try:
        code = train.main(arguments)
    except SystemExit as exit:
        code = exit.code
    message = capsys.readouterr().err
    assert code == 2
    for part in parts:
        assert part in message
    assert "Traceback" not in message
    assert not any(Path().iterdir())


def test_an_open_axis_is_filled_with_the_devices_there_are():
    assert train.settle_mesh(settings("--mesh", "1x2x-1")).mesh == MeshConfig(tensor=2, expert=4)


def test_another_run_is_not_overwritten(capsys):
    config = RunConfig(run_dir="run")
    saved.save(config)
    Path("run/metrics.jsonl").write_text("{}\n")
    assert train.main(["--run-dir", "run", "--data.rows", "32"]) == 2
    assert "16" in capsys.readouterr().err
    assert saved.load("run/config.yaml") == config


def test_ctrl_c_before_training_is_one_line(monkeypatch, capsys):
    def interrupt(command: train.Command) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupt)
    assert train.main([]) == train.EXIT_STOPPED_AT_ONCE
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_ctrl_c_in_one_of_several_processes_is_one_line_too(monkeypatch, capsys):
    def stopped(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    placement = Placement(coordinator="here:1", num_processes=2, process_index=1, local_devices=None, origins={})
    monkeypatch.setattr(train, "resolve", lambda *_: placement)
    monkeypatch.setattr(train, "_train", stopped)
    monkeypatch.setattr(processes, "start", lambda *_: None)
    monkeypatch.setattr(processes, "leave_at_once", sys.exit)
    with pytest.raises(SystemExit) as left:
        train.main([])
    error = capsys.readouterr().err
    assert left.value.code == train.EXIT_STOPPED_AT_ONCE and "stopped at once" in error and "Traceback" not in error


def test_the_plan_of_a_mesh_needs_none_of_its_devices(capsys):
    assert train.main(["--mesh", "replica=4,expert=16", "--data.rows", "64", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "mesh: replica=4 expert=16" in output
    assert "plan for 64 devices" in output
    assert not any(Path().iterdir())


def test_the_plan_of_a_pipeline_shares_out_the_layers(capsys):
    assert train.main(["--mesh", "4x2x16", "--data.rows", "64", "--dry-run"]) == 0
    assert "plan for 128 devices" in capsys.readouterr().out
    assert train.main(["--mesh", "pipe=16", "--dry-run"]) == 2
    assert "mesh.pipe" in capsys.readouterr().err


def test_help_and_errors_do_not_wait_for_jax():
    script = (
        "import sys; from mmjax.train import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert main(['--mesh', 'x']) == 2 and main(['--model.width', '0']) == 2\n"
        "assert 'jax' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "--dry-run" in finished.stdout
