"""`atropos-tui`, also as `python -m atropos_tui`."""

from __future__ import annotations

import sys


def main() -> int:
    """Entry point of the script; returns the exit code."""
    from atropos_tui import streams

    streams.prepare()
    from atropos_tui.cli.main import run

    argv = sys.argv[1:]
    try:
        code = run(argv)
    except SystemExit as leaving:  # of argparse
        code = leaving.code if isinstance(leaving.code, int) else 0
    return streams.finish(code, argv)


if __name__ == "__main__":
    sys.exit(main())
