"""`python -m mmjax.convert`: released checkpoints to ours, and ours or a run's back to released ones."""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mmjax.errors import CheckpointError, ConfigurationError, MmjaxError

if TYPE_CHECKING:
    from mmjax.checkpoint.convert import Progress as Told
    from mmjax.checkpoint.export import Read

# Ctrl-C: nothing is left behind, the same command starts over.
EXIT_STOPPED_AT_ONCE = 130
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class Command:
    """Convert weights. The direction is found from what SRC is.

    SRC is a released checkpoint (a folder with safetensors, or GGUF): DST becomes a folder that runs start from.
    SRC is such a folder, or the folder of a run: DST becomes a folder that `transformers` loads.

    python -m mmjax.convert downloads/model weights/model

    python -m mmjax.convert weights/model exported/model

    python -m mmjax.convert runs/tuned exported/tuned --released weights/model
    """

    source: Annotated[Path, tyro.conf.arg(name="src", metavar="SRC"), tyro.conf.Positional]
    """What there is."""
    target: Annotated[Path, tyro.conf.arg(name="dst", metavar="DST"), tyro.conf.Positional]
    """What is made: a new or empty folder."""
    released: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """For a run: the converted checkpoint whose names and files are taken; else the one that the run started from."""
    packed: Literal["auto", "keep", "decode"] = "auto"
    """MXFP4 experts stay packed, or become bfloat16. On the way back `keep` packs again, with a loss if they changed;
    `auto` does not when they come unpacked out of a run."""
    merge: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """For a run that trains adapters: write the model with them merged in."""
    adapter: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """For a run that trains adapters: write them as files that `peft` loads."""
    max_memory: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "4GiB"
    """Memory that a conversion may use besides the stored tensor it reads."""
    max_shard: Annotated[str, tyro.conf.arg(metavar="SIZE")] = ""
    """Size of the files on the way back, such as 5GB; else as they came."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace DST if this command has written it; anything else is never replaced."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Then run the same tokens through transformers and ours and compare the logits."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. What a person can mend is one message, never a traceback."""
    try:
        return run(tyro.cli(Command, args=arguments, prog="python -m mmjax.convert"))
    except MmjaxError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing is left behind, the same command starts over", file=sys.stderr)
        return EXIT_STOPPED_AT_ONCE


def run(command: Command) -> int:
    """Convert, and verify if asked to."""
    from mmjax.checkpoint.manifest import MANIFEST
    from mmjax.checkpoint.weights import MODEL
    from mmjax.training.loop import CHECKPOINTS

    memory_bytes = parse_size(command.max_memory, "--max-memory")
    shard_bytes = parse_size(command.max_shard, "--max-shard") if command.max_shard else None
    if command.target.absolute() == command.source.absolute():
        raise CheckpointError(
            str(command.target), found="SRC and DST the same", expected="two places", remedy="give another DST"
        )
    is_converted = (command.source / MODEL).exists() and (command.source / MANIFEST).exists()
    is_run = (command.source / CHECKPOINTS).is_dir()
    if command.released and not is_run:
        raise ConfigurationError(
            "--released", found="a source that is no run", expected="the folder of a run as SRC", remedy="leave it out"
        )
    if is_converted:
        _export(command, command.source, None, shard_bytes)
        original, converted = command.target, command.source
    elif is_run:
        converted = _released_of(command)
        _export_run(command, converted, shard_bytes)
        original = command.target
    else:
        _import(command, memory_bytes)
        original, converted = command.source, command.target
    if command.verify:
        from mmjax.checkpoint import verify

        if is_run:
            raise ConfigurationError(
                "--verify",
                found="the weights of a run",
                expected="a released or converted checkpoint as SRC",
                remedy="convert DST into a folder of ours with --verify",
            )
        Console().print(verify.compare(original, converted))
    return 0


