"""Alerts that a profile asks for: `[[alert]]` as rules over a metric of the trainer's records, or over a held-out
accuracy, whose steps are the weight versions.

An alert is a `MetricRule` like ours, under the name `alert`: it speaks once while its condition holds, on the screen,
in `events`, `why` and the report, and by `[notify]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from atropos_common.records import HELD_OUT_METRIC, METRIC_KINDS, EvalRecord
from atropos_tui.diagnoses.metric_rules import Judge, MetricRule
from atropos_tui.diagnoses.model import Rule
from atropos_tui.profile.spec import AlertSpec

ALERT = Rule("alert", "a metric is where the profile's [[alert]] does not want it")
SLOPE_STEPS = 5
"""A slope is taken over no fewer steps."""
BASE_STEPS = 50
"""A z-score is against the mean and the deviation of so many steps before."""
LEAST_BASE = 10
SHOWN = 5


def alert_rules(alerts: Sequence[AlertSpec]) -> tuple[MetricRule, ...]:
    """A rule for each condition of each alert."""
    return tuple(_rule(alert, words, judge) for alert in alerts for words, judge in _conditions(alert))


def _rule(alert: AlertSpec, words: str, judge: Judge) -> MetricRule:
    fix = (
        f"you asked to be told by [[alert]] of the profile: look at {alert.metric} in view 2 of the screen or in the "
        "report, at the events of that time, and at what the sentence on top says; or set other bounds"
    )
    window = max(alert.for_steps, SLOPE_STEPS) + BASE_STEPS
    kinds = (METRIC_KINDS.get(alert.metric, EvalRecord),)
    return MetricRule(ALERT.name, f"alert: {alert.metric} {words}", fix, kinds, judge, window)


def _conditions(alert: AlertSpec) -> list[tuple[str, Judge]]:
    """What has to hold, in words and as a judge."""
    below, above, slope, z = alert.below, alert.above, alert.slope, alert.z
    count = alert.for_steps
    found: list[tuple[str, Judge]] = []
    if below is not None:
        found.append((f"is below {below:g}", lambda records: _all(records, alert.metric, count, lambda x: x < below)))
    if above is not None:
        found.append((f"is above {above:g}", lambda records: _all(records, alert.metric, count, lambda x: x > above)))
    if slope is not None:
        verb = "rises" if slope > 0 else "falls"
        found.append((f"{verb} by {abs(slope):g} a step", lambda records: _steep(records, alert.metric, slope, count)))
    if z is not None:
        found.append((f"is {z:g} deviations off", lambda records: _odd(records, alert.metric, z, count)))
    return found


def _values(records: Sequence[Any], metric: str) -> list[tuple[int, float]]:
    """Step and value of each record that has one."""
    known = (_value(record, metric) for record in records)
    return [(step, float(value)) for step, value in known if value is not None and math.isfinite(value)]


def _value(record: Any, metric: str) -> tuple[int, float | None]:
    if not isinstance(record, EvalRecord):
        return record.step, getattr(record, metric)
    asked = metric in (f"{HELD_OUT_METRIC}{record.split}", f"{HELD_OUT_METRIC}{record.env}/{record.split}")
    return record.weight_version or 0, record.accuracy if asked else None


def _all(records: Sequence[Any], metric: str, count: int, holds: Any) -> str | None:
    newest = _values(records, metric)[-count:]
    return _said(newest) if len(newest) == count and all(holds(value) for _, value in newest) else None


def _steep(records: Sequence[Any], metric: str, slope: float, count: int) -> str | None:
    """The line of least squares through the newest values is as steep, in the same direction."""
    newest = _values(records, metric)[-max(count, SLOPE_STEPS) :]
    if len(newest) < max(count, SLOPE_STEPS):
        return None
    middle, mean = fmean(step for step, _ in newest), fmean(value for _, value in newest)
    spread = sum((step - middle) ** 2 for step, _ in newest)
    found = sum((step - middle) * (value - mean) for step, value in newest) / spread if spread else 0.0
    steep = found >= slope if slope > 0 else found <= slope
    return f"{found:+.3g} a step; {_said(newest)}" if steep else None


def _odd(records: Sequence[Any], metric: str, z: float, count: int) -> str | None:
    """Each of the newest values is `z` deviations away from the mean of those before them."""
    values = _values(records, metric)
    base, newest = [value for _, value in values[:-count]][-BASE_STEPS:], values[-count:]
    if len(base) < LEAST_BASE or len(newest) < count:
        return None
    mean, deviation = fmean(base), pstdev(base)
    if not deviation or any(abs(value - mean) < z * deviation for _, value in newest):
        return None
    return f"{_said(newest)}; the {len(base)} steps before: {mean:.3g} ± {deviation:.2g}"


def _said(values: Sequence[tuple[int, float]]) -> str:
    shown = values[-SHOWN:]
    return f"{', '.join(f'{value:.4g}' for _, value in shown)} at steps {values[0][0]}-{values[-1][0]}"
