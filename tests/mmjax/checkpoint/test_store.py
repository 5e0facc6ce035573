import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.checkpoint.store import Store
from mmjax.config import MeshConfig
from mmjax.errors import CheckpointError
from mmjax.parallel.mesh import make_mesh

ROOT = Path(__file__).parents[3]


def _state(step: int, mesh: Mesh | None = None) -> dict[str, Any]:
    mesh = mesh or make_mesh(MeshConfig())
    weight = jax.random.normal(jax.random.key(step), (16, 8))
    arrays = {
        "parameters": {
            "layers.0.weight": (weight, PartitionSpec("fsdp", "tensor")),
            "scale": (weight[0].astype(jnp.bfloat16), PartitionSpec()),
        },
        "packed": ((weight * 50).astype(jnp.int8), PartitionSpec(None, "tensor")),
        "odd": (jnp.asarray([jnp.nan, -0.0, jnp.inf]), PartitionSpec()),
        "step": (jnp.int32(step), PartitionSpec()),
    }
    return jax.tree.map(
        lambda pair: jax.device_put(pair[0], NamedSharding(mesh, pair[1])),
        arrays,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def _abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def _assert_bitwise_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _saved(directory: Path, steps: tuple[int, ...] = (1, 2), **options: Any) -> Path:
    with Store(directory, **options) as store:
        for step in steps:
            store.save(step, _state(step), {"tokens": 10 * step})
    return directory


def _restore(directory: Path, **options: Any) -> tuple[Any, list[str]]:
    reports: list[str] = []
    with Store(directory, report=reports.append, **options) as store:
        return store.restore_latest(_abstract(_state(0))), reports


def _data_file(step: Path) -> Path:
    return max(step.rglob("d/*"), key=lambda file: file.stat().st_size)


def test_what_is_restored_is_bitwise_what_was_saved_even_when_the_arrays_are_donated_at_once(tmp_path: Path) -> None:
    double = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + leaf, state), donate_argnums=0)
    with Store(tmp_path) as store:
        state = _state(1)
        store.save(1, state, {"data": {"seed": 3}})
        double(state)
    (restored, metadata), reports = _restore(tmp_path)
    _assert_bitwise_equal(restored, _state(1))
    assert metadata == {"data": {"seed": 3}} and not reports


def test_a_directory_without_steps_restores_nothing(tmp_path: Path) -> None:
    assert _restore(tmp_path / "absent") == (None, [])


@pytest.mark.parametrize("target", [MeshConfig(), MeshConfig(fsdp=2, tensor=4), MeshConfig(expert=2, fsdp=4)])
def test_eight_devices_save_and_other_meshes_restore(tmp_path: Path, target: MeshConfig) -> None:
    with Store(tmp_path) as store:
        store.save(5, _state(5, make_mesh(MeshConfig(fsdp=8))), {})
        wanted = _state(5, make_mesh(target))
        store.wait()
        restored, _ = store.restore_latest(_abstract(wanted))
    _assert_bitwise_equal(restored, wanted)
    assert jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, wanted)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "metadata", "manifest"])