def parse_size(text: str, option: str) -> int:
    """4GiB, 500MB or 1000000 as bytes.

    Raises:
      ConfigurationError: it is no size.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigurationError(
            option, found=repr(text), expected="a size", remedy="give a number and a unit, such as 4GiB"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def _import(command: Command, memory_bytes: int) -> None:
    from mmjax.checkpoint.convert import convert
    from mmjax.checkpoint.released_files import open_released

    released = open_released(command.source)
    total = sum(tensor.num_bytes for tensor in released.tensors.values())
    with _progress(total, f"to {command.target}") as progress:
        matching = convert(
            released,
            command.target,
            progress,
            keeps_packed=command.packed != "decode",
            overwrite=command.overwrite,
            memory_bytes=memory_bytes,
        )
    storage = matching.model.moe.expert_storage
    print(f"{len(released.tensors):,} tensors became {len(matching.targets):,} arrays (routed experts: {storage})")


def _export_run(command: Command, released: Path, shard_bytes: int | None) -> None:
    """The latest complete step of a run: its model, the model with its adapters merged, or its adapters."""
    from mmjax.checkpoint.adapters import export_run, merged_arrays
    from mmjax.checkpoint.export import run_arrays
    from mmjax.checkpoint.store import Store
    from mmjax.config import saved
    from mmjax.training.loop import CHECKPOINTS

    config = saved.load(command.source / saved.FILE_NAME)
    steps = Store(command.source / CHECKPOINTS, read_only=True).steps()
    if not steps:
        raise CheckpointError(
            str(command.source), found="no complete step", expected="a checkpoint", remedy="train until one is saved"
        )
    if (command.merge + command.adapter != 1) if config.lora.rank else (command.merge or command.adapter):
        found = "a run that trains adapters" if config.lora.rank else "a run that trains the model itself"
        remedy = "add --merge for the whole model or --adapter for peft files" if config.lora.rank else "leave it out"
        raise ConfigurationError("--merge or --adapter", found=found, expected="the one that fits", remedy=remedy)
    step = command.source / CHECKPOINTS / str(steps[-1])
    if command.adapter:
        export_run(config, step, command.target, overwrite=command.overwrite)
        print(f"adapters of step {steps[-1]} written to {command.target}")
        return
    arrays = merged_arrays(config, step) if command.merge else run_arrays(step, config.model)
    _export(command, released, arrays, shard_bytes)


def _export(command: Command, released: Path, arrays: "tuple[Read, set[str]] | None", shard_bytes: int | None) -> None:
    """Those of the converted checkpoint `released` unless others of the same model are given."""
    from mmjax.checkpoint.export import converted_arrays, export

    read, paths = arrays or converted_arrays(released)
    holds_packed = arrays is None or any(path.endswith("_codes") for path in paths)
    keeps_packed = holds_packed if command.packed == "auto" else command.packed == "keep"
    with _progress(None, f"to {command.target}") as progress:
        export(
            released,
            read,
            paths,
            command.target,
            progress,
            keeps_packed=keeps_packed,
            overwrite=command.overwrite,
            shard_bytes=shard_bytes,
        )
    print(f"written: {', '.join(sorted(file.name for file in command.target.iterdir())[:12])}")


def _released_of(command: Command) -> Path:
    """The converted checkpoint that a run's export takes names and files from."""
    if command.released:
        return Path(command.released)
    from mmjax.config import saved

    weights = saved.load(command.source / saved.FILE_NAME).weights
    if not weights:
        raise ConfigurationError(
            "--released",
            found="a run that started from random numbers",
            expected="the converted checkpoint whose names and files are taken",
            remedy="add --released FOLDER",
        )
    return Path(weights)


@contextlib.contextmanager
def _progress(total: int | None, label: str) -> Iterator["Told"]:
    """A bar for bytes on a terminal, and a way to say what a person should know."""
    from mmjax.checkpoint.convert import Progress as Told

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield Told(lambda size: bar.advance(task, size), lambda text: console.print(f"note: {escape(text)}"))


if __name__ == "__main__":
    sys.exit(main())
