"""A start that is refused leaves the folder as it was; what holds work, or was there before, stays."""

import errno
import fcntl
import multiprocessing
from pathlib import Path

import pytest

from mmjax.errors import ConfigurationError
from mmjax.resilience.run_folder import sole_user


def refused(run_dir: Path, *files: str, error: Exception) -> None:
    """A run that writes these files and then ends so."""
    with sole_user(run_dir, settled=("config.yaml", "data_index")):
        for name in files:
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).write_text("text")
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        raise error


MENDABLE = ConfigurationError("x", found="a", expected="b", remedy="c")


@pytest.mark.parametrize(
    ("files", "is_there", "error", "stays"),
    [
        (("config.yaml", "data_index/a.npz"), False, MENDABLE, False),
        ((), False, MENDABLE, False),
        (("config.yaml", "quarantine.jsonl"), False, MENDABLE, True),
        (("config.yaml", "checkpoints/5/array"), False, MENDABLE, True),
        (("config.yaml",), True, MENDABLE, True),
        # A bug: what there is may say more of it.
        (("config.yaml",), False, RuntimeError("bug"), True),
    ],
)
def test_only_a_new_folder_without_work_goes_again(tmp_path, files, is_there, error, stays):
    run_dir = tmp_path / "runs" / "one"
    if is_there:
        run_dir.mkdir(parents=True)
    with pytest.raises(type(error)):
        refused(run_dir, *files, error=error)
    assert run_dir.exists() == stays
    assert not stays or all((run_dir / name).read_text() == "text" for name in files)


def hold(run_dir: Path, held, let_go) -> None:
    with sole_user(run_dir):
        held.set()
        let_go.wait(60)


def test_a_folder_that_another_process_trains_in_is_refused_and_stays(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, let_go = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "run", held, let_go))
    other.start()
    assert held.wait(60)
    with pytest.raises(ConfigurationError, match="another process"), sole_user(tmp_path / "run"):
        pass
    assert (tmp_path / "run").exists()
    let_go.set()
    other.join()


def test_a_file_system_without_locks_is_told_and_no_reason_not_to_train(tmp_path, monkeypatch, capsys):
    def flock(number: int):
        def refuse(*_: object) -> None:
            raise OSError(number, "no")

        return refuse

    monkeypatch.setattr(fcntl, "flock", flock(errno.ENOSYS))
    with sole_user(tmp_path / "run"):
        assert "no locks" in capsys.readouterr().err
    monkeypatch.setattr(fcntl, "flock", flock(errno.EIO))
    with pytest.raises(OSError, match="no"), sole_user(tmp_path / "run"):
        pass
