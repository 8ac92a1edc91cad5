"""`note` shows or changes the note and the tags of a run."""

from __future__ import annotations

import argparse

from atropos_tui.cli.manage import runs
from atropos_tui.errors import Exit, Problem, UserError


def note(options: argparse.Namespace) -> int:
    """Exit 2 for an invalid tag, or a run of another user."""
    from atropos_tui.monitor.run.notes import notes_of, read_notes, write_notes

    entry = runs.pick(options.run)
    before = read_notes(entry.dir)
    if options.text is None and not (options.tags or options.untags):
        print(before.line or f"no note: atropos-tui note {entry.run_id} TEXT --tag TAG")
        return Exit.DONE
    entry = runs.pick_own(options.run)
    gone = {tag.removeprefix("#") for tag in options.untags}
    kept = [tag for tag in before.tags if tag not in gone]
    try:
        text = before.text if options.text is None else options.text
        after = notes_of(text, [*kept, *options.tags])
        write_notes(entry.dir, after)
    except ValueError as error:
        reason, _, fix = str(error).partition(": ")
        raise UserError("the note is not changed", [Problem(reason, fix)]) from None
    except OSError as error:
        path = str(entry.dir.notes_json)
        problem = Problem(error.strerror or str(error), "make the run's folder writable", path)
        raise UserError("the note cannot be written", [problem]) from None
    print(after.line or "no note any more")
    return Exit.DONE
