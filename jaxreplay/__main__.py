"""`python -m jaxreplay CHECKPOINT`: print the configuration and the arrays of a checkpoint."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxreplay", description="Show the contents of a checkpoint.")
    parser.add_argument("checkpoint", help="the path passed to jr.save")
    path = parser.parse_args(arguments).checkpoint
    from jaxreplay.checkpoint import _checkpoint, _leaves  # after argument parsing: JAX is slow to import

    try:
        content = _checkpoint.open_saved(path)[0]
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    config, rows = content["buffer"], [("array", "dtype", "shape", "bytes")]
    is_dict = isinstance(config, dict) and config.get("type") == "builtins.dict"
    print(f"{path}: saved by jaxreplay {content['library']}, format {content['format']}\n")
    for name, part in (config["fields"] if is_dict else {"configuration": config}).items():
        print(f"{name}: {_text(part)}")
    total = 0
    for record in content["leaves"]:
        shape, dtype = _leaves.stored_type(record)
        num_bytes = math.prod(shape) * dtype.itemsize
        rows.append((record["path"], record["dtype"], str(record["shape"]), f"{num_bytes:,}"))
        total += num_bytes
    rows.append((f"{len(rows) - 1} arrays", "", "", f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for where, dtype, shape, size in rows:
        print(f"{where:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}")
    return 0


def _text(config: Any) -> str:
    """A described configuration in one line."""
    if isinstance(config, list):
        return "(" + ", ".join(map(_text, config)) + ")"
    if not isinstance(config, dict):
        return repr(config)
    if "fields" not in config:  # a function, a dtype or a mesh
        return str(next(iter(config.values())))
    fields = ", ".join(f"{name}={_text(x)}" for name, x in config["fields"].items())
    return f"{config['type'].rpartition('.')[2]}({fields})"


if __name__ == "__main__":
    sys.exit(main())
