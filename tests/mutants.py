"""Mutation testing: small changes to the package, and the changes that no test notices.

`python tests/mutants.py` samples mutants by a seed, and runs the default tests that cover each. It prints the mutants
that were killed (a test failed), survived (with the change) or timed out. A mutant in `mutants_equivalent` is printed
as "equivalent", or as "slow" if only a slow test fails, with the reason. One run of the suite under coverage finds the
tests that cover a line (`--concerns FOLDER` keeps it for the next time; needs pytest-cov). `--out FILE` records the
outcomes; `--against FILE` lists mutants that were killed in a record and are not now. Takes an hour on two cores.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import difflib
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time

import mutants_concerns
from mutants_equivalent import EQUIVALENT, KILLED_BY_SLOW

ROOT = pathlib.Path(__file__).parent.parent

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*"}
ARITHMETIC |= {ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<"}
# Arguments for promises and layouts, which change no value.
NOT_DROPPED = {"unique_indices", "mode", "dtype", "axis", "static_argnums", "static_argnames", "donate_argnums"}
NOT_DROPPED |= {"strict"}
# Functions whose arguments are interchangeable, or so unlike that no program would run.
NOT_SWAPPED = {"jnp.minimum", "jnp.maximum", "jnp.asarray", "jnp.array", "jnp.full", "jnp.zeros", "jnp.ones"}
NOT_SWAPPED |= {"jax.tree.map", "isinstance", "getattr", "hasattr", "check_integer", "check_number", "np.asarray"}
NOT_SWAPPED |= {"jnp.issubdtype", "jax.eval_shape", "jnp.concatenate", "jnp.arange", "defaultdict", "max", "min", "zip"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: replaces the source between two positions (line from 1, column)."""

    module: str
    function: str
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    function_lines: tuple[int, ...]
    before: str
    after: str
    occurrence: int  # of the same change in the function, from 1

    @property
    def name(self):
        """Unique name, unchanged when other functions change."""
        number = f" (#{self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.module}.{self.function}: {_one_line(self.before)} -> {_one_line(self.after)}{number}"

    def apply(self, source):
        raw, offsets = _offsets(source)
        first, last = (offsets[line - 1] + column for line, column in (self.start, self.end))
        return (raw[:first] + self.after.encode() + raw[last:]).decode()


@functools.cache
def _offsets(source):
    """The source as bytes, and the offsets of its lines."""
    raw = source.encode()
    return raw, [0, *itertools.accumulate(map(len, raw.splitlines(keepends=True)))]


def _one_line(text):
    return re.sub(r"\s+", " ", text)


