"""`python -m mmjax.train`: one run, from its settings to its last checkpoint."""

import argparse
import dataclasses
import difflib
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmjax.config import (
    MESH_AXIS_PURPOSES,
    ConfigurationFaults,
    Fault,
    MeshConfig,
    ModelConfig,
    RunConfig,
    check,
    describe_mesh,
    flatten,
    parse_mesh,
    resolve_mesh,
    saved,
    settings_with,
    to_yaml,
)
from mmjax.errors import ConfigurationError, MmjaxError
from mmjax.parallel.launch import LaunchOptions, Placement, resolve
from mmjax.planner.plan_file import read_plan
from mmjax.planner.stages import with_stages

# Ctrl-C before the first step, or a second one after it; the first one saves and ends with errors.EXIT_INTERRUPTED.
EXIT_STOPPED_AT_ONCE = 130
_STOPPED_AT_ONCE = "stopped at once; the same command goes on from the latest checkpoint, if any"


@dataclass(frozen=True, kw_only=True)
class Command:
    """Train a model, or adapters on it. The same run folder again goes on from its latest complete checkpoint.

    Settings come from the defaults, an experiment or a file, then from the model of `--weights` and the tower of
    `--audio-weights`, then from a plan, then from the options below.

    python -m mmjax.train --experiment digits_cpu --mesh fsdp=2,expert=2 --optimizer.learning-rate 1e-3

    python -m mmjax.train --weights CONVERTED --lora.rank 16 --lora.targets q_proj v_proj
    """

    experiment: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Start from experiments/NAME.py."""
    config: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Start from a YAML file, such as the config.yaml of a run."""
    plan: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Take mesh, device order, micro-batches, schedule and what is kept from a plan.json of `python -m mmjax.plan`."""
    mesh: Annotated[str, tyro.conf.arg(metavar="MESH")] = ""
    """4x2x16 is pipe x tensor x expert; fsdp=2,expert=64 names axes; one axis may be -1: the devices that are left."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print what each device would hold and stop; needs no device of the mesh."""
    cluster: Annotated[str, tyro.conf.arg(metavar="CLUSTER")] = ""
    """With --dry-run: also compile the step for these GPUs, none of which need be there, and print its memory, its
    exchanges and FLOPs. 16x8xh200 is nodes x GPUs of a node x GPU; or a YAML file. Needs the extra `deviceless`."""
    json: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """With --cluster: also write these numbers to FILE."""
    evaluate_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train nothing: answer the held-out questions as the run's latest checkpoint does, or the model it would start
    from where there is none."""
    launch: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    settings: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff] = dataclasses.field(
        default_factory=RunConfig
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. What a person can mend is one message, never a traceback."""
    try:
        command = read_command(sys.argv[1:] if arguments is None else arguments)
        if not command.dry_run:
            refuse_options_of_dry_run(command)
            return train(command)
        return show_plan(command.settings, command.cluster, command.json)
    except MmjaxError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print(_STOPPED_AT_ONCE, file=sys.stderr)
        return EXIT_STOPPED_AT_ONCE


def read_command(arguments: Sequence[str]) -> Command:
    """The command line with its settings resolved.

    In this order: defaults, experiment or file, the model of `--weights`, `--plan`, options, `--mesh`.
    """
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--experiment", nargs="?", default="")
    scan.add_argument("--config", nargs="?", default="")
    scan.add_argument("--weights", nargs="?", default="")
    scan.add_argument("--audio-weights", nargs="?", default="")
    scan.add_argument("--plan", nargs="?", default="")
    start, _ = scan.parse_known_args(arguments)
    if start.experiment and start.config:
        raise ConfigurationError(
            "command line", found="--experiment and --config", expected="one of them", remedy="leave one out"
        )
    settings = RunConfig()
    if start.experiment:
        settings = find_experiment(start.experiment)
    elif start.config:
        settings = saved.load(start.config)
    # An experiment names weights and leaves their model to them; a saved configuration holds its model whole.
    if weights := start.weights or (start.experiment and settings.weights):
        from mmjax.checkpoint.weights import read_model

        settings = dataclasses.replace(settings, model=with_run_settings(read_model(weights), settings.model))
    if audio_weights := start.audio_weights or (start.experiment and settings.audio_weights):
        from mmjax.checkpoint.tower_weights import read_audio

        model = dataclasses.replace(settings.model, audio=read_audio(audio_weights, settings.model.audio))
        settings = dataclasses.replace(settings, model=model)
    plan = read_plan(Path(start.plan)) if start.plan else None
    settings = plan.applied(settings) if plan else settings
    command = tyro.cli(Command, default=Command(settings=settings), args=arguments, prog="python -m mmjax.train")
    is_dtype_given = any(one.replace("_", "-").startswith("--model.parameter-dtype") for one in arguments)
    if weights and command.settings.lora.rank and not is_dtype_given:
        from mmjax.checkpoint.weights import resting_dtype

        # What is frozen needs no more bits than it came with.
        model = command.settings.model
        model = dataclasses.replace(model, parameter_dtype=resting_dtype(weights, model))
        command = dataclasses.replace(command, settings=dataclasses.replace(command.settings, model=model))
    if command.mesh:
        mesh = dataclasses.replace(command.settings, mesh=parse_mesh(command.mesh))
        command = dataclasses.replace(command, settings=mesh)
    for difference in plan.differences(command.settings) if plan else []:
        print(f"note: {difference}")
    return command


