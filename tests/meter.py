"""What tests cost: programs that they compile, CPU seconds and memory, in the report; and a budget for each file.

A program that is in the compilation cache of the run is loaded, not compiled. So a file compiles at most as many as
when it runs alone, in any order and with any number of processes. `--meter` lists the files and the dearest tests.
"""

import collections
import os
import resource
import shutil
import sys
import time
import zlib

import jax
import jaxlib
import pytest

BUDGET = 80  # programs that the default tests of a file may compile, but for these:
BUDGETS = {
    "test_documentation.py": 250,
    "test_docstrings.py": 250,
    "test_contract.py": 150,  # 20 for each kind of buffer
    "test_testing.py": 114,
    "test_migration.py": 100,
    "test_every_sampler.py": 220,  # 45 for each sampler; a new one fits
}
PROPERTY = "meter"
MOST_KEPT = 500_000_000  # bytes of compiled programs
_counts = collections.Counter()


def _hear(event, *_, **__):
    if event == "/jax/compilation_cache/cache_hits":
        _counts["loaded"] += 1
        _counts["compiled"] -= 1
    elif event == "/jax/core/compile/backend_compile_duration":  # told for a program that is loaded too
        _counts["compiled"] += 1


jax.monitoring.register_event_listener(_hear)
jax.monitoring.register_event_duration_secs_listener(_hear)


def kept_cache(environment, root, most=MOST_KEPT):
    """A folder for what this JAX compiles with these flags, emptied once it is too large.

    It is in the virtual environment; None unless that is in the checkout.
    """
    if environment.parent != root or not (environment / "pyvenv.cfg").exists():
        return None
    kept = environment / "compiled-tests"
    flags = zlib.crc32(os.environ.get("XLA_FLAGS", "").encode())
    if sum(path.stat().st_size for path in kept.rglob("*") if path.is_file()) > most:
        shutil.rmtree(kept)
    folder = kept / f"jax-{jax.__version__}-{jaxlib.__version__}-{flags:08x}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def over(files, budgets=BUDGETS, budget=BUDGET):
    """Lines about the files, {name: programs compiled by default tests}, that are over their budgets."""
    return [
        f"{name} compiled {count} programs; its budget is {budgets.get(name, budget)}"
        for name, count in sorted(files.items())
        if count > budgets.get(name, budget)
    ]


class Meter:
    """The plugin. The process that reports adds up what the others tell it."""

    def __init__(self):
        self.files = collections.defaultdict(collections.Counter)
        self.of_default = collections.Counter()  # programs compiled, by file
        self.tests, self.bytes = {}, {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        item.stash["began"] = (_counts.copy(), time.process_time())
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        try:
            return (yield)
        finally:
            before, seconds = item.stash["began"]
            cost = {name: _counts[name] - before[name] for name in ("compiled", "loaded")}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            cost |= {"seconds": time.process_time() - seconds, "process": os.getpid(), "bytes": peak}
            item.user_properties.append((PROPERTY, cost))

    def pytest_runtest_logreport(self, report):
        cost = dict(report.user_properties).get(PROPERTY) if report.when == "teardown" else None
        if cost is None:
            return
        cost = dict(cost)  # a worker sends its report after this
        self.bytes[cost.pop("process")] = cost.pop("bytes")
        file = report.nodeid.split("::")[0].rpartition("/")[2]
        self.files[file].update(cost)
        self.tests[report.nodeid] = cost
        if "slow" not in report.keywords:
            self.of_default[file] += cost["compiled"]

    def pytest_sessionfinish(self, session):
        if over(self.of_default) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter, config):
        total = sum(self.files.values(), collections.Counter())
        memory = " + ".join(f"{x / 1e9:.1f}" for x in self.bytes.values())
        terminalreporter.write_line(f"{text(total)}; memory {memory or 0} GB at most")
        if config.option.meter:
            dearest = sorted(self.tests.items(), key=lambda of: -of[1]["compiled"])[:50]
            for name, cost in [*sorted(self.files.items(), key=lambda of: -of[1]["compiled"]), *dearest]:
                terminalreporter.write_line(f"{text(cost)}  {name}")
        for line in over(self.of_default):
            terminalreporter.write_line(line, red=True)


def text(cost):
    return f"{cost['compiled']:5} programs compiled, {cost['loaded']:5} loaded, {cost['seconds']:6.1f} CPU seconds"
