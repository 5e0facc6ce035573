"""A compiled program read from its text: instructions in the order they run, how often, and what each costs."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Bytes of an element; what has none (tokens, opaque values) is left out.
_ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e8m0fnu", "f8e4m3", "f8e4m3b11fnuz"), 1.0),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2.0),
    **dict.fromkeys(("s32", "u32", "f32"), 4.0),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8.0),
    "c128": 16.0,
}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
# Nothing runs for these: they name values.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "partition-id", "replica-id", "opt-barrier", "domain"),
    )
)
_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")
_HOST_SPACE = "S(5)"


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]
    on_host: bool

    @property
    def num_bytes(self) -> float:
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 0.0)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    attributes: str
    """All that follows the operands."""
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Of the result; a tuple's one after the other."""
        return tuple(
            Array(dtype, tuple(int(size.strip("<=")) for size in sizes.split(",") if size), _HOST_SPACE in layout)
            for dtype, sizes, layout in _ARRAY.findall(self.type_text)
        )

    @property
    def num_bytes(self) -> float:
        return sum(array.num_bytes for array in self.arrays)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        names = (name for group in _CALLED.findall(self.attributes) for name in group.strip("{}").split(","))
        return tuple(name.strip().lstrip("%") for name in names if name.strip())

    def attribute(self, name: str) -> str:
        """Text of a plain attribute such as `body=%region`; empty if there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else ""

    @property
    def operation(self) -> str:
        """The path of the traced operation that it came from; empty if the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def trip_count(self) -> int:
        """Of a loop; 1 where the compiler does not know it."""
        found = re.search(r'known_trip_count"?:\s*\{\\?"n\\?":\\?"(\d+)', self.attributes)
        return int(found.group(1)) if found else 1

    @property
    def runs(self) -> float:
        """How often a loop's body runs each time that it is reached: a condition's as often as its name says."""
        # Differentiated it is called `jvp(runs_1_of_2)/while`.
        found = re.search(r"\bruns_(\d+)_of_(\d+)\)*/while$", self.operation)
        return int(found.group(1)) / int(found.group(2)) if found else self.trip_count


@dataclass(frozen=True)
class LargeResult:
    """An array that a program makes."""

    shape: str
    num_bytes: float
    operation: str
    """The end of the path of the traced operation that it came from."""
    on_host: bool


