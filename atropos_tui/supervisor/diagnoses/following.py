"""Feeds records of `telemetry.jsonl` and `eval.*.jsonl` to the number rules, attempt by attempt."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from atropos_common.records import (
    AlignmentRecord,
    EvalRecord,
    Record,
    RolloutRecord,
    StepRecord,
    TimingRecord,
    TrainerRecord,
)
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Voice, shortened
from atropos_tui.supervisor.diagnoses.numbers import NUMBER_RULES, NumberRule

PACE_STEPS = 20
MARKS_A_STEP = (StepRecord, AlignmentRecord, TimingRecord, RolloutRecord)
"""Kinds that are judged. Others may carry the step that an attempt resumed from."""


class _Track:
    """One rule over one series: its window, its voice, and how long all has been well."""

    def __init__(self, rule: NumberRule) -> None:
        self.rule = rule
        self.records: deque[Record] = deque(maxlen=rule.window)
        self.voice = Voice()
        self._good = 0

    def put(self, record: Record) -> Diagnosis | None:
        self.records.append(record)
        evidence = self.rule.judge(list(self.records))
        if evidence is None:
            self._good += 1
            if self._good >= self.rule.good:
                self.voice.lowered()
            return None
        self._good = 0
        if not self.voice.raised(record.time):
            return None
        rule = self.rule
        return Diagnosis(rule.title, shortened(evidence), rule.fix, rule.name, self.voice.episodes - 1)


class NumberWatch:
    """What the numbers say. Each rule speaks once while its trouble lasts, in each attempt of the trainer."""

    def __init__(self, since: float) -> None:
        """`since`: Unix seconds; older records (of a run that is resumed) are known, but not spoken of."""
        self.attempt = 0
        self.step = 0
        """Newest optimizer step, 0 before the first."""
        self.step_at: float | None = None
        """When it was written."""
        self._since = since
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._tracks: dict[Hashable, _Track] = {}

    @property
    def pace_s(self) -> float:
        """Seconds between the newest steps, the longest of them; 0 where there is none."""
        return max(self._pace, default=0.0)

    def feed(self, record: Record) -> list[Diagnosis]:
        """What is to be said now that `record` has come."""
        if isinstance(record, TrainerRecord):
            return self._feed_trainer(record)
        if isinstance(record, EvalRecord):
            return self._judge(record, (record.env, record.split))
        return []

    def _feed_trainer(self, record: TrainerRecord) -> list[Diagnosis]:
        if record.rank != 0 or not isinstance(record, MARKS_A_STEP):
            return []
        if record.attempt < self.attempt:
            return []  # a late line of an attempt that is over
        if record.attempt > self.attempt:
            self._begin_attempt(record)
        if isinstance(record, StepRecord):
            self.step, self.step_at = record.step, record.time
        elif isinstance(record, TimingRecord):
            self._pace.append(record.step_s)
        return self._judge(record, None)

    def _begin_attempt(self, record: TrainerRecord) -> None:
        """From a later attempt's first step on, what earlier ones did does not count; every rule may speak again."""
        self.attempt = record.attempt
        for track in self._tracks.values():
            kept = [old for old in track.records if not isinstance(old, TrainerRecord) or old.step < record.step]
            track.records = deque(kept, maxlen=track.rule.window)
            track.voice = Voice()

    def _judge(self, record: Record, series: Hashable) -> list[Diagnosis]:
        said = []
        for rule in NUMBER_RULES:
            if isinstance(record, rule.kinds):
                key = (rule.name, rule.title, rule.kinds, series)
                found = self._tracks.setdefault(key, _Track(rule)).put(record)
                if found is not None and record.time >= self._since:
                    said.append(found)
        return said
