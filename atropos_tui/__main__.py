"""Entry point of `atropos-tui` and `python -m atropos_tui`."""

from __future__ import annotations

import sys


def main() -> int:
    from atropos_tui import streams

    streams.prepare()  # before any import that may print
    from atropos_tui.cli.main import run

    argv = sys.argv[1:]
    try:
        code = run(argv)
    except SystemExit as leaving:  # argparse exits after --help and after wrong usage
        code = leaving.code if isinstance(leaving.code, int) else 0
    return streams.finish(code, argv)


if __name__ == "__main__":
    sys.exit(main())
