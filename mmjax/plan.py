"""`python -m mmjax.plan`: what a run would cost on every mesh of a cluster, before it takes a GPU."""

import dataclasses
import difflib
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmjax.config import (
    ConfigurationFaults,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    describe_mesh,
    to_yaml,
)
from mmjax.errors import ConfigurationError, MmjaxError
from mmjax.parallel.pipeline_schedule import Kind, ScheduleName, make_schedule
from mmjax.planner.adapters import ADAPTED_NAMES, Tuning
from mmjax.planner.branches import BranchPlanner, Mix
from mmjax.planner.compute_time import Rates
from mmjax.planner.expert_size import exchange_buffer
from mmjax.planner.hardware import Cluster
from mmjax.planner.machine import discover
from mmjax.planner.memory import device_bytes
from mmjax.planner.plan_file import read_plan, write_plan
from mmjax.planner.readings import fit_link, load, with_inside_link
from mmjax.planner.report import (
    as_json,
    draw,
    print_branches,
    print_expert_sizes,
    print_no_fit,
    print_plans,
    print_readings,
    print_rejections,
)
from mmjax.planner.search import Plan, SearchResult, check_without_mesh, search, with_links
from mmjax.planner.stages import with_stages
from mmjax.planner.step_fit import fit_readings
from mmjax.planner.step_time import StepClock
from mmjax.planner.topology import bandwidth_matrix, machine_cluster, machine_graph, read_cluster
from mmjax.planner.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Command:
    """Search all meshes of a cluster for the fastest that fits. Loads no JAX and needs no GPU.

    python -m mmjax.plan --model kimi_k31 --cluster 16x8xh200 --seq 8192 --lora --experts-at-rest mxfp4

    `python -m mmjax.plan measure` times exchanges between the devices of this machine instead, `python -m mmjax.plan
    fit` prints what readings come to, `python -m mmjax.plan schedule` the schedule of a pipeline: see their own --help.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME")] = "kimi_k31"
    """A function of mmjax/presets."""
    cluster: Annotated[str, tyro.conf.arg(metavar="CLUSTER")] = "here"
    """16x8xh200 (nodes x GPUs of a node x GPU), a .yaml file, or `here`: the GPUs of this machine."""
    seq: int = 8192
    """Positions of a row."""
    rows: int = 0
    """Rows of a step over all devices; 0 takes one for each GPU."""
    row_patches: int = 0
    """Image patches of a row; 0 plans for text alone."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    lora: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train float32 adapters; everything else is frozen, in bfloat16. Without it everything is trained, in float32."""
    rank: int = 16
    expert_rank: int = 0
    """Rank of the adapters of each routed expert; 0 puts none there."""
    experts_at_rest: Literal["parameter_dtype", "mxfp4"] = "parameter_dtype"
    """How frozen experts are held."""
    readings: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Take the link inside a node from a file that `measure` wrote, and rates from kernels and steps in it."""
    row_clips: int = 0
    """Clips of sound of a row, for a model that hears."""
    imbalance: float = 0.0
    """Rows of the fullest pair of devices over the mean, as a run has measured: sizes experts' buffers. 0: unknown."""
    since: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """A plan.json: search only if the share of pictures and sounds in the FLOPs has changed by --threshold since."""
    threshold: float = 0.1
    overlap: float = 0.0
    """Share of the computing time under which gathers of weights hide."""
    top: int = 8
    """Plans to print."""
    output: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Write plan.json (for `python -m mmjax.train --plan`), plan.yaml (all settings, for `--config`), plans.json and
    plans.png there."""
    confirm: int = 0
    """Compile the step of so many of the fastest plans for the cluster, without a GPU (extra `deviceless`, loads JAX),
    and print what it holds beside what was predicted."""
    confirm_layers: int = 0
    """Confirm with the first so many layers only: the whole of a large model takes long to compile. 0: all of them."""


@dataclass(frozen=True, kw_only=True)
class MeasureCommand:
    """Time exchanges between the devices of this machine through JAX, fit their link, and write the readings."""

    output: Annotated[str, tyro.conf.arg(metavar="FILE")] = "readings.json"
    smallest_bytes: int = 1 << 12
    largest_bytes: int = 1 << 28
    repeats: int = 10


@dataclass(frozen=True, kw_only=True)
class FitCommand:
    """Print the rates that a file of readings gives, the error left, and each whole step as predicted from the others.
    Loads no JAX.

    python -m mmjax.plan fit --readings docs/readings/h200.json
    """

    readings: Annotated[str, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class ScheduleCommand:
    """Print which stage of a pipeline does what in each tick (F forward, B backward, W gradients of weights), how much
    of the time devices wait, and how many micro-batches each keeps. Loads no JAX.

    python -m mmjax.plan schedule --schedule 1f1b --pipe 4 --micro-batches 8
    """

    schedule: ScheduleName = "1f1b"
    pipe: int = 4
    """Devices of the pipe axis."""
    micro_batches: int = 8
    """Of a step: training.accumulation."""
    chunks: int = 1
    """Stages of each device, with `interleaved`."""
    transfer: Literal["hidden", "direct"] = "hidden"
    """As training.pipeline_transfer."""
    backward: float = 3.0
    """Time of a backward pass, the stage's recomputation with it, when a forward pass takes 1. Split, both halves have
    the recomputation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 when nothing fits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["measure"]:
            return measure(tyro.cli(MeasureCommand, args=arguments[1:], prog="python -m mmjax.plan measure"))
        if arguments[:1] == ["fit"]:
            command = tyro.cli(FitCommand, args=arguments[1:], prog="python -m mmjax.plan fit")
            print_readings(_console(), load(Path(command.readings)))
            return 0
        if arguments[:1] == ["schedule"]:
            return print_schedule(tyro.cli(ScheduleCommand, args=arguments[1:], prog="python -m mmjax.plan schedule"))
        return run(tyro.cli(Command, args=arguments, prog="python -m mmjax.plan"))
    except MmjaxError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code


