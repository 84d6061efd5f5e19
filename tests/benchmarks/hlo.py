"""What a compiled program does, read off its optimised HLO text."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator

# What moves no data, or is counted through the computations that it calls.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "iota", "partition-id", "replica-id", "opt-barrier", "async-done", "copy-done", "fusion-done",
}  # fmt: skip
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?[\])}]) ([a-z][a-z\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CONSTANT = re.compile(r" constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction that is run.

    Attributes:
      kind: its operation.
      result: its type as text.
      line: all of its text.
      times: how often it is run; the body of a loop of unknown length is taken to be run once.
      depth: number of loops around it.
      trips: of a loop the number of passes, None where it is unknown.
    """

    kind: str
    result: str
    line: str
    times: int
    depth: int
    trips: int | None = None

    @property
    def moves(self) -> bool:
        """Whether it copies from one kind of memory to another."""
        return self.kind == "copy-start" and self.result.count("S(1)") == 1

    @property
    def num_bytes(self) -> int:
        """Of the result, without padding."""
        return num_bytes(self.result)

    @property
    def cycles(self) -> int:
        """The compiler's own estimate for a run; 0 if there is none."""
        return int(found.group(1)) if (found := _CYCLES.search(self.line)) else 0

    @property
    def is_kernel(self) -> bool:
        return self.kind not in _FREE and self.kind != "while"

    @property
    def called(self) -> str:
        """Computation of a fusion."""
        return _called(self.line, "calls")


def num_bytes(result: str) -> int:
    """Bytes of arrays of a type, without padding."""
    total = 0
    for kind, bits, axes in _ARRAY.findall(result):
        size = 1
        for axis in filter(None, axes.split(",")):
            size *= int(axis)
        total += size * (1 if kind == "pred" else max(int(bits or 8) // 8, 1))
    return total


class Program:
    """The instructions of a program, those in its loops as often as they are run."""

    def __init__(self, text: str):
        self._computations: dict[str, list[str]] = {}
        entry = name = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                name = found.group(1)
                self._computations[name] = []
                entry = name if line.startswith("ENTRY") else entry
            elif name and line.startswith(" "):
                self._computations[name].append(line)
        self._entry = entry
        self.instructions = list(self._run(entry, 1, 0))

    @property
    def kernels(self) -> int:
        """Kernels that are launched, or on a CPU functions that are called."""
        return sum(i.times for i in self.instructions if i.is_kernel)

    @property
    def chain(self) -> int:
        """The most kernels that wait for one another; passes of a loop wait for the pass before."""
        return self._chain(self._entry)

    @property
    def cycles(self) -> int:
        """The sum of the compiler's own estimates; on a TPU most instructions have one, elsewhere none."""
        return sum(i.times * i.cycles for i in self.instructions)

    @property
    def loops(self) -> list[Instruction]:
        return [i for i in self.instructions if i.kind == "while"]

    @property
    def collectives(self) -> list[Instruction]:
        return [i for i in self.instructions if i.kind.removesuffix("-start") in _COLLECTIVES]

    def copies(self, sizes: Iterable[int]) -> list[Instruction]:
        """Copies of arrays of about so many bytes, padded or not; without moves to another kind of memory."""
        return [i for i in self._copies(sizes) if not i.moves]

    def moves(self, sizes: Iterable[int]) -> list[Instruction]:
        """Moves of arrays of about so many bytes between memories, which a TPU makes in the background."""
        return [i for i in self._copies(sizes) if i.moves]

    def _copies(self, sizes: Iterable[int]) -> list[Instruction]:
        def about(copy: Instruction) -> bool:
            num_bytes = copy.num_bytes / (2 if copy.kind == "copy-start" else 1)  # that has both ends
            return any(0.9 * size <= num_bytes <= 1.7 * size for size in sizes)

        return [i for i in self.instructions if i.kind in {"copy", "copy-start", "transpose"} and about(i)]

    def parts(self, name: str) -> Iterator[tuple[str, str, str, list[str], str]]:
        """Name, type, operation, names of the operands and others, and line of each instruction of a computation."""
        for line in self._computations.get(name, []):
            if found := _INSTRUCTION.match(line):
                own, result, kind, rest = found.groups()
                yield own, result, kind, _NAME.findall(rest), line

    def _chain(self, name: str) -> int:
        longest = {"": 0}  # up to each instruction
        for own, _, kind, before, line in self.parts(name):
            called = functools.partial(_called, line)
            if kind == "while":
                trips = self._trips(line)
                cost = (trips or 1) * self._chain(called("body")) + (0 if trips else self._chain(called("condition")))
            elif kind == "call" and "xla_cpu_small_call" not in line:
                cost = self._chain(called("to_apply"))
            elif kind == "conditional":
                cost = max(map(self._chain, _branches(line)))
            else:
                cost = kind not in _FREE
            longest[own] = cost + max((longest.get(other, 0) for other in before), default=0)
        return max(longest.values())

    def _run(self, name: str, times: int, depth: int) -> Iterator[Instruction]:
        for _, result, kind, _, line in self.parts(name):
            called = functools.partial(_called, line)
            if kind == "while":
                trips = self._trips(line)
                yield Instruction(kind, result, line, times, depth, trips)
                yield from self._run(called("body"), times * (trips or 1), depth + 1)
                if trips is None:  # otherwise the condition is not run
                    yield from self._run(called("condition"), times, depth + 1)
            elif kind == "call" and "xla_cpu_small_call" not in line:  # such a call, loops and all, is one kernel
                yield from self._run(called("to_apply"), times, depth)
            elif kind == "conditional":
                longest = max(([*self._run(branch, times, depth)] for branch in _branches(line)), key=len)
                yield from longest
            else:
                yield Instruction(kind, result, line, times, depth)

    def _trips(self, line: str) -> int | None:
        """Passes of a loop; on a TPU they are not said, but a counter is compared with a constant."""
        if known := _TRIPS.search(line):
            return int(known.group(1))
        condition = self._computations.get(_called(line, "condition"), [])
        kinds = [found.group(3) for other in condition if (found := _INSTRUCTION.match(other))]
        bounds = [int(found.group(1)) for other in condition if (found := _CONSTANT.search(other))]
        counts = sorted(set(kinds) - {"parameter", "get-tuple-element"}) == ["compare", "constant"]
        return bounds[0] if counts and len(bounds) == 1 and "direction=LT" in condition[-1] else None


def _called(line: str, key: str) -> str:
    found = re.search(rf"\b{key}=%?([\w.\-]+)", line)
    return found.group(1) if found else ""


def _branches(line: str) -> list[str]:
    """Computations of a conditional."""
    branches = re.search(r"branch_computations=\{(.*?)\}", line)
    names = branches.group(1).replace("%", "").split(", ") if branches else []
    return [*names, _called(line, "true_computation"), _called(line, "false_computation")]


def count_kernels(text: str, steps: int) -> float:
    """Kernels a step of a program that is one scan of `steps` steps; a loop of unknown length counts once."""
    return round(Program(text).kernels / steps, 1)
