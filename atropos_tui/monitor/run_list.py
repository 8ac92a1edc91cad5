"""The rows of `runs`, and the runs offered for comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from atropos_common.protocol.record_base import (
    Number,
    Record,
    RecordError,
)
from atropos_common.protocol.record_tail import kind_words, nth_from_end, whole_lines
from atropos_common.protocol.records import EvalRecord, parse_line
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.files import open_regular
from atropos_common.system.run_dir import RunDir, registry
from atropos_tui.monitor.bench import WINDOW
from atropos_tui.monitor.format import columns, duration, number, one_line, real
from atropos_tui.monitor.run.notes import Notes, read_notes
from atropos_tui.monitor.run.run_files import exit_code, moment, read_info, read_json, within
from atropos_tui.monitor.run.series import mean
from atropos_tui.profile.ports import has_supervisor

MOST_OTHERS = 100  # runs offered for comparison, newest first
LIVE, UNFINISHED = "live", "unfinished"
AGES = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True)
class RunRow:
    """One run, from its files."""

    run: str
    name: str
    mode: str
    state: str
    """`live`, `waits` (in SLURM's queue), `ended CODE`, or `crashed`."""
    reason: str
    """Reason of its end, or of the wait."""
    started_at: float | None
    """First start in Unix seconds."""
    duration_s: float | None
    """From its newest start to its end, if known."""
    step: int | None
    training_steps: int | None
    reward: Number | None
    """Mean of the newest 20 steps."""
    held_out: Number | None
    """Newest held-out accuracy, from 0 to 1."""
    dir: Path
    step_s: Number | None = None
    """Mean seconds of one step, of the newest 20 steps."""
    note: str = ""
    tags: tuple[str, ...] = ()

    def cells(self, now: float) -> tuple[str, ...]:
        """Return the cells of `HEADINGS`."""
        steps = "–" if self.step is None else f"{self.step}/{self.training_steps or '–'}"
        ended = f": {self.reason}" if self.reason and self.state != "ended 0" else ""
        return (
            one_line(self.run),
            one_line(self.mode),
            age(self.started_at, now),
            duration(self.duration_s),
            steps,
            number(self.reward),
            "–" if self.held_out is None else f"{100 * self.held_out:.1f} %",
            one_line(f"{self.state}{ended}"),
            Notes(self.note, self.tags).line,
        )


HEADINGS = ("RUN", "MODE", "STARTED", "TOOK", "STEPS", "REWARD", "HELD OUT", "STATE", "NOTE")


FIGURES = HEADINGS[3:7]
SPARED = ("MODE", "TOOK", "HELD OUT")  # left out of a narrow table, in this order
# Width kept for the state before those columns are left out.
STATE_COLUMNS = 11


def table(runs: Sequence[RunRow], now: float, width: int | None = None) -> list[str]:
    """Return headings and a line for each run, with the columns that fit."""
    rows = [HEADINGS, *(run.cells(now) for run in runs)]
    kept = list(range(len(HEADINGS)))
    if width is not None or not any(run.note or run.tags for run in runs):
        kept.remove(HEADINGS.index("NOTE"))
    for name in SPARED:
        taken = sum(max(len(row[at]) for row in rows) + 2 for at in kept[:-1])
        if width is None or taken + STATE_COLUMNS <= width:
            break
        kept.remove(HEADINGS.index(name))
    right = [place for place, at in enumerate(kept) if HEADINGS[at] in FIGURES]
    return columns([[row[at] for at in kept] for row in rows], right)


def listed(run: RunDir, *, is_live: bool, now: float) -> RunRow:
    """Describe `run`; it is `UNFINISHED` if it neither lives nor has a result."""
    info, figures, notes = read_info(run), last_figures(run), read_notes(run)
    meta, result = read_json(run.run_json), read_json(run.result_json)
    code = None if is_live else exit_code(run)
    until = now if is_live else None if code is None else moment(result.get("ended_at"))
    started = moment(meta.get("started_at"))
    newest_start = moment(meta.get("resumed_at")) or started
    return RunRow(
        run=info.run_id or run.root.name,
        name=info.name,
        mode=info.mode,
        state=LIVE if is_live else UNFINISHED if code is None else f"ended {code}",
        reason="" if code is None else one_line(str(result.get("reason", ""))),
        started_at=started,
        duration_s=max(0.0, until - newest_start) if until and newest_start else None,
        step=figures.step,
        training_steps=info.training_steps,
        reward=figures.reward,
        held_out=figures.held_out,
        dir=run.root,
        step_s=figures.step_s,
        note=notes.text,
        tags=notes.tags,
    )


def age(when: float | None, now: float) -> str:
    """Return a text such as `2 h ago`."""
    if when is None:
        return "–"
    seconds = max(0.0, now - when)
    unit, size = next(((unit, size) for unit, size in AGES if seconds >= size), ("s", 1))
    return f"{seconds // size:.0f} {unit} ago"


def other_runs(root: Path) -> list[RunRow]:
    """Return the newest runs with trainer records: neighbours, and others of this user."""
    found = {}
    for path in [*within(root.parent), *within(registry())]:
        try:
            run = RunDir(path.resolve())
            if run.root != root.resolve() and run.telemetry_jsonl.is_file():
                started = moment(read_json(run.run_json).get("started_at"))
                found[run.root] = (path.stat().st_mtime if started is None else started, run)
        except (OSError, RuntimeError):
            continue  # unreadable, or deleted meanwhile; RuntimeError: a loop of links
    newest = sorted(found.values(), key=lambda item: item[0], reverse=True)[:MOST_OTHERS]
    now = time.time()
    rows = []
    for started, run in newest:
        row = listed(run, is_live=has_supervisor(run), now=now)
        rows.append(replace(row, run=run.root.name, started_at=started))
    return rows


R = TypeVar("R", bound=Record)
# An environment's newest records have one of each of its splits; this is their limit.
SPLITS = 16


@dataclass(frozen=True)
class LastFigures:
    """Newest figures of a run; None without data."""

    step: int | None
    reward: float | None
    """Mean of the newest 20 steps."""
    step_s: float | None
    """Mean seconds of a step, of the same steps."""
    held_out: float | None
    """First split of the first environment, as in the headline."""


def last_figures(run: RunDir) -> LastFigures:
    """Read the last records of `run`; an unreadable file has none."""
    steps = [step for step in _last(run.telemetry_jsonl, StepRecord, WINDOW) if step.rank == 0]
    times = [time for time in _last(run.telemetry_jsonl, TimingRecord, WINDOW) if time.rank == 0]
    accuracies = (_held_out(path) for path in sorted(run.root.glob("eval.*.jsonl")))
    return LastFigures(
        step=steps[-1].step if steps else None,
        reward=mean([real(step.reward_mean) for step in steps]),
        step_s=mean([real(time.step_s) for time in times]),
        held_out=next((found for found in accuracies if found is not None), None),
    )


def _held_out(path: Path) -> float | None:
    # The split that an environment wrote first.
    first = next(_records(path, EvalRecord, kind_words(EvalRecord.KIND), 0), None)
    newest = _last(path, EvalRecord, SPLITS) if first else []
    found = [one for one in newest if first and one.split == first.split]
    return real(found[-1].accuracy) if found else None


def _last(path: Path, kind: type[R], count: int) -> list[R]:
    words = kind_words(kind.KIND)
    # One more than needed: the first match may be cut.
    found = list(_records(path, kind, words, nth_from_end(path, words, count + 1)))
    return found[-count:]


def _records(path: Path, kind: type[R], words: tuple[bytes, ...], begin: int) -> Iterator[R]:
    # Records after byte `begin`; a line that is cut there is skipped.
    try:
        with open_regular(path) as file:
            file.seek(begin)
            for line in whole_lines(file):
                try:
                    record = parse_line(line) if any(each in line for each in words) else None
                except RecordError:
                    continue
                if isinstance(record, kind):
                    yield record
    except OSError:
        return
