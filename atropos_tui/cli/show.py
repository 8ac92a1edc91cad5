"""Text for terminals: events, component tables, ends of runs, live lines.

Printing runs in a thread: a paused terminal must not block a supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from atropos_common.protocol.control import ComponentStatus, GpuStatus, Recipe, RunStatus, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    ProbeRecord,
    StageRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.format import (
    TONES,
    Tone,
    bytes_text,
    columns,
    duration,
    glyph_and_word,
    number,
    one_line,
    reason_of,
    seconds_text,
)
from atropos_tui.monitor.run.run_files import is_crashed
from atropos_tui.monitor.why import next_stage

T = TypeVar("T")
_BEYOND_ASCII = re.compile("[^ -~\n]")
READ_EVERY_S = 0.5
"""Seconds between two reads of the telemetry of a run without a screen."""
STEP_LINE_EVERY_S = 2.0
"""Seconds between two lines about training."""
FLUSH_TIMEOUT_S = 2.0
"""Seconds that the end of a command waits for a reader."""
PARTING_S = 60.0
BACKLOG = 10_000
"""Lines that wait to be printed."""


def ascii_json(text: str) -> str:
    return _BEYOND_ASCII.sub(lambda found: json.dumps(found.group())[1:-1], text)


ANSI_COLOURS: dict[Tone, str] = {"good": "32", "busy": "36", "warn": "33", "bad": "31", "dim": "2"}
"""Colours of the terminal's own palette; a glyph carries the same meaning without colour."""
_STATES = re.compile(f"(?<=  )(?:{'|'.join(re.escape(glyph_and_word(state)) for state in State)})")
"""State words in a column; in a sentence they are ordinary words."""


def has_colour() -> bool:
    """Standard output is a terminal that wants colours (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def inked(text: str, tone: Tone) -> str:
    return f"\x1b[{ANSI_COLOURS[tone]}m{text}\x1b[0m" if has_colour() else text


def painted(text: str) -> str:
    """Colour each component's state in `text`."""
    return _STATES.sub(lambda found: inked(found[0], TONES[found[0].split()[-1]]), text)


def event_line(record: Record) -> str:
    """One record as one line (a diagnosis takes three)."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.time))
    match record:
        case StateRecord():
            reason = f"  ({reason_of(record)})" if record.reason else ""
            return f"{clock}  {record.component or '':<14} {record.old} → {record.new}{reason}"
        case ProbeRecord():
            said = (
                f"{record.probe} check {'passed' if record.ok else 'failed'}  "
                f"{one_line(record.detail)}"
            )
            return f"{clock}  {record.component or '':<14} {said}".rstrip()
        case StageRecord():
            return f"{clock}  {record.component or '':<14} reached: {one_line(record.stage)}"
        case CommandRecord():
            target = f" {record.component}" if record.component else ""
            return (
                f"{clock}  command        {record.action}{target}: {record.status}  "
                f"{one_line(record.detail)}"
            ).rstrip()
        case DiagnosisRecord(over=True):
            return (
                f"{clock}  {record.component or '':<14} over: {one_line(record.title)} "
                f"({one_line(record.evidence)})"
            )
        case DiagnosisRecord():
            return (
                f"{clock}  {record.component or '':<14} {one_line(record.title)}\n"
                f"{'':<10}evidence: {one_line(record.evidence)}\n{'':<10}fix: "
                f"{one_line(record.fix)}"
            )
    return f"{clock}  {record.kind}"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Align columns; the first row is the header."""
    return "\n".join(columns(rows, right))


def ps_table(status: RunStatus, said: str = "", now: float | None = None) -> str:
    """Components of a run; `said` is the verdict, shown below the title."""
    now = time.time() if now is None else now
    # The column is left out on machines without GPUs.
    gpu = (
        ("GPU",) if any(component.gpu_bytes is not None for component in status.components) else ()
    )
    head = (
        "COMPONENT",
        "ROLE",
        "STATE",
        "PID",
        "UPTIME",
        "RESTARTS",
        "MEMORY",
        *gpu,
        "CPU",
        "PORT",
        "NOTE",
    )
    rows = [head, *(_ps_row(component, now, with_gpu=bool(gpu)) for component in status.components)]
    phase = "crashed" if is_crashed(status) else status.phase
    title = f"{status.run_id}  {status.mode}  {phase}" + (
        f"  ({one_line(status.reason)})" if status.reason else ""
    )
    heading = [title, said] if said else [title]
    return "\n".join(
        [*heading, table(rows, right=range(3, len(head) - 1)), *map(_gpu_line, status.gpus)]
    )


def _gpu_line(gpu: GpuStatus) -> str:
    """Total use of one GPU, our processes and others."""
    busy = "" if gpu.utilization_percent is None else f", {gpu.utilization_percent} % busy"
    name = f" ({one_line(gpu.name)})" if gpu.name else ""
    return (
        f"GPU {gpu.index}{name}: {bytes_text(gpu.used_bytes)} of {bytes_text(gpu.total_bytes)} "
        f"used{busy}"
    )


