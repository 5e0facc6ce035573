"""Exchanges are really run, with the sizes that the readings say."""

import jax

from mmjax import plan
from mmjax.parallel.link_readings import read_links
from mmjax.planner.readings import EXCHANGES, load


def test_every_exchange_is_timed_for_every_size():
    readings = read_links([1024, 4096], repeats=2, devices=jax.devices()[:4])
    assert [(r.exchange, r.num_bytes) for r in readings.exchanges] == [
        (exchange, size) for exchange in EXCHANGES for size in (1024, 4096)
    ]
    assert all(r.seconds > 0 and r.num_devices == 4 for r in readings.exchanges)
    assert readings.versions["jax"] == jax.__version__


def test_measure_writes_what_a_plan_reads(tmp_path, capsys):
    path = tmp_path / "readings.json"
    sizes = ["--smallest-bytes", "4096", "--largest-bytes", "4194304", "--repeats", "3"]
    assert plan.main(["measure", "--output", str(path), *sizes]) == 0
    assert "error" in capsys.readouterr().out
    assert len(load(path).exchanges) == 4 * 6
    small = ["--model", "kimi_linear_48b", "--cluster", "8xh200", "--seq", "4096", "--rows", "16"]
    assert plan.main([*small, "--readings", str(path)]) == 0
    assert "link inside a node" in capsys.readouterr().out
    assert plan.main(["measure", "--smallest-bytes", "8", "--largest-bytes", "4"]) == 2
