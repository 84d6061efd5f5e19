"""Which of the default tests run a line of the package, read off one run of the suite under coverage."""

import collections
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

# Interrupts a process at any moment, also where it holds a lock of coverage.
NOT_COVERED = "tests/wrappers/test_interrupts.py::test_at_any_moment_they_lose_nothing_and_leave_nothing_locked"
MOST_SECONDS = {"line": 60, "function": 30, "module": 30}  # of tests, as they took in the whole suite


def record(root, folder):
    """Run the default tests of the checkout `root`; leaves `coverage` and `times.xml` in `folder`."""
    settings = folder / "coveragerc"
    settings.write_text("[run]\nconcurrency = thread, multiprocessing\n")
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--deselect", NOT_COVERED]
    command += ["--junitxml", str(folder / "times.xml")]
    command += [f"--cov={root / 'jaxreplay'}", "--cov-context=test", f"--cov-config={settings}", "--cov-report=term"]
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "coverage"), "PYTHONPATH": str(root)}
    subprocess.run(command, cwd=root, check=True, env=environment)


class Concerns:
    """The tests that concern a place in the package, the most telling first."""

    def __init__(self, root, folder):
        import coverage

        data = coverage.CoverageData(str(folder / "coverage"))
        data.read()
        self.seconds = _seconds(folder / "times.xml")
        self.lines = {}  # of module: of line: tests
        package = root / "jaxreplay"
        for file in data.measured_files():
            path = pathlib.Path(file)
            if path.is_relative_to(package):
                by_line = data.contexts_by_lineno(file)
                found = {line: {c.rpartition("|")[0] for c in contexts if c} for line, contexts in by_line.items()}
                self.lines[str(path.relative_to(package).with_suffix(""))] = found
        names = {test for by_line in self.lines.values() for tests in by_line.values() for test in tests}
        if gone := sorted(names - collected(root)):
            raise SystemExit(f"{folder} is of other tests, such as {gone[0]}: delete it")

    def tests(self, module, line, function_lines):
        """Names for pytest: tests of the line, then of its function, then of its module.

        The module's own tests come before those of its folder and all others, and the quickest first. A line that is
        traced once in a process is known as that of one test alone, and other tests tell too.
        """
        by_line = self.lines.get(module, {})
        counted = collections.Counter(test for tests in by_line.values() for test in tests)
        groups = {
            "line": by_line.get(line, set()),
            "function": {test for at in function_lines for test in by_line.get(at, ())},
            "module": {test for test, _ in counted.most_common(40)},
        }
        chosen = {}
        for name, tests in groups.items():
            left = MOST_SECONDS[name]
            for test in sorted(tests - chosen.keys(), key=self._order(module)):
                left -= self.seconds.get(test, 0.0)
                if left < 0:
                    break
                chosen[test] = None
        return list(chosen)

    def _order(self, module):
        place = pathlib.Path("tests", module)

        def key(test):
            file = pathlib.Path(test.partition("::")[0])
            own = file.parent == place.parent and file.stem == f"test_{place.name.lstrip('_')}"
            return not own, file.parent != place.parent, self.seconds.get(test, 0.0), test

        return key


def collected(root):
    """The names of all tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "slow or not slow"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return {line.strip() for line in listed.stdout.splitlines()}


def _seconds(file):
    """By name of the test."""
    found = {}
    for case in xml.etree.ElementTree.parse(file).getroot().iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        found[f"{path}::{case.get('name')}"] = float(case.get("time", 0))
    return found
