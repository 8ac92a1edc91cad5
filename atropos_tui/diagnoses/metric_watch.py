"""Rules over the trainer's records and the evaluations, fed record by record."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from atropos_common.records import OF_EACH_STEP, EvalRecord, Record, StepRecord, TimingRecord, TrainerRecord
from atropos_tui.diagnoses.metric_rules import METRIC_RULES, MetricRule
from atropos_tui.diagnoses.model import Diagnosis, Finding, shortened

PACE_STEPS = 20
SLOWEST = 8
"""Limit of the factor on `MetricRule.good` for a number that goes wrong again and again."""


class _Track:
    """One rule over one series: its window, its finding, and how many records without evidence came last."""

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
            return self.finding.raised(record.time, lambda: rule.diagnosis(shortened(evidence), rule.fix))
        self._good += 1
        if self._good < self.rule.good * min(self.finding.slower, SLOWEST):
            return []
        step = getattr(record, "step", 0)
        return self.finding.closed(f"{self._good} records without it" + (f", up to step {step}" if step else ""))


class MetricWatch:
    """Rules over the trainer's records: each opens one diagnosis while its trouble lasts, in each attempt."""

    def __init__(self, since: float, rules: Sequence[MetricRule] = METRIC_RULES) -> None:
        """`since`: Unix seconds; older records (of a run that is resumed) are known, but not spoken of."""
        self._rules = rules
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
        """Diagnoses, and ends of diagnoses, now that `record` has come."""
        if isinstance(record, TrainerRecord):
            return self._feed_trainer(record)
        if isinstance(record, EvalRecord):
            return self._judge(record, (record.env, record.split))
        return []

    def _feed_trainer(self, record: TrainerRecord) -> list[Diagnosis]:
        if record.rank != 0 or record.attempt < self.attempt:
            return []  # a late line of an attempt that is over
        said: list[Diagnosis] = []
        if record.attempt > self.attempt and isinstance(record, OF_EACH_STEP):
            said = self._begin_attempt(record)
        if isinstance(record, StepRecord):
            self.step, self.step_at = record.step, record.time
        elif isinstance(record, TimingRecord):
            self._pace.append(record.step_s)
        return said + self._judge(record, None)

    def _begin_attempt(self, record: TrainerRecord) -> list[Diagnosis]:
        """From a later attempt's first step on, what earlier ones did does not count; every rule may speak again."""
        self.attempt = record.attempt
        said: list[Diagnosis] = []
        for track in self._tracks.values():
            kept = [old for old in track.records if not isinstance(old, TrainerRecord) or old.step < record.step]
            track.records = deque(kept, maxlen=track.rule.window)
            said += track.finding.closed(f"attempt {record.attempt} of the trainer begins")
            track.finding = Finding()
        return said

    def is_open(self, rule: str) -> bool:
        """Whether the numbers say now what `rule` is about."""
        return any(track.rule.name == rule and track.finding.open for track in self._tracks.values())

    def _judge(self, record: Record, series: Hashable) -> list[Diagnosis]:
        said: list[Diagnosis] = []
        for rule in self._rules:
            if isinstance(record, rule.kinds):
                key = (rule.name, rule.title, rule.kinds, series)
                found = self._tracks.setdefault(key, _Track(rule)).put(record)
                if record.time >= self._since:
                    said += found
        return said
