"""`ps`, `why`, `events`, `runs`: query a live run, or read the files of an ended one."""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from atropos_common.protocol.control import Phase, RunStatus
from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.protocol.record_tail import whole_lines
from atropos_common.protocol.records import (
    RECORD_TYPES,
    ComponentRecord,
    DiagnosisRecord,
    parse_line,
)
from atropos_common.system.files import open_regular
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import show
from atropos_tui.cli.manage import runs
from atropos_tui.cli.manage.logs import compiled
from atropos_tui.cluster import slurm
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import counted, number, one_line
from atropos_tui.monitor.run.run_files import RunInfo, component_rows, read_info, status_from_files
from atropos_tui.profile.errors import did_you_mean
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, StreamLost

if TYPE_CHECKING:
    from atropos_tui.cli.answers import Why
    from atropos_tui.monitor.run.state import RunState
    from atropos_tui.monitor.run_list import RunRow
    from atropos_tui.monitor.verdict import Verdict
    from atropos_tui.monitor.why import Explanation

RUNS_SHOWN = 20
REFRESH_S = 1.0
"""Seconds between two updates of `ps -f`."""
STEP_S = 10.0
"""Seconds between two steps printed by `ps -f`."""


async def status_of(entry: runs.RunEntry) -> RunStatus:
    """Status from the supervisor on any machine, or rebuilt from the files."""
    try:
        return await ControlClient(entry.dir.root).status()
    except NoSupervisor:
        return await asyncio.to_thread(status_of_files, entry)


def status_of_files(entry: runs.RunEntry) -> RunStatus:
    """Status of a run whose supervisor does not listen here."""
    from atropos_tui.monitor.run.run_files import load_run

    info, state, _ = load_run(entry.dir.root)
    return status_without_socket(entry, info, state)


def status_without_socket(entry: runs.RunEntry, info: RunInfo, state: RunState) -> RunStatus:
    """Status from another machine's supervisor, the job's state, or the files."""
    try:
        job = slurm.elsewhere(entry.dir)
    except UserError as error:
        if entry.dir.result_json.exists():  # SLURM is silent, but the run has recorded its end
            return status_from_files(entry.dir, info, state)
        return _unreached_status(
            entry, info, state, Phase.RUNNING, f"{error.title}: {error.problems[0].reason}"
        )
    if job is None:
        return status_from_files(entry.dir, info, state)
    if not job.runs:
        return _unreached_status(entry, info, state, Phase.STARTING, slurm.waits(job)[0])
    if said := slurm.run_there(job, "ps", str(entry.dir.root), "--json"):
        return RunStatus.model_validate_json(said)
    reason = (
        f"it runs on {job.node} but does not answer; try srun --jobid={job.id} --overlap -w "
        f"{job.node} true"
    )
    return _unreached_status(entry, info, state, Phase.RUNNING, reason)


def _unreached_status(
    entry: runs.RunEntry, info: RunInfo, state: RunState, phase: Phase, reason: str
) -> RunStatus:
    status = status_from_files(entry.dir, info, state)
    known = {
        "phase": phase,
        "reason": reason,
        "exit_code": None,
        "components": component_rows(info, state),
    }
    return status.model_copy(update=known)


def read_events(run: RunDir) -> Iterator[Record]:
    try:
        with open_regular(run.supervisor_jsonl) as file:
            for line in whole_lines(file):
                try:
                    yield parse_line(line)
                except RecordError:
                    continue
    except OSError:
        return


async def ps(options: argparse.Namespace) -> int:
    entry = runs.of(options)
    slurm.require_here(entry.dir)
    if options.json:
        print(show.ascii_json((await status_of(entry)).model_dump_json(indent=2)))
        return Exit.DONE
    if options.follow:
        await follow(entry)
        return Exit.DONE
    explained, said = await _explained(entry, [])
    print(show.painted(show.ps_table(explained.status, show.inked(said.line, said.tone))))
    return Exit.DONE


