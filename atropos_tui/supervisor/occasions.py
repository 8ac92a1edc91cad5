"""What a run is told about for, by the webhook of `[notify]` and by the bell of the screen."""

from __future__ import annotations

from typing import Literal, TypeGuard

from trainer_core.contracts.records import DiagnosisRecord, Record

Event = Literal["failed", "mismatch", "done"]

MISMATCH = "alignment_mismatch"


def is_mismatch(record: Record) -> TypeGuard[DiagnosisRecord]:
    """Whether `record` diagnoses that trainer and engine disagree about the same weights."""
    return isinstance(record, DiagnosisRecord) and record.rule == MISMATCH


def event_of_exit(code: int | None) -> Event | None:
    """What an exit code of a run means; None for one that was stopped by hand, or still runs."""
    if code is None or code == 130:
        return None
    return "failed" if code else "done"
