"""`compare`: several stacks side by side or in turn, and one table at the end.

Each stack has its own supervisor and run directory, and goes on if this program is killed. An
interrupt stops them all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from atropos_common.system.files import write_private
from atropos_common.system.run_dir import RunDir, safe_text
from atropos_tui.cli import show
from atropos_tui.cli.manage import runs
from atropos_tui.cli.manage.control import bring_down
from atropos_tui.cli.results.report import overlay
from atropos_tui.cli.start.profiles import checked, read_env_files
from atropos_tui.cli.start.up import spawn_supervisor, write_run_files
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.bench import Progress, benchmark_runs, benchmarks_json, render_benchmarks
from atropos_tui.monitor.format import plain_text, text_table
from atropos_tui.monitor.overlay import read_runs, settings_table
from atropos_tui.profile.budget.inventory import read_machine
from atropos_tui.profile.checks.preflight import separate
from atropos_tui.profile.errors import refused
from atropos_tui.profile.load import find_profile
from atropos_tui.profile.profile import Profile, load_profile
from atropos_tui.profile.site import make_site
from atropos_tui.profile.spec import StackSpec
from atropos_tui.streams import write_own

POLL_S = 0.2
REDRAW_S = 0.5
PAGE = "overlay.html"
REPEAT_S = 10.0
"""Seconds between two lines about a stack while only its figures change."""
WORST_FIRST = (Exit.FAULT, Exit.COMPONENT_FAILED, Exit.TIMEOUT, Exit.USAGE, Exit.INTERRUPTED)


@dataclass(eq=False)
class ComparedStack:
    """One stack of the comparison; compared by identity."""

    label: str
    """Name of its run directory and column; `LABEL:key=value` sets a key of this stack."""
    name: str
    """PROFILE as given."""
    sets: list[str] = field(default_factory=list)
    profile: Profile = field(init=False)
    """Set by `load`."""
    root: Path = field(init=False)
    """Run directory, known before the plan."""
    spec: StackSpec = field(init=False)
    """Set after every check has passed."""
    progress: Progress | None = None
    """None before the start."""
    note: str = "waits for its turn"
    code: int | None = None

    @property
    def phase(self) -> str:
        return self.progress.phase if self.progress else self.note

    def line(self) -> str:
        return self.progress.line() if self.progress else self.note

    def has_settled(self, component: str) -> bool:
        return self.progress is not None and self.progress.settled(component)


async def compare(options: argparse.Namespace) -> int:
    """Start every stack, follow all to their ends, print the table; return the worst exit code."""
    entries = label_entries(options)
    if len(entries) < 2:
        name, label = entries[0].name, entries[0].label
        fix = (
            f"name two, or the same one twice with a difference: atropos-tui compare {name} "
            f"{name} --set "
            f"{label}-2:trainer.lr=1e-5; to run one stack: atropos-tui up {name}"
        )
        raise UserError(
            "compare needs at least two stacks", [Problem(f"{name} is the only one", fix)]
        )
    base = (options.run_dir or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    if runs.is_used(base):
        raise UserError(
            "the directory is in use", [Problem(f"{base} is not empty", "choose another --run-dir")]
        )
    said = prepare(entries, base, sequential=options.sequential)
    board = Board(entries, sys.stderr if options.json else sys.stdout)
    how = "one after another" if options.sequential else "side by side"
    board.say(f"comparing {len(entries)} stacks {how}: {base}")
    for line in said:
        board.say(f"  {line}")
    code = await Comparison(entries, board, sequential=options.sequential).run()
    print_results(entries, board, as_json=options.json)
    write_overlay(started(entries), base, board)
    return code


def label_entries(options: argparse.Namespace) -> list[ComparedStack]:
    """One entry per PROFILE, labelled by its file (`demo`, `demo-2`, ...)."""
    entries: list[ComparedStack] = []
    problems: list[Problem] = []
    for name in options.profiles:
        # Labels name folders and columns, so they are short and safe as file names.
        stem = safe_text(Path(name).stem).lstrip("._-")[:40] or "profile"
        taken = {entry.label for entry in entries}
        labels = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        label = next(each for each in labels if each not in taken)
        entries.append(ComparedStack(label, name))
    by_label = {entry.label: entry for entry in entries}
    for item in options.sets:
        if ":" not in item.partition("=")[0]:
            for entry in entries:
                entry.sets.append(item)
            continue
        label, _, own = item.partition(":")
        if label in by_label:
            by_label[label].sets.append(own)
        else:
            problems.append(
                Problem(
                    f"no stack is called {label!r}", f"one of: {', '.join(by_label)}", "--set", item
                )
            )
    if problems:
        raise refused(problems, "invalid --set")
    if options.steps is not None:
        for entry in entries:
            entry.sets.append(f"trainer.training_steps={options.steps}")
    return entries


def prepare(entries: Sequence[ComparedStack], base: Path, *, sequential: bool) -> list[str]:
    """Check every stack before any is started.

    Returns:
        Lines about settings changed so that the stacks fit side by side.

    Raises:
        UserError: lists every problem of every profile.
    """
    each(entries, load)
    said: list[str] = []
    if not sequential:
        changes = separate(
            {entry.label: entry.profile for entry in entries}, len(read_machine().gpus)
        )
        if changes.problems:
            raise refused(changes.problems, "these stacks do not fit side by side")
        said = changes.lines
        # Load again with the new ports and GPUs, so that the profile that is written has them too.
        for entry in entries:
            entry.sets += changes.sets[entry.label]
        each(entries, load)
        without_gpus = [
            entry.label for entry in entries if not any(part.gpus for part in entry.profile.vllm)
        ]
        if len(without_gpus) > 1:
            share = f"{', '.join(without_gpus)} share {os.cpu_count()} processors"
            said.append(f"{share}: to measure each on its own add --sequential")

    for entry in entries:
        entry.root = base / entry.label
    each(entries, plan)
    return said


def plan(entry: ComparedStack, *, resumed_id: str | None = None) -> None:
    """Check a loaded entry and set what it starts; `resumed_id` continues that run.

    Raises:
        UserError: lists every problem.
    """
    file = find_profile(entry.name)
    run_id = resumed_id or runs.new_run_id(entry.label)
    site = make_site(entry.profile, entry.root, run_id=run_id, dotenv=read_env_files(file))
    ready = checked(entry.profile, file, site, machine=True, resumed=resumed_id is not None)
    entry.profile, entry.spec = ready.site.profile, ready.stack


def load(entry: ComparedStack) -> None:
    """Read the entry's profile with its own overrides."""
    entry.profile, _ = load_profile(entry.name, entry.sets)