def print_schedule(command: ScheduleCommand) -> int:
    """Print a schedule's table and what it comes to."""
    try:
        schedule = make_schedule(
            command.schedule,
            num_devices=command.pipe,
            num_micro_batches=command.micro_batches,
            num_chunks=command.chunks,
            latency=2 if command.transfer == "hidden" else 1,
        )
    except ValueError as error:
        raise ConfigurationError(
            "schedule", found=str(error), expected="sizes that fit the schedule", remedy="change them: see --help"
        ) from None
    print(*schedule.lines(), sep="\n")
    # Split, a backward pass and the gradients of weights share the work, but for the recomputation in both.
    half = (command.backward + 1) / 2
    is_split = command.schedule == "split_backward"
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: half if is_split else command.backward, Kind.WEIGHT: half}
    total, kept = schedule.seconds(seconds), schedule.under_way()
    work = command.micro_batches * command.chunks * (1 + command.backward)
    print(f"{len(schedule.ticks)} ticks, of which a device waits {schedule.idle_share:.1%}")
    print(f"{1 - work / total:.1%} of the time is lost where each tick takes as long as its longest operation")
    print(f"inputs that each device keeps: {', '.join(map(str, kept))}; buffer of {schedule.slots().num_inputs}")
    return 0


def run(command: Command) -> int:
    """Search, print, and write what was asked for."""
    preset = find_preset(command.model)
    machine, rates = None, Rates(overlap=command.overlap)
    if command.cluster == "here":
        machine = discover()
        for fault in machine.faults():
            print(f"warning: {fault}")
        cluster = machine_cluster(machine)
    else:
        cluster = read_cluster(command.cluster)
    if command.readings:
        readings = load(Path(command.readings))
        if readings.exchanges:
            fit = fit_link(readings.exchanges)
            print(f"link inside a node: {fit.describe()}")
            cluster = with_inside_link(cluster, fit)
        if readings.kernels or readings.steps:
            steps = fit_readings(readings, rates)
            print(steps.describe())
            rates = steps.rates
    config, tuning = describe_run(command, preset(), cluster)
    if command.since and not is_changed(command, config, cluster, tuning):
        return 0
    result = search(config, cluster, tuning=tuning, rates=rates)
    if machine:
        bandwidth = bandwidth_matrix(machine_graph(machine, cluster.gpu))
        result = with_links(result, StepClock(config, cluster, tuning=tuning, rates=rates), bandwidth)
    console = _console()
    console.print(
        f"{command.model} on {cluster.name}: {config.data.rows} rows of {config.data.row_tokens:,} tokens a step; "
        f"{result.num_meshes} meshes, {len(result.plans)} plans fit {format_bytes(cluster.usable_bytes)} a device"
    )
    if not result.plans:
        print_no_fit(console, config, cluster, tuning, result)
        return 1
    print_plans(console, result, command.top)
    planner = BranchPlanner(result.plans[0].config, cluster, tuning=tuning, threshold=command.threshold)
    mix = mix_of(result.plans[0].config)
    branches = planner.plan(mix)
    print_branches(console, planner, branches)
    print_expert_sizes(console, result, cluster, tuning)
    print_rejections(console, result)
    if command.output:
        more = {
            "mix": dataclasses.asdict(mix),
            "branches": {plan.name: dataclasses.asdict(plan.best) for plan in branches},
        }
        write_files(Path(command.output), result, tuning, more)
    if command.confirm:
        confirm(console, result.plans[: command.confirm], cluster, tuning, command.confirm_layers)
    return 0


