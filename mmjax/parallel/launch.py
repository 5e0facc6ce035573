"""Which process of a run this one is: found from the launcher's environment or given, always complete, never guessed.

Four values describe a process: the coordinator's address, the number of processes, this one's index and the devices it
uses. Each is looked up in every place that can know it; two places that disagree are an error, not a matter of order.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mmjax.errors import ConfigurationError

Launcher = Literal["auto", "none", "slurm", "open_mpi", "kubernetes"]
DEFAULT_PORT = 8476
_FIELDS = ("coordinator", "num_processes", "process_index", "local_devices")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Several processes, usually one a host. Under Slurm, Open MPI and Kubernetes nothing needs to be given."""

    launcher: Launcher = "auto"
    """Whose environment to read; `auto` reads all there are, `none` takes only what is given here."""
    coordinator: str = ""
    """Host and port of process 0, e.g. node1:8476."""
    num_processes: int = 0
    process_index: int = -1
    local_devices: str = ""
    """Devices of this process, e.g. 0,1; empty: those that the launcher leaves it, or all of the host."""
    start_timeout_seconds: int = 300
    """How long to wait for the other processes at the start."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """This process among those of the run."""

    coordinator: str
    num_processes: int
    process_index: int
    local_devices: tuple[int, ...] | None
    """None: all devices of the host."""
    origins: Mapping[str, str]
    """Where each of the values came from."""


@dataclass(frozen=True)
class _Clue:
    """What one place says about one value."""

    field: str
    value: Any
    origin: str


def resolve(options: LaunchOptions, environment: Mapping[str, str]) -> Placement | None:
    """The placement of this process; None where nothing speaks of several processes.

    Raises:
      ConfigurationError: places disagree, a value is missing or malformed, or Slurm allotted tasks that `srun` did not
        start.
    """
    clues = [*_given(options), *_from_jax(environment)]
    readers = {"slurm": _from_slurm, "open_mpi": _from_open_mpi, "kubernetes": _from_kubernetes}
    assert {*readers, "auto", "none"} == {*get_args(Launcher)}
    for name, reader in readers.items():
        if options.launcher in ("auto", name):
            found = list(reader(environment))
            if options.launcher == name and not found:
                raise ConfigurationError(
                    "--launch.launcher",
                    found=f"{name}, but none of its variables in the environment",
                    expected=f"a process that {name} started",
                    remedy="start it through the launcher, or give the values by --launch options",
                )
            clues += found
    values = {field: _agreed(field, [clue for clue in clues if clue.field == field]) for field in _FIELDS}
    if not any(values[field] for field in _FIELDS[:3]):
        return None
    if values["num_processes"] is not None and values["num_processes"].value == 1 and values["coordinator"] is None:
        return None
    if missing := [field for field in _FIELDS[:3] if values[field] is None]:
        raise ConfigurationError(
            "several processes",
            found=", ".join(f"{clue.field} from {clue.origin}" for clue in values.values() if clue is not None),
            expected=f"{' and '.join(missing)} too",
            remedy="give " + ", ".join(f"--launch.{field.replace('_', '-')}" for field in missing),
        )
    coordinator, count, index, devices = (values[field] for field in _FIELDS)
    assert coordinator is not None and count is not None and index is not None
    if not 0 <= index.value < count.value:
        raise ConfigurationError(
            index.origin,
            found=f"process {index.value}",
            expected=f"0 to {count.value - 1}, as {count.origin} says",
            remedy="number the processes from 0",
        )
    return Placement(
        coordinator=_with_port(coordinator, environment),
        num_processes=count.value,
        process_index=index.value,
        local_devices=devices.value if devices is not None else None,
        origins={
            field: clue.origin if clue is not None else "no place: all of the host" for field, clue in values.items()
        },
    )


def _agreed(field: str, clues: list[_Clue]) -> _Clue | None:
    """The one value that all places give.

    A coordinator that is given names the port too; a launcher knows the host only, and a host has several names.
    """
    if field == "coordinator" and clues:
        given = [clue for clue in clues if clue.origin.startswith(("--", "JAX_"))]
        clues = given or clues[:1]
    if len({clue.value for clue in clues}) > 1:
        raise ConfigurationError(
            f"several processes: {field}",
            found="; ".join(f"{clue.value} from {clue.origin}" for clue in clues),
            expected="the same from each",
            remedy="mend the one that is wrong, or name the launcher to believe by --launch.launcher",
        )
    return clues[0] if clues else None


def _given(options: LaunchOptions) -> Iterator[_Clue]:
    if options.coordinator:
        yield _Clue("coordinator", options.coordinator, "--launch.coordinator")
    if options.num_processes:
        yield _Clue("num_processes", options.num_processes, "--launch.num-processes")
    if options.process_index >= 0:
        yield _Clue("process_index", options.process_index, "--launch.process-index")
    if options.local_devices:
        yield _Clue(
            "local_devices", _indices(options.local_devices, "--launch.local-devices"), "--launch.local-devices"
        )


def _from_jax(environment: Mapping[str, str]) -> Iterator[_Clue]:
    """JAX's own variables."""
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        port = environment.get("JAX_COORDINATOR_PORT", "")
        yield _Clue("coordinator", f"{address}:{port}" if port else address, "JAX_COORDINATOR_ADDRESS")
    for field, name in (("num_processes", "JAX_NUM_PROCESSES"), ("process_index", "JAX_PROCESS_ID")):
        if name in environment:
            yield _Clue(field, _number(environment, name), name)
    if devices := environment.get("JAX_LOCAL_DEVICE_IDS"):
        yield _Clue("local_devices", _indices(devices, "JAX_LOCAL_DEVICE_IDS"), "JAX_LOCAL_DEVICE_IDS")


