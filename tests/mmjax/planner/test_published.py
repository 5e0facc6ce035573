"""Comparisons with published systems run, and say what docs/planner.md says of them."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

published = importlib.import_module("bench_planner")

SLOW = ("hop-aware and default all-to-all", "data parallelism and the plan, 32 A100")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in published.EXPERIMENTS]
)
def test_every_comparison_has_a_full_table_and_a_plot(name, tmp_path):
    header, rows = published.EXPERIMENTS[name]()
    assert rows and all(len(row) == len(header) for row in rows)
    published.draw(header, rows, name, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_gathers_in_chunks_hide_what_a_sum_at_the_end_cannot():
    _, rows = published.reduce_and_gather()
    assert all(float(row[-1]) > 10 for row in rows)


def test_the_cut_is_never_slower_than_equal_layers():
    _, rows = published.equal_and_cut()
    assert all(float(row[-1]) >= 1 for row in rows)
