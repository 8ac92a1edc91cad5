from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from atropos_common.system.files import names_in
from atropos_common.system.run_dir import RunDir, is_safe_name
from atropos_tui.cli.manage import runs
from atropos_tui.cli.show import has_colour
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.log_reader import LogLine, LogReader, MergedLogs
from atropos_tui.monitor.patterns import Pattern, PatternError
from atropos_tui.monitor.run.run_files import read_info
from atropos_tui.profile.errors import did_you_mean
from atropos_tui.supervisor.processes.logs import attempts

Show = Callable[[LogLine], str]

FOLLOW_S = 0.05
"""Seconds between two reads of growing files."""
LINES = 200
"""Number of lines without -n and --since."""
LIVE_S = 0.5
"""Seconds between two checks of whether the run is live."""
AT_ONCE = 1000
"""Lines per search, and per write to the terminal."""
COLOURS = (36, 33, 32, 35, 34, 96)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Filter:
    """Selects lines by time and pattern."""

    pattern: Pattern | None
    since: float

    def of(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the selected lines, safe for a terminal."""
        source = (line for line in lines if line.time >= self.since)
        if self.pattern is None:
            yield from (line._replace(text=one_line(line.text)) for line in source)
            return
        while batch := list(itertools.islice(source, AT_ONCE)):
            # The pattern may match the text as shown or as printed, with its colour codes.
            shown, printed = [one_line(line.text) for line in batch], [line.text for line in batch]
            matching = set(self.pattern.matching(shown))
            if shown != printed:
                matching.update(self.pattern.matching(printed))
            yield from (batch[number]._replace(text=shown[number]) for number in sorted(matching))


@dataclass(frozen=True)
class Prefix:
    """Formats a line with time and component, in its colour."""

    names: list[str]
    colour: bool
    today: str

    def __call__(self, line: LogLine) -> str:
        when = datetime.fromtimestamp(line.time)
        day = "" if str(when.date()) == self.today else f"{when.date()} "
        label = line.component if line.attempt == 1 else f"{line.component}#{line.attempt}"
        head = (
            f"{day}{when:%H:%M:%S}.{when.microsecond // 1000:03d} "
            f"{label:<{max(map(len, self.names)) + 2}}"
        )
        if self.colour:
            number = self.names.index(line.component) % len(COLOURS)
            head = f"\x1b[{COLOURS[number]}m{head}\x1b[0m"
        return f"{head} {line.text}"


def as_json(line: LogLine) -> str:
    """A line as `LogRow`, without building the pydantic model."""
    return json.dumps(
        {"time": line.time, "component": line.component, "attempt": line.attempt, "text": line.text}
    )


async def logs(options: argparse.Namespace) -> int:
    entry, chosen = runs.with_components(options.words, options.run_dir)
    since = -math.inf if options.since is None else moment(options.since, datetime.now())
    wanted = Filter(compiled(options.grep), since)
    names, readers = _readers(entry.dir, chosen, options)
    count = _count(options)
    for reader in readers:
        # The last N lines overall are among the last N of each component, unless a pattern drops
        # some.
        reader.skip(math.inf if options.grep else count, since)
    merged = MergedLogs(readers)
    alone = options.no_prefix or len(chosen) == 1
    prefix = Prefix(names, has_colour(), str(datetime.now().date()))
    show: Show = as_json if options.json else (lambda line: line.text) if alone else prefix
    first = wanted.of(merged.ready() if options.follow else merged.rest())
    # Without a limit, lines are printed as they are read; a limit needs the last ones, so all are
    # read first.
    shown = _print(first if count == math.inf else deque(first, maxlen=int(count)), show)
    if options.follow:
        await _follow(entry, merged, wanted, show)
    elif not shown and options.since is not None:
        print(
            f"no matching line since {datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S}",
            file=sys.stderr,
        )
    return Exit.DONE


async def _follow(entry: runs.RunEntry, merged: MergedLogs, wanted: Filter, show: Show) -> None:
    live, asked = True, -math.inf
    while live:
        if time.monotonic() - asked >= LIVE_S:
            live, asked = (
                entry.is_live,
                time.monotonic(),
            )  # before the read, so that the last read gets every line
        _print(wanted.of(merged.ready() if live else merged.rest()), show)
        if live:
            await asyncio.sleep(FOLLOW_S)


def _print(lines: Iterable[LogLine], show: Show) -> int:
    count, source = 0, iter(lines)
    while batch := list(itertools.islice(source, AT_ONCE)):
        count += len(batch)
        print("\n".join(map(show, batch)), flush=True)
    return count


def _readers(
    run: RunDir, chosen: list[str], options: argparse.Namespace
) -> tuple[list[str], list[LogReader]]:
    """Names and readers of the chosen components, or of all in plan order."""
    planned = [part.name for part in read_info(run).components if is_safe_name(part.name)]
    known = list(dict.fromkeys([*planned, *names_in(run.logs, folders=True)]))
    names = list(dict.fromkeys(chosen)) or known
    # Folders count as well: a resumed run may have a new plan without an earlier component.
    if unknown := [name for name in names if name not in known]:
        fixes = [f"{did_you_mean(name, known)}one of: {', '.join(known)}" for name in unknown]
        problems = [
            Problem(f"{name!r} is not part of this run", fix)
            for name, fix in zip(unknown, fixes, strict=True)
        ]
        raise UserError("no such component", problems)
    attempt = _attempt(options.attempt)
    readers = [LogReader(run.logs / name, attempt) for name in names]
    if isinstance(attempt, int) and not any(reader.path for reader in readers):
        have = {
            name: sorted(int(path.stem) for path in attempts(run.logs / name)) for name in names
        }
        listed = ", ".join(
            f"{name}: {' '.join(map(str, numbers)) or 'none'}" for name, numbers in have.items()
        )
        raise UserError(
            f"no attempt {attempt}",
            [Problem(f"attempts with a log: {listed}", "--attempt all shows all")],
        )
    silent = [name for name, reader in zip(names, readers, strict=True) if reader.path is None]
    for name in silent if chosen else []:
        print(f"{name} has not printed anything yet", file=sys.stderr)
    return names, readers


def _attempt(text: str | None) -> int | Literal["all"] | None:
    if text is None or text == "all":
        return "all" if text else None
    if not text.isdecimal():
        raise UserError(
            "invalid --attempt",
            [Problem(f"{text!r} is not a number", "e.g. --attempt 2, --attempt all")],
        )
    return int(text)


def _count(options: argparse.Namespace) -> float:
    if options.lines is None:
        return LINES if options.since is None else math.inf
    return float(options.lines)


def compiled(pattern: str | None) -> Pattern | None:
    """Raises:
    UserError: it is not a regular expression.
    """
    try:
        return Pattern(pattern) if pattern else None
    except PatternError as error:
        raise UserError("invalid --grep", [Problem(f"not a regular expression: {error}")]) from None


def moment(text: str, now: datetime) -> float:
    """--since in Unix seconds: `90s`, `5m`, `2h`, `1d` ago; `HH:MM[:SS]`; a date, or date and time.

    Raises:
        UserError: it is none of these.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return max(0.0, now.timestamp() - float(match[1]) * UNITS[match[2]])
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            # A time later than now is yesterday's.
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()
            at = datetime.combine(now.date(), clock)
            return (at if at <= now else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        fix = "e.g. --since 5m, --since 14:30, --since 2026-11-02T14:30"
        raise UserError("invalid --since", [Problem(f"not a time: {text!r}", fix)]) from None