@dataclass(frozen=True)
class Computation:
    """Instructions in the order they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        return self.by_name.get(instruction.operands[number]) if number < len(instruction.operands) else None

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        return (self.by_name[name] for name in instruction.operands if name in self.by_name)


@dataclass(frozen=True)
class Program:
    """A module: its computations by name."""

    computations: Mapping[str, Computation]
    entry: str
    filled_share: float = 1.0
    """Of the rows of grouped products: how many hold something. Kernels skip empty blocks."""
    _flops: dict[str, float] = field(default_factory=dict, repr=False)

    def runs(self) -> Iterator[tuple[Computation, float, bool]]:
        """Every computation on the way from the entry, how often it runs a step, and whether only under a condition.

        Bodies of fusions, reductions and asynchronous wrappers are left out: they are parts of an instruction.
        """
        yield from self._runs(self.entry, 1.0, False)

    def _runs(self, name: str, times: float, is_conditional: bool) -> Iterator[tuple[Computation, float, bool]]:
        computation = self.computations[name]
        yield computation, times, is_conditional
        for instruction in computation.instructions:
            match instruction.opcode:
                case "while":
                    # One that hardly ever runs is counted as it does when it runs.
                    runs = instruction.runs or 1
                    is_seldom = is_conditional or not instruction.runs
                    yield from self._runs(instruction.attribute("body"), times * runs, is_seldom)
                case "conditional":
                    for branch in instruction.called:
                        yield from self._runs(branch, times, True)
                case "call":
                    for called in instruction.called:
                        yield from self._runs(called, times, is_conditional)

    def largest_results(self, number: int) -> list["LargeResult"]:
        """The largest arrays that instructions make, each shape of each traced operation once."""
        largest: dict[tuple[str, str], LargeResult] = {}
        for computation, _, _ in self.runs():
            for instruction in computation.instructions:
                is_view = instruction.opcode in _FREE or instruction.opcode in ("while", "conditional", "call")
                if is_view or instruction.opcode.endswith("-done"):
                    continue
                for array in instruction.arrays:
                    shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
                    operation = re.sub(
                        r"^.*(?:checkpoint|rematted_computation|closed_call)/", "", instruction.operation
                    )
                    result = LargeResult(shape, array.num_bytes, operation or instruction.opcode, array.on_host)
                    largest[shape, result.operation] = result
        return sorted(largest.values(), key=lambda result: -result.num_bytes)[:number]

    def flops(self) -> float:
        """Of matrix products in a step, all that is computed again included; conditional parts left out."""
        return sum(
            times * self.instruction_flops(computation, instruction)
            for computation, times, is_conditional in self.runs()
            if not is_conditional
            for instruction in computation.instructions
        )

    def instruction_flops(self, computation: Computation, instruction: Instruction) -> float:
        """Of the matrix products of one instruction that is no loop, branch or call."""
        match instruction.opcode:
            case "dot":
                lhs = computation.operand(instruction, 0)
                summed = _numbers(instruction.attributes, "lhs_contracting_dims")
                return 2.0 * _size(instruction) * _extent(lhs, summed)
            case "fusion" | "async-start":
                return sum(self.computation_flops(name) for name in instruction.called)
            case "custom-call" if "$matmul" in instruction.attributes or "cublas$" in instruction.attributes:
                lhs = computation.operand(instruction, 0)
                found = re.search(r'lhs_contracting_dimensions"?:\[([^\]]*)\]', instruction.attributes)
                summed = [int(number) for number in re.findall(r"\d+", found.group(1))] if found else []
                return 2.0 * math.prod(instruction.arrays[0].shape) * _extent(lhs, summed)
            case "custom-call":
                return self._grouped_flops(computation, instruction)
        return 0.0

    def computation_flops(self, name: str) -> float:
        if name not in self._flops:
            computation = self.computations[name]
            self._flops[name] = sum(self.instruction_flops(computation, i) for i in computation.instructions)
        return self._flops[name]

    def _grouped_flops(self, computation: Computation, instruction: Instruction) -> float:
        """Of a kernel that multiplies rows [n, i] with one of several weights [e, i, o], or contracts rows into them.

        2 n i o for each stack of weights that it takes or gives and whose i and o are widths of rows.
        """
        taken = [array for operand in computation.operands(instruction) for array in operand.arrays]
        arrays = [array for array in (*taken, *instruction.arrays) if array.dtype in ("bf16", "f16", "f32")]
        rows = [array.shape for array in arrays if len(array.shape) == 2]
        widths, num_rows = {shape[1] for shape in rows}, max((shape[0] for shape in rows), default=0)
        stacks = [array.shape for array in arrays if len(array.shape) == 3 and widths & set(array.shape[1:])]
        return self.filled_share * sum(2.0 * num_rows * shape[1] * shape[2] for shape in stacks)

    def instruction_bytes(self, computation: Computation, instruction: Instruction) -> float:
        """Read from and written to memory by one instruction that is no loop, branch or call."""
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done", "-update")):
            return 0.0
        if instruction.opcode == "fusion":
            return self._fusion_bytes(computation, instruction)
        if instruction.opcode in ("dynamic-slice", "gather"):
            return 2 * instruction.num_bytes
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            number = len(instruction.operands) - 1 if instruction.opcode == "scatter" else 1
            changed = computation.operand(instruction, number)
            return 2 * (changed.num_bytes if changed else 0.0)
        return instruction.num_bytes + sum(operand.num_bytes for operand in computation.operands(instruction))

    def _fusion_bytes(self, computation: Computation, instruction: Instruction) -> float:
        """Parameters as far as they are read, results as far as they change: a slice of an array costs its own size."""
        body = self.computations[instruction.called[0]]
        users: dict[str, list[Instruction]] = {}
        for inner in body.instructions:
            for name in inner.operands:
                users.setdefault(name, []).append(inner)
        total = 0.0
        for parameter in body.instructions:
            if parameter.opcode == "parameter":
                read = (_read_bytes(parameter, user) for user in users.get(parameter.name, []))
                total += min(parameter.num_bytes, sum(read))
        root = body.root
        for result in body.operands(root) if root.opcode == "tuple" else [root]:
            changed = body.operand(result, 1) if result.opcode == "dynamic-update-slice" else result
            total += changed.num_bytes if changed else 0.0
        return total


def _read_bytes(parameter: Instruction, user: Instruction) -> float:
    """What `user` reads of a parameter of a fusion: a slice of it, or nothing of what it overwrites in part."""
    if user.operands[0] == parameter.name:
        if user.opcode == "dynamic-update-slice":
            return 0.0
        if user.opcode in ("dynamic-slice", "gather", "slice"):
            return user.num_bytes
    return parameter.num_bytes


def _size(instruction: Instruction) -> int:
    return math.prod(instruction.arrays[0].shape)


def _extent(operand: Instruction | None, dimensions: list[int]) -> int:
    return math.prod(operand.arrays[0].shape[number] for number in dimensions) if operand else 1


def _numbers(attributes: str, name: str) -> list[int]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [int(number) for number in found.group(1).split(",") if number] if found else []


def read_program(text: str, *, filled_share: float = 1.0) -> Program:
    """The text of a compiled, scheduled module (`compiled.as_text()`) as a program.

    Raises:
      ValueError: there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(instructions))
            name = ""
        elif name and (start := _INSTRUCTION.match(line)):
            instructions.append(_read_instruction(line, start))
    if not entry:
        raise ValueError("the text holds no entry computation")
    return Program(computations, entry, filled_share)


