"""Mutation testing: faults as people make them, each put into a copy, and the tests of its own room that notice.

`python tests/mutants.py` samples mutants by a seed: rooms, modules and kinds of fault take turns. A room is a folder of
the package; its tests are the folder of the same name in `tests/`, those of the mutant's module first. It prints which
test failed, and the mutants that survived. A survivor in `survivors.json` has a reason. `--only` takes a regular
expression of names or kinds, `--list` only lists, `--out` records the outcomes, and `--against` lists mutants that were
killed in a record and are not now. `--compiled PYTHON` asks `.ci/run compiled` of barriers that survive, by its
interpreter.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jaxreplay"
MORE_TESTS = {
    "__main__": ["test_main.py"],
    "__init__": ["test_imports.py"],
    "testing/_rules": ["test_testing.py"],
    "testing/_streams": ["test_testing.py"],
    "testing/_buffers": ["test_testing.py", "buffers/test_contract.py"],
    "testing/_samplers": ["test_testing.py", "samplers/test_every_sampler.py"],
    "_common/calls": ["buffers/test_arguments.py", "buffers/test_contract.py"],
    "_common/files": ["datasets/test_recorder.py", "checkpoint/test_checkpoint_files.py"],
    "_common/random": ["buffers/test_contract.py"],
    "_common/signals": ["wrappers/test_interrupts.py"],
    "_common/checks": ["test_wrong_use.py", "buffers/test_arguments.py"],
    "transitions/_batch": ["buffers/test_replay_buffer.py"],
    "samplers/_base": ["buffers/test_arguments.py"],
}  # of modules without a folder, or of which only their users tell

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
EXTREMES = {"min": "max", "minimum": "maximum", "pmin": "pmax", "cummin": "cummax", "argmin": "argmax"}
EXTREMES |= {of: name for name, of in EXTREMES.items()} | {"floor": "ceil", "ceil": "floor"}
BARRIERS = {"xla.read_once", "xla.materialize", "xla.after"}
FOR_COMPILED = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
COUNTERS = {"saturating_add", "ring.saturating_add"}
# Promises, types and layouts, which change no value, and arguments of functions that have no other.
PROMISES = {"unique_indices", "indices_are_sorted", "mode", "dtype", "strict", "wrap_negative_indices", "inline"}
PROMISES |= {"static_argnums", "static_argnames", "donate_argnums", "default", "meaning", "traced", "unroll"}
PROMISES |= {"cpu", "cuda", "rocm", "read", "stable"}  # ways of a backend; what is so by default, and said
PROMISES |= {"help", "description", "name", "stacklevel", "label", "color", "linewidth", "xlim", "ylim"}  # texts, looks
# Sizes from which another way is faster, and a limit far from all that is stored.
CHOSEN = {"ALL_PAIRS", "SMALL", "WIDE", "FEW_BYTES", "MAX_DESCRIPTION"}

# Mutants that no test need notice, by name, and why.
SURVIVORS = json.loads((ROOT / "tests" / "survivors.json").read_text())


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault: replaces `before`, which begins at this offset of the source, as UTF-8."""

    module: str
    function: str
    kind: str
    offset: int
    before: str
    after: str
    occurrence: int  # of the same change in the function, from 1

    @property
    def room(self):
        return self.module.partition("/")[0]

    @property
    def name(self):
        """Unique name, unchanged when other functions change."""
        before, after = (re.sub(r"\s+", " ", text) for text in (self.before, self.after))
        return f"{self.module}.{self.function}: {before} -> {after}" + f" (#{self.occurrence})" * (self.occurrence > 1)

    def apply(self, root):
        file = root / "jaxreplay" / f"{self.module}.py"
        source, end = file.read_bytes(), self.offset + len(self.before.encode())
        file.write_bytes(source[: self.offset] + self.after.encode() + source[end:])


