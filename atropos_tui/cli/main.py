"""Dispatch and the outermost error handling: a user's mistake is a message, a fault of ours is a report to file."""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from atropos_tui import __version__
from atropos_tui.cli.parser import build_parser
from atropos_tui.errors import Exit, UserError


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; never raises but for argparse's own SystemExit."""
    options = build_parser().parse_args(argv)
    module, _, name = options.handler.partition(":")
    try:
        handler = getattr(importlib.import_module(f"atropos_tui.cli.{module}"), name)
        result = handler(options)
        return int(asyncio.run(result) if asyncio.iscoroutine(result) else result)
    except UserError as error:
        print(f"atropos-tui: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error, and Python must not complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.DONE)
    except Exception:
        return _report_fault(argv, getattr(options, "run_dir", None))


def _report_fault(argv: Sequence[str], run_dir: Path | None) -> int:
    """Write what a developer needs beside the run (or to a temporary file) and say where."""
    folder = run_dir if run_dir is not None and run_dir.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"atropos-tui-fault-{os.getpid()}.txt"
    versions = f"atropos-tui {__version__}, Python {platform.python_version()}, {platform.platform()}"
    head = f"{versions}\narguments: {list(argv)}\n\n"
    path.write_text(head + traceback.format_exc(), encoding="utf-8")
    last = traceback.format_exc(limit=0).strip().splitlines()[-1]
    print(
        f"atropos-tui: a fault of ours: {last}\n  The report is in {path}; please file it as an issue.", file=sys.stderr
    )
    return int(Exit.FAULT)
