"""`python -m jaxreplay CHECKPOINT [--out report.html]`: report the contents of a checkpoint as text or HTML."""

import argparse
import pathlib
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxreplay", description="Show the contents of a checkpoint.")
    parser.add_argument("checkpoint", help="the path passed to jr.save")
    parser.add_argument("--out", metavar="FILE.html", help="write an HTML page with figures there (extra `plots`)")
    options = parser.parse_args(arguments)
    from jaxreplay.inspection._report import of_checkpoint  # after argument parsing: JAX is slow to import

    try:
        report = of_checkpoint(options.checkpoint, html=options.out is not None)
        if options.out is None:
            print(report, end="")
        else:
            pathlib.Path(options.out).write_text(report, encoding="utf-8")
            print(f"wrote {options.out} ({len(report.encode()):,} bytes)")
    except (ImportError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
