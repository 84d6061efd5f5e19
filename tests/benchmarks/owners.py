"""Whose a kernel is, by the source lines in the metadata of a compiled program, and the bytes that it moves."""

import importlib.util
import pathlib
import re

from hlo import Instruction, Program, num_bytes

PACKAGE = pathlib.Path(importlib.util.find_spec("jaxreplay").origin).parent
_FRAME = re.compile(r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_PASSES_ON = {"bitcast", "reshape"}


class Owners:
    """Parts of the package that the kernels of a program come from."""

    def __init__(self, program: Program, text: str):
        self._program = program
        files, locations = (_table(text, name) for name in ("FileNames", "FileLocations"))
        file_of = {n: files[re.search(r"file_name_id=(\d+)", x)[1]].strip('"') for n, x in locations.items()}
        frames = {n: _FRAME.match(x).groups() for n, x in _table(text, "StackFrames").items()}
        # XLA prints the number of the caller's frame plus 1: the outermost frame then names itself.
        more = any(n == caller for n, (_, caller) in frames.items())
        self._frames = {
            n: (file_of[location], str(int(caller) - more) if caller else None)
            for n, (location, caller) in frames.items()
        }

    def of(self, kernel: Instruction) -> str | None:
        """The owner of a kernel: "tracer" (`jaxreplay/transitions`), "replay" (all else of jaxreplay) or None.

        A fusion belongs to the part whose results it writes, as far as these have metadata.
        """
        lines = [kernel.line]
        if kernel.kind == "fusion":
            parts = list(self._program.parts(kernel.called))
            results = next((before for *_, before, line in parts if "ROOT" in line and " tuple(" in line), [])
            roots = [line for name, *_, line in parts if name in results or "ROOT" in line]
            lines = [*roots, kernel.line, *(line for *_, line in parts)]
        files = next((found for line in lines if (found := self._files(line))), [])
        # Helpers have no owner, and an automatic reset runs the environment.
        own = [x.relative_to(PACKAGE).parts for x in files if x.is_relative_to(PACKAGE) and x.name != "_autoreset.py"]
        own = [x for x in own if x[0] != "_common"]
        return None if not own else "tracer" if own[-1][0] == "transitions" else "replay"

    def _files(self, line: str) -> list[pathlib.Path]:
        """Files of the calls that an instruction comes from, the innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", line)
        frame, files = found and found[1], []
        while frame in self._frames:
            file, frame = self._frames[frame]
            files.append(pathlib.Path(file))
        return files

    def num_bytes(self, kernel: Instruction) -> int:
        """Bytes that a kernel reads and writes; of an array that it reads or changes in parts, only the parts."""
        if kernel.kind != "fusion":
            return 2 * kernel.num_bytes
        parts = {name: (result, kind, before) for name, result, kind, before, _ in self._program.parts(kernel.called)}

        def written(name: str) -> int:
            result, kind, before = parts[name]
            if kind == "tuple":
                return sum(written(x) for x in before if x in parts)
            if kind in _PASSES_ON and before[0] in parts and parts[before[0]][1] in _UPDATES:
                return written(before[0])
            return num_bytes(parts[before[_UPDATES[kind]]][0]) if kind in _UPDATES else num_bytes(result)

        def read(name: str) -> int:
            total, whole = 0, num_bytes(parts[name][0])
            for other, (result, kind, before) in parts.items():
                if name not in before or kind == "tuple":
                    continue
                if kind in _PASSES_ON:
                    total += read(other)
                elif kind in ("gather", "dynamic-slice", "slice") and before[0] == name:
                    total += num_bytes(result)
                elif kind not in _UPDATES or before[0] != name:
                    return whole
            return min(total, whole)

        arguments = [name for name, (_, kind, _) in parts.items() if kind == "parameter"]
        return sum(map(read, arguments)) + written(next(reversed(parts)))


_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}  # operand that holds the changes


def _table(text: str, name: str) -> dict[str, str]:
    """A numbered table at the head of a program's text."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.M)
    return dict(line.split(" ", 1) for line in found[1].splitlines()) if found else {}
