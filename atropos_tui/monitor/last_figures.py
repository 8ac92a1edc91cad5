"""The newest figures of a run, from the ends of its files: so that a list of many runs need not read them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from atropos_common.files import open_regular
from atropos_common.record_tail import nth_from_end, whole_lines
from atropos_common.records import EvalRecord, Record, RecordError, StepRecord, parse_line
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.bench import WINDOW
from atropos_tui.monitor.format import real
from atropos_tui.monitor.series import mean

R = TypeVar("R", bound=Record)
SPLITS = 16
"""Of an environment, at most: its newest records hold one of each."""


@dataclass(frozen=True)
class LastFigures:
    """None where there is no data."""

    step: int | None
    """Newest optimizer step."""
    reward: float | None
    """Mean of the newest `WINDOW` steps."""
    held_out: float | None
    """Newest accuracy of the first split of the first environment that reports one, as the sentence on top has it."""


def last_figures(run: RunDir) -> LastFigures:
    """Read the last few records of `run`; a file that cannot be read has none."""
    steps = [step for step in _last(run.telemetry_jsonl, StepRecord, WINDOW) if step.rank == 0]
    accuracies = (_held_out(path) for path in sorted(run.root.glob("eval.*.jsonl")))
    return LastFigures(
        step=steps[-1].step if steps else None,
        reward=mean([real(step.reward_mean) for step in steps]),
        held_out=next((found for found in accuracies if found is not None), None),
    )


def _held_out(path: Path) -> float | None:
    """The newest accuracy of the split that an environment wrote first."""
    first = next(_records(path, EvalRecord, _words(EvalRecord), 0), None)
    found = [one for one in _last(path, EvalRecord, SPLITS) if first is not None and one.split == first.split]
    return real(found[-1].accuracy) if found else None


def _last(path: Path, kind: type[R], count: int) -> list[R]:
    """The last `count` records of a kind, oldest first."""
    words = _words(kind)
    found = list(_records(path, kind, words, nth_from_end(path, words, count + 1)))
    return found[-count:]


def _words(kind: type[Record]) -> bytes:
    """In every line of a kind."""
    return f'"kind":"{kind.KIND}"'.encode()


def _records(path: Path, kind: type[R], words: bytes, begin: int) -> Iterator[R]:
    """Those behind byte `begin`, which may lie within a line: that one is left out."""
    try:
        with open_regular(path) as file:
            file.seek(begin)
            for line in whole_lines(file):
                try:
                    record = parse_line(line) if words in line else None
                except RecordError:
                    continue
                if isinstance(record, kind):
                    yield record
    except OSError:
        return
