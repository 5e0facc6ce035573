"""What a search found, for people: tables, a plot; and for programs: JSON."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmjax.config import RunConfig, describe_mesh
from mmjax.errors import ConfigurationError
from mmjax.planner.adapters import Tuning
from mmjax.planner.branches import BranchPlan, BranchPlanner
from mmjax.planner.compute_time import PEER_SHARES
from mmjax.planner.cost import golden_cost
from mmjax.planner.expert_size import expert_size_by_rule, expert_sizes_by_search
from mmjax.planner.hardware import Cluster
from mmjax.planner.readings import Readings, fit_golden, fit_link
from mmjax.planner.search import Plan, SearchResult, describe_kept, describe_schedule, remedies
from mmjax.planner.step_fit import fit_readings
from mmjax.planner.units import format_bytes, format_seconds

_KEPT_LABELS = {"layer": "inputs of layers kept", "results": "some results kept", "none": "everything kept"}


def print_plans(console: Console, result: SearchResult, top: int) -> None:
    """The fastest plans with the reason why each loses, other ways to run the best, where its time and memory go."""
    headers = ("micro-batches", "kept", "schedule", "step", "tokens/s/GPU", "MFU", "memory", "why not")
    table = Table("mesh", *headers, title="plans")
    for plan in result.plans[:top]:
        table.add_row(escape(describe_mesh(plan.config.mesh)), *_cells(plan, result))
    console.print(table)
    best = result.plans[0]
    if result.siblings:
        table = Table(*headers, title=f"other ways to run {describe_mesh(best.config.mesh)}")
        for plan in result.siblings[:top]:
            table.add_row(*_cells(plan, result))
        console.print(table)
    if best.config.mesh.device_order:
        console.print("devices stand in another order than their own (mesh.device_order of the plan)")
    shares = Table("time of the best", "", "", title="predicted, not measured")
    for term, seconds in sorted(best.time.terms.items(), key=lambda item: -item[1]):
        if seconds:
            shares.add_row(term.replace("_", " "), format_seconds(seconds), f"{seconds / best.time.total:.1%}")
    shares.add_section()
    for part, value in sorted(dataclasses.asdict(best.memory).items(), key=lambda item: -item[1]):
        shares.add_row(part.replace("_", " "), format_bytes(value), f"{value / best.memory.total:.1%}")
    if best.host_bytes:
        shares.add_section()
        shares.add_row("on the host", format_bytes(best.host_bytes), "")
    console.print(shares)


def _cells(plan: Plan, result: SearchResult) -> list[str]:
    moe = plan.config.model.moe
    transport = f", {moe.transport}" if plan.time.expert_exchange and moe.transport != "all_to_all" else ""
    schedule = describe_schedule(plan.config) if plan.config.mesh.pipe > 1 else ""
    return [
        str(plan.config.training.accumulation),
        describe_kept(plan.config),
        (schedule + transport).removeprefix(", "),
        format_seconds(plan.time.total),
        f"{plan.tokens_per_second:,.0f}",
        f"{plan.utilisation:.1%}",
        format_bytes(plan.memory.total),
        result.reasons_against(plan),
    ]


def print_branches(console: Console, planner: BranchPlanner, plans: Sequence[BranchPlan]) -> None:
    """Each branch with the ways to share its work, and the golden formula of the best ones."""
    if len(plans) == 1:
        return
    table = Table("branch", "shared as", "computing", "exchange", "bytes a device", "setting", title="branches")
    for plan in plans:
        for option in plan.options:
            table.add_row(
                plan.name if option is plan.best else "",
                option.share,
                format_seconds(option.compute),
                format_seconds(option.exchange),
                format_bytes(option.exchanged_bytes),
                option.setting or "not built: the trainer cannot do this",
            )
        table.add_section()
    console.print(table)
    for plan in plans:
        if plan.best is not plan.best_built:
            built = plan.best_built
            console.print(
                f"{plan.name}: {plan.best.share} would be fastest and is not built; a run has it {built.share}"
                f" ({built.setting}), {format_seconds(built.total - plan.best.total)} a step more"
            )
    cost = golden_cost(planner.golden_branches(plans))
    terms = ", ".join(f"{one.name} {format_seconds(one.total)}" for one in cost.branches)
    console.print(f"on devices of their own: {terms}; the slowest sets {format_seconds(cost.total)}")


def print_expert_sizes(console: Console, result: SearchResult, cluster: Cluster, tuning: Tuning) -> None:
    """The fastest plan for each number of devices that experts are spread over, and what the rule says."""
    config = result.plans[0].config
    sizes = expert_sizes_by_search(result.plans)
    if config.model.moe.num_dense_layers >= config.model.num_layers or len(sizes) < 2:
        return
    try:
        rule = str(expert_size_by_rule(config.model, cluster, tuning=tuning, optimizer=config.optimizer.name))
    except ConfigurationError as error:
        rule = f"none: {error.found}"
    found = ", ".join(f"{size}: {format_seconds(plan.time.total)}" for size, plan in sizes.items())
    console.print(f"devices for experts, fastest step of each: {found}; by rule (half of the memory): {rule}")


def print_rejections(console: Console, result: SearchResult) -> None:
    """How many ways are out, by kind of reason, with an example of each."""
    kinds: dict[str, list[str]] = {}
    for rejection in result.rejections:
        words = (word for word in rejection.reason.split() if not word[0].isdigit())
        kind = "too much memory" if rejection.reason.startswith("needs ") else next(words)
        kinds.setdefault(kind, []).append(f"{rejection.name}: {rejection.reason}")
    table = Table("rejected because of", "ways", "for example", title="rejected")
    for kind, examples in sorted(kinds.items(), key=lambda item: -len(item[1])):
        table.add_row(escape(kind.rstrip(":")), str(len(examples)), escape(examples[0]))
    console.print(table)


def print_no_fit(console: Console, config: RunConfig, cluster: Cluster, tuning: Tuning, result: SearchResult) -> None:
    """Say that nothing fits, how near the nearest is, and what would make it fit."""
    if result.tightest:
        console.print(f"[bold]nothing fits.[/bold] Nearest: {escape(result.tightest.name)} {result.tightest.reason}")
    else:
        console.print("[bold]no mesh is legal.[/bold]")
        print_rejections(console, result)
    found = remedies(config, cluster, tuning=tuning)
    console.print("what would make it fit:" if found else "none of the remedies that were tried makes it fit")
    for remedy in found:
        console.print(f"  - {escape(remedy)}")


def print_readings(console: Console, readings: Readings) -> None:
    """What readings come to, and the error left: links, shares of the peak, steps each from the others, branches."""
    versions = ", ".join(f"{name} {version}" for name, version in readings.versions.items())
    console.print(escape(f"{readings.hardware}: {versions}"))
    if readings.exchanges:
        console.print(f"link inside a node: {fit_link(readings.exchanges).describe()}")
    fit = fit_readings(readings)
    if fit.kernel_shares:
        table = Table(
            "part", "readings", "share of the peak", "published", "worst error", title="kernels by themselves"
        )
        for part, (share, error) in fit.kernel_shares.items():
            shapes = "; ".join(kernel.shape for kernel in readings.kernels if kernel.part == part)
            table.add_row(part, escape(shapes), f"{share:.3g}", f"{PEER_SHARES[part]:.3g}", f"{error:.1%}")
        console.print(table)
    if fit.steps:
        headers = ("read", "from kernels alone", "fitted", "from the other steps", "error")
        table = Table("step", *headers, title="whole steps")
        for step in fit.steps:
            times = (step.seconds, step.published, step.fitted, step.from_others)
            table.add_row(step.name, *map(format_seconds, times), f"{step.error_from_others:+.1%}")
        console.print(table)
        console.print(fit.describe())
    if readings.golden:
        golden = fit_golden(readings.golden)
        console.print(
            f"branches: compute x {golden.compute:.2f}, exchange x {golden.exchange:.2f}, alpha {golden.alpha:.2f},"
            f" beta {golden.beta:.2f}; error {golden.mean_error:.1%} on average, {golden.worst_error:.1%} at worst"
        )
    else:
        console.print("alpha and beta stay 1: no step of branches on devices of their own was read")


def draw(result: SearchResult, path: Path) -> None:
    """Time against memory of every plan, the front of the best joined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    plot = figure.subplots()
    gibi = 1024**3
    for kept, marker in (("layer", "o"), ("results", "^"), ("none", "x")):
        chosen = [plan for plan in result.plans if _kept_kind(plan) == kept]
        times, sizes = [plan.time.total for plan in chosen], [plan.memory.total / gibi for plan in chosen]
        if chosen:
            plot.scatter(sizes, times, marker=marker, s=18, label=_KEPT_LABELS[kept])
    front = result.front()
    plot.plot([plan.memory.total / gibi for plan in front], [plan.time.total for plan in front], "k-", linewidth=0.8)
    plot.set(xlabel="memory of a device, GiB", ylabel="step, s", yscale="log", title="plans that fit (predicted)")
    plot.legend()
    figure.savefig(path, dpi=150)


def _kept_kind(plan: Plan) -> str:
    model = plan.config.model
    return "results" if model.remat_keep or model.remat_offload else model.remat


def as_json(plan: Plan, result: SearchResult) -> dict[str, object]:
    config = plan.config
    return {
        "mesh": config.mesh.sizes,
        "device_order": config.mesh.device_order,
        "accumulation": config.training.accumulation,
        "kept": describe_kept(config),
        "schedule": describe_schedule(config) if config.mesh.pipe > 1 else None,
        "transport": config.model.moe.transport,
        "seconds": plan.time.terms,
        "bytes": dataclasses.asdict(plan.memory),
        "host_bytes": plan.host_bytes,
        "tokens_per_second_per_device": plan.tokens_per_second,
        "mfu": plan.utilisation,
        "reason": result.reasons_against(plan),
    }
