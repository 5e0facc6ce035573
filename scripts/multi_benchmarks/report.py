"""The tables of `bench_multi.py`, and what must hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multi_benchmarks.gradients import FLOAT32_BOUND, bound_of
from multi_benchmarks.runner import Outcome
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SPEED_BOUND = 0.85
"""Of one GPU's tokens a second that each of several must reach with adapters and experts over all of them."""


@dataclass(frozen=True)
class Check:
    """Something that must hold."""

    what: str
    found: str
    wanted: str
    holds: bool


def values_of(outcome: Outcome) -> dict[str, Any]:
    """All that a case with one result reported."""
    return {name: value for result in outcome.results for name, value in result.items()}


def speed_ratios(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of each step on several devices: its tokens a second and device over those of one device; by the case's name."""
    speeds = {
        outcome.name: values_of(outcome)["tokens_per_second"]
        for outcome in outcomes
        if "tokens_per_second" in values_of(outcome)
    }
    alone = {name.split()[0]: speed for name, speed in speeds.items() if name.endswith(" one GPU")}
    return {
        name: speed / alone[name.split()[0]]
        for name, speed in speeds.items()
        if name.split()[0] in alone and not name.endswith(" one GPU")
    }


def checks(outcomes: Sequence[Outcome]) -> list[Check]:
    found = []
    for outcome in outcomes:
        for result in outcome.results if outcome.part == "meshes" else ():
            if "norm" not in result:
                continue
            if result["dtype"] == "float32":
                value, bound, measure = result["largest"], FLOAT32_BOUND, "of a leaf's scale"
            else:
                value, bound = result["norm"], bound_of(result["usual"])
                measure = f"of a leaf's norm; one GPU from float32 {result['usual']:.1e}"
            what = f"{outcome.name}, {result['dtype']}: gradients"
            found.append(Check(what, f"{value:.1e} {measure}", f"at most {bound:.1e}", value <= bound))
        if "gradients" in (values := values_of(outcome)):
            apart, bound = values["gradients"], bound_of(values["gradients"]["usual"])
            text = f"{apart['norm']:.1e} of a leaf's norm, {apart['num_nonfinite']} not finite"
            text += f"; after one more rounding {apart['usual']:.1e}"
            holds = apart["norm"] <= bound and not apart["num_nonfinite"]
            found.append(Check(f"{outcome.name}: first gradients", text, f"at most {bound:.1e}", holds))
        if outcome.part == "tests" and outcome.results:
            bad = [result["test"] for result in outcome.results if result["result"] in ("failed", "error")]
            passed = sum(result["result"] == "passed" for result in outcome.results)
            text = f"{passed} passed, {len(bad)} failed {' '.join(bad)}".strip()
            found.append(Check(outcome.name, text, "none failed", not bad))
    for name, ratio in speed_ratios(outcomes).items():
        if any(name.endswith(f" expert={number}") for number in (2, 4, 8)):
            wanted = f"at least {SPEED_BOUND:.0%}"
            found.append(Check(f"{name}: speed of one GPU", f"{ratio:.1%}", wanted, ratio >= SPEED_BOUND))
    return found


def print_report(outcomes: Sequence[Outcome], console: Console | None = None) -> None:
    """All tables, the checks last."""
    console = console or Console(width=150)
    for table in (
        environment_table(outcomes),
        link_table(outcomes),
        gradient_table(outcomes),
        exchange_table(outcomes),
        step_table(outcomes),
        part_table(outcomes),
        unfinished_table(outcomes),
        check_table(outcomes),
    ):
        if table.row_count:
            console.print(table)


def environment_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("environment", "")
    for outcome in outcomes:
        values = values_of(outcome) if outcome.part == "environment" else {}
        for name, value in values.items():
            if isinstance(value, dict):
                text = ", ".join(f"{key} {one}" for key, one in value.items())
            elif name == "links":
                text = "\n".join(" ".join(f"{link:>5}" for link in row) for row in value)
            elif name == "planned_link":
                text = f"{value / 1e9:.0f} GB/s, as the planner takes it"
            elif isinstance(value, list):
                text = ", ".join(map(str, value))
            else:
                text = str(value)
            table.add_row(name.replace("_", " "), escape(text))
    return table


def link_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("exchange", "bytes", "measured", "GB/s sent by a device", "expected", "measured / expected")
    for outcome in outcomes:
        for result in outcome.results if outcome.part == "links" else ():
            if "fit" in result:
                planned = f"{result['planned_link'] / 1e9:.0f} GB/s"
                table.add_row("fit", "", escape(result["fit"]), "", planned, "")
                continue
            table.add_row(
                result["exchange"],
                f"{result['num_bytes']:,.0f}",
                milliseconds(result["seconds"]),
                f"{result['bandwidth'] / 1e9:.1f}",
                milliseconds(result["expected_seconds"]),
                f"{result['seconds'] / result['expected_seconds']:.2f}",
            )
    return table


def gradient_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("against one GPU", "", "loss", "difference over scale", "over norm", "bound", "worst leaf")
    for outcome in outcomes:
        for result in outcome.results if outcome.part == "meshes" else ():
            if "norm" not in result:
                continue
            is_single = result["dtype"] == "float32"
            bound = f"{FLOAT32_BOUND:.0e} of scale" if is_single else f"{bound_of(result['usual']):.1e} of norm"
            table.add_row(
                outcome.name.removeprefix("gradients "),
                result["dtype"],
                f"{result['loss_difference']:.1e}",
                f"{result['largest']:.1e}",
                f"{result['norm']:.1e}",
                bound,
                escape(result["leaf"]),
            )
    return table


def exchange_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("transport alone", "forward", "GB/s sent", "forward and backward", "bytes sent forward")
    for outcome in outcomes:
        for result in outcome.results:
            if "refused" in result:
                table.add_row(result["transport"], escape(result["refused"]), "", "", "")
            elif "transport" in result:
                table.add_row(
                    result["transport"],
                    milliseconds(result["forward_seconds"]),
                    f"{result['bandwidth'] / 1e9:.1f}",
                    milliseconds(result["step_seconds"]),
                    f"{result['sent_bytes']:,.0f}",
                )
    return table


def step_table(outcomes: Sequence[Outcome]) -> Table:
    columns = ("step", "time", "tokens/s a device", "MFU", "of one GPU", "exchanging", "hidden", "hidden by schedule")
    table = Table(*columns, "memory", "rounds", "gradients", "uneven routers")
    ratios = speed_ratios(outcomes)
    for outcome in outcomes:
        if "tokens_per_second" not in (values := values_of(outcome)):
            continue
        traced, scheduled = values.get("traced"), values.get("scheduled")
        apart = values.get("gradients")
        table.add_row(
            escape(outcome.name),
            milliseconds(values["step_seconds"]),
            f"{values['tokens_per_second']:,.0f}",
            f"{values['mfu']:.1%}",
            f"{ratios[outcome.name]:.1%}" if outcome.name in ratios else "",
            milliseconds(traced["exchanging"]) if traced else "",
            f"{traced['hidden_share']:.0%}" if traced else "",
            f"{scheduled['hidden_share']:.0%}" if scheduled else "",
            f"{max(values['peak_bytes'], values['compiled_bytes']) / 2**30:.1f} GiB",
            f"{values['rounds']:.2f}",
            f"{apart['norm']:.0e}" if apart else "",
            milliseconds(values["uneven_seconds"]) if "uneven_seconds" in values else "",
        )
    return table


def part_table(outcomes: Sequence[Outcome]) -> Table:
    """Of a traced step: computing by parts, milliseconds, the mean of the devices."""
    table = Table("traced step", "first to last kernel", "computing, by device", "by part")
    for outcome in outcomes:
        if (traced := values_of(outcome).get("traced")) is not None:
            table.add_row(
                escape(outcome.name),
                milliseconds(traced["span"]),
                ", ".join(map(milliseconds, traced["computing_of_devices"])),
                ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in traced["parts"].items()),
            )
    return table


def unfinished_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("not done", "why")
    for outcome in outcomes:
        if outcome.status != "done":
            table.add_row(escape(outcome.name), escape(outcome.status))
    return table


def check_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("must hold", "found", "wanted", "")
    for check in checks(outcomes):
        table.add_row(escape(check.what), escape(check.found), check.wanted, "holds" if check.holds else "[red]misses")
    return table


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"