def test_a_damaged_step_is_named_and_kept_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    step = _saved(tmp_path) / "2"
    file = {"metadata": step / "_METADATA", "manifest": step / "manifest.json"}.get(damage) or _data_file(step)
    content = bytearray(file.read_bytes())
    match damage:
        case "truncate":
            file.write_bytes(content[: len(content) // 2])
        case "delete":
            file.unlink()
        case _:
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    (restored, metadata), [report] = _restore(tmp_path)
    _assert_bitwise_equal(restored, _state(1))
    assert metadata == {"tokens": 10}
    assert str(step) in report and file.name in report
    assert (tmp_path / "damaged-2").is_dir() and not step.exists()
    with Store(tmp_path) as store:
        store.save(2, _state(2), {})
    _assert_bitwise_equal(_restore(tmp_path)[0][0], _state(2))


def test_a_flipped_bit_in_any_file_is_seen_and_the_file_named(tmp_path: Path) -> None:
    step = _saved(tmp_path, (1,)) / "1"
    for file in [file for file in step.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        place = len(content) * 2 // 3
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        reports: list[str] = []
        with Store(tmp_path, read_only=True, report=reports.append) as store, pytest.raises(CheckpointError):
            store.restore_latest(_abstract(_state(0)))
        assert file.name in reports[0]
        file.write_bytes(content)
    _assert_bitwise_equal(_restore(tmp_path)[0][0], _state(1))


def test_a_flipped_bit_in_a_large_file_is_seen_in_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmjax.checkpoint.manifest._SMALL_FILE_BYTES", -1)
    state = {"weight": jax.device_put(jax.random.normal(jax.random.key(0), (64, 64)), _state(0)["step"].sharding)}
    with Store(tmp_path) as store:
        store.save(1, state, {})
    file = _data_file(tmp_path / "1")
    content = file.read_bytes()
    reports: list[str] = []
    for place in range(600, 12_000, 1_600):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with Store(tmp_path, read_only=True, report=reports.append) as store, pytest.raises(CheckpointError):
            store.restore_latest(_abstract(state))
    assert any("array weight differs" in report for report in reports)
    assert len(reports) == 8


def test_read_only_uses_the_step_before_a_damaged_one_and_moves_nothing(tmp_path: Path) -> None:
    _saved(tmp_path)
    _data_file(tmp_path / "2").unlink()
    before = sorted(tmp_path.rglob("*"))
    (restored, _), reports = _restore(tmp_path, read_only=True)
    _assert_bitwise_equal(restored, _state(1))
    assert len(reports) == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_step_without_manifest_counts_as_absent(tmp_path: Path) -> None:
    _saved(tmp_path)
    (tmp_path / "2" / "manifest.json").unlink()
    (restored, _), [report] = _restore(tmp_path)
    _assert_bitwise_equal(restored, _state(1))
    assert "incomplete" in report and (tmp_path / "incomplete-2").is_dir()


def test_when_all_steps_are_damaged_it_never_starts_from_scratch(tmp_path: Path) -> None:
    _saved(tmp_path)
    for step in ("1", "2"):
        _data_file(tmp_path / step).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"damaged-1, damaged-2"):
            _restore(tmp_path)


def test_another_model_is_refused_with_the_leaves_named_and_nothing_is_moved(tmp_path: Path) -> None:
    _saved(tmp_path, (1,))
    wrong = _abstract(_state(0))
    wrong["parameters"]["scale"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=wrong["step"].sharding)
    wrong["packed"] = jax.ShapeDtypeStruct((4, 8), jnp.int8, sharding=wrong["step"].sharding)
    wrong["new"] = wrong.pop("odd")
    with Store(tmp_path) as store, pytest.raises(CheckpointError) as caught:
        store.restore_latest(wrong)
    for text in (
        "odd is saved and not wanted",
        "new is wanted and not saved",
        "parameters.scale is saved as bfloat16[8] and wanted as float32[8]",
        "packed is saved as int8[16, 8] and wanted as int8[4, 8]",
    ):
        assert text in str(caught.value)
    assert (tmp_path / "1").is_dir()


def test_the_last_steps_and_the_best_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path, keep_last=2) as store:
        for step, score in ((1, 0.1), (2, 0.9), (3, None), (4, 0.5), (5, None)):
            store.save(step, {"x": jnp.zeros(2)}, {}, score=score)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_without_keep_best_only_the_last_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path, keep_last=1, keep_best=False) as store:
        for step, score in ((1, 0.9), (2, 0.1)):
            store.save(step, {"x": jnp.zeros(2)}, {}, score=score)
        store.wait()
        assert store.steps() == [2]


