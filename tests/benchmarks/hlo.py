"""Number of kernels that a compiled scan runs a step, read off its HLO text."""

import re

# What moves no data, or is counted through the computations that it calls.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "iota", "partition-id", "replica-id", "opt-barrier", "async-done", "copy-done",
}  # fmt: skip
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\])}] ([a-z][a-z\-]*)\((.*)$")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')


def count_kernels(text: str, steps: int) -> float:
    """Kernels a step of a program that is one scan of `steps` steps; a loop of unknown length counts once."""
    computations: dict[str, list[str]] = {}
    entry = name = None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found.group(1)
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and line.startswith(" "):
            computations[name].append(line)

    def called(key: str, line: str) -> str:
        found = re.search(rf"{key}=%?([\w.\-]+)", line)
        return found.group(1) if found else ""

    def cost(name: str) -> float:
        total = 0.0
        for line in computations.get(name, []):
            found = _INSTRUCTION.match(line)
            if not found:
                continue
            kind = found.group(1)
            if kind == "while":
                # Where the number of trips is known the condition is not run.
                trips = _TRIPS.search(line)
                body = cost(called("body", line))
                total += body * int(trips.group(1)) if trips else body + cost(called("condition", line))
            elif kind == "call" and "xla_cpu_small_call" not in line:  # such a call, loops and all, is one kernel
                total += cost(called("to_apply", line))
            elif kind == "conditional":
                branches = re.search(r"branch_computations=\{(.*?)\}", line)
                names = branches.group(1).replace("%", "").split(", ") if branches else []
                names += [called("true_computation", line), called("false_computation", line)]
                total += max(cost(branch) for branch in names)
            elif kind not in _FREE:
                total += 1
        return total

    return round(cost(entry) / steps, 1) if entry else 0.0
