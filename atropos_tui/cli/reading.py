"""Commands that read: they ask a live run, and answer from the files of one that has ended."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

from atropos_tui.cli import runs, show
from atropos_tui.cli.control import client
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.follow import LogFollower
from atropos_tui.monitor.plain import duration, one_line
from trainer_core.contracts.control import Phase, RunStatus
from trainer_core.contracts.records import DiagnosisRecord, Record, RecordError, parse_line
from trainer_core.contracts.run_dir import RunDir, is_safe_name

FOLLOW_S = 0.2


async def status_of(entry: runs.RunEntry) -> RunStatus:
    """From the supervisor, else rebuilt from plan.json and supervisor.jsonl."""
    from atropos_tui.supervisor.client import NoSupervisor

    try:
        return await client(entry.dir.root).status()
    except NoSupervisor:
        return _status_of_files(entry)


def _status_of_files(entry: runs.RunEntry) -> RunStatus:
    from atropos_tui.monitor.feed import load_run
    from atropos_tui.monitor.run_info import status_from_files

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
    status = await status_of(runs.pick(options.run_dir))
    print(status.model_dump_json(indent=2) if options.json else show.ps_table(status))
    return Exit.DONE


async def why(options: argparse.Namespace) -> int:
    """What is waited for, and the last diagnosis with evidence and fix."""
    entry = runs.pick(options.run_dir)
    status = await status_of(entry)
    chosen = [part for part in status.components if options.component in (None, part.name)]
    if not chosen:
        raise _no_component(options.component, [part.name for part in status.components])
    diagnoses = {record.component: record for record in read_events(entry.dir) if isinstance(record, DiagnosisRecord)}
    for part in chosen:
        since = f" for {duration(time.time() - part.since)}" if part.since and status.phase != Phase.ENDED else ""
        print(f"{part.name}: {part.state}{since}  {one_line(part.waiting_for or part.reason)}".rstrip())
        if (found := diagnoses.get(part.name)) is not None:
            print(f"  {one_line(found.title)}")
            print(f"  evidence: {one_line(found.evidence)}\n  fix: {one_line(found.fix)}")
    return Exit.DONE


def _no_component(name: str, known: list[str]) -> UserError:
    return UserError(f"no component {name!r}", [Problem("not part of this run", f"one of: {', '.join(known)}")])


async def events(options: argparse.Namespace) -> int:
    entry = runs.pick(options.run_dir)
    source = _live_events(entry) if options.follow else _past_events(entry)
    async for record in source:
        print(record.to_line().rstrip("\n") if options.json else show.event_line(record), flush=True)
    return Exit.DONE


async def _past_events(entry: runs.RunEntry) -> AsyncIterator[Record]:
    for record in read_events(entry.dir):
        yield record


async def _live_events(entry: runs.RunEntry) -> AsyncIterator[Record]:
    """The past from the file, then the live stream from where the file ended."""
    from atropos_tui.supervisor.client import NoSupervisor, StreamLost

    last = -1
    for record in read_events(entry.dir):
        last = record.seq
        yield record
    while True:
        try:
            async for item in client(entry.dir.root).events(after=last):
                if isinstance(item, Record):
                    last = item.seq
                    yield item
            return
        except StreamLost:
            continue  # too slow a reader: go on behind the last record that was shown
        except NoSupervisor:
            return


async def logs(options: argparse.Namespace) -> int:
    """Print the newest attempt's log; `-f` goes on through restarts until the run ends."""
    entry = runs.pick(options.run_dir)
    try:
        pattern = re.compile(options.grep) if options.grep else None
    except re.error as error:
        raise UserError("invalid --grep", [Problem(f"not a regular expression: {error}")]) from None
    follower = LogFollower(entry.dir.logs / options.component) if is_safe_name(options.component) else None
    if follower is None or not follower.begun:
        known = [part.name for part in _status_of_files(entry).components]
        if follower is None or options.component not in known:
            raise _no_component(options.component, known)
        print(f"{options.component} has not printed anything yet", file=sys.stderr)
    wanted = (line for line in follower.drain() if pattern is None or pattern.search(line))
    last = deque(wanted, maxlen=max(options.lines, 0))
    if not options.follow:
        last.extend(line for line in follower.rest() if pattern is None or pattern.search(line))
    for line in last:
        print(one_line(line), flush=options.follow)
    if options.follow:
        await _follow(entry, follower, pattern)
    return Exit.DONE


async def _follow(entry: runs.RunEntry, follower: LogFollower, pattern: re.Pattern[str] | None) -> None:
    live = True
    while live:
        live = entry.is_live  # before reading: what an ended run wrote is then all there
        for line in itertools.chain(follower.drain(), () if live else follower.rest()):
            if pattern is None or pattern.search(line):
                print(one_line(line), flush=True)
        if live:
            await asyncio.sleep(FOLLOW_S)


def list_runs(options: argparse.Namespace) -> int:
    entries = runs.all_runs()
    rows = []
    for entry in entries:
        result = runs.read_result(entry.dir)
        state = "live" if entry.is_live else (f"ended {result['exit_code']}" if result else "gone")
        rows.append(
            {
                "run": entry.info.get("run_id"),
                "mode": entry.info.get("mode"),
                "state": state,
                "dir": str(entry.dir.root),
            }
        )
    if options.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no runs yet: atropos-tui up PROFILE")
    else:
        print(
            show.table([("RUN", "MODE", "STATE", "DIRECTORY"), *(tuple(str(v) for v in row.values()) for row in rows)])
        )
    return Exit.DONE


def bench(options: argparse.Namespace) -> int:
    """The guides' BENCHMARK SUMMARY of each run."""
    from atropos_tui.monitor import bench as summary

    chosen = [runs.pick(path).dir.root for path in options.runs] or [runs.pick(None).dir.root]
    figures = [summary.benchmark_run(path) for path in chosen]
    print(summary.benchmarks_json(figures) if options.json else summary.render_benchmarks(figures))
    return Exit.DONE