class NewLines:
    """Changes since the last call as plain text, for screen readers and log files."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._said = ""
        self._step = 0
        self._step_at = float("-inf")

    def lines(
        self, status: RunStatus, info: RunInfo, state: RunState, said: Verdict, now: float
    ) -> Iterator[str]:
        """Components with a new state, the verdict if its words changed, and the newest step."""
        for row in status.components:
            if (
                self._states.get(row.name, row.state) != row.state
            ):  # the first state of a component is no change
                yield f"{row.name} is {row.state.value}" + (
                    f": {one_line(row.reason)}" if row.reason else ""
                )
            self._states[row.name] = row.state
        # Without its numbers: a verdict that only counts on is no news.
        words = re.sub(r"[\d.,:]+", "", said.what)
        if self._said and words != self._said:
            yield f"{said.severity}: {said.text}"
        self._said = words
        if state.step != self._step and now - self._step_at >= STEP_S:
            self._step, self._step_at = state.step, now
            of = f" of {info.training_steps}" if info.training_steps else ""
            yield f"step {state.step}{of}, reward {number(state.metric('reward_mean').last)}"


async def follow(entry: runs.RunEntry) -> None:
    """`ps -f`: print the table, then a line for each change. Nothing is redrawn."""
    from atropos_tui.monitor.format import clock
    from atropos_tui.monitor.run.run_files import load_run
    from atropos_tui.monitor.verdict import verdict

    info, state, feed = load_run(entry.dir.root)
    changes, begun = NewLines(), False
    while True:
        state = feed.catch_up(
            state
        )  # files first, so that the status is never older than the records
        try:
            status = await ControlClient(entry.dir.root).status()
        except NoSupervisor:
            status = status_from_files(entry.dir, info, state)
        now = time.time()
        said = verdict(status, info, state, now)
        news = list(changes.lines(status, info, state, said, now))
        if not begun:
            print(show.ps_table(status, said.line), flush=True)
            begun = True
        else:
            for line in news:
                print(f"{clock(now)}  {line}", flush=True)
        if status.phase is Phase.ENDED:
            return
        await asyncio.sleep(REFRESH_S)


async def why(options: argparse.Namespace) -> int:
    """Print the verdict on the run, and what its components wait for."""
    entry, names = runs.with_components(options.words, options.run_dir)
    slurm.require_here(entry.dir)
    if options.json:
        print((await why_answer(entry, names)).as_json())
        return Exit.DONE
    explained, said = await _explained(entry, names)
    # Lines are wrapped on a terminal only; a pipe or file gets whole sentences.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if not names:
        print(show.inked(said.line, said.tone) + "\n")
    chosen: list[str | None] = [*names] or [None]
    print(
        show.painted("\n".join(line for name in chosen for line in explained.lines(name, columns)))
    )
    return Exit.DONE


async def why_answer(entry: runs.RunEntry, names: list[str]) -> Why:
    """Build the data of `why`.

    Raises:
        UserError: one of `names` is not part of the run.
    """
    from atropos_tui.cli.answers import ComponentWhy, Why

    explained, said = await _explained(entry, names)
    status, state = explained.status, explained.state
    return Why(
        run_id=status.run_id,
        phase=status.phase,
        exit_code=status.exit_code,
        sentence=said.line,
        headline=explained.lines()[0],
        components=[
            ComponentWhy(
                name=name, state=explained.rows[name].state, says=_ideas(explained.lines(name))
            )
            for name in names or explained.rows
        ],
        diagnoses=_diagnoses(state, status),
    )


def _diagnoses(state: RunState, status: RunStatus) -> list[DiagnosisRecord]:
    """Open diagnoses of a live run, the most severe first; of an ended run all."""
    from atropos_tui.monitor.why import open_diagnoses

    standing = open_diagnoses(state, status)
    if status.phase is not Phase.ENDED:
        return standing
    return [
        each if each in standing else each.model_copy(update={"over": True})
        for each in state.diagnoses
    ]


def _ideas(paragraph: list[str]) -> list[str]:
    """Lines of a component's paragraph without its name and state."""
    first, *rest = paragraph  # "NAME  STATE  text": two spaces between the columns
    return [text for line in ["  ".join(first.split("  ")[2:]), *rest] if (text := line.strip())]