def test_a_score_that_comes_after_the_save_decides_what_is_kept(tmp_path: Path) -> None:
    with Store(tmp_path, keep_last=1) as store:
        for step, score in ((1, 0.5), (2, 0.9)):
            store.save(step, {"x": jnp.zeros(2)}, {})
            store.set_score(step, score)
            assert store.steps() == [step]
        store.save(3, {"x": jnp.zeros(2)}, {})
        store.set_score(3, 0.1)
        # Of a step that is gone or was never saved there is nothing to say.
        store.set_score(1, 1.0)
        store.set_score(4, 1.0)
        assert store.steps() == [2, 3]
    assert Store(tmp_path, read_only=True).restore_latest(_abstract({"x": jnp.zeros(2)})) is not None


def test_a_step_that_is_not_new_is_an_error_not_a_silent_no(tmp_path: Path) -> None:
    with Store(_saved(tmp_path)) as store:
        for step in (1, 2):
            with pytest.raises(CheckpointError, match="there already"):
                store.save(step, _state(step), {})


@pytest.mark.parametrize("limit", ["file size", "file system", "file system, unforeseen"])
def test_a_full_disk_is_one_message_and_leaves_earlier_steps_whole(
    tmp_path: Path, limit: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {**_state(2), "big": jnp.asarray(np.random.default_rng(0).normal(size=1 << 20), jnp.float32)}
    if limit == "file system, unforeseen":
        monkeypatch.setattr(Store, "_check_room", lambda *_: None)
    if limit != "file size":
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
    try:
        _saved(tmp_path, (1,))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        store = Store(tmp_path)
        if limit == "file size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(CheckpointError, match="the disk or quota full") as caught, store:
                store.save(2, big, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "complete steps: 1" in str(caught.value) and "\n" not in str(caught.value)
        # What Orbax's threads still write may reappear behind the clearing up; the next start removes it.
        left = {path.name for path in tmp_path.iterdir()} - {"1"}
        assert all(name.startswith("2.orbax-checkpoint-tmp") for name in left)
        store.save(3, _state(3), {})
        store.wait()
        _assert_bitwise_equal(_restore(tmp_path)[0][0], _state(3))
        with Store(tmp_path):
            assert {path.name for path in tmp_path.iterdir()} == {"1", "3"}
    finally:
        if limit != "file size":
            subprocess.run(["umount", str(tmp_path)], check=False)
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_save_is_seen_by_check_and_on_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "manifest.json.tmp")

    monkeypatch.setattr("mmjax.checkpoint.store.write_manifest", fail)
    with pytest.raises(CheckpointError, match="Permission denied"), Store(tmp_path) as store:
        store.save(1, _state(1), {})
    assert list(tmp_path.iterdir()) == []


CHILD = """
    import os, signal, sys, time
    import jax
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    from mmjax.checkpoint import store as module

    directory, moment = sys.argv[1:]
    write = module.write_manifest

    def write_or_die(path, manifest):
        if moment == "before the manifest" and path.name == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, manifest)

    module.write_manifest = write_or_die
    store = module.Store(directory)
    for step in range(1, 1000):
        state = {"weight": jax.random.normal(jax.random.key(step), (1024, 1024)), "step": jnp.int32(step)}
        store.save(step, state, {"step": step})
        if moment == "while arrays are written" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["before the manifest", "while arrays are written"])
def test_kill_during_a_save_leaves_the_last_complete_step(tmp_path: Path, moment: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), moment],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert json.loads((tmp_path / "2" / "manifest.json").read_text())["metadata"] == {"step": 2}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = {"weight": jax.random.normal(jax.random.key(2), (1024, 1024)), "step": jnp.int32(2)}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), expected)
    with Store(tmp_path, report=lambda text: None) as store:
        restored, metadata = store.restore_latest(abstract)
        _assert_bitwise_equal(restored, expected)
        assert metadata == {"step": 2}
        store.save(3, restored, {})
        store.wait()
        assert store.steps() == [1, 2, 3]
    assert not list(tmp_path.glob("*tmp*"))
