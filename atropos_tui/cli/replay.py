"""`replay`: a run that was, in the screen as it was; faster or slower, back and forth."""

from __future__ import annotations

import argparse
import sys

from atropos_tui.cli import runs
from atropos_tui.errors import Exit, Problem, UserError


def replay(options: argparse.Namespace) -> int:
    """Load the run's records, then show them; 2 where there is no terminal or nothing recorded."""
    from atropos_tui.monitor.replay import Recording, Replay

    entry = runs.pick(options.run)
    recording = Recording.load(entry.dir)
    if not recording.records:
        raise UserError(
            "nothing to replay",
            [Problem("the run's streams hold no records", "`atropos-tui runs` lists other runs", str(entry.dir.root))],
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fix = "use `atropos-tui report` for a page, events and logs for text"
        raise UserError("no terminal", [Problem("the screen needs one", fix)])
    from atropos_tui.ui.replay import run_replay

    run_replay(Replay(recording, options.speed))
    return Exit.DONE
