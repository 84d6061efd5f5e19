"""Command lines of the examples: a wrong one gives a single clear line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def make_folder(self, path: Path) -> None:
        """The folder that --out names."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.error(f"argument --out: cannot make the folder {str(path)!r} ({error.strerror})")


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}")
        return int(text)

    return parse