class Finder(ast.NodeVisitor):
    """All mutants of a module's functions, except in messages, types, docstrings and decorators."""

    def __init__(self, module):
        self.module, self.path, self.found, self.seen = module, [], [], collections.Counter()
        self.raw = (PACKAGE / f"{module}.py").read_bytes()
        self.lines = [0, *itertools.accumulate(map(len, self.raw.splitlines(keepends=True)))]
        self.visit(ast.parse(self.raw))

    def start(self, node):
        return self.lines[node.lineno - 1] + node.col_offset

    def text(self, node):
        return self.raw[self.start(node) : self.lines[node.end_lineno - 1] + node.end_col_offset].decode()

    def is_text(self, node):
        """True for text that depends on a case, or is put together: of a message, or of what is printed."""
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
        return all(isinstance(x, ast.JoinedStr) or (len(parts) > 1 and self.text(x)[0] == '"') for x in parts)

    def is_chosen(self, node):
        """True for a comparison with one of `CHOSEN`."""
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        return any(self.text(x).rpartition(".")[2] in CHOSEN for x in sides)

    def mutant(self, kind, node, after):
        before, function = self.text(node), ".".join(self.path)
        if function and before != after:
            self.seen[function, before, after] += 1
            number = self.seen[function, before, after]
            self.found.append(Mutant(self.module, function, kind, self.start(node), before, after, number))

    def visit_ClassDef(self, node):
        if not any(self.text(base).startswith("Protocol") for base in node.bases):
            self.path.append(node.name)
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    self.visit(child)
            self.path.pop()

    def visit_FunctionDef(self, node):
        if not any("abstractmethod" in self.text(x) or "overload" in self.text(x) for x in node.decorator_list):
            self.path.append(node.name)
            for child in node.body:
                if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    self.visit(child)
            self.path.pop()

    def visit_Raise(self, node):
        pass

    visit_JoinedStr = visit_Assert = visit_Raise

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_If(self, node):
        if not node.orelse and isinstance(node.body[0], ast.Raise | ast.Return | ast.Continue | ast.Break):
            is_error = isinstance(node.body[0], ast.Raise)
            if is_error or not self.is_chosen(node.test):
                self.mutant("error not raised" if is_error else "guard removed", node.test, "False")
        self.generic_visit(node)

    def visit_IfExp(self, node):
        if not self.is_text(node):
            self.mutant("guard removed", node, f"({self.text(node.body)})")
            self.mutant("guard removed", node, f"({self.text(node.orelse)})")
            self.generic_visit(node)

    def visit_Expr(self, node):
        is_check = isinstance(node.value, ast.Call) and "check" in self.text(node.value.func)
        self.mutant("error not raised" if is_check else "call removed", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        kind = {ast.BitAnd: "mask dropped", ast.Add: "counter not carried"}.get(type(node.op), "step removed")
        if not self.is_text(node.value):
            self.mutant(kind, node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node):
        value, targets = node.value, node.targets[0]
        if (
            isinstance(targets, ast.Tuple)
            and isinstance(value, ast.Call)
            and self.text(value.func) == "jax.random.split"
        ):
            self.mutant("key reused", value, ", ".join([self.text(value.args[0])] * len(targets.elts)))
        self.visit(value)

    def visit_Compare(self, node):
        operator = COMPARISONS.get(type(node.ops[0]))
        if operator and len(node.ops) == 1 and not self.is_chosen(node):
            self.mutant("off by one", node, f"(({self.text(node.left)}) {operator} ({self.text(node.comparators[0])}))")
        self.generic_visit(node)

    def visit_BinOp(self, node):
        left, right = self.text(node.left), self.text(node.right)
        if isinstance(node.op, ast.Add | ast.Sub) and right == "1":
            self.mutant("off by one", node, f"({left})")
        if isinstance(node.op, ast.BitAnd | ast.Mod) and not isinstance(node.left, ast.Constant):
            self.mutant("mask dropped" if isinstance(node.op, ast.BitAnd) else "wrap removed", node, f"({left})")
        if isinstance(node.op, ast.BitAnd):
            self.mutant("mask dropped", node, f"({right})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        inner = node.operand
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv) and isinstance(inner.left, ast.UnaryOp):
            self.mutant("rounding", node, f"({self.text(inner.left)[1:]} // ({self.text(inner.right)}))")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for k in range(len(node.values)):
            kept = [f"({self.text(x)})" for x in (*node.values[:k], *node.values[k + 1 :])]
            word = " and " if isinstance(node.op, ast.And) else " or "
            self.mutant("guard removed", node, f"({word.join(kept)})")
        self.generic_visit(node)

    def visit_Call(self, node):
        function, given = self.text(node.func), [self.text(x) for x in node.args]
        name, named = function.rpartition(".")[2], [self.text(x) for x in node.keywords]

        def call(*arguments, of=function):
            return f"{of}({', '.join(arguments)})"

        if function == "jnp.where" and len(given) == 3:
            self.mutant("mask dropped", node, f"({given[1]})")
            self.mutant("mask dropped", node, f"({given[2]})")
        if name in EXTREMES:
            kind = "rounding" if name in ("floor", "ceil") else "min for max"
            self.mutant(kind, node, call(*given, *named, of=function.removesuffix(name) + EXTREMES[name]))
        if name in ("clip", "minimum", "maximum") or (function in ("min", "max") and len(given) == 2):
            for kept, argument in zip(given, node.args[: 1 if name == "clip" else 2], strict=False):
                if not isinstance(argument, ast.Constant | ast.UnaryOp) and not kept.isupper():
                    self.mutant("clip removed", node, f"({kept})")
        if name == "fold_in":
            self.mutant("key reused", node, given[0])
        if function in BARRIERS and given:
            kept = f"({', '.join(given)},)" if name == "materialize" else given[0]
            self.mutant("barrier removed", node, kept)
        elif function.endswith(("ring.after", "rows.after", "sequences.after")):
            self.mutant("barrier removed", node, function.removesuffix(".after"))
        if function in COUNTERS:
            self.mutant("counter not carried", node, given[0])
        for k, argument in enumerate(given):
            if argument.endswith("axis_name"):
                self.mutant("axis_name dropped", node, call(*given[:k], "None", *given[k + 1 :], *named))
        for k, keyword in enumerate(node.keywords):
            rest = call(*given, *named[:k], *named[k + 1 :])
            if "axis" in (keyword.arg or "").split("_") and re.fullmatch("-?[01]", self.text(keyword.value)):
                self.mutant("wrong axis", keyword.value, "1" if self.text(keyword.value) == "0" else "0")
            elif name == "replace":
                self.mutant("field not carried", node, rest)
            elif keyword.arg is not None and keyword.arg not in PROMISES:
                is_axis = keyword.arg.endswith("axis_name")
                self.mutant("axis_name dropped" if is_axis else "argument not forwarded", node, rest)
        self.generic_visit(node)


def every_mutant():
    modules = [str(file.relative_to(PACKAGE).with_suffix("")) for file in sorted(PACKAGE.rglob("*.py"))]
    return [mutant for module in modules for mutant in Finder(module).found]


def in_turns(items, seed, *keys):
    """All items, where the values of the first key take turns, in each the values of the second, and so on."""
    if not keys:
        return random.Random(seed).sample(items, len(items))
    groups = collections.defaultdict(list)
    for item in items:
        groups[getattr(item, keys[0])].append(item)
    order = random.Random(seed).sample(sorted(groups), len(groups))
    queues = [in_turns(groups[name], f"{seed} {name}", *keys[1:]) for name in order]
    return [item for turn in itertools.zip_longest(*queues) for item in turn if item is not None]


def tests_of(mutant):
    """The files of the room, those named as the module first, then the short ones; of barriers also temporaries."""
    stem = pathlib.Path(mutant.module).name.strip("_").rstrip("s")
    files = (ROOT / "tests" / mutant.room).glob("test_*.py")
    files = sorted(files, key=lambda x: (stem not in x.stem, x.stat().st_size))
    more = [f"tests/{file}" for file in MORE_TESTS.get(mutant.module, [])]
    more += ["tests/test_temporaries.py"] * (mutant.kind == "barrier removed")
    return [*(str(file.relative_to(ROOT)) for file in files), *more]


def run(mutant, seconds, compiled=None):
    """(outcome, the test that told, seconds) of a mutant in a copy of the checkout."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = pathlib.Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*_cache"))
        mutant.apply(root)
        command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        outcome, output = finished([*command, *tests_of(mutant)], root, seconds)
        if outcome == "survived":
            slow, more = finished([*command, "-m", "slow", *tests_of(mutant)], root, seconds)
            if slow == "killed" and "FAILED" in more:
                outcome, output = "killed slowly", more
        if outcome == "survived" and compiled and mutant.kind == "barrier removed":
            command = [compiled, "tests/benchmarks/compiled.py", "--smoke"]
            found, output = finished(command, root, 10 * seconds, FOR_COMPILED)
            more = re.search(r"^.* was .*, is [\d.]+$", output, re.MULTILINE)
            if found != "survived" and not more:
                raise RuntimeError(f"{mutant.name}: the programs cannot be compiled:\n{output[-2000:]}")
            outcome, output = (found, f"FAILED .ci/run compiled: {more[0]}") if more else (outcome, "")
    if "no tests ran" in output and "rror" not in output:
        raise RuntimeError(f"{mutant.name}: no test was run:\n{output}")
    told = re.search(r"^(?:FAILED|ERROR) (?:.*tests/)?(.*?)(?: - .*)?$", output, re.MULTILINE)
    return outcome, told and told[1], time.monotonic() - begin


def finished(command, root, seconds, more=()):
    """The outcome and output of a program, which is stopped after this time, with all that it started."""
    environment = {**os.environ, "PYTHONPATH": str(root), **dict(more)}
    with tempfile.TemporaryFile("w+") as log:
        program = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            outcome = "killed" if program.wait(seconds) else "survived"
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        log.seek(0)
        return outcome, log.read()


def summarize(record):
    """A table of outcomes by room, and one by kind."""
    for by in ("room", "kind"):
        print()
        for name in sorted({entry[by] for entry in record.values()}):
            counts = collections.Counter(x["outcome"] for x in record.values() if x[by] == name)
            print(f"{name:<24}", *(f"{number} {outcome:<12}" for outcome, number in sorted(counts.items())))
    told = sum(entry["outcome"] != "survived" for entry in record.values())
    print(f"\n{told} of {len(record)} were noticed, or have a reason")


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--only", default="", help="regular expression of names or kinds")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=600, help="seconds for the tests of a mutant")
    parser.add_argument("--compiled", help="Python of .venv-compiled")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    return parser.parse_args()


def main():
    arguments, every = read_arguments(), every_mutant()
    if gone := SURVIVORS.keys() - {mutant.name for mutant in every}:
        print(f"no mutants now: {sorted(gone)}")
    chosen = [x for x in every if re.search(arguments.only, x.name) or re.search(arguments.only, x.kind)]
    chosen = in_turns(chosen, arguments.seed, "room", "module", "kind")[: arguments.number]
    if arguments.list:
        print(*(f"{mutant.kind}: {mutant.name}" for mutant in chosen), sep="\n")
        return
    record = {}
    with tempfile.TemporaryDirectory() as cache, concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        jobs = {pool.submit(run, x, arguments.timeout, arguments.compiled): x for x in chosen}
        for job in concurrent.futures.as_completed(jobs):
            mutant, (outcome, told, seconds) = jobs[job], job.result()
            reason = SURVIVORS.get(mutant.name)
            outcome = "has a reason" if outcome == "survived" and reason else outcome
            record[mutant.name] = {"room": mutant.room, "kind": mutant.kind, "outcome": outcome, "told": told}
            print(f"{outcome}: {mutant.name} [{mutant.kind}, {seconds:.0f} s] {told or reason or ''}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(record, indent=1))
        # A copy without a fault, so that tests that always fail are seen.
        lasting = {entry["room"] for entry in record.values() if entry["outcome"] in ("survived", "has a reason")}
        for mutant in {x.room: x for x in chosen if x.room not in lasting}.values():
            outcome, told, _ = run(dataclasses.replace(mutant, after=mutant.before), arguments.timeout)
            if outcome != "survived":
                raise SystemExit(f"{mutant.room}: its tests fail without a fault: {told}")
    summarize(record)
    if arguments.against:
        for name, entry in json.loads(arguments.against.read_text()).items():
            now = record.get(name, {}).get("outcome", "gone")
            if entry["outcome"] == "killed" and now != "killed":
                print(f"killed before, now {now}: {name}")


if __name__ == "__main__":
    main()
