"""Comparison of runs: common axes, bands of seeds, differing settings, final values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.bench import RunBenchmark, benchmark_state
from atropos_tui.monitor.charts import NOISY, Along, Ruler, is_smoothed, smooth
from atropos_tui.monitor.format import (
    counted,
    duration,
    masked_line,
    number,
    seconds_text,
    text_table,
)
from atropos_tui.monitor.run.run_files import RunInfo, exit_code, load_run, names_of, read_toml
from atropos_tui.monitor.run.series import Series, mean
from atropos_tui.monitor.run.state import RunState

# Final values are means over the newest steps: at most `LAST`, and one part in `LAST_SHARE` of the
# shortest run.
LAST, LAST_SHARE = 20, 4
PLACES = 300  # points of a band
POINTS = 2_000  # points of a curve
NONE = "–"
MOST_WORDS = 3  # settings in a label
_NOT_A_SETTING = ("name", "prepare", "notify")
SEED = "seed"


@dataclass(frozen=True, eq=False)
class RunCurves:
    """One of several runs, from its files."""

    name: str
    info: RunInfo
    state: RunState
    settings: dict[str, str]
    """The resolved profile, flattened, without names and ports."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs on the same axes as the one on the screen, as chosen."""

    others: dict[Path, RunCurves] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of the run on the screen."""
    first: RunBenchmark | None = None
    """Figures of the first of `others`."""

    def with_runs(self, roots: Sequence[Path], run: RunDir) -> Comparison:
        """Read the runs that are new, and the settings of `run`."""
        new = [root for root in roots if root not in self.others]
        known = self.others | dict(zip(new, read_runs(new), strict=True))
        first = _figures(roots[0], known[roots[0]]) if roots else None
        return Comparison({root: known[root] for root in roots}, settings_of(run), first)

    def runs(self, info: RunInfo, state: RunState) -> Sequence[RunCurves]:
        """Return this run and the others; empty without a comparison."""
        if not self.others:
            return ()
        name = f"{info.run_id} (this)" if info.run_id else "this run"
        return [RunCurves(name, info, state, self.settings), *self.others.values()]


def _figures(root: Path, run: RunCurves) -> RunBenchmark:
    figures = benchmark_state(run.state, run=run.name, mode=run.info.mode, gpus=run.info.gpu_count)
    return replace(figures, exit_code=exit_code(RunDir(root)))


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[RunCurves, ...]


@dataclass(frozen=True)
class MetricLine:
    """A metric of one setting along an axis; of several runs mean, lowest and highest."""

    label: str
    places: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    smoothing: int = 0
    last: float | None = None
    """Mean over the newest steps (`last_steps`) and the runs."""


def read_runs(roots: Sequence[Path]) -> list[RunCurves]:
    found = []
    for root, name in zip(roots, names_of(roots), strict=True):
        info, state, _ = load_run(root)
        found.append(RunCurves(masked_line(name), info, state, settings_of(RunDir(root))))
    return found


def settings_of(run: RunDir) -> dict[str, str]:
    """Return the settings in profile.toml by dotted key; empty without that file."""
    return {
        masked_line(key): masked_line(str(value))
        for key, value in _flat(read_toml(run.profile_toml))
        if key.split(".")[0] not in _NOT_A_SETTING
        and key.split(".")[-1] not in ("port", "name")
        and (key == SEED or key.split(".")[-1] != SEED)
    }


def flat_settings(table: dict[str, Any]) -> dict[str, str]:
    """Return every setting of a profile by dotted key."""
    return {masked_line(key): masked_line(str(value)) for key, value in _flat(table)}


def _flat(table: dict[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    # Entries of an array of tables go by their name, else by their index. Of GPUs only the number
    # counts.
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for at, item in enumerate(value):
                yield from _flat(item, f"{before}{key}.{item.get('name', at)}.")
        else:
            is_count = key == "gpus" and isinstance(value, list)
            yield f"{before}{key}", len(value) if is_count else value


def differing(runs: Sequence[RunCurves]) -> dict[str, list[str]]:
    """Return the settings that differ, with each run's value; the seed comes last."""
    return differing_settings([run.settings for run in runs])


