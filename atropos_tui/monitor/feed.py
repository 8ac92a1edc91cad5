"""All streams of one run as one feed of records: telemetry, evaluations, the supervisor's journal.

`RunFeed.read` does file input and parsing, so call it off the event loop; what it returns is applied by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from atropos_common.record_tail import RecordTail, nth_from_end
from atropos_common.records import Record
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.run_info import RunInfo, read_info
from atropos_tui.monitor.state import ROLLOUTS_KEPT, RunState

_ROLLOUT = b'"kind":"rollout"'
"""As the trainer writes it; inside a text its quotation marks would be escaped."""


@dataclass
class Batch:
    """What one `read` brought."""

    records: list[Record]
    behind: bool
    """More is known to wait: read again at once."""
    anew: bool
    """A file was cut or replaced and comes again from its start: begin with a new `RunState`."""


@dataclass
class RunFeed:
    """Tails of every stream of `run`."""

    run: RunDir
    _tails: dict[Path, RecordTail] = field(default_factory=dict)
    _restarts: int = 0

    @property
    def bad_lines(self) -> int:
        """Lines that were no records, over all streams."""
        return sum(tail.bad_lines for tail in self._tails.values())

    def read(self) -> Batch:
        """One bounded chunk of every stream."""
        for path in (self.run.supervisor_jsonl, self.run.telemetry_jsonl, *self.run.root.glob("eval.*.jsonl")):
            if path not in self._tails:
                self._tails[path] = self._tail(path)
        records = [record for tail in self._tails.values() for record in tail.read()]
        restarts = sum(tail.restarts for tail in self._tails.values())
        if restarts != self._restarts:
            return self._start_over()
        return Batch(records, any(tail.behind for tail in self._tails.values()), False)

    def _tail(self, path: Path) -> RecordTail:
        """From the file's start, without the rollouts that a state would have forgotten again at its end."""
        return RecordTail(path, unread=_ROLLOUT, unread_before=nth_from_end(path, _ROLLOUT, ROLLOUTS_KEPT))

    def _start_over(self) -> Batch:
        """Read every stream from its start, so that one fresh state holds all of them."""
        self._tails = {path: RecordTail(path) for path in self._tails}
        self._restarts = 0
        return Batch([], True, True)


def load_run(root: Path) -> tuple[RunInfo, RunState, RunFeed]:
    """Everything the files of a run hold at this moment."""
    run = RunDir(root)
    feed, state = RunFeed(run), RunState()
    while True:
        batch = feed.read()
        if batch.anew:
            state = RunState()
        for record in batch.records:
            state.apply(record)
        if not batch.behind:
            return read_info(run), state, feed
