"""Command lines of the examples. A wrong one gives a single clear error line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors on stderr and exit status 2."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False)
        self.counts: dict[str, tuple[int, int]] = {}

    def add_count(self, name: str, what: str, default: int, short: int, low: int = 1, high: int = 2**31 - 1) -> None:
        """Add an integer option with another default for --short."""
        self.add_argument(f"--{name}", type=integer(low, high), help=f"{what} ({default}; {short} if short)")
        self.counts[name] = default, short

    def add_experiment(self, seeds: int, short_seeds: int = 2, short: str = "a tiny budget; it does not learn") -> None:
        """Add the options of every experiment: --seeds, --seed, --out and --short."""
        self.add_count("seeds", "number of seeds", seeds, short_seeds, high=4096)
        self.add_argument("--seed", type=integer(0), default=0, help="base seed (0)")
        self.add_argument("--out", type=Path, default=Path("out"), help="output folder (out)")
        self.add_argument("--short", action="store_true", help=short)

    def parse(self) -> argparse.Namespace:
        """The arguments, with defaults filled in. Makes the folder of --out, if there is that option."""
        args = self.parse_args()
        for name, defaults in self.counts.items():
            if getattr(args, name) is None:
                setattr(args, name, defaults[args.short])
        if "out" in args:
            try:
                args.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self.error(f"argument --out: cannot make the folder {str(args.out)!r} ({error.strerror})")
        return args

    def learning_steps(self, env_steps: int, num_envs: int, config: Any) -> int:
        """Steps after the warmup within `env_steps`, rounded down to whole intervals of progress reports."""
        least = num_envs * (config.warmup + config.intervals)
        if env_steps < least:
            self.error(f"argument --steps: {env_steps} is too few for {num_envs} environments, which need {least}")
        return (env_steps // num_envs - config.warmup) // config.intervals * config.intervals

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}")
        return int(text)

    return parse