def differing_settings(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """`differing`, of each run's settings."""
    keys = sorted({key for each in settings for key in each}, key=lambda key: (key == SEED, key))
    found = {key: [each.get(key, NONE) for each in settings] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def by_run(runs: Sequence[RunCurves]) -> list[Setting]:
    """Return each run alone, named by the run and its differing settings."""
    found = {key: values for key, values in differing(runs).items() if len(values) > 1}
    keys = list(found)[:MOST_WORDS]
    settings = []
    for at, run in enumerate(runs):
        words = _words([(key, found[key][at]) for key in keys])
        settings.append(Setting(", ".join(filter(None, (run.name, words))), (run,)))
    return settings


def by_setting(runs: Sequence[RunCurves]) -> list[Setting]:
    """Group runs by setting, in order of first appearance."""
    keys = [key for key in differing(runs) if key != SEED]
    found: dict[tuple[str, ...], list[RunCurves]] = {}
    for run in runs:
        found.setdefault(tuple(run.settings.get(key, NONE) for key in keys), []).append(run)
    if not keys and all(not run.settings for run in runs):  # no profiles: they cannot be grouped
        return [Setting(run.name, (run,)) for run in runs]
    telling = _telling(list(found))
    words = [_words([(keys[at], values[at]) for at in telling]) for values in found]
    if not telling or len(telling) > MOST_WORDS or len(set(words)) < len(words):
        # Too much to tell, or too little to tell them apart: the first run's name.
        words = [
            each[0].name if len(found) > 1 or len(each) == 1 else "" for each in found.values()
        ]
    settings = []
    for word, members in zip(words, found.values(), strict=True):
        count = f"{len(members)} runs" if len(members) > 1 else ""
        settings.append(Setting(", ".join(filter(None, (word, count))), tuple(members)))
    return settings


def _telling(rows: Sequence[Sequence[str]]) -> list[int]:
    # Greedily, few columns in which all `rows` differ.
    chosen: list[int] = []
    while len({tuple(row[at] for at in chosen) for row in rows}) < len(rows):

        def kinds(column: int) -> int:
            return len({tuple(row[at] for at in (*chosen, column)) for row in rows})

        chosen.append(max((at for at in range(len(rows[0])) if at not in chosen), key=kinds))
    return chosen


def _words(settings: Sequence[tuple[str, str]]) -> str:
    parts = (
        value if key == "mode" else f"{key.rpartition('.')[2]} {PurePath(value).name}"
        for key, value in settings
    )
    return ", ".join(parts)


def lines(
    settings: Sequence[Setting], metric: str, along: Along, smoothing: int = 0
) -> list[MetricLine | None]:
    """Return the curve of `metric` for each setting; None without data."""
    runs = [run for setting in settings for run in setting.runs]
    longest = max((len(run.state.metric(metric)) for run in runs), default=0)
    # All curves or none: a smooth one beside a noisy one would look like a difference.
    span = smoothing if metric in NOISY and is_smoothed(longest, smoothing) else 0
    count = last_steps(runs)
    return [_line(setting, metric, along, span, count) for setting in settings]


def _line(setting: Setting, metric: str, along: Along, span: int, count: int) -> MetricLine | None:
    found = [(run, run.state.metric(metric)) for run in setting.runs]
    found = [(run, series) for run, series in found if len(series)]
    if not found:
        return None
    curves, ends = [], []
    for run, series in found:
        drawn = smooth(series, span, POINTS) if span else series
        curves.append((list(Ruler(run.state, along).place(drawn)), list(drawn.values)))
        # Evaluations are rare and exact: the newest value counts, without a mean.
        ends.append(series.last if metric in run.state.evals else final(series, count))
    last = mean([value for value in ends if value is not None])
    if len(curves) == 1:
        return MetricLine(setting.label, *curves[0], smoothing=span, last=last)
    return MetricLine(setting.label, *_band(curves), smoothing=span, last=last)


def _band(
    curves: Sequence[tuple[list[float], list[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    # Places, means, minima and maxima of the curves that reach each place.
    everywhere = sorted({place for places, _ in curves for place in places})
    found: tuple[list[float], ...] = ([], [], [], [])
    for place in everywhere[:: max(1, math.ceil(len(everywhere) / PLACES))]:
        values = [one for curve in curves if (one := _between(*curve, place)) is not None]
        if values:
            row = (place, sum(values) / len(values), min(values), max(values))
            for column, value in zip(found, row, strict=True):
                column.append(value)
    places, means, low, high = found
    return places, means, low, high


def _between(places: Sequence[float], values: Sequence[float], place: float) -> float | None:
    # None outside the curve, and beside a gap.
    at = bisect_left(places, place)
    if at == len(places) or (at == 0 and places[0] > place):
        return None
    if places[at] == place:
        return values[at] if math.isfinite(values[at]) else None
    share = (place - places[at - 1]) / (places[at] - places[at - 1])
    value = values[at - 1] + share * (values[at] - values[at - 1])
    return value if math.isfinite(value) else None


# How each ended.


def last_steps(runs: Iterable[RunCurves]) -> int:
    """Return the number of newest steps in each run's final value."""
    lengths = (len(run.state.metric("reward_mean")) for run in runs)
    return max(1, min(LAST, min(filter(None, lengths), default=LAST) // LAST_SHARE))


def final(series: Series, count: int) -> float | None:
    return mean(series.tail(count))


def splits(runs: Iterable[RunCurves]) -> list[str]:
    """Return every environment and split with evaluations."""
    return list(dict.fromkeys(name for run in runs for name in run.state.evals))


def final_table(runs: Sequence[RunCurves]) -> list[list[str]]:
    """Return titles and a row for each run: mode, seed and final values."""
    evaluated, count = splits(runs), last_steps(runs)
    reward = f"reward, last {counted(count, 'step')}"
    ends = ("completion tokens", "tokens/s", "step", "waiting", "duration")
    rows = [["run", "mode", SEED, "steps", reward, *evaluated, *ends]]
    for run in runs:
        metric = run.state.metric
        times = metric("step_s").times
        rows.append(
            [
                run.name,
                run.info.mode or NONE,
                run.settings.get(SEED, NONE),
                f"{run.state.step:,}",
                number(final(metric("reward_mean"), count)),
                *(number(run.state.metric(name).last) for name in evaluated),
                number(final(metric("completion_tokens_mean"), count), 1),
                number(final(metric("tokens_per_s"), count), 0),
                seconds_text(final(metric("step_s"), count)),
                _waiting(run, count),
                duration(times[-1] - times[0] + metric("step_s").values[0]) if times else NONE,
            ]
        )
    return rows


def _waiting(run: RunCurves, count: int) -> str:
    # Share of the time in which the trainer had no batch.
    wait, whole = (final(run.state.metric(name), count) for name in ("data_wait_s", "step_s"))
    return NONE if wait is None or not whole else f"{wait / whole:.0%}"


def settings_table(runs: Sequence[RunCurves]) -> list[list[str]]:
    """Return titles and a row for each differing setting except the seed, if any."""
    rows = [[key, *values] for key, values in differing(runs).items() if key != SEED]
    return [["setting", *(run.name for run in runs)], *rows] if rows else []


def seeds_table(runs: Sequence[RunCurves]) -> list[list[str]]:
    """Return titles and a row for each setting with several runs, if any."""
    several = [setting for setting in by_setting(runs) if len(setting.runs) > 1]
    evaluated, count = splits(runs), last_steps(runs)
    rows = [["setting", f"reward, last {counted(count, 'step')}", *evaluated]] if several else []
    for setting in several:
        columns = [[final(run.state.metric("reward_mean"), count) for run in setting.runs]]
        columns += [[run.state.metric(name).last for run in setting.runs] for name in evaluated]
        rows.append([setting.label, *map(_spread, columns)])
    return rows


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    return f"{number(mean(known))} ({number(min(known))} to {number(max(known))})"


def summary(runs: Sequence[RunCurves]) -> str:
    """Return the tables of final values and differences as text."""
    found = (final_table(runs), seeds_table(runs), settings_table(runs))
    return "\n\n".join(text_table(rows) for rows in found if rows)