def _console() -> Console:
    """Tables that a file or another program reads are not cut to a terminal's width."""
    return Console(width=None if sys.stdout.isatty() else 200)


def mix_of(config: RunConfig) -> Mix:
    """What a step of full rows holds."""
    data, model = config.data, config.model
    return Mix(
        text_tokens=data.rows * data.row_tokens,
        patches=data.rows * data.row_patches if model.vision.is_present else 0.0,
        clips=data.rows * data.row_clips if model.audio.is_present else 0.0,
    )


def is_changed(command: Command, config: RunConfig, cluster: Cluster, tuning: Tuning) -> bool:
    """Whether the mix of modalities differs from that of an earlier plan past the threshold; says so."""
    plan = read_plan(Path(command.since))
    found = plan.predicted.get("mix")
    if not isinstance(found, dict) or set(found) != {field.name for field in dataclasses.fields(Mix)}:
        raise ConfigurationError(
            command.since, found="no mix", expected="a plan.json that holds one", remedy="plan once without --since"
        )
    planner = BranchPlanner(config, cluster, tuning=tuning, threshold=command.threshold)
    before, after = Mix(**found), mix_of(config)
    # Per token: a larger step of the same mix is no other mix.
    scale = after.text_tokens / before.text_tokens
    before = dataclasses.replace(
        before, text_tokens=after.text_tokens, patches=before.patches * scale, clips=before.clips * scale
    )
    change = planner.change(before, after)
    verdict = "planning again" if change >= command.threshold else "the plan stands"
    print(f"the mix has changed by {change:.1%} of all FLOPs, the threshold is {command.threshold:.1%}: {verdict}")
    return change >= command.threshold


