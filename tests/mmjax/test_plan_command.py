"""The plan command: what it prints and writes, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmjax import plan
from mmjax.config import check, from_yaml
from mmjax.planner.adapters import Tuning, trained_arrays
from mmjax.planner.machine import discover
from mmjax.planner.topology import read_cluster
from mmjax.train import read_command
from mmjax.training.dry_run import tuning_of

SMALL = ["--model", "kimi_linear_48b", "--cluster", "8xh200", "--seq", "4096", "--rows", "16"]


def test_a_plan_is_printed_and_its_settings_run(tmp_path, capsys):
    assert plan.main([*SMALL, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in ("kimi_linear_48b on 1x8xh200", "MFU", "predicted, not measured", "rejected"):
        assert text in printed
    config = from_yaml((tmp_path / "plan.yaml").read_text(), "plan.yaml")
    assert check(config) == [] and config.mesh.num_devices == 8
    # Settings of another run take the plan.
    taken = read_command(["--plan", str(tmp_path / "plan.json"), "--data.rows", "32"]).settings
    assert (taken.mesh, taken.training, taken.data.rows) == (config.mesh, config.training, 32)
    assert taken.model.remat_keep == config.model.remat_keep
    plans = json.loads((tmp_path / "plans.json").read_text())
    assert plans[0]["mesh"] == config.mesh.sizes and plans[0]["reason"] == "the fastest that fits"
    assert (tmp_path / "plans.png").stat().st_size > 5000


@pytest.mark.parametrize("expert_rank", [0, 2])
def test_settings_of_planned_adapters_put_them_where_they_were_planned(tmp_path, capsys, expert_rank):
    options = ["--lora", "--rank", "8", "--expert-rank", str(expert_rank), "--output", str(tmp_path)]
    assert plan.main([*SMALL, *options]) == 0
    config = from_yaml((tmp_path / "plan.yaml").read_text(), "plan.yaml")
    assert check(config) == [] and config.lora.rank == 8
    planned = Tuning(kind="lora", rank=8, expert_rank=expert_rank)
    expected, found = (trained_arrays(config.model, tuning) for tuning in (planned, tuning_of(config)))
    assert sorted(expected, key=str) == sorted(found, key=str)


def test_adapters_of_experts_alone_are_planned_but_no_settings_are_written(tmp_path, capsys):
    assert plan.main([*SMALL, "--lora", "--rank", "0", "--expert-rank", "1", "--output", str(tmp_path)]) == 0
    assert "no plan.yaml" in capsys.readouterr().out
    assert not (tmp_path / "plan.yaml").exists()


def test_a_plan_stands_until_the_mix_of_modalities_changes(tmp_path, capsys):
    def run(rows: int, patches: int, *more: str) -> str:
        model = ["--model", "kimi_k3_tiny", "--cluster", "2xh200", "--seq", "512", "--rows", str(rows)]
        assert plan.main([*model, "--row-patches", str(patches), "--output", str(tmp_path), *more]) == 0
        return capsys.readouterr().out

    assert "branches" in run(4, 64)
    since = ["--since", str(tmp_path / "plan.json"), "--threshold", "0.05"]
    assert "the plan stands" in run(8, 64, *since)
    again = run(4, 512, *since)
    assert "planning again" in again and "branches" in again
    assert plan.main(["--cluster", "2xh200", "--since", str(tmp_path / "plans.json")]) == 2


def test_a_measured_imbalance_sizes_the_buffers(capsys):
    command = plan.Command(model="kimi_linear_48b", imbalance=1.5)
    config, _ = plan.describe_run(command, plan.find_preset("kimi_linear_48b")(), read_cluster("8xh200"))
    assert config.model.moe.capacity_factor == 1.5
    assert "1.5 times the mean, rounds: 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.deviceless
def test_plans_are_confirmed_by_compiled_steps(capsys):
    model = ["--model", "smollm2_135m", "--cluster", "2xh200", "--seq", "512", "--rows", "8"]
    assert plan.main([*model, "--confirm", "1", "--confirm-layers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "compiled for 1x2xh200" in printed and "bytes at the peak" in printed and "(1 layers)" in printed


def test_when_nothing_fits_it_says_what_would(capsys):
    assert plan.main(["--model", "kimi_k31", "--cluster", "8xl40s", "--seq", "2048", "--lora"]) == 1
    printed = capsys.readouterr().out
    assert "nothing fits" in printed and "GiB" in printed and "make" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "kimi_k32"], "did you mean 'kimi_k3"),
        (["--cluster", "16x8xh201"], "did you mean 'h20"),
        (["--cluster", "8xh200", "--seq", "0"], "data.row_tokens"),
        (["--cluster", "no_such_file.yaml"], "no_such_file.yaml"),
    ],
)
def test_mistakes_are_one_message(arguments, message, capsys):
    assert plan.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_this_machine_is_planned_for_with_a_warning_of_what_is_broken(monkeypatch, capsys):
    text = (Path(__file__).parent / "planner" / "machines" / "b200_one_without_nvlink.txt").read_text()
    names = "".join(f"{index}, NVIDIA B200\n" for index in range(8))
    outputs = {"--query-gpu=index,name": names, "topo": text}
    found = discover(lambda command: outputs.get(command[1 % len(command)], ""), Path("/nonexistent"))
    monkeypatch.setattr(plan, "discover", lambda: found)
    assert plan.main(["--model", "kimi_linear_48b", "--rows", "8", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert "warning: GPU2 has 0 NVLinks" in printed and "kimi_linear_48b on 1x8xb200" in printed


def test_a_machine_of_uneven_links_gets_its_devices_in_an_order_that_suits_them(monkeypatch, capsys, tmp_path):
    text = (Path(__file__).parent / "planner" / "machines" / "pcie_4_gpus.txt").read_text()
    # The board as it would be with its cards in other slots: 0 and 2, 1 and 3 share a socket.
    rows = [["X", "SYS", "NODE", "SYS"], ["SYS", "X", "SYS", "NODE"]]
    rows += [["NODE", "SYS", "X", "SYS"], ["SYS", "NODE", "SYS", "X"]]
    header = text.splitlines()[0].replace("NIC", "\0").split("\0")[0]
    matrix = "\n".join([header, *(f"GPU{index}    {'    '.join(row)}" for index, row in enumerate(rows))])
    outputs = {"--query-gpu=index,name": "".join(f"{index}, NVIDIA L40S\n" for index in range(4)), "topo": matrix}
    found = discover(lambda command: outputs.get(command[1 % len(command)], ""), Path("/nonexistent"))
    monkeypatch.setattr(plan, "discover", lambda: found)
    options = ["--model", "qwen3_0_6b", "--rows", "8", "--seq", "2048", "--output", str(tmp_path)]
    assert plan.main(options) == 0
    plans = json.loads((tmp_path / "plans.json").read_text())
    assert any(one["device_order"] for one in plans)


def test_the_fit_of_committed_readings_is_printed(capsys):
    readings = Path(__file__).parents[2] / "docs" / "readings" / "h200.json"
    assert plan.main(["fit", "--readings", str(readings)]) == 0
    printed = capsys.readouterr().out
    for text in ("NVIDIA H200", "share of the peak", "llava15_lora_1xh200", "from the other steps", "on average"):
        assert text in printed
    assert plan.main([*SMALL, "--readings", str(readings), "--top", "1"]) == 0
    assert "parts from kernels" in capsys.readouterr().out
    assert plan.main(["fit", "--readings", "nowhere.json"]) == 2


def test_images_are_planned_when_asked_for():
    command = plan.Command(model="kimi_k3", row_patches=1024)
    config, _ = plan.describe_run(command, plan.find_preset("kimi_k3")(), read_cluster("8xh200"))
    assert config.model.vision.is_present and config.data.row_patches == 1024
    text, _ = plan.describe_run(plan.Command(model="kimi_k3"), plan.find_preset("kimi_k3")(), read_cluster("8xh200"))
    assert not text.model.vision.is_present


def test_planning_loads_no_jax():
    script = "import sys; from mmjax import plan; plan.main(sys.argv[1:]); print('jax' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", script, *SMALL], capture_output=True, text=True, check=True, timeout=120
    )
    assert finished.stdout.strip().endswith("False")


def test_a_schedule_is_printed_with_what_it_costs_and_loads_no_jax(capsys):
    assert plan.main(["schedule", "--schedule", "gpipe", "--pipe", "2", "--micro-batches", "2"]) == 0
    printed = capsys.readouterr().out
    assert "  0 | F0 F1 .  .  .  B0 B1 " not in printed
    assert printed.splitlines()[1].startswith("  1 | .  .  F0 F1 B0 B1")
    assert "8 ticks, of which a device waits 50.0%" in printed
    assert plan.main(["schedule", "--chunks", "2"]) == 2
    assert "interleaved" in capsys.readouterr().err