def _from_slurm(environment: Mapping[str, str]) -> Iterator[_Clue]:
    if "SLURM_JOB_ID" not in environment:
        return
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None:
        # Inside sbatch or salloc: the script itself is no task of a step.
        if int(environment.get("SLURM_NTASKS", "1") or 1) > 1:
            raise ConfigurationError(
                "SLURM_STEP_NODELIST",
                found=f"a Slurm job of {environment['SLURM_NTASKS']} tasks, but no step",
                expected="a process that srun started",
                remedy="put srun before the command, or --launch.launcher none for one process",
            )
        return
    yield _Clue("num_processes", _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_STEP_NUM_TASKS")
    yield _Clue("process_index", _number(environment, "SLURM_PROCID"), "SLURM_PROCID")
    # Two jobs may share the first host: a port of their own each.
    job = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '')}"
    port = 20_000 + zlib.crc32(job.encode()) % 12_000
    yield _Clue("coordinator", f"{first_host(nodes)}:{port}", "SLURM_STEP_NODELIST and SLURM_JOB_ID")
    tasks_here = _tasks_on_node(environment)
    if tasks_here > 1:
        yield from _share_of_node(environment, _number(environment, "SLURM_LOCALID"), tasks_here, "SLURM_LOCALID")


def _from_open_mpi(environment: Mapping[str, str]) -> Iterator[_Clue]:
    """Open MPI 4 and 5; only 4 tells where mpirun ran."""
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    yield _Clue("num_processes", size, "OMPI_COMM_WORLD_SIZE")
    yield _Clue("process_index", _number(environment, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK")
    here = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    launcher_address = re.search(r"tcp6?://\[?([^,:\]]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    if here == size:
        yield _Clue("coordinator", "127.0.0.1", "OMPI_COMM_WORLD_LOCAL_SIZE: all processes on this host")
    elif launcher_address:
        yield _Clue("coordinator", launcher_address.group(1), "OMPI_MCA_orte_hnp_uri: the host of mpirun")
    if here > 1:
        local = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
        yield from _share_of_node(environment, local, here, "OMPI_COMM_WORLD_LOCAL_RANK")


def _from_kubernetes(environment: Mapping[str, str]) -> Iterator[_Clue]:
    """An indexed Job. Its size and its first pod's name are not in the environment: the manifest gives JAX_..."""
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        yield _Clue("process_index", _number(environment, "JOB_COMPLETION_INDEX"), "JOB_COMPLETION_INDEX")


def _share_of_node(environment: Mapping[str, str], local_index: int, here: int, origin: str) -> Iterator[_Clue]:
    """Devices of one of several processes of a host, unless the launcher shows each its own already."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else None
    if count == 1:
        return
    if count is not None and count % here:
        raise ConfigurationError(
            "CUDA_VISIBLE_DEVICES",
            found=f"{count} devices for {here} processes of this host",
            expected="a multiple of the processes",
            remedy="give --launch.local-devices",
        )
    share = (count or here) // here
    yield _Clue("local_devices", tuple(range(local_index * share, (local_index + 1) * share)), origin)


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node, from a list like 2(x3),1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise _malformed("SLURM_STEP_TASKS_PER_NODE", text, "a list like 2(x3),1")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[0]


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: `rack[1-2]-node[01-04,07],login1` -> `rack1-node01`."""
    depth, end = 0, len(node_list)
    for position, character in enumerate(node_list):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            end = position
            break
    first = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", node_list[:end])
    if not first or depth or "[" in first or "]" in first:
        raise _malformed("SLURM_STEP_NODELIST", node_list, "a node list like node[1-4]")
    return first


def _with_port(clue: _Clue, environment: Mapping[str, str]) -> str:
    host, colon, port = clue.value.rpartition(":")
    if not colon:
        return f"{clue.value}:{environment.get('JAX_COORDINATOR_PORT') or DEFAULT_PORT}"
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise _malformed(clue.origin, clue.value, "host:port")
    return clue.value


def _number(environment: Mapping[str, str], *names: str) -> int:
    for name in names:
        if name in environment:
            if not environment[name].isdecimal():
                raise _malformed(name, environment[name], "a whole number")
            return int(environment[name])
    raise _malformed(names[0], "nothing", "a whole number")


def _indices(text: str, origin: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise _malformed(origin, text, "numbers like 0,1")
    return tuple(map(int, text.split(",")))


def _malformed(where: str, found: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        where, found=found, expected=expected, remedy="mend it, or give the values by --launch options"
    )
