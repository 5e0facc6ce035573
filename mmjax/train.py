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
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmjax.config import (
    MESH_AXIS_PURPOSES,
    UNBUILT_AXES,
    ConfigurationFaults,
    Fault,
    MeshConfig,
    RunConfig,
    check,
    describe_mesh,
    parse_mesh,
    resolve_mesh,
    saved,
    to_yaml,
)
from mmjax.errors import ConfigurationError, MmjaxError
from mmjax.parallel.launch import LaunchOptions, Placement, resolve

# Ctrl-C before the first step, or a second one after it; the first one saves and ends with errors.EXIT_INTERRUPTED.
EXIT_STOPPED_AT_ONCE = 130


@dataclass(frozen=True, kw_only=True)
class Command:
    """Train a model, or adapters on it. The same run folder again goes on from its latest complete checkpoint.

    Settings come from the defaults, an experiment or a file, then from the model of `--weights`, then from the options
    below.

    python -m mmjax.train --experiment digits_cpu --mesh fsdp=2,expert=2 --optimizer.learning-rate 1e-3
    python -m mmjax.train --weights CONVERTED --lora.rank 16 --lora.targets q_proj v_proj
    """

    experiment: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Start from experiments/NAME.py."""
    config: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Start from a YAML file, such as the config.yaml of a run."""
    mesh: Annotated[str, tyro.conf.arg(metavar="MESH")] = ""
    """4x2x16 is pipe x tensor x expert; fsdp=2,expert=64 names axes; one axis may be -1: the devices that are left."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print what each device would hold and stop; needs no device of the mesh."""
    launch: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    settings: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff] = dataclasses.field(
        default_factory=RunConfig
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. What a person can mend is one message, never a traceback."""
    try:
        command = read_command(sys.argv[1:] if arguments is None else arguments)
        return show_plan(command.settings) if command.dry_run else train(command.settings, command.launch)
    except MmjaxError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped at once; the same command goes on from the latest checkpoint, if any", file=sys.stderr)
        return EXIT_STOPPED_AT_ONCE


def read_command(arguments: Sequence[str]) -> Command:
    """The command line with its settings resolved.

    In this order: defaults, experiment or file, the model of `--weights`, options, `--mesh`.
    """
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--experiment", nargs="?", default="")
    scan.add_argument("--config", nargs="?", default="")
    scan.add_argument("--weights", nargs="?", default="")
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

        # What is computed again in the backward pass is a matter of the run.
        model = dataclasses.replace(read_model(weights), remat=settings.model.remat)
        settings = dataclasses.replace(settings, model=model)
    command = tyro.cli(Command, default=Command(settings=settings), args=arguments, prog="python -m mmjax.train")
    if command.mesh:
        mesh = dataclasses.replace(command.settings, mesh=parse_mesh(command.mesh))
        command = dataclasses.replace(command, settings=mesh)
    return command


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


def train(config: RunConfig, launch: LaunchOptions) -> int:
    """Connect the processes of the run, check and print the settings, then train."""
    placement = resolve(launch, os.environ)
    if placement is None:
        return _train(config, is_first=True)
    _print_placement(placement)
    from mmjax.parallel import processes

    processes.start(placement, to_yaml(config), launch.start_timeout_seconds)
    try:
        return _train(config, is_first=placement.process_index == 0)
    except MmjaxError as error:
        _print_error(error)
        processes.leave_at_once(error.exit_code)
    except BaseException:
        traceback.print_exc()
        processes.leave_at_once(1)
    raise AssertionError("a process that failed goes on")


def _train(config: RunConfig, *, is_first: bool) -> int:
    config = settle_mesh(config)
    _print_mesh(config.mesh)
    if is_first:
        print(to_yaml(config))
    _allow_float64(config)

    from mmjax.parallel.mesh import make_mesh
    from mmjax.training import loop

    return loop.run(config, make_mesh(config.mesh))


def show_plan(config: RunConfig) -> int:
    """Print the mesh and what each of its devices would hold. A plan over axes that are not built yet is shown too."""
    _print_mesh(config.mesh)
    faults = check(config)
    if -1 in config.mesh.sizes.values():
        found = f"{describe_mesh(config.mesh)} in a dry run, which counts no devices"
        faults.insert(0, Fault(path="mesh", found=found, remedy="give every axis a size"))
    if all(fault.path in UNBUILT_AXES for fault in faults):
        from mmjax.training import dry_run

        _allow_float64(config)
        title = f"plan for {config.mesh.num_devices} devices"
        if faults:
            title += ", with nothing split yet over " + " and ".join(fault.path for fault in faults)
        table = Table("each device holds", "", title=title)
        for label, value in dry_run.report(config):
            table.add_row(escape(label), escape(value))
        Console().print(table)
    if faults:
        raise ConfigurationFaults("settings", faults)
    return 0


def settle_mesh(config: RunConfig) -> RunConfig:
    """`config` with an open mesh axis filled by the devices there are.

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
    return resolved


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
    lines = {"found": error.found, "expected": error.expected, "to do": error.remedy}
    print(f"error: {error.where}", *(f"  {name:9} {text}" for name, text in lines.items()), sep="\n", file=sys.stderr)


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
