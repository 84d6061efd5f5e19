"""`python -m jaxreplay CHECKPOINT`: print the configuration and the arrays of a checkpoint."""

import argparse
import collections
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxreplay", description="Show the contents of a checkpoint.")
    parser.add_argument("checkpoint", help="the path passed to jr.save")
    path = parser.parse_args(arguments).checkpoint
    from jaxreplay.checkpoint import _checkpoint  # after argument parsing: JAX is slow to import

    try:
        content = _checkpoint.newest(path, lambda _, content: content)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    step = "" if content["step"] is None else f", step {content['step']}"
    print(f"{path}: saved by jaxreplay {content['library']!r}{step}\n")
    for where, value in content["config"].items():
        print(f"{where} = {value!r}")
    sizes = collections.Counter()
    for name, (size, _) in content["files"].items():
        sizes[name.partition("/")[0]] += size
    rows = [("array", "dtype", "shape", "bytes on disk")]
    for i, leaf in enumerate(content["leaves"]):
        rows.append((leaf["path"], leaf["dtype"], str(leaf.get("number", leaf.get("shape"))), f"{sizes[str(i)]:,}"))
    rows.append((f"{len(rows) - 1} arrays and numbers", "", "", f"{sum(sizes.values()):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for where, dtype, shape, size in rows:
        print(f"{where:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
