"""What a screen reads of the components' logs: one, or all in order of arrival. `LogFeed(run).read(name)`, in a thread.

It keeps a screen fresh whatever is printed: in a flood it jumps ahead and leaves a marker, since the file has the rest.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

from atropos_tui.monitor.log_buffer import Classifier, Entry
from atropos_tui.monitor.merged import due
from atropos_tui.monitor.plain import bytes_text, plain_text
from atropos_tui.monitor.tail import LogTail, newest_log
from atropos_tui.supervisor.log_times import LogTimes
from atropos_tui.supervisor.record_tail import CHUNK_BYTES
from trainer_core.contracts.run_dir import RunDir

FLOOD_BYTES = 32 * 1024
"""Read at once while more comes than can be shown: some hundred lines, each of which costs the screen time."""
CALM_READS = 20
"""So many reads without a jump end a flood."""
CHUNKS_AT_END = 16
"""Read of an attempt that is over before its successor is shown."""


class _Component:
    """One component's log, through its attempts."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._folder = folder
        self._tail: LogTail | None = None
        self._times: tuple[LogTimes, BinaryIO] | None = None
        self._classify = Classifier()
        self._calm = CALM_READS

    @property
    def path(self) -> Path | None:
        """The log that is being read."""
        return self._tail.path if self._tail else None

    def read(self, *, timed: bool) -> list[Entry]:
        newest = newest_log(self._folder)
        if newest is None:
            return []
        entries: list[Entry] = []
        if self._tail is not None and newest != self._tail.path:
            for _ in range(CHUNKS_AT_END):
                more = self._chunk(self._tail, timed)
                entries += more
                if not more:
                    break
            entries.append(Entry("note", f"── attempt {newest.stem} of {self.name} ──", self.name, time.time()))
            self._tail = None
        if self._tail is None:
            self._tail, self._calm = LogTail(newest), CALM_READS
            self.close()
        return entries + self._chunk(self._tail, timed)

    def _chunk(self, tail: LogTail, timed: bool) -> list[Entry]:
        flood = self._calm < CALM_READS
        tail.history_bytes = FLOOD_BYTES if flood else CHUNK_BYTES
        was_begun = tail.begun
        lines, skipped = tail.read(FLOOD_BYTES if flood else CHUNK_BYTES)
        self._calm = 0 if skipped and was_begun else self._calm + 1
        ends = tail.ends if timed and lines else []
        when = self._arrivals(tail, ends) if timed else [0.0] * len(lines)
        entries = []
        if skipped:
            where = f"{tail.path.parent.name}/{tail.path.name}"
            words = "skipped here" if was_begun else "earlier"
            at = when[0] if when else time.time()
            entries.append(Entry("note", f"··· {bytes_text(skipped)} {words}, in {where} ···", self.name, at))
        for line, at in zip(lines, when, strict=True):
            text = plain_text(line)
            entries.append(Entry(self._classify.kind(text), text, self.name, at))
        return entries

    def _arrivals(self, tail: LogTail, ends: list[int]) -> list[float]:
        if self._times is None or tail.anew:
            self.close()
            try:
                log = tail.path.open("rb")
            except OSError:
                return [time.time()] * len(ends)
            self._times = LogTimes(tail.path, log), log
        times = self._times[0]
        times.refresh()
        return [times.at(end - 1) for end in ends]

    def close(self) -> None:
        """Let go of the files that are held open."""
        if self._times is not None:
            for held in self._times:
                held.close()
            self._times = None


class LogFeed:
    """Logs of a run as a screen follows them; what it follows may change at every call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._following: tuple[str, ...] = ()
        self._components: dict[str, _Component] = {}
        self._held: list[tuple[Entry, float]] = []
        """Lines whose turn has not come, and when each was read, by the monotonic clock."""

    def path(self, name: str) -> Path | None:
        """The log of `name` that is being read."""
        return self._components[name].path if name in self._components else None

    def read(self, names: tuple[str, ...]) -> list[Entry]:
        """What was printed since the last call; from their latest lines on, where `names` are others than before."""
        if names != self._following:
            for old in self._components.values():
                old.close()
            self._following, self._held = names, []
            self._components = {name: _Component(self._run.logs / name) for name in names}
        if len(names) == 1:
            return self._components[names[0]].read(timed=False)
        limit, now = due((entry.time, read_at) for entry, read_at in self._held), time.monotonic()
        new = (entry for part in self._components.values() for entry in part.read(timed=True))
        held = [*self._held, *((entry, now) for entry in new)]
        held.sort(key=lambda item: item[0].time)
        ready = [entry for entry, _ in held if entry.time <= limit]
        self._held = held[len(ready) :]
        return ready