# Settings of a model that are a matter of the run: how it is computed and trained, not what it is.
_OF_A_RUN = (
    *("compute_dtype", "remat", "remat_keep", "remat_offload", "loss_chunk_tokens", "layer_loops"),
    *("pipeline_stages", "pipeline_chunks"),
    *("linear_attention.chunk_tokens", "gated_delta_net.chunk_tokens"),
    *("full_attention.query_chunk_tokens", "grouped_attention.query_chunk_tokens"),
    "full_attention.deterministic_gradients",
    *(
        f"moe.{name}"
        for name in ("transport", "node_devices", "exchange_chunks", "expert_axes", "capacity_factor", "overflow")
    ),
    *(
        f"moe.router.{name}"
        for name in ("balance_coefficient", "balance_over", "z_coefficient", "sign_rate", "quantile_bins")
    ),
)
_OF_AN_INDEXER = tuple(f"full_attention.indexer.{name}" for name in ("stage", "loss_coefficient", "score_dtype"))


def with_run_settings(model: ModelConfig, described: ModelConfig) -> ModelConfig:
    """A checkpoint's model with what an experiment's `described` one says of the run, where that is no default."""
    names = _OF_A_RUN + (_OF_AN_INDEXER if model.full_attention.indexer.stage != "none" else ())
    values, defaults = flatten(described), flatten(ModelConfig())
    changes = {name: values[name] for name in names if values[name] != defaults[name]}
    return settings_with(model, changes, "the experiment's model")


def find_experiment(name: str) -> RunConfig:
    """The configuration that `experiments/<name>.py` describes."""
    import experiments

    names = sorted(module.name for module in pkgutil.iter_modules(experiments.__path__) if not module.ispkg)
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        raise ConfigurationError(
            "--experiment",
            found=repr(name),
            expected=f"one of {', '.join(names)}",
            remedy=f"did you mean {nearest[0]!r}?" if nearest else "choose one, or add a file to experiments/",
        )
    return importlib.import_module(f"experiments.{name}").run()


def train(command: Command) -> int:
    """Connect the processes of the run, check and print the settings, then train or evaluate."""
    config, launch, is_evaluation_only = command.settings, command.launch, command.evaluate_only
    placement = resolve(launch, os.environ)
    if placement is None:
        return _train(config, is_first=True, is_evaluation_only=is_evaluation_only)
    _print_placement(placement)
    from mmjax.parallel import processes

    processes.start(placement, to_yaml(config), launch.start_timeout_seconds)
    try:
        return _train(config, is_first=placement.process_index == 0, is_evaluation_only=is_evaluation_only)
    except MmjaxError as error:
        _print_error(error)
        processes.leave_at_once(error.exit_code)
    except KeyboardInterrupt:
        print(_STOPPED_AT_ONCE, file=sys.stderr)
        processes.leave_at_once(EXIT_STOPPED_AT_ONCE)
    except BaseException:
        traceback.print_exc()
        processes.leave_at_once(1)
    raise AssertionError("a process that failed goes on")


def _train(config: RunConfig, *, is_first: bool, is_evaluation_only: bool) -> int:
    config = settle_mesh(config)
    _print_mesh(config.mesh)
    if is_first:
        print(to_yaml(config))
    _allow_float64(config)

    from mmjax.parallel.mesh import make_mesh
    from mmjax.training import loop

    return loop.run(config, make_mesh(config.mesh), is_evaluation_only=is_evaluation_only)


def refuse_options_of_dry_run(command: Command) -> None:
    """What only a dry run reads is an error elsewhere."""
    for name, value in (("--cluster", command.cluster), ("--json", command.json)):
        if value:
            remedy = f"add --dry-run, or leave {name} out: a run takes the devices that are there"
            raise ConfigurationError(name, found=repr(value), expected="a dry run", remedy=remedy)