def _read_instruction(line: str, start: re.Match) -> Instruction:
    rest = line[start.end() :]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    operands = tuple(word.split()[-1].lstrip("%") for word in _split(rest[: end - 1]) if word.strip())
    return Instruction(start.group(2), opcode, type_text, operands, rest[end:], bool(start.group(1)))


def _closing(text: str) -> int:
    """Index behind the bracket that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if not depth:
            return match.end()
    raise ValueError(f"unbalanced: {text[:80]}")


def _split(text: str) -> list[str]:
    """At commas outside of brackets; comments left out."""
    text = re.sub(r"/\*.*?\*/", "", text)
    if not re.search(r"[(\[{]", text):
        return text.split(",")
    words, depth, begin = [], 0, 0
    for match in re.finditer(r"[()\[\]{},]", text):
        symbol = match.group()
        if symbol == "," and not depth:
            words.append(text[begin : match.start()])
            begin = match.end()
        elif symbol != ",":
            depth += 1 if symbol in "([{" else -1
    return [*words, text[begin:]]


@dataclass(frozen=True)
class Collective:
    """One exchange between devices."""

    kind: str
    instruction: Instruction
    """Its start where it is asynchronous."""
    num_bytes: float
    """On one device: the larger of what it gives and what it gets."""
    groups: tuple[tuple[int, ...], ...]
    """Devices that exchange with each other, in the order of the mesh; pairs (from, to) of a permutation."""
    is_synchronous: bool


def collective_of(program: Program, computation: Computation, instruction: Instruction) -> Collective | None:
    """The exchange that an instruction starts or is; None for anything else."""
    opcode, inner, owner = instruction.opcode, instruction, computation
    if opcode == "async-start" and instruction.called:
        owner = program.computations[instruction.called[0]]
        inner = next((i for i in owner.instructions if i.opcode in _COLLECTIVES), None)
        if inner is None:
            return None
        opcode = f"{inner.opcode}-start"
    kind = opcode.removesuffix("-start")
    if kind not in _COLLECTIVES:
        return None
    given = sum(operand.num_bytes for operand in owner.operands(inner))
    gotten = inner.num_bytes - (given if inner.opcode.endswith("-start") and kind != "all-reduce" else 0.0)
    is_synchronous = not opcode.endswith("-start") or '"is_sync":true' in instruction.attributes
    return Collective(kind, instruction, max(given, gotten), _groups(inner.attributes), is_synchronous)


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        numbers = [int(number) for number in re.findall(r"\d+", pairs.group(1))]
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        groups = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return tuple(tuple(int(number) for number in group.split(",") if number) for group in groups)
    # [groups, members]<=[sizes]T(order): the numbers 0, 1, ... in an array of these sizes, transposed, cut anew.
    if compact := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        num_groups, members = int(compact.group(1)), int(compact.group(2))
        sizes = [int(size) for size in compact.group(3).split(",")]
        order = [int(axis) for axis in compact.group(4).split(",")] if compact.group(4) else list(range(len(sizes)))
        numbers = _transposed_numbers(sizes, order)
        return tuple(tuple(numbers[group * members : (group + 1) * members]) for group in range(num_groups))
    return ()


def _transposed_numbers(sizes: list[int], order: list[int]) -> list[int]:
    """0, 1, ... laid out in `sizes`, read in the order of the transposed axes."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    numbers = [0]
    for axis in order:
        numbers = [number + index * strides[axis] for number in numbers for index in range(sizes[axis])]
    return numbers