async def _explained(entry: runs.RunEntry, names: list[str]) -> tuple[Explanation, Verdict]:
    """Present state of a run, and the verdict on it.

    Raises:
        UserError: one of `names` is not part of the run.
    """
    from atropos_tui.monitor.run.run_files import load_run
    from atropos_tui.monitor.verdict import verdict
    from atropos_tui.monitor.why import Explanation

    info, state, _ = load_run(entry.dir.root)
    try:
        status = await ControlClient(entry.dir.root).status()
    except NoSupervisor:
        status = await asyncio.to_thread(status_without_socket, entry, info, state)
    now = time.time()
    explained = Explanation(status, info, state, now)
    if unknown := [name for name in names if name not in explained.rows]:
        raise _no_component(unknown[0], list(explained.rows))
    return explained, verdict(status, info, state, now)


def _no_component(name: str, known: list[str]) -> UserError:
    fix = f"{did_you_mean(name, known)}one of: {', '.join(known)}"
    return UserError(
        f"no component {name!r}", [Problem("not part of this run, and no run has this name", fix)]
    )


async def events(options: argparse.Namespace) -> int:
    entry, count = runs.of(options), 0
    wanted = _wanted_events(entry, options)
    async for record in _events(entry, follow=options.follow):
        if wanted(record):
            count += 1
            line = (
                show.ascii_json(record.to_line().rstrip("\n"))
                if options.json
                else show.event_line(record)
            )
            print(line, flush=True)
    if not count:
        print(f"{entry.dir.root.name} has no matching event", file=sys.stderr)
    return Exit.DONE


def event_kinds() -> list[str]:
    """Kinds of records that a supervisor writes."""
    return [name for name, record in RECORD_TYPES.items() if issubclass(record, ComponentRecord)]


def _wanted_events(entry: runs.RunEntry, options: argparse.Namespace) -> Callable[[Record], bool]:
    if options.kind not in (None, *event_kinds()):
        fix = f"{did_you_mean(options.kind, event_kinds())}one of: {', '.join(event_kinds())}"
        raise UserError("invalid --kind", [Problem(f"no kind {options.kind!r}", fix)])
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
    """Past events from the file, then the live stream."""
    last = -1
    for record in read_events(entry.dir):
        last = record.seq
        yield record
    while follow:
        try:
            # `after`: the stream repeats nothing that the file had, and leaves no gap.
            async for item in ControlClient(entry.dir.root).events(after=last):
                if isinstance(item, Record):
                    last = item.seq
                    yield item
            return
        except StreamLost:
            continue  # this reader is too slow: continue after the last record shown
        except NoSupervisor:
            return


def list_runs(options: argparse.Namespace) -> int:
    found = runs.all_runs()
    limit = (
        options.limit if options.limit is not None else (len(found) if options.json else RUNS_SHOWN)
    )
    shown = found[: limit or len(found)]
    if options.json:
        from atropos_tui.cli.schemas import answer_json

        print(answer_json("runs", [run_row(entry) for entry in shown]))
    elif not shown:
        print("no runs yet: atropos-tui up PROFILE")
    else:
        from atropos_tui.monitor.run_list import table

        print("\n".join(table([run_row(entry) for entry in shown], time.time())))
        if more := len(found) - len(shown):
            print(f"{counted(more, 'older run')}: --limit 0 shows all")
    return Exit.DONE


def run_row(entry: runs.RunEntry) -> RunRow:
    from atropos_tui.monitor.run_list import LIVE, UNFINISHED, listed

    found = listed(entry.dir, is_live=entry.is_live, now=time.time())
    # A run in the queue looks unfinished from its files alone.
    if found.state != LIVE and (queued := slurm.queued(entry.dir)):
        return replace(found, state="waits", reason=queued)
    return replace(found, state=_crashed(entry)) if found.state == UNFINISHED else found


def _crashed(entry: runs.RunEntry) -> str:
    from atropos_tui.cli.manage.cleanup import find_dead

    found = find_dead(entry.dir.root, entry.info)
    if found is None:
        return "live"  # its supervisor starts or ends right now
    if not found.processes:
        return "crashed"
    return f"crashed, {found.count_text} left: atropos-tui clean"