def confirm(console: Console, plans: Sequence[Plan], cluster: Cluster, tuning: Tuning, num_layers: int) -> None:
    """Compile plans for the cluster and print the compiler's account beside the prediction."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from mmjax.training.compiled_step import compile_step

    table = Table("mesh", "", "predicted", "compiled", "compiled / predicted", title=f"compiled for {cluster.name}")
    for plan in plans:
        config = with_stages(with_layers(plan.config, num_layers) if num_layers else plan.config)
        memory, clock = device_bytes(config, tuning), StepClock(config, cluster, tuning=tuning)
        time, compiled = clock.step(config), compile_step(config, cluster)
        held = compiled.device_memory
        # Results of layers that the plan keeps, of as many layers as are compiled.
        results = plan.memory.saved_activations - device_bytes(plan.config, tuning).saved_activations
        peak = memory.total + max(0.0, results) * config.model.num_layers / plan.config.model.num_layers
        exposed = time.communication_share * time.total
        rows = [
            ("bytes at rest", memory.arguments, held["arguments"], format_bytes),
            ("bytes at the peak", peak, held["peak"], format_bytes),
            ("computing", time.total - exposed, compiled.timeline.compute, format_seconds),
            ("waiting for exchanges", exposed, compiled.timeline.exposed, format_seconds),
        ]
        name = escape(describe_mesh(config.mesh)) + (f" ({config.model.num_layers} layers)" if num_layers else "")
        for index, (label, predicted, found, write) in enumerate(rows):
            ratio = f"{found / predicted:.2f}" if predicted else ""
            table.add_row(name if not index else "", label, write(predicted), write(found), ratio)
        table.add_section()
    console.print(table)


def with_layers(config: RunConfig, num_layers: int) -> RunConfig:
    """The run of a model with the first so many layers."""
    kept = tuple(layer for layer in config.model.full_attention_layers if layer < num_layers)
    number = min(num_layers, config.model.num_layers)
    model = dataclasses.replace(config.model, num_layers=number, full_attention_layers=kept, pipeline_stages=())
    return dataclasses.replace(config, model=model)


def measure(command: MeasureCommand) -> int:
    """Write readings of sizes that grow fourfold, and print the link that fits them."""
    import jax

    from mmjax.parallel.link_readings import read_links

    if not 0 < command.smallest_bytes < command.largest_bytes or command.repeats < 1 or jax.local_device_count() < 2:
        raise ConfigurationError(
            "measure",
            found=f"{command.smallest_bytes} to {command.largest_bytes} bytes, {command.repeats} repeats,"
            f" {jax.local_device_count()} devices",
            expected="at least two devices, two sizes of which the first is smaller, and one repeat",
            remedy="mend the sizes, or run it where there are several devices",
        )
    sizes = [command.smallest_bytes]
    while sizes[-1] * 4 <= command.largest_bytes:
        sizes.append(sizes[-1] * 4)
    readings = read_links(sizes, command.repeats)
    readings.save(Path(command.output))
    print(f"{readings.hardware}: {fit_link(readings.exchanges).describe()}")
    print(f"readings written to {command.output}")
    return 0


def describe_run(command: Command, model: ModelConfig, cluster: Cluster) -> tuple[RunConfig, Tuning]:
    """Settings of the run to plan for, its mesh left open.

    Raises:
      ConfigurationFaults: settings that no mesh mends.
    """
    data = DataConfig(
        source="conversations.jsonl",
        tokenizer="tokenizer.json",
        rows=command.rows or cluster.num_devices,
        row_tokens=command.seq,
        row_patches=command.row_patches or 4,
        image_max_patches=min(command.row_patches or 4, 16_384),
        row_clips=command.row_clips,
    )
    if command.imbalance:
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, **_sized_buffer(command, model, cluster)))
    if not command.row_patches:
        model = dataclasses.replace(model, vision=dataclasses.replace(model.vision, num_layers=0))
    if model.residual == "attention":
        # In loops within blocks every stage and every number of finished blocks is compiled apart.
        model = dataclasses.replace(model, layer_loops="whole")
    config = RunConfig(model=model, data=data, optimizer=OptimizerConfig(name=command.optimizer))
    if faults := check_without_mesh(config):
        raise ConfigurationFaults("settings", faults)
    if command.lora:
        storage = "mxfp4" if command.experts_at_rest == "mxfp4" else "dense"
        moe = dataclasses.replace(model.moe, expert_storage=storage)
        lora = LoraConfig(
            rank=command.rank,
            targets=ADAPTED_NAMES,
            experts="per_expert" if command.expert_rank else "none",
            expert_rank=command.expert_rank,
        )
        model = dataclasses.replace(model, parameter_dtype="bfloat16", moe=moe)
        config = dataclasses.replace(config, model=model, lora=lora)
    tuning = Tuning(
        kind="lora" if command.lora else "full",
        rank=command.rank,
        expert_rank=command.expert_rank,
        experts_at_rest=command.experts_at_rest,
    )
    return config, tuning


def _sized_buffer(command: Command, model: ModelConfig, cluster: Cluster) -> dict[str, Any]:
    """`capacity_factor` for a measured imbalance: experts on all devices of a node, or on as many as there are."""
    num_devices = max(2, cluster.gpus_per_node)
    width = model.moe.latent_width or model.width
    buffer = exchange_buffer(
        command.imbalance,
        mean_bytes=2.0 * command.seq * model.moe.experts_per_token * width,
        link=cluster.between if cluster.num_nodes > 1 else cluster.inside,
        num_devices=num_devices,
        memory_bytes=0.05 * cluster.usable_bytes,
    )
    print(f"buffers of the experts' exchange: {buffer.capacity_factor:.3g} times the mean, rounds: {buffer.rounds}")
    return {"capacity_factor": buffer.capacity_factor}


def find_preset(name: str) -> Callable[[], ModelConfig]:
    """The preset of that name, from any file of mmjax/presets."""
    import mmjax.presets

    presets: dict[str, Callable[[], ModelConfig]] = {}
    for module in pkgutil.iter_modules(mmjax.presets.__path__):
        members = inspect.getmembers(importlib.import_module(f"mmjax.presets.{module.name}"), inspect.isfunction)
        presets |= {
            name: value
            for name, value in members
            if not name.startswith("_") and value.__annotations__.get("return") is ModelConfig
        }
    if name in presets:
        return presets[name]
    nearest = difflib.get_close_matches(name, presets, n=1)
    raise ConfigurationError(
        "--model",
        found=repr(name),
        expected=f"one of {', '.join(sorted(presets))}",
        remedy=f"did you mean {nearest[0]!r}?" if nearest else "choose one, or add a function to mmjax/presets",
    )


def write_files(folder: Path, result: SearchResult, tuning: Tuning, more: Mapping[str, Any]) -> None:
    """plans.json and plans.png; plan.json of the best; plan.yaml of it too, unless only experts get adapters, which
    settings cannot say."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json.dumps([as_json(plan, result) for plan in result.plans], indent=1) + "\n")
    draw(result, folder / "plans.png")
    best = result.plans[0]
    write_plan(folder / "plan.json", best.config, as_json(best, result) | dict(more))
    print(f"the best, for settings of your own: python -m mmjax.train --plan {folder / 'plan.json'} ...")
    if tuning.kind == "full" or tuning.rank:
        (folder / "plan.yaml").write_text(to_yaml(best.config))
        print(f"the best with all settings: python -m mmjax.train --config {folder / 'plan.yaml'}")
    else:
        print("no plan.yaml: settings have no word for adapters of experts alone")


if __name__ == "__main__":
    sys.exit(main())
