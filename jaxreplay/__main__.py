"""`python -m jaxreplay CHECKPOINT [--out report.html]`: what a checkpoint holds, as text or as a page."""

import argparse
import pathlib
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxreplay", description="Shows what a checkpoint holds.")
    parser.add_argument("checkpoint", help="the path that was given to jr.save")
    parser.add_argument("--out", metavar="FILE.html", help="write a page with figures there (extra `plots`)")
    options = parser.parse_args(arguments)
    from jaxreplay.inspection._report import of_checkpoint  # behind the arguments, as JAX takes a while to import

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
