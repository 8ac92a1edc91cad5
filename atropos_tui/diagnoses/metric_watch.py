"""Evaluation of the metric rules, record by record."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import EvalRecord
from atropos_common.protocol.trainer_records import (
    OF_EACH_STEP,
    StepRecord,
    TimingRecord,
    TrainerRecord,
)
from atropos_tui.diagnoses.metric_rules import METRIC_RULES, MetricRule
from atropos_tui.diagnoses.model import Diagnosis, Finding, shortened

PACE_STEPS = 20
SLOWEST = 8
"""Limit of the factor on `MetricRule.good` for a recurring problem."""


class _Track:
    def __init__(self, rule: MetricRule) -> None:
        self.rule = rule
        self.records: deque[Record] = deque(maxlen=rule.window)
        self.finding = Finding()
        self._good = 0

    def put(self, record: Record) -> list[Diagnosis]:
        self.records.append(record)
        evidence = self.rule.judge(list(self.records))
        if evidence is not None:
            self._good = 0
            rule = self.rule
            return self.finding.raised(
                record.time, lambda: rule.diagnosis(shortened(evidence), rule.fix)
            )
        self._good += 1
        if self._good < self.rule.good * min(self.finding.slower, SLOWEST):
            return []
        step = getattr(record, "step", 0)
        return self.finding.closed(
            f"{self._good} records without it" + (f", up to step {step}" if step else "")
        )


class MetricWatch:
    """All metric rules of a run; each opens one diagnosis per attempt while its problem lasts."""

    def __init__(self, since: float, rules: Sequence[MetricRule] = METRIC_RULES) -> None:
        """Records older than `since` (Unix seconds) fill the windows but are not reported."""
        self._rules = rules
        self.attempt = 0
        self.step = 0
        """Newest optimizer step."""
        self.step_at: float | None = None
        self._since = since
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._tracks: dict[Hashable, _Track] = {}

    @property
    def pace_s(self) -> float:
        """Longest of the newest step times, in seconds."""
        return max(self._pace, default=0.0)

    def feed(self, record: Record) -> list[Diagnosis]:
        if isinstance(record, TrainerRecord):
            return self._feed_trainer(record)
        if isinstance(record, EvalRecord):
            return self._judge(record, (record.env, record.split))
        return []

    def _feed_trainer(self, record: TrainerRecord) -> list[Diagnosis]:
        if record.rank != 0 or record.attempt < self.attempt:
            return []  # rank 0 speaks for all ranks; late records of an ended attempt do not count
        results: list[Diagnosis] = []
        # Other records can come before the first step of an attempt that then fails.
        if record.attempt > self.attempt and isinstance(record, OF_EACH_STEP):
            results = self._begin_attempt(record)
        if isinstance(record, StepRecord):
            self.step, self.step_at = record.step, record.time
        elif isinstance(record, TimingRecord):
            self._pace.append(record.step_s)
        return results + self._judge(record, None)

    def _begin_attempt(self, record: TrainerRecord) -> list[Diagnosis]:
        """Drop steps that the new attempt repeats, and let every rule report again."""
        self.attempt = record.attempt
        results: list[Diagnosis] = []
        for track in self._tracks.values():
            kept = [
                old
                for old in track.records
                if not isinstance(old, TrainerRecord) or old.step < record.step
            ]
            track.records = deque(kept, maxlen=track.rule.window)
            results += track.finding.closed(f"attempt {record.attempt} of the trainer begins")
            track.finding = Finding()
        return results

    def judges(self, rule: str, attempt: int) -> bool:
        """True if the rule has seen a trainer's record of the attempt."""
        return any(
            track.rule.name == rule and getattr(track.records[-1], "attempt", None) == attempt
            for track in self._tracks.values()
            if track.records
        )

    def is_open(self, rule: str) -> bool:
        return any(
            track.rule.name == rule and track.finding.open for track in self._tracks.values()
        )

    def _judge(self, record: Record, series: Hashable) -> list[Diagnosis]:
        results: list[Diagnosis] = []
        for number, rule in enumerate(self._rules):
            if isinstance(record, rule.kinds):
                found = self._tracks.setdefault((number, series), _Track(rule)).put(record)
                if record.time >= self._since:
                    results += found
        return results
