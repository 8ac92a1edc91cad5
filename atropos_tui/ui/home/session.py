"""The list of runs and the screens of runs, one after the other, until the user leaves."""

from __future__ import annotations

import gc
from pathlib import Path

from atropos_tui.monitor.catalogue import Catalogue, Source
from atropos_tui.ui.app import run_cockpit
from atropos_tui.ui.commands import Outcome
from atropos_tui.ui.home.app import Choice, HomeApp
from atropos_tui.ui.home.table import Memory
from atropos_tui.ui.terminal import run_app, with_theme


def run_session(
    source: Source, first: Path | None = None, *, read_only: bool = False
) -> tuple[Path | None, Outcome]:
    """Show the run `first`, or the list; return the last run and how its screen was left.

    Leaving the list returns None and `detach`.
    """
    # Kept over the whole session, so that the list comes back as it was left.
    catalogue, memory = Catalogue(source), Memory()
    choice, last, from_home = Choice(first), first, first is None
    while True:
        if choice.run is None:
            home = HomeApp(catalogue, memory, last)
            home.read_only = read_only
            found = run_app(with_theme(home), Choice(None))
            if found == "failed":
                return None, "failed"
            choice = found
            if choice.run is None:
                return None, "detach"
        last = choice.run
        outcome = run_cockpit(
            last,
            read_only=read_only,
            from_home=from_home,
            view=choice.view,
            others=choice.others,
        )
        if outcome != "home":
            return last, outcome
        # The history of the run that was left: `keep_history_out_of_collections` froze it.
        gc.unfreeze()
        gc.collect()
        choice, from_home = Choice(None), True
