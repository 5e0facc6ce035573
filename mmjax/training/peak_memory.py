"""What a compiled program holds when it holds most, from the report that XLA writes of its arrays' lives."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.training.compiled_program import Instruction, Program


def dump_options(folder: Path) -> dict[str, Any]:
    """Options of a compilation with which XLA writes its reports into `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


@dataclass(frozen=True)
class AtPeak:
    """Arrays of one kind that are there when most is."""

    made_by: str
    """The last word of the traced operation, and in which pass it runs."""
    count: int
    num_bytes: int


# Words at the end of an operation's path that say how it is carried out, not what it is.
_CARRIERS = frozenset(("mpmd_map", "pallas_call", "body", "closed_call", "while", "cond", "checkpoint"))
_ALIVE = re.compile(r"^\s+([\w.\-]+)\{[\d, ]*\}: (\d+) bytes")


def alive_at_peak(folder: Path, program: Program) -> list[AtPeak]:
    """Arrays alive at the peak by what makes them, the largest sum first; empty where XLA wrote no report.

    An array that lies in the place of an argument is left out.
    """
    reports = sorted(folder.glob("*-live-range.txt"), key=lambda path: path.stat().st_size)
    if not reports:
        return []
    instructions = {i.name: i for computation in program.computations.values() for i in computation.instructions}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with reports[-1].open(encoding="utf-8") as lines:
        for line in lines:
            if "(peak)" in line:
                break
        for line in lines:
            if (found := _ALIVE.match(line)) is None:
                break
            made_by = _maker(instructions.get(found[1]))
            counts[made_by] += 1
            sizes[made_by] += int(found[2])
    return [AtPeak(made_by, counts[made_by], size) for made_by, size in sizes.most_common()]


def _maker(instruction: Instruction | None) -> str:
    if instruction is None:
        return "other"
    if instruction.opcode == "parameter":
        return "arguments"
    if instruction.opcode == "while":
        return "results of loops: kept for the backward pass, gradients"
    words = [word for word in instruction.operation.split("/") if word not in _CARRIERS]
    if not words:
        return instruction.opcode
    is_again, is_backward = "rematted_computation" in words, any("transpose(" in word for word in words)
    return f"{words[-1]}, {'computed again' if is_again else 'backward' if is_backward else 'forward'}"