def _ps_row(component: ComponentStatus, now: float, *, with_gpu: bool) -> tuple[str, ...]:
    alive = component.pid is not None and component.started_at is not None
    # The most useful of three: a current wait, a known cause, or the reason of the last change of
    # state.
    note = component.waiting_for or component.diagnosis or component.reason
    if component.state is State.HEALTHY:  # a healthy component may still have start-up stages left
        stage = next_stage(component)
        note = f"waiting for: {stage.name}" if stage else ""
    return (
        component.name,
        component.role.value,
        glyph_and_word(component.state),
        str(component.pid or "-"),
        duration(now - component.started_at) if alive and component.started_at else "-",
        str(component.restarts),
        bytes_text(component.memory_bytes),
        *([bytes_text(component.gpu_bytes)] if with_gpu else []),
        "-" if component.cpu_percent is None else f"{component.cpu_percent:.0f}%",
        str(component.port or "-"),
        one_line(note),
    )


def confirmed(question: str) -> bool:
    """Ask a yes/no question; the end of the input means no."""
    try:
        print(f"{question} [y/N] ", end="", flush=True)  # `input(prompt)` would bypass the gate
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def recipe_text(recipe: Recipe) -> str:
    target = f" {recipe.component}" if recipe.component else ""
    lines = [f"{recipe.action}{target}"]
    if recipe.stop:
        lines.append(f"  stops:  {' → '.join(recipe.stop)}")
    if recipe.start:
        lines.append(f"  starts: {' → '.join(recipe.start)}")
    if recipe.note:
        lines.append(f"  note:   {recipe.note}")
    return "\n".join(lines)


def ending(result: dict[str, Any]) -> str:
    """How a run ended; after a failure with the component and its last lines."""
    code = result.get("exit_code")
    lines = [f"run ended with code {code}: {one_line(str(result.get('reason', '')))}"]
    last = result.get("last_lines") or []
    if code and last:
        lines.append(f"last lines of {result.get('component')}:")
        lines += [f"  | {one_line(str(line))}" for line in last]
    return "\n".join(lines)


class StepLines:
    """Prints new optimizer steps; those of earlier attempts are not repeated."""

    def __init__(self, run: RunDir, training_steps: int | None, say: Callable[[str], None]) -> None:
        self._tail = RecordTail(run.telemetry_jsonl, from_end=True)
        self._total = training_steps
        self._say = say
        self._began = time.time()
        self._step: StepRecord | None = None
        self._timing: TimingRecord | None = None
        self._unprinted = ""
        self._printed_at = 0.0
        self._looking = threading.Lock()
        """Serialises reads: a cancelled one goes on in its thread for a moment."""

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Print steps while `work` runs, and return its result."""
        following = asyncio.create_task(self._follow())
        try:
            return await work
        finally:
            # Cancelled first, so that the last step is printed after the follower's own lines.
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self.finish()

    async def _follow(self) -> None:
        while True:
            # In a thread: a slow disk must not delay the supervisor, which shares this event loop.
            await asyncio.to_thread(self.look)
            await asyncio.sleep(READ_EVERY_S)

    def look(self, *, last: bool = False) -> None:
        """Read new records, and print the newest step if it is due or `last`."""
        with self._looking:
            self._read()
            if self._unprinted and (
                last or time.monotonic() - self._printed_at >= STEP_LINE_EVERY_S
            ):
                self._say(self._unprinted)
                self._unprinted, self._printed_at = "", time.monotonic()

    def finish(self) -> None:
        self.look(last=True)

    def _read(self) -> None:
        while True:
            for record in self._tail.read():
                # Only rank 0 is shown; records from before the start belong to an earlier attempt.
                if (
                    record.time < self._began
                    or not isinstance(record, StepRecord | TimingRecord)
                    or record.rank
                ):
                    continue
                if isinstance(record, StepRecord):
                    self._step = record
                else:
                    self._timing = record
                step, timing = self._step, self._timing
                # A step and its timing are two records; the line needs both of the same step.
                if step and timing and (step.attempt, step.step) == (timing.attempt, timing.step):
                    self._unprinted = step_line(step, timing, self._total)
            if not self._tail.behind:
                return


def step_line(step: StepRecord, timing: TimingRecord, total: int | None) -> str:
    """One optimizer step in the columns of the events."""
    clock = time.strftime("%H:%M:%S", time.localtime(step.time))
    count = f"{step.step:>{len(str(total))}}/{total}" if total else str(step.step)
    return (
        f"{clock}  {'trainer':<14} step {count}  reward {number(step.reward_mean):>6}  loss "
        f"{number(step.loss):>8}  "
        f"{seconds_text(timing.step_s):>8}/step  {number(timing.tokens_per_s):>7} tok/s"
    )


class Printer:
    """Prints lines in a thread behind a bounded queue; reports at the end how many did not fit."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(BACKLOG)
        self._dropped = 0
        self._thread = threading.Thread(target=self._print, name="printer", daemon=True)

    def say(self, line: str) -> None:
        try:
            # Never blocks: the caller is the supervisor's event loop.
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def __enter__(self) -> Printer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._dropped:
            self.say(f"({self._dropped} lines were not printed; `atropos-tui events` shows them)")
        try:
            self._lines.put(None, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(FLUSH_TIMEOUT_S)

    def _print(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                print(line, flush=True)
            except (BrokenPipeError, ValueError):
                return  # the reader has left; the run goes on


@contextlib.contextmanager
def exit_if_blocked(code: int, patience_s: float = PARTING_S) -> Iterator[None]:
    """Exit with `code` after `patience_s` seconds if the last output blocks on a paused
    terminal."""
    # os._exit: an ordinary exit would flush the blocked output and hang as well.
    timer = threading.Timer(patience_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
