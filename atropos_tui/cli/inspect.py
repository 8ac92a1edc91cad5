"""`ps`, `why`, `events`, `runs`: they ask a live run, and answer from the files of one that has ended."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_common.control import RunStatus
from atropos_common.records import RECORD_TYPES, ComponentRecord, Record, RecordError, parse_line
from atropos_common.run_dir import RunDir
from atropos_tui.cli import runs, show
from atropos_tui.cli.logs import compiled
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run_files import RunInfo, read_info, status_from_files
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, StreamLost

if TYPE_CHECKING:
    from atropos_tui.monitor.state import RunState
    from atropos_tui.monitor.verdict import Verdict
    from atropos_tui.monitor.why import Picture


async def status_of(entry: runs.RunEntry) -> RunStatus:
    """From the supervisor, else rebuilt from plan.json and supervisor.jsonl."""
    try:
        return await ControlClient(entry.dir.root).status()
    except NoSupervisor:
        return status_of_files(entry)


def status_of_files(entry: runs.RunEntry) -> RunStatus:
    from atropos_tui.monitor.run_files import load_run

    info, state, _ = load_run(entry.dir.root)
    return status_from_files(entry.dir, info, state)


def read_events(run: RunDir) -> Iterator[Record]:
    """Records of supervisor.jsonl; a torn or foreign line is passed over."""
    try:
        with run.supervisor_jsonl.open("rb") as file:
            for line in file:
                try:
                    yield parse_line(line)
                except RecordError:
                    continue
    except OSError:
        return


async def ps(options: argparse.Namespace) -> int:
    entry = runs.pick(options.run_dir)
    if options.json:
        print(show.ascii_json((await status_of(entry)).model_dump_json(indent=2)))
        return Exit.DONE
    if options.follow:
        from atropos_tui.cli.text_mode import follow

        await follow(entry)
        return Exit.DONE
    status, said = await judged(entry)
    print(show.ps_table(status, said.line))
    return Exit.DONE


async def judged(entry: runs.RunEntry) -> tuple[RunStatus, Verdict]:
    """How a run stands at this moment, and the one sentence about it."""
    from atropos_tui.monitor.verdict import verdict

    info, state, status = await _all_of(entry)
    return status, verdict(status, info, state, time.time())


async def _all_of(entry: runs.RunEntry) -> tuple[RunInfo, RunState, RunStatus]:
    """What the files tell, and the supervisor's word on how it stands."""
    from atropos_tui.monitor.run_files import load_run

    info, state, _ = load_run(entry.dir.root)
    try:
        return info, state, await ControlClient(entry.dir.root).status()
    except NoSupervisor:
        return info, state, status_from_files(entry.dir, info, state)


async def why(options: argparse.Namespace) -> int:
    """The sentence about the run; what it or one component waits for, since when, and the usual cause."""
    (picture, said), component = await _picture(runs.pick(options.run_dir)), options.component
    if component not in (None, *picture.rows):
        named = runs.find(Path(component)) if options.run_dir is None else None
        if named is None:
            raise _no_component(component, list(picture.rows))
        (picture, said), component = await _picture(named), None
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if component is None:
        print(said.line + "\n")
    print("\n".join(picture.lines(component, columns)))
    return Exit.DONE


async def _picture(entry: runs.RunEntry) -> tuple[Picture, Verdict]:
    """The run at this moment, with all that its records tell."""
    from atropos_tui.monitor.verdict import verdict
    from atropos_tui.monitor.why import Picture

    info, state, status = await _all_of(entry)
    now = time.time()
    return Picture(status, info, state, now), verdict(status, info, state, now)


def _no_component(name: str, known: list[str]) -> UserError:
    return UserError(f"no component {name!r}", [Problem("not part of this run", f"one of: {', '.join(known)}")])


async def events(options: argparse.Namespace) -> int:
    entry = runs.pick(options.run_dir)
    wanted = _wanted_events(entry, options)
    async for record in _events(entry, follow=options.follow):
        if wanted(record):
            line = show.ascii_json(record.to_line().rstrip("\n")) if options.json else show.event_line(record)
            print(line, flush=True)
    return Exit.DONE


def _wanted_events(entry: runs.RunEntry, options: argparse.Namespace) -> Callable[[Record], bool]:
    kinds = [name for name, record in RECORD_TYPES.items() if issubclass(record, ComponentRecord)]
    if options.kind not in (None, *kinds):
        raise UserError("invalid --kind", [Problem(f"no kind {options.kind!r}", f"one of: {', '.join(kinds)}")])
    names = [part.name for part in read_info(entry.dir).components]
    if options.component not in (None, *names):
        raise _no_component(options.component, names)
    pattern = compiled(options.grep)
    return lambda record: (
        options.kind in (None, record.kind)
        and options.component in (None, getattr(record, "component", None))
        and (pattern is None or pattern.search(show.event_line(record)))
    )


async def _events(entry: runs.RunEntry, *, follow: bool) -> AsyncIterator[Record]:
    """The past from the file, then the live stream from where the file ended."""
    last = -1
    for record in read_events(entry.dir):
        last = record.seq
        yield record
    while follow:
        try:
            async for item in ControlClient(entry.dir.root).events(after=last):
                if isinstance(item, Record):
                    last = item.seq
                    yield item
            return
        except StreamLost:
            continue  # too slow a reader: go on behind the last record that was shown
        except NoSupervisor:
            return


def list_runs(options: argparse.Namespace) -> int:
    rows = []
    for entry in runs.all_runs():
        result = runs.read_result(entry.dir)
        state = "live" if entry.is_live else (f"ended {result['exit_code']}" if result else _crashed(entry))
        known = {"run": entry.info.get("run_id"), "mode": entry.info.get("mode")}
        rows.append(known | {"state": state, "dir": str(entry.dir.root)})
    if options.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no runs yet: atropos-tui up PROFILE")
    else:
        cells = [tuple(one_line(str(value)) for value in row.values()) for row in rows]
        print(show.table([("RUN", "MODE", "STATE", "DIRECTORY"), *cells]))
    return Exit.DONE


def _crashed(entry: runs.RunEntry) -> str:
    """A run without supervisor and result, and what is left of it."""
    from atropos_tui.cli.cleanup import find_dead

    found = find_dead(entry.dir.root, entry.info)
    if found is None:
        return "live"  # its supervisor is just coming or going
    if not found.processes:
        return "crashed"
    then = "kept: atropos-tui up --resume" if found.is_adoptable else "left: atropos-tui clean"
    return f"crashed, {found.count_text} {then}"
