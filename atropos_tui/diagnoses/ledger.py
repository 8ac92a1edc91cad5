"""The open diagnoses of a run, in the supervisor: each opening and each end becomes one record of the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atropos_common.control import State
from atropos_common.records import DiagnosisRecord, StateRecord
from atropos_tui.diagnoses.model import Diagnosis, Ends

Key = tuple[str | None, str, str]
"""Component (None: the run), rule and title."""


@dataclass(frozen=True)
class _Open:
    """An open diagnosis and the attempt of its component that it belongs to."""

    found: Diagnosis
    attempt: int


class Ledger:
    """Open diagnoses by component, rule and title, oldest first. Belongs to the supervisor's event loop."""

    def __init__(self, emit: Callable[[DiagnosisRecord], None]) -> None:
        self._emit = emit
        self._open: dict[Key, _Open] = {}

    def add(
        self, component: str | None, found: Diagnosis, attempt: int = 0, *, ending: bool = False, again: bool = False
    ) -> None:
        """Record that `found` is open or, for the end of one, that it is over.

        Args:
            attempt: of the component; within one attempt an open diagnosis is recorded once.
            ending: it explains the end of the attempt: recorded again where another diagnosis came after it.
            again: its evidence is new: recorded again.
        """
        key = component, found.rule, found.title
        known = self._open.get(key)
        if found.over:
            if known is not None:
                self._close(key, found.evidence)
            return
        again = again or (ending and self._newest(component) is not known)
        if known is not None and known.attempt == attempt and not again:
            return
        self._open.pop(key, None)
        self._open[key] = _Open(found, attempt)
        self._emit(found.record(component))

    def restore(self, records: Iterable[DiagnosisRecord]) -> None:
        """Take over what an earlier supervisor of the run left open; what was about the run as a whole is over."""
        left: dict[Key, _Open] = {}
        for record in records:
            key = record.component, record.rule, record.title
            left.pop(key, None)
            if not record.over:
                found = Diagnosis(record.title, record.evidence, record.fix, record.rule, record.severity or "warning")
                left[key] = _Open(found, 0)
        self._open = left | self._open
        for key in [key for key in left if key[0] is None]:
            self._close(key, "the run goes on under a new supervisor")

    def moved(self, record: StateRecord) -> None:
        """End what the new state of a component ends: health in a later attempt, and completion."""
        done = record.new == State.COMPLETED
        if not done and record.new != State.HEALTHY:
            return
        for key, known in list(self._open.items()):
            later = known.attempt < record.attempt and known.found.ends is not Ends.LOOK
            if key[0] == record.component and known.found.ends is not Ends.RUN and (done or later):
                self._close(key, "it completed" if done else f"attempt {record.attempt} is healthy")

    def end_all(self, why: str) -> None:
        """End every diagnosis: the run has ended well."""
        for key in list(self._open):
            self._close(key, why)

    def of(self, component: str) -> list[Diagnosis]:
        """Open diagnoses of a component, oldest first."""
        return [known.found for key, known in self._open.items() if key[0] == component]

    def _newest(self, component: str | None) -> _Open | None:
        return next((known for key, known in reversed(self._open.items()) if key[0] == component), None)

    def _close(self, key: Key, why: str) -> None:
        self._emit(self._open.pop(key).found.ended(why).record(key[0]))
