"""`atropos-tui`, also as `python -m atropos_tui`."""

from __future__ import annotations

import sys


def main() -> int:
    """Entry point of the script; returns the exit code."""
    from atropos_tui.cli.main import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
