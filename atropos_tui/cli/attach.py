"""`attach`: the screen on a run, and what is said once it was left. Imports no profile: it opens as fast as it can."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from atropos_common.run_dir import RunDir
from atropos_tui.cli import runs
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line


def attach(options: argparse.Namespace) -> int:
    """Open the screen on a live run, or on what an ended one left."""
    return open_screen(runs.pick(options.run_dir).dir)


def open_screen(run: RunDir) -> int:
    """Show the run; leaving either detaches (0) or stops the stack and ends with the run's code."""
    if not sys.stdout.isatty():
        raise UserError("no terminal", [Problem("the screen needs one", "use ps, logs and events instead")])
    from atropos_tui.ui.app import run_cockpit

    choice = run_cockpit(run.root)
    if choice in ("detach", "failed"):
        why = "detached" if choice == "detach" else "the screen failed, which is a fault of ours"
        _say_if_heard(f"{why}; the run goes on: {one_line(str(run.root))}\n  atropos-tui attach · ps · down")
        return Exit.DONE if choice == "detach" else Exit.FAULT
    from atropos_tui.cli.control import bring_down, tell_end

    # The screen has said `down`, or has seen the end; either way the supervisor may need a moment to finish.
    asyncio.run(bring_down(run.root, timeout_s=None))
    return tell_end(run)


def _say_if_heard(text: str) -> None:
    """Print to a terminal that may have closed, which is why the screen was left: that is no failure."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again at exit