def show_plan(config: RunConfig, cluster_text: str = "", json_file: str = "") -> int:
    """Print the mesh and what each of its devices would hold.

    With a cluster also what the step compiled for it says of itself, which goes to `json_file` as well.
    """
    cluster = None
    if cluster_text:
        from mmjax.planner.topology import read_cluster

        cluster = read_cluster(cluster_text)
        config = dataclasses.replace(config, mesh=resolve_mesh(config.mesh, cluster.num_devices))
        # The plug-in that compiles for GPUs looks for a driver otherwise.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    elif json_file:
        raise ConfigurationError(
            "--json", found=repr(json_file), expected="--cluster beside it", remedy="add --cluster, such as 16x8xh200"
        )
    _print_mesh(config.mesh)
    faults = check(config)
    if -1 in config.mesh.sizes.values():
        found = f"{describe_mesh(config.mesh)} in a dry run, which counts no devices"
        faults.insert(0, Fault(path="mesh", found=found, remedy="give every axis a size"))
    if faults:
        raise ConfigurationFaults("settings", faults)
    from mmjax.training import dry_run

    config = with_stages(config)
    _allow_float64(config)
    table = Table("each device holds", "", title=f"plan for {config.mesh.num_devices} devices")
    for label, value in dry_run.report(config):
        table.add_row(escape(label), escape(value))
    Console().print(table)
    if cluster is not None:
        from mmjax.training.compiled_step import compile_step

        compiled = compile_step(config, cluster)
        table = Table("the compiled step, on each device", "", title=f"compiled for {cluster.name}")
        for label, value in compiled.rows():
            table.add_row(escape(label), escape(value))
        Console().print(table)
        if json_file:
            compiled.write(Path(json_file))
    return 0


def settle_mesh(config: RunConfig) -> RunConfig:
    """`config` with an open mesh axis filled by the devices there are, and layers shared out to pipeline stages.

    Raises:
      ConfigurationFaults: all faults, those of the devices among them.
    """
    faults = check(config)
    if config.mesh.num_devices == 1 or any(size < 1 and size != -1 for size in config.mesh.sizes.values()):
        resolved = config
    else:
        num_devices, kind = _count_devices()
        resolved = dataclasses.replace(config, mesh=resolve_mesh(config.mesh, num_devices))
        faults = check(resolved)
        if resolved.mesh != config.mesh and num_devices % resolved.mesh.num_devices:
            found = (
                f"{describe_mesh(config.mesh)} with {num_devices} devices ({kind}), which the other axes do not divide"
            )
            faults.insert(0, Fault(path="mesh", found=found, remedy=f"give axes whose product divides {num_devices}"))
        elif resolved.mesh.num_devices > num_devices:
            needed = resolved.mesh.num_devices
            there = f"{num_devices} {'is' if num_devices == 1 else 'are'} there ({kind})"
            remedy = f"give a mesh of at most {num_devices}, or add --dry-run to see this plan without the devices"
            found = f"{describe_mesh(resolved.mesh)} needs {needed} devices; {there}"
            faults.insert(0, Fault(path="mesh", found=found, remedy=remedy))
    if faults:
        raise ConfigurationFaults("settings", faults)
    return with_stages(resolved)


def _allow_float64(config: RunConfig) -> None:
    """JAX rounds float64 to float32 unless told otherwise."""
    if "float64" in (config.model.parameter_dtype, config.model.compute_dtype):
        import jax

        jax.config.update("jax_enable_x64", True)


def _count_devices() -> tuple[int, str]:
    import jax

    try:
        return jax.device_count(), jax.devices()[0].device_kind
    except RuntimeError as error:
        raise ConfigurationError(
            "JAX", found=str(error), expected="a device", remedy="check the driver, or set JAX_PLATFORMS=cpu"
        ) from error


def _print_mesh(mesh: MeshConfig) -> None:
    print(f"mesh: {describe_mesh(mesh)}")
    for axis, size in mesh.sizes.items():
        if size != 1:
            print(f"  {axis:8}{size:4}  {MESH_AXIS_PURPOSES[axis]}")


def _print_placement(placement: Placement) -> None:
    print(f"process {placement.process_index} of {placement.num_processes}, coordinator {placement.coordinator}")
    for value, origin in placement.origins.items():
        print(f"  {value:14} from {origin}")


def _print_error(error: MmjaxError) -> None:
    if isinstance(error, ConfigurationFaults):
        _print_faults(error)
        return
    print(error.lines(), file=sys.stderr)


def _print_faults(error: ConfigurationFaults) -> None:
    plural = "fault" if len(error.faults) == 1 else "faults"
    table = Table(title=f"{escape(error.where)}: {len(error.faults)} {plural}", title_justify="left", show_lines=True)
    table.add_column("setting", overflow="fold")
    table.add_column("given", overflow="fold")
    table.add_column("possible, and what to do", overflow="fold")
    for fault in error.faults:
        table.add_row(escape(fault.path), escape(fault.found), escape(fault.remedy))
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
