"""What a screen reads of the components' logs: one, or all in order of arrival. `LogFeed(run).read(name)`, in a thread.

It keeps a screen fresh whatever is printed: in a flood it jumps ahead and leaves a marker, since the file has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui.monitor.log_buffer import Classifier, Entry
from atropos_tui.monitor.log_reader import Line, LogReader, MergedLogs
from atropos_tui.monitor.plain import plain_text


class EntryMaker:
    """Makes the lines of several components into entries of a screen, with a note where another attempt begins."""

    def __init__(self) -> None:
        self.attempts: dict[str, int] = {}
        """The attempt of each component's last line."""
        self._classifiers: dict[str, Classifier] = {}

    def entries(self, lines: Iterable[Line]) -> list[Entry]:
        """The entries of `lines`, and the notes between them."""
        entries: list[Entry] = []
        for at, name, attempt, text, _, is_note in lines:
            if self.attempts.get(name) != attempt:
                if name in self.attempts:
                    entries.append(Entry("note", f"── attempt {attempt} of {name} ──", name, at))
                else:
                    self._classifiers[name] = Classifier()
                self.attempts[name] = attempt
            if is_note:
                entries.append(Entry("note", text, name, at))
            else:
                text = plain_text(text)
                entries.append(Entry(self._classifiers[name].kind(text), text, name, at))
        return entries


class LogFeed:
    """Logs of a run as a screen follows them; what it follows may change at every call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._readers: dict[str, LogReader] = {}
        self._merged = MergedLogs([])
        self._maker = EntryMaker()

    def path(self, name: str) -> Path | None:
        """The log of `name` that is being read."""
        return self._readers[name].path if name in self._readers else None

    def read(self, names: tuple[str, ...]) -> list[Entry]:
        """What was printed since the last call; from their latest lines on, where `names` are others than before."""
        if names != tuple(self._readers):
            self._merged.close()
            self._readers = {name: LogReader(self._run.logs / name, lossy=True) for name in names}
            self._merged, self._maker = MergedLogs(list(self._readers.values())), EntryMaker()
        return self._maker.entries(self._merged.ready())