def each(entries: Sequence[ComparedStack], work: Callable[[ComparedStack], None]) -> None:
    """Call `work` for every entry, and raise all problems together."""
    problems: list[Problem] = []
    several = Counter(entry.name for entry in entries)
    for entry in entries:
        try:
            work(entry)
        except UserError as error:
            for problem in error.problems or [Problem(error.title)]:
                if several[entry.name] > 1:  # the same file twice: tell which entry has the problem
                    line = f":{problem.line}" if problem.line else ""
                    problem = replace(
                        problem, file=f"{problem.file}{line} ({entry.label})", line=None
                    )
                problems.append(problem)
    if problems:
        raise refused(problems, "these stacks cannot be started")


class Board:
    def __init__(self, entries: Sequence[ComparedStack], to: TextIO) -> None:
        self._entries = entries
        self._to = to
        self._live = to.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = 0
        """Lines that the next drawing replaces."""
        self._width = max(len(entry.label) for entry in entries)
        self._last = {entry.label: ("", 0.0) for entry in entries}

    def say(self, line: str) -> None:
        self._print(plain_text(line) + "\n")
        self._drawn = 0

    def draw(self) -> None:
        columns, rows = shutil.get_terminal_size()
        entries = self._entries
        if self._live and len(entries) >= rows:
            # More lines than rows would scroll, and the cursor could not return to the first one.
            entries = [entry for entry in entries if entry.progress and entry.code is None][
                : rows - 1
            ]
        lines = [plain_text(f"{entry.label:<{self._width}}  {entry.line()}") for entry in entries]
        if self._live:
            # Cursor up to the first live line (F), each line cleared (2K), and the rest of an
            # earlier, longer board (J).
            up = f"\x1b[{self._drawn}F" if self._drawn else ""
            text = "".join(f"\x1b[2K{line[: columns - 1]}\n" for line in lines)
            self._print(up + text + ("\x1b[J" if len(lines) < self._drawn else ""))
            self._drawn = len(lines)
            return
        for entry, line in zip(entries, lines, strict=True):
            phase, when = self._last[entry.label]
            if entry.phase != phase or (
                line and time.monotonic() - when > REPEAT_S and entry.code is None
            ):
                self._last[entry.label] = entry.phase, time.monotonic()
                self._print(line + "\n")

    def _print(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader has left; the stacks go on
            write_own(self._to, text)


class Comparison:
    """Runs the stacks; the first interrupt stops them, the second kills the rest."""

    def __init__(self, entries: Sequence[ComparedStack], board: Board, *, sequential: bool) -> None:
        self._entries = entries
        self._board = board
        self._sequential = sequential
        self._interrupts = 0
        self._over = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run until every stack has ended; return the worst exit code."""
        loop = asyncio.get_running_loop()
        # Instead of asyncio's own handler, which would cancel this task before the stacks have
        # stopped.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        drawing = asyncio.create_task(self._draw())
        try:
            await self._all()
            await asyncio.gather(
                *self._stopping
            )  # a stop returns a little later than its stack's end
        finally:
            self._over.set()
            await drawing
        if self._interrupts:
            return Exit.INTERRUPTED
        codes = [entry.code for entry in self._entries]
        return next((code for code in WORST_FIRST if code in codes), Exit.DONE)

    async def _all(self) -> None:
        if self._sequential:
            for entry in self._entries:
                await self._one(entry)
        else:
            await asyncio.gather(*(self._one(entry) for entry in self._entries))

    async def _draw(self) -> None:
        last = False
        while not last:
            last = (
                self._over.is_set()
            )  # read before drawing, so that the final state is drawn as well
            for entry in self._entries:
                if entry.progress is not None:
                    await asyncio.to_thread(entry.progress.refresh)
            self._board.draw()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), REDRAW_S)

    async def _one(self, entry: ComparedStack) -> None:
        await self._wait_for_shared_steps(entry)
        if self._interrupts:
            entry.note = "not started"
            return
        try:
            await asyncio.to_thread(start, entry)  # waits for the supervisor's socket
        except UserError as error:
            entry.note = str(error).replace("\n", "; ")
            entry.code = error.exit_code
            return
        await self._follow(entry)

    async def _follow(self, entry: ComparedStack) -> None:
        run = RunDir(entry.root)
        entry.progress = Progress(run)
        if self._interrupts:  # the interrupt came while the supervisor was starting
            self._stop(entry)
        while runs.RunEntry(run, {}).is_live:
            await asyncio.sleep(POLL_S)
        result = runs.read_result(run)
        entry.code = int(result["exit_code"]) if result else Exit.FAULT

    async def _wait_for_shared_steps(self, entry: ComparedStack) -> None:
        """Wait while an earlier stack runs a prepare step that this one shares: both would write
        the same files."""
        for other in self._before(entry):
            for step in sorted(_creates(entry.spec).keys() & _creates(other.spec).keys()):
                name = _creates(other.spec)[step]
                while other.code is None and not self._interrupts and not other.has_settled(name):
                    entry.note = f"waits for {name} of {other.label}"
                    await asyncio.sleep(POLL_S)

    def _before(self, entry: ComparedStack) -> Sequence[ComparedStack]:
        """Entries that may run a prepare step which `entry` shares."""
        return self._entries[: self._entries.index(entry)]

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._board.say("stopping every stack; interrupt again to kill them")
        else:  # a third interrupt ends this program, whatever the stacks do
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)
        for entry in self._entries:
            if entry.progress is not None and entry.code is None:
                self._stop(entry)

    def _stop(self, entry: ComparedStack) -> None:
        self._stopping.add(
            asyncio.create_task(self._bring_down(entry, 0.0 if self._interrupts > 1 else None))
        )

    async def _bring_down(self, entry: ComparedStack, timeout_s: float | None) -> None:
        try:
            await bring_down(entry.root, timeout_s)
        except UserError as error:
            self._board.say(f"{entry.label}: {error}")


def _creates(stack: StackSpec) -> dict[str, str]:
    """Path -> one-shot component that creates it."""
    return {part.creates: part.name for part in stack.components if part.creates}


def start(entry: ComparedStack) -> None:
    run = RunDir(entry.root)
    run.create()
    write_run_files(run, entry.spec, entry.profile)
    runs.remember(run, entry.spec.run_id)
    spawn_supervisor(run, entry.spec)


def started(entries: Sequence[ComparedStack]) -> list[Path]:
    return [entry.root for entry in entries if entry.progress is not None]


def write_overlay(roots: Sequence[Path], base: Path, board: Board) -> None:
    trained = [run for run in read_runs(roots) if run.state.step]
    if len(trained) < 2:
        return
    try:
        write_private(base / PAGE, overlay(trained))
        board.say(f"curves on the same axes: {base / PAGE}")
    except (
        UserError,
        OSError,
    ) as error:  # such as missing packages for charts; the table is printed already
        board.say(f"no page with curves: {error}")


def print_results(entries: Sequence[ComparedStack], board: Board, *, as_json: bool) -> None:
    """Print the table of figures, then how failed stacks ended."""
    figures = benchmark_runs(started(entries))
    if as_json:
        print(benchmarks_json(figures))
    elif figures:
        print(f"\n{render_benchmarks(figures)}\n")
        if apart := settings_table(read_runs(started(entries))):
            print(f"{text_table(apart)}\n")
    print_failures(entries, board)


def print_failures(entries: Sequence[ComparedStack], board: Board) -> None:
    for entry in entries:
        run = RunDir(entry.root)
        result = runs.read_result(run)
        if entry.progress is None:
            board.say(f"{entry.label}: {entry.note}")
        elif entry.code:
            ending = show.ending(result) if result else "its supervisor was killed: no result.json"
            for line in f"{entry.label}: {ending}\n  files: {run.root}".splitlines():
                board.say(line)
