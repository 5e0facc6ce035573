"""Plans as files: what a run takes from them, and what it is told."""

import dataclasses
import json

import pytest

from mmjax.config import DataConfig, MeshConfig, ModelConfig, RunConfig, TrainingConfig
from mmjax.config.fault import ConfigurationFaults
from mmjax.errors import ConfigurationError
from mmjax.planner.plan_file import PLANNED, read_plan, write_plan
from mmjax.train import read_command

PLANNED_RUN = RunConfig(
    mesh=MeshConfig(fsdp=2, expert=2, device_order=(0, 2, 1, 3)),
    model=dataclasses.replace(ModelConfig(), remat_keep=("attention",)),
    training=TrainingConfig(accumulation=2, pipeline_transfer="direct"),
    data=DataConfig(rows=16, row_tokens=256),
)


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(path, PLANNED_RUN, {"seconds": {"forward": 1.0}})
    return path


def test_a_run_takes_what_was_planned_and_keeps_the_rest(plan):
    other = RunConfig(seed=7, data=DataConfig(rows=32, row_tokens=256))
    planned = read_plan(plan).applied(other)
    assert planned.mesh == PLANNED_RUN.mesh and planned.model.remat_keep == ("attention",)
    assert planned.training == PLANNED_RUN.training
    assert planned.seed == 7 and planned.data == other.data
    assert read_plan(plan).differences(planned) == ["data.rows is 32, the plan was made for 16"]
    assert read_plan(plan).applied(PLANNED_RUN) == PLANNED_RUN


def test_the_command_takes_a_plan_and_options_go_before_it(plan, capsys):
    settings = read_command(["--plan", str(plan), "--training.accumulation", "4", "--data.rows", "32"]).settings
    assert settings.mesh.device_order == (0, 2, 1, 3) and settings.training.accumulation == 4
    assert "data.rows is 32" in capsys.readouterr().out
    assert read_command(["--plan", str(plan), "--mesh", "fsdp=4"]).settings.mesh == MeshConfig(fsdp=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ('{"kind": "other"}', "no plan"),
        ('{"kind": "mmjax plan"}', "settings"),
        ('{"kind": "mmjax plan", "settings": {"seed": 3}}', "seed, which a plan does not decide"),
        ("[]", "no plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_plan(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_plan(tmp_path / "missing.json")


def test_values_of_a_wrong_type_are_faults_with_their_names(plan):
    content = json.loads(plan.read_text())
    content["settings"] |= {"mesh.fsdp": "two", "model.remat": "some"}
    plan.write_text(json.dumps(content))
    with pytest.raises(ConfigurationFaults, match=r"mesh\.fsdp") as caught:
        read_plan(plan).applied(RunConfig())
    assert {fault.path for fault in caught.value.faults} == {"mesh.fsdp", "model.remat"}
    assert set(content["settings"]) == set(PLANNED)
