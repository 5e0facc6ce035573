"""One machine as its tools describe it: `nvidia-smi`, its link matrix, and the network cards under /sys."""

import dataclasses
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmjax.errors import ConfigurationError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\S+|bnxt_re\S+|rdmap\S+|irdma\S+|rocep\S+|ibp\S+|hfi\d+\S*|efa\S*")
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
# Older drivers call the link between CPU sockets by another name.
_OLD_NAMES = {"SOC": "SYS"}
_NIC_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")

Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network card that can do RDMA."""

    name: str
    is_up: bool
    gigabits: float
    """Rate it runs at; 0 when it is not known."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs and network cards of one machine, and what lies between them."""

    gpus: tuple[str, ...]
    """Name of each GPU, as its driver gives it; empty text where only the matrix is known."""
    links: tuple[tuple[str, ...], ...]
    """[GPU][GPU]: X (itself), NV#, PIX, PXB, PHB, NODE or SYS."""
    nic_links: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Link of each network card to each GPU."""
    nics: tuple[Nic, ...] = ()
    """State of network cards, where it was found out."""

    @property
    def working_nics(self) -> tuple[str, ...]:
        """Cards that are up; all of the matrix, where no state was found out."""
        return tuple(nic.name for nic in self.nics if nic.is_up) if self.nics else tuple(self.nic_links)

    def nvlinks(self) -> list[list[int]]:
        """[GPU][GPU]: how many NVLinks; -1 on the diagonal."""
        return [
            [-1 if link == "X" else int(link[2:]) if link.startswith("NV") else 0 for link in row] for row in self.links
        ]

    def nearest_nics(self) -> list[str | None]:
        """For each GPU the working card with the shortest way to it, taken by no GPU before if possible."""
        taken: set[str] = set()
        chosen: list[str | None] = []
        for gpu in range(len(self.gpus)):
            order = sorted(
                (name for name in self.working_nics if name in self.nic_links),
                key=lambda name: (_distance(self.nic_links[name][gpu]), name in taken),
            )
            chosen.append(order[0] if order else None)
            taken.update(order[:1])
        return chosen

    def faults(self) -> list[str]:
        """What looks broken: GPUs without the NVLinks that most others have, cards that are down."""
        counts = [tuple(sorted(link for link in row if link > 0)) for row in self.nvlinks()]
        faults = []
        for gpu, links in enumerate(counts):
            usual = max(set(counts), key=counts.count)
            if sum(links) < sum(usual):
                faults.append(f"GPU{gpu} has {sum(links)} NVLinks to others, most GPUs here have {sum(usual)}")
        return faults + [f"{nic.name} is down" for nic in self.nics if not nic.is_up]


def parse_matrix(text: str, gpu_names: Sequence[str] = ()) -> Machine:
    """Read what `nvidia-smi topo -m` prints.

    `gpu_names` come from `parse_gpus`. Text without any GPU gives a machine without GPUs.

    Raises:
      ConfigurationError: rows that are missing, cut or run together, unknown links, a matrix that is not symmetric.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    devices: list[str] = []
    rows: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for line in lines:
        cells = line.split()
        if legend := _NIC_LEGEND.fullmatch(line):
            names[legend[1]] = legend[2]
        elif not devices and len(cells) > 0 and cells[0] == "GPU0" and "X" not in cells:
            devices = _header(line)
        elif devices and cells and cells[0] in devices:
            if cells[0] in rows:
                raise _matrix_error(f"{cells[0]} twice", "one row for each device")
            rows[cells[0]] = [_OLD_NAMES.get(cell, cell) for cell in cells[1 : len(devices) + 1]]
    gpus = [name for name in devices if name.startswith("GPU")]
    if not gpus:
        return Machine(gpus=(), links=())
    for name in gpus:
        if name not in rows:
            raise _matrix_error(f"no row of {name}", f"a row for each of {len(gpus)} GPUs")
        if bad := [cell for cell in rows[name] if not _LINK.fullmatch(cell)] or len(rows[name]) < len(devices):
            found = f"{bad[0]!r} in the row of {name}" if isinstance(bad, list) else f"the row of {name} cut short"
            raise _matrix_error(found, f"{len(devices)} links out of X, NV#, PIX, PXB, PHB, NODE, SYS")
    links = tuple(tuple(rows[name][: len(gpus)]) for name in gpus)
    for row in range(len(gpus)):
        for column in range(row + 1):
            if links[row][column] != links[column][row] or (links[row][column] == "X") != (row == column):
                found = f"{links[row][column]} from GPU{row} to GPU{column}, {links[column][row]} back"
                raise _matrix_error(found, "the same link both ways, X only on the diagonal")
    if gpu_names and len(gpu_names) != len(gpus):
        raise _matrix_error(f"{len(gpus)} GPUs", f"{len(gpu_names)}, as nvidia-smi lists")
    nic_links = {
        names.get(name, name): tuple(rows[gpu][column] for gpu in gpus)
        for column, name in enumerate(devices)
        if name not in gpus
    }
    return Machine(gpus=tuple(gpu_names) or ("",) * len(gpus), links=links, nic_links=nic_links)


