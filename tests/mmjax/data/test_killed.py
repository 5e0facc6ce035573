"""Processes that are killed and started again see the batches of one that never was: over epochs and a lost source."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEPS = 60

# Takes batches from the saved position on; saves it every third step, as a checkpoint would; loses a source at step 20.
CHILD = """
    import json, os, shutil, signal, sys
    from pathlib import Path

    from mmjax.config import DataConfig, VisionConfig
    from mmjax.data import loader as loader_module
    from mmjax.data.batch import digest
    from mmjax.data.loader import Loader, check_fingerprint

    loader_module.MIN_CHAPTER_SAMPLES = 16
    folder, die_at = Path(sys.argv[1]), int(sys.argv[2])
    data = DataConfig(
        source=";".join(f"{folder}/{name}/d.jsonl,{weight}" for name, weight in (("a", 3), ("b", 2), ("c", 1))),
        rows=4, row_tokens=48, row_patches=4, image_max_patches=4, packing_window=4, lost_source="reweight",
        prefetch_batches=0,
    )
    loader = Loader(data, VisionConfig(num_layers=0), 0, folder=folder / "run", say=lambda text: None)
    checkpoint = folder / "run" / "position.json"
    step = 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        check_fingerprint(saved["data"], loader.fingerprint())
        loader.resume(saved["position"])
        step = saved["step"]
    batches = loader.iterate(step)
    while step < 60:
        if step == 20 and (folder / "b").exists():
            shutil.rmtree(folder / "b")
        batch = next(batches)
        print(step, digest(batch), flush=True)
        step += 1
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 3 == 0:
            state = {"step": step, "position": loader.position(step), "data": loader.fingerprint()}
            unfinished = checkpoint.with_suffix(".tmp")
            unfinished.write_text(json.dumps(state))
            unfinished.replace(checkpoint)
"""


def write_sources(folder: Path) -> None:
    for name, count in (("a", 30), ("b", 20), ("c", 7)):
        write_source(folder, name, count)


def write_source(folder: Path, name: str, count: int) -> None:
    (folder / name).mkdir(parents=True)
    lines = []
    for number in range(count):
        turns = [{"from": "human", "value": f"{name}{number}"}, {"from": "gpt", "value": "x" * (number % 9 + 1)}]
        lines.append(json.dumps({"conversations": turns}) + "\n")
    (folder / name / "d.jsonl").write_text("".join(lines))


def run(folder: Path, die_at: int) -> tuple[int, list[tuple[int, str]]]:
    """(exit code, digest of each step taken)."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), str(die_at)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode, [(int(step), text) for step, text in map(str.split, result.stdout.splitlines())]


@pytest.mark.slow
def test_killed_at_any_step_and_resumed_the_batches_are_those_of_a_run_never_killed(tmp_path):
    write_sources(tmp_path / "whole")
    code, expected = run(tmp_path / "whole", -1)
    assert code == 0 and [step for step, _ in expected] == list(range(STEPS)) and len(set(expected)) == STEPS
    # Names of sources hold their folder: the killed runs work in the same one.
    lost = json.loads((tmp_path / "whole/run/lost_sources.jsonl").read_text())
    assert lost["from_step"] == 20
    shutil.rmtree(tmp_path / "whole")
    write_sources(tmp_path / "whole")
    for death in (20, 22, 40):
        code, seen = run(tmp_path / "whole", death)
        assert code == -signal.SIGKILL and seen[-1][0] == death - 1
        assert seen == expected[seen[0][0] : death]
        # Steps before the loss can be made again only with the source back, as an outage ends; later ones without it.
        if death == 22:
            write_source(tmp_path / "whole", "b", 20)
    code, seen = run(tmp_path / "whole", -1)
    assert code == 0 and seen == expected[seen[0][0] :]
    assert len((tmp_path / "whole/run/lost_sources.jsonl").read_text().splitlines()) == 1
