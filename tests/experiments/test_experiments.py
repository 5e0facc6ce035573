"""Every experiment, found rather than listed, is valid, and its settings are those under review in its golden text.

After a change that is meant: python tests/experiments/test_experiments.py
"""

import pkgutil
from pathlib import Path

import pytest

import experiments
from mmjax.config import check, flatten
from mmjax.train import find_experiment

GOLDEN = Path(__file__).parents[1] / "golden" / "experiments"
NAMES = [module.name for module in pkgutil.iter_modules(experiments.__path__) if not module.ispkg]


def settings_text(name: str) -> str:
    return "".join(f"{path} = {value!r}\n" for path, value in flatten(find_experiment(name)).items())


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_has_no_fault(name: str):
    assert check(find_experiment(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_an_experiment_are_those_of_its_golden_text(name: str):
    recorded = (GOLDEN / f"{name}.txt").read_text()
    assert settings_text(name) == recorded, "if that is meant, run python tests/experiments/test_experiments.py"


def test_no_golden_text_is_left_of_a_removed_experiment():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(NAMES)


if __name__ == "__main__":
    for name in NAMES:
        (GOLDEN / f"{name}.txt").write_text(settings_text(name))