class Finder(ast.NodeVisitor):
    """All mutants of a module's functions, except in messages, types, docstrings and decorators."""

    def __init__(self, module, source):
        self.module, self.source, self.path, self.found = module, source, [], []
        self.bound, self.seen, self.lines = set(), collections.Counter(), ()
        self.visit(ast.parse(source))

    def mutant(self, kind, node, after):
        if not self.path:
            return
        before, function = self.text(node), ".".join(self.path)
        if _one_line(before) == _one_line(after):
            return
        ast.parse(after)
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        self.seen[function, before, after] += 1
        occurrence = self.seen[function, before, after]
        self.found.append(Mutant(self.module, function, kind, start, end, self.lines, before, after, occurrence))

    def text(self, node):
        raw, offsets = _offsets(self.source)
        first, last = offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset
        return raw[first:last].decode()

    def visit_ClassDef(self, node):
        if any(self.text(base).startswith("Protocol") for base in node.bases):
            return
        self.path.append(node.name)
        for child in node.body:
            if isinstance(child, ast.FunctionDef):
                self.visit(child)
        self.path.pop()

    def visit_FunctionDef(self, node):
        if any("abstractmethod" in self.text(decorator) for decorator in node.decorator_list):
            return
        outside, self.bound = self.bound, {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        outer, self.lines = self.lines, tuple(range(node.lineno, node.end_lineno + 1))
        self.path.append(node.name)
        for child in node.body:
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not is_docstring:
                self.visit(child)
        self.path.pop()
        self.bound, self.lines = outside, outer

    def visit_Raise(self, node):
        pass

    def visit_JoinedStr(self, node):
        pass

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_If(self, node):
        if len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
            self.mutant("removed statement", node.test, "False")
        self.generic_visit(node)

    def visit_Expr(self, node):
        self.mutant("removed statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node):
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if names and names <= self.bound:
            self.mutant("removed statement", node, "pass")
        self.bound |= names
        self.visit(node.value)

    def visit_AugAssign(self, node):
        self.mutant("dropped mask" if isinstance(node.op, ast.BitAnd) else "removed statement", node, "pass")
        if type(node.op) in ARITHMETIC:
            target, value = self.text(node.target), self.text(node.value)
            self.mutant("arithmetic", node, f"{target} {ARITHMETIC[type(node.op)]}= {value}")
        self.visit(node.value)

    def visit_Compare(self, node):
        if len(node.ops) == 1:
            left, right = self.text(node.left), self.text(node.comparators[0])
            self.mutant("comparison", node, f"(({left}) {COMPARISONS[type(node.ops[0])]} ({right}))")
        self.generic_visit(node)

    def visit_BinOp(self, node):
        left, right = self.text(node.left), self.text(node.right)
        if type(node.op) in ARITHMETIC:
            self.mutant("arithmetic", node, f"(({left}) {ARITHMETIC[type(node.op)]} ({right}))")
        if isinstance(node.op, ast.BitAnd):
            self.mutant("dropped mask", node, f"({left})")
            self.mutant("dropped mask", node, f"({right})")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        other = " or " if isinstance(node.op, ast.And) else " and "
        self.mutant("comparison", node, "(" + other.join(f"({self.text(value)})" for value in node.values) + ")")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if not isinstance(node.operand, ast.Constant):
            self.mutant("arithmetic", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.mutant("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.mutant("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.mutant("constant", node, str(2 * node.value + 1))

    def visit_Call(self, node):
        function = self.text(node.func)
        given = [self.text(argument) for argument in node.args]
        named = [self.text(keyword) for keyword in node.keywords]

        def call(arguments):
            return f"{function}({', '.join(arguments)})"

        if function == "jnp.where" and len(given) == 3:
            self.mutant("dropped mask", node, f"({given[1]})")
            self.mutant("dropped mask", node, f"({given[2]})")
            self.mutant("swapped arguments", node, call([given[0], given[2], given[1]]))
        elif function not in NOT_SWAPPED:
            for i in range(len(given) - 1):
                swapped = [*given[:i], given[i + 1], given[i], *given[i + 2 :]]
                self.mutant("swapped arguments", node, call(swapped + named))
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in NOT_DROPPED:
                self.mutant("dropped mask", node, call(given + named[:i] + named[i + 1 :]))
        self.generic_visit(node)

    def visit_Subscript(self, node):
        if isinstance(node.value, ast.Name) and node.value.id in ("tuple", "dict", "list", "type"):
            return
        self.generic_visit(node)


def modules_of(package):
    return [str(file.relative_to(package).with_suffix("")) for file in sorted(package.rglob("*.py"))]


def mutants_of(package, module):
    return Finder(module, (package / f"{module}.py").read_text()).found


def choose(package, modules, number, seed):
    """Choose `number` mutants in rounds: each takes one per module, and within a module the kinds take turns."""
    queues = []
    for module in modules:
        rng = random.Random(f"{seed} {module}")
        by_kind = collections.defaultdict(list)
        for mutant in mutants_of(package, module):
            by_kind[mutant.kind].append(mutant)
        of_kinds = [rng.sample(of_kind, len(of_kind)) for _, of_kind in sorted(by_kind.items())]
        queues.append([m for turn in itertools.zip_longest(*of_kinds) for m in turn if m is not None])
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    return sorted(itertools.islice((m for m in rounds if m is not None), number), key=lambda m: m.module)


def run_tests(root, tests, log, seconds):
    """In a process of its own, which may take `seconds` of processor time: exit with 0 if all tests pass."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    os.chdir(root)  # where processes that tests start look first
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    with open(log, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        import pytest

        options = [
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:meter",
            "--rootdir",
            str(root),
            "--tb=line",
        ]
        status = pytest.main([*options, "-c", str(root / "pyproject.toml"), "-m", "not slow", *tests])
        out.flush()
        os._exit(int(status))


def run_one(context, root, mutant, tests, timeout):
    """(outcome, the test that told, seconds) of a mutant, in a copy of the checkout `root`."""
    if not tests:
        return "survived", None, 0.0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = pathlib.Path(folder) / "checkout"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__", ".git", ".*_cache", ".hypothesis"))
        file = copy / "jaxreplay" / f"{mutant.module}.py"
        file.write_text(mutant.apply(file.read_text()))
        log = pathlib.Path(folder) / "log"
        begin = time.monotonic()
        process = context.Process(target=run_tests, args=(copy, tests, log, timeout))
        process.start()
        process.join(2 * timeout)  # threads that wait for each other take no processor time
        seconds = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
            return "timed out", None, seconds
        if process.exitcode == 0:
            return "survived", None, seconds
        output = log.read_text(errors="replace") if log.exists() else ""
        if "ERROR: not found" in output:  # the package says which cases there are
            return "killed", "a case that is there no more", seconds
        if "no tests ran" in output and "rror" not in output:
            raise RuntimeError(f"{mutant.name}: no test was run:\n{output}")
        told = re.search(r"^(?:FAILED|ERROR) (?:.*tests/)?(\S+)", output, re.MULTILINE)
        return "killed", told.group(1) if told else f"exit {process.exitcode}", seconds


def show(mutant, source):
    changed = mutant.apply(source).splitlines()
    return "\n".join(difflib.unified_diff(source.splitlines(), changed, mutant.module, mutant.module, lineterm="", n=1))


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=420)
    parser.add_argument("--modules", nargs="+", default=modules_of(ROOT / "jaxreplay"))
    parser.add_argument("--concerns", type=pathlib.Path, help="folder of the run under coverage, reused if present")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=300, help="processor seconds for the tests of a mutant")
    parser.add_argument("--only", type=pathlib.Path, help="a record: only mutants that survived or timed out in it")
    parser.add_argument("--against", type=pathlib.Path, help="a record: list mutants killed in it and not now")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def recorded_concerns(folder):
    if not (folder / "times.xml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        mutants_concerns.record(ROOT, folder)
    return mutants_concerns.Concerns(ROOT, folder)


def gone(package):
    """Names with a reason to survive that are no mutants now."""
    found = {m.name for module in modules_of(package) for m in mutants_of(package, module)}
    return sorted({*EQUIVALENT, *KILLED_BY_SLOW} - found)


def excused(name):
    """What is said of a mutant that survived, and why."""
    for outcome, reasons in (("equivalent", EQUIVALENT), ("slow", KILLED_BY_SLOW)):
        if name in reasons:
            return outcome, reasons[name]
    return "survived", None


def run_all(package, chosen, concerns, arguments):
    """The record of all mutants, by name; prints each."""
    context, record = multiprocessing.get_context("forkserver"), {}
    context.set_forkserver_preload(["jax", "flax", "optax", "chex", "scipy.stats", "pytest", "tensorstore"])
    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:

        def run(mutant):
            tests = concerns.tests(mutant.module, mutant.start[0], mutant.function_lines)
            return run_one(context, ROOT, mutant, tests, arguments.timeout)

        for job, (outcome, told, seconds) in zip(chosen, pool.map(run, chosen), strict=True):
            if outcome == "survived":
                outcome, told = excused(job.name)
            record[job.name] = {"kind": job.kind, "outcome": outcome, "told": told, "seconds": round(seconds)}
            print(f"{outcome:10} {seconds:4.0f} s  {job.name}  [{told or job.kind}]", flush=True)
            if outcome == "survived":
                print(show(job, (package / f"{job.module}.py").read_text()), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def summarize(record):
    """Print how many of each module were caught."""
    by_module = collections.defaultdict(collections.Counter)
    for name, entry in record.items():
        for key in (name.split(".")[0], "all"):
            by_module[key][entry["outcome"]] += 1
    for module, counts in by_module.items():
        told = sum(counts.values()) - counts["equivalent"]
        caught = counts["killed"] + counts["slow"] + counts["timed out"]
        print(f"{module:28} {caught} of {told} caught, {dict(counts)}")


def main():
    arguments = read_arguments()
    cache, kept = (tempfile.TemporaryDirectory(prefix=f"mutants-{name}-") for name in ("cache", "concerns"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache.name)
    package = ROOT / "jaxreplay"
    for name in gone(package):
        print(f"no mutant any more, take its reason out: {name}")
    concerns = recorded_concerns(arguments.concerns or pathlib.Path(kept.name))
    chosen = choose(package, arguments.modules, arguments.number, arguments.seed)
    if arguments.only:
        before = json.loads(arguments.only.read_text())
        chosen = [m for m in chosen if before.get(m.name, {}).get("outcome") in ("survived", "timed out")]
    record = run_all(package, chosen, concerns, arguments)
    summarize(record)
    if arguments.against:
        for name, entry in json.loads(arguments.against.read_text()).items():
            now = record.get(name, {}).get("outcome", "gone")
            if entry["outcome"] == "killed" and now != "killed":
                print(f"killed before, now {now}: {name}")


if __name__ == "__main__":
    main()