def parse_gpus(text: str) -> list[str]:
    """Names of GPUs from `nvidia-smi --query-gpu=index,name --format=csv,noheader`, in order.

    Raises:
      ConfigurationError: a line that tells of an error, such as a lost GPU.
    """
    names = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.lower().startswith("no devices"):
            return []
        index, comma, name = line.partition(",")
        if not comma or not index.strip().isdigit() or "error" in name.lower():
            raise ConfigurationError(
                "nvidia-smi", found=line[:120], expected="`index, name` of every GPU", remedy="reset or remove that GPU"
            )
        names.append(name.strip())
    return names


def read_nics(sys_root: Path = Path("/sys")) -> tuple[Nic, ...]:
    """RDMA cards under `/sys/class/infiniband`, first port each; none where there is no such folder."""
    folder = sys_root / "class" / "infiniband"
    if not folder.is_dir():
        return ()
    nics = []
    for card in sorted(folder.iterdir()):
        port = card / "ports" / "1"
        # "4: ACTIVE", "400 Gb/sec (4X NDR)"
        state, rate = (_text(port / name) for name in ("state", "rate"))
        number = re.match(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec", rate)
        nics.append(Nic(name=card.name, is_up="ACTIVE" in state, gigabits=float(number[1]) if number else 0.0))
    return tuple(nics)


def parse_nics(text: str) -> tuple[Nic, ...]:
    """Cards from `ibv_devinfo` (`hca_id: mlx5_0` ... `state: PORT_ACTIVE (4)`) or `rdma link` (`link mlx5_0/1 state
    ACTIVE ...`), first port each; neither tells the rate."""
    found = re.findall(r"^\s*link (\S+?)/1 state (\w+)", text, flags=re.MULTILINE)
    found += re.findall(r"^hca_id:\s*(\S+)$.*?^\s*state:\s*PORT_(\w+)", text, flags=re.MULTILINE | re.DOTALL)
    return tuple(Nic(name=name, is_up=state == "ACTIVE", gigabits=0.0) for name, state in found)


def discover(run: Run | None = None, sys_root: Path = Path("/sys")) -> Machine:
    """This machine. Without `nvidia-smi`, or when it finds no device, a machine without GPUs."""
    run = run or _run
    nics = read_nics(sys_root) or parse_nics(_output(run, ["ibv_devinfo"]) or _output(run, ["rdma", "link"]))
    gpus = parse_gpus(_output(run, ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]))
    if not gpus:
        return Machine(gpus=(), links=(), nics=nics)
    return dataclasses.replace(parse_matrix(_output(run, ["nvidia-smi", "topo", "-m"]), gpus), nics=nics)


def _output(run: Run, command: Sequence[str]) -> str:
    """What a command prints; nothing when it is not installed."""
    try:
        return run(command)
    except FileNotFoundError:
        return ""


def _run(command: Sequence[str]) -> str:
    """Output of a command, its complaints included; what it found is read from the text, not from its exit code."""
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return finished.stdout or finished.stderr


def _header(line: str) -> list[str]:
    names = []
    for cell in line.split():
        if not _DEVICE.fullmatch(cell):
            # "CPU Affinity" and what follows, perhaps run together with the last device's name.
            if run_together := re.match(r"((?:GPU|NIC)\d+)[A-Z]", cell):
                raise _matrix_error(f"{cell!r} in the header", f"{run_together[1]!r} and the next column apart")
            break
        names.append(cell)
    return names


def _distance(link: str) -> int:
    return ("X", "PIX", "PXB", "PHB", "NODE", "SYS").index(link)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _matrix_error(found: str, expected: str) -> ConfigurationError:
    remedy = "copy the whole output of `nvidia-smi topo -m`, lines unbroken"
    return ConfigurationError("nvidia-smi topo -m", found=found, expected=expected, remedy=remedy)
