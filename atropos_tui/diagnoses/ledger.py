"""Open diagnoses of a run; each opening and each end is one journal record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atropos_common.protocol.control import State
from atropos_common.protocol.records import DiagnosisRecord, StateRecord
from atropos_tui.diagnoses.model import Diagnosis, Ends

Key = tuple[str | None, str, str]
"""Component (None: the run), rule, title."""


@dataclass(frozen=True)
class _Open:
    found: Diagnosis
    attempt: int


class Ledger:
    """Open diagnoses, oldest first. Event loop only."""

    def __init__(self, emit: Callable[[DiagnosisRecord], None]) -> None:
        self._emit = emit
        self._open: dict[Key, _Open] = {}

    def add(
        self,
        component: str | None,
        found: Diagnosis,
        attempt: int = 0,
        *,
        ending: bool = False,
        again: bool = False,
    ) -> None:
        """Record that `found` is open or, if `found.over`, that it has ended.

        Args:
            ending: it explains the end of the attempt; record it again if another diagnosis came
                later.
            again: record it again, because its evidence is new.
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
        self._open.pop(key, None)  # insert it again at the end: the order is by age
        self._open[key] = _Open(found, attempt)
        self._emit(found.record(component))

    def restore(self, records: Iterable[DiagnosisRecord]) -> None:
        """Restore what an earlier supervisor left open; end diagnoses about the run as a whole."""
        left: dict[Key, _Open] = {}
        for record in records:
            key = record.component, record.rule, record.title
            left.pop(key, None)
            if not record.over:
                found = Diagnosis(
                    record.title, record.evidence, record.fix, record.rule, record.severity
                )
                left[key] = _Open(found, 0)
        # Diagnoses of this supervisor, made before the restore, replace older ones.
        self._open = left | self._open
        for key in [key for key in left if key[0] is None]:
            self._close(key, "the run goes on under a new supervisor")

    def moved(self, record: StateRecord) -> None:
        """End the diagnoses that a component's new state ends."""
        done = record.new == State.COMPLETED
        if not done and record.new != State.HEALTHY:
            return
        for key, known in list(self._open.items()):
            # The attempt that has the problem may be healthy as well: only a later one ends it.
            later = known.attempt < record.attempt and known.found.ends is not Ends.LOOK
            if key[0] == record.component and known.found.ends is not Ends.RUN and (done or later):
                self._close(key, "it completed" if done else f"attempt {record.attempt} is healthy")

    def end_all(self, why: str) -> None:
        for key in list(self._open):
            self._close(key, why)

    def of(self, component: str) -> list[Diagnosis]:
        return [known.found for key, known in self._open.items() if key[0] == component]

    def _newest(self, component: str | None) -> _Open | None:
        return next(
            (known for key, known in reversed(self._open.items()) if key[0] == component), None
        )

    def _close(self, key: Key, why: str) -> None:
        self._emit(self._open.pop(key).found.ended(why).record(key[0]))
