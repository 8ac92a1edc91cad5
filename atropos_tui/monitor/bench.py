"""Figures of a run: its current pace, and the BENCHMARK SUMMARY.

A finished run of one attempt shows the trainer's own summary, others what their records say.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from atropos_common.protocol import benchmark_summary as summary
from atropos_common.protocol.control import State
from atropos_common.system.run_dir import RunDir
from atropos_tui.diagnoses import gravest_first
from atropos_tui.monitor.format import (
    bytes_text,
    counted,
    duration,
    number,
    one_line,
    real,
    seconds_text,
    text_table,
)
from atropos_tui.monitor.run.run_files import (
    RunFeed,
    RunInfo,
    exit_code,
    load_run,
    names_of,
    read_info,
    read_json,
)
from atropos_tui.monitor.run.series import Series, mean
from atropos_tui.monitor.run.state import (
    ACCEPTED,
    CAPACITY_S,
    COUNTED_S,
    GENERATED,
    IDLE_S,
    RATED_S,
    TOKENS,
    RunState,
)

SETTLED = (State.COMPLETED, State.STOPPED, State.FAILED)
ILL = (State.UNHEALTHY, State.BACKOFF, State.STOPPING, State.FAILED)
# Newest steps over which live figures are averaged.
WINDOW = 20

# Name on the screen -> field of the timing record.
PARTS = {"wait": "data_wait_s", "train": "train_s", "sync": "sync_s", "checkpoint": "checkpoint_s"}


@dataclass(frozen=True)
class Pace:
    """Means over the newest `window` steps, in seconds, tokens and bytes; None without data."""

    window: int
    step_s: float | None
    parts: dict[str, float | None]
    waiting: float | None
    """Share of the time in which the trainer waited for rollouts."""
    engine_idle: float | None
    """Share of the time in which the engines had no request."""
    engine_capacity: float | None
    """Used share of the engines' capacity."""
    tokens_per_s: float | None
    mfu_peak: float | None
    """Model FLOP utilization of the training part, of the card's dense peak."""
    mfu: float | None
    """Share of 790 TFLOP/s."""
    steps_per_hour: float | None
    eta_s: float | None
    """Time left by the wall clock, waiting included."""


def pace(state: RunState, training_steps: int | None, window: int = WINDOW) -> Pace:
    """Measure the newest steps; all steps once the trainer has written its summary."""
    timing = state.metric("step_s")
    window = timing.count if state.benchmark else window
    count = min(window, timing.count)
    wall = _wall_per_step(timing, window, state.attempt_steps.get(state.attempt, 0))
    step_s = timing.newest(count).mean
    parts = {name: state.metric(metric).newest(count).mean for name, metric in PARTS.items()}
    known = [value for value in parts.values() if value is not None]
    if step_s is not None and known:
        other = step_s - sum(known)
        parts["other"] = other if not other < 0 else None  # `not <` keeps NaN
    basis = wall or step_s  # wall time includes the gaps between steps
    left = None if training_steps is None else max(0, training_steps - state.step)
    return Pace(
        window=count,
        step_s=step_s,
        parts=parts,
        waiting=min(1.0, parts["wait"] / step_s) if parts["wait"] is not None and step_s else None,
        engine_idle=_idle_share(state, count),
        engine_capacity=_capacity_share(state, count),
        tokens_per_s=tokens_per_second(state, count),
        mfu_peak=state.metric("mfu_peak").newest(count).mean,
        mfu=state.metric("mfu").newest(count).mean,
        steps_per_hour=3600 / basis if basis else None,
        eta_s=None if left is None or basis is None else left * basis,
    )


def _wall_per_step(series: Series, window: int, first_step: int) -> float | None:
    # Between steps of the current attempt only, so that a restart does not count as slow.
    newest = series.newest(window + 1)
    at = bisect_left(newest.steps, first_step)
    steps, times = newest.steps[at:], newest.times[at:]
    if len(steps) < 2 or times[-1] <= times[0]:  # the clock ran backwards
        return None
    return (times[-1] - times[0]) / (steps[-1] - steps[0])


def tokens_per_second(state: RunState, count: int | None = None) -> float | None:
    """Return total tokens over total seconds of the newest `count` steps (default: all)."""
    return _ratio(state.sums[TOKENS], state.metric("step_s"), count)


def _idle_share(state: RunState, count: int) -> float | None:
    return _ratio(state.sums[IDLE_S], state.sums[COUNTED_S], count)


def _capacity_share(state: RunState, count: int) -> float | None:
    return _ratio(state.sums[CAPACITY_S], state.sums[RATED_S], count)


def _ratio(part: Series, whole: Series, count: int | None) -> float | None:
    count = whole.count if count is None else count
    total = whole.newest(count).total
    return part.newest(count).total / total if len(part) and total else None


@dataclass(frozen=True)
class TokenUse:
    """Use of the generated tokens over some steps."""

    accepted_per_s: float
    """Tokens that trained, per second and GPU; without GPUs per second."""
    gpus: int
    accepted: float
    """Share of the generated tokens, 0 to 1."""
    thrown_away: dict[str, float]
    """Shares of the generated tokens by reason, largest first."""

    @property
    def unit(self) -> str:
        return "tokens/s/GPU" if self.gpus else "tokens/s"

    @property
    def rate(self) -> str:
        """`accepted_per_s` as a whole number."""
        return summary.whole_text(self.accepted_per_s)


OTHER = "other"
"""Evaluations, the probe, completions in flight, and tokens that nobody counted."""


def reasons_text(thrown_away: Mapping[str, float], before: str = "") -> str:
    """Return shares in words after `before`, without those below 0.5 %; empty without any."""
    shown = {name: share for name, share in thrown_away.items() if share >= 0.005}
    words = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shown.items())
    return f"{before}{one_line(words)}" if words else ""


def token_use(state: RunState, gpus: int, count: int | None = None) -> TokenUse | None:
    """Measure the newest `count` steps (default: all); None before the first accepted token.

    Args:
        gpus: GPUs of the stack; 0 without.
    """
    timing = state.metric("step_s")
    is_whole = count is None or count >= timing.count
    steps = timing if count is None else timing.newest(count)
    if not len(steps) or not len(state.sums[ACCEPTED]) or not steps.total > 0:
        return None

    def over(series: Series) -> float:
        # A reason has points only where it occurred.
        return series.part(bisect_left(series.steps, steps.steps[0]), len(series)).total

    start, end = steps.times[0] - steps.values[0], steps.times[-1]
    by_env = state.thrown_away.total if is_whole else state.thrown_away.between(start, end)
    lost = dict(by_env)
    for name, series in state.series.items():
        prefix, _, reason = name.partition("/")
        if prefix == "left_out_tokens":
            lost[reason] = lost.get(reason, 0.0) + over(series)
    accepted, known = over(state.sums[ACCEPTED]), sum(lost.values())
    # Old rollouts were generated before these steps: the engines' count may be smaller.
    generated = max(over(state.sums[GENERATED]), accepted + known)
    if not math.isfinite(generated) or generated <= 0:
        return None
    lost[OTHER] = lost.get(OTHER, 0.0) + generated - accepted - known
    largest_first = sorted(lost.items(), key=lambda one: -one[1])
    return TokenUse(
        accepted / steps.total / max(1, gpus),
        gpus,
        accepted / generated,
        {name: tokens / generated for name, tokens in largest_first if tokens > 0},
    )


@dataclass(frozen=True)
class RunBenchmark:
    """Figures of one run: seconds, bytes, tokens per second; None without data."""

    run: str
    mode: str
    source: str
    """`trainer`: its own summary; `records`: computed here."""
    attempts: int
    steps: int
    total_s: float | None
    avg_step_s: float | None
    total_step_s: float | None
    avg_sync_s: float | None
    syncs: int
    total_sync_s: float | None
    avg_data_wait_s: float | None
    total_data_wait_s: float | None
    engine_idle_fraction: float | None
    """Share of the time in which the engines had no request."""
    engine_capacity_used: float | None
    """Used share of the engines' capacity, over the steps that report it."""
    accepted_tokens_per_s: float | None
    """Generated tokens that were trained on, per second."""
    gpus: int
    """GPUs of the stack; 0 on a CPU machine or if unknown."""
    accepted_tokens_per_s_per_gpu: float | None
    """None without GPUs."""
    accepted_share: float | None
    """Share of the generated tokens that were trained on."""
    thrown_away: dict[str, float]
    """Shares of the generated tokens that were not, by reason."""
    peak_bytes: int | None
    avg_bytes: int | None
    peak_rss_bytes: int | None
    """Main memory of the trainer process."""
    tokens_per_s: float | None
    mfu_peak: float | None
    """Model FLOP utilization of the training part, of the card's dense peak; mean of the steps."""
    mfu: float | None
    """Share of 790 TFLOP/s."""
    reward_first: float | None
    """Mean of the first five steps."""
    reward_last: float | None
    """Mean of the last five steps."""
    held_out: float | None = None
    """Newest accuracy of the first environment that evaluates."""
    checkpoint_bytes: int | None = None
    """Size of the newest checkpoint."""
    exit_code: int | None = None
    """None while it runs, or if unknown."""

    @property
    def waiting_share(self) -> float | None:
        """Share of all steps' time without rollouts."""
        return summary.waiting_share(self)


def benchmark_run(root: Path) -> RunBenchmark:
    """Measure the run directory `root`; missing files give None."""
    info, state, _ = load_run(root)
    figures = benchmark_state(state, run=root.name, mode=info.mode, gpus=info.gpu_count)
    return replace(figures, exit_code=exit_code(RunDir(root)))


def benchmark_runs(roots: Sequence[Path]) -> list[RunBenchmark]:
    named = zip(roots, names_of(roots), strict=True)
    return [replace(benchmark_run(root), run=name) for root, name in named]


def benchmark_state(state: RunState, *, run: str, mode: str, gpus: int = 0) -> RunBenchmark:
    """Measure a run that is in memory."""
    use = token_use(state, gpus)
    reward = state.metric("reward_mean").values
    common = {
        "run": run,
        "attempts": len(state.attempt_steps),
        "gpus": gpus,
        "accepted_tokens_per_s_per_gpu": use.accepted_per_s if use and gpus else None,
        "accepted_share": use.accepted if use else None,
        "thrown_away": use.thrown_away if use else {},
        "peak_rss_bytes": _whole(state.metric("rss_bytes").highest),
        "mfu_peak": state.metric("mfu_peak").mean,
        "mfu": state.metric("mfu").mean,
        "reward_first": mean(reward[:5]),
        "reward_last": mean(reward[-5:]),
        "held_out": next((series.last for series in state.evals.values()), None),
        "checkpoint_bytes": state.checkpoints[-1].bytes if state.checkpoints else None,
    }
    record = state.benchmark
    mode = one_line((record.mode if record else "") or mode)
    # After a restart the trainer's summary covers its last attempt only, which may have no step.
    if record is None or record.steps < state.metric("step_s").count:
        return _possible(RunBenchmark(mode=mode, source="records", **common, **_computed(state)))  # type: ignore[arg-type]
    figures = record.model_dump(include=set(RunBenchmark.__dataclass_fields__) - {"mode"})
    return _possible(RunBenchmark(mode=mode, source="trainer", **common, **figures))  # type: ignore[arg-type]


def _computed(state: RunState) -> dict[str, float | int | None]:
    step, wait = state.metric("step_s"), state.metric("data_wait_s")
    return {
        "steps": state.step,
        "total_s": _span(step),
        "avg_step_s": step.mean,
        "total_step_s": _total(step),
        "avg_sync_s": state.syncs.mean,
        "syncs": state.syncs.count,
        "total_sync_s": _total(state.syncs),
        "avg_data_wait_s": wait.mean,
        "total_data_wait_s": _total(wait),
        "engine_idle_fraction": _idle_share(state, step.count),
        "engine_capacity_used": _capacity_share(state, step.count),
        "accepted_tokens_per_s": _ratio(state.sums[ACCEPTED], step, None),
        "peak_bytes": _whole(state.metric("peak_bytes").highest),
        "avg_bytes": _whole(state.metric("allocated_bytes").mean),
        "tokens_per_s": tokens_per_second(state),
    }


def _span(step: Series) -> float | None:
    # From the first step's start to the last one's end; None if the clock was set back.
    if not step.times or any(later < earlier for earlier, later in pairwise(step.times)):
        return None
    return step.times[-1] - step.times[0] + step.values[0]


def _possible(figures: RunBenchmark) -> RunBenchmark:
    # Negative times and rates come from clocks that run backwards.
    names = (name for name in RunBenchmark.__dataclass_fields__ if name.endswith("_s"))
    wrong: dict[str, Any] = {name: None for name in names if (getattr(figures, name) or 0) < 0}
    return replace(figures, **wrong)


def _total(series: Series) -> float | None:
    return series.total if len(series) else None


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None and math.isfinite(value) else None


def render_benchmarks(runs: Sequence[RunBenchmark]) -> str:
    """Return the summary of one run, or a table with ratios to the first."""
    return _summary(runs[0]) if len(runs) == 1 else _comparison(runs)


def benchmarks_json(runs: Sequence[RunBenchmark]) -> str:
    """Return `{"runs": [...]}`, with `ratios` to the first run; non-finite numbers are strings."""
    rows: list[dict[str, object]] = []
    for run in runs:
        figures = asdict(run) | {"waiting_share": run.waiting_share}
        rows.append({key: _strict(value) for key, value in figures.items()})
    for row, run in zip(rows[1:], runs[1:], strict=True):
        found = {name: ratio(getattr(run, name), getattr(runs[0], name)) for _, name, _ in _ROWS}
        row["ratios"] = {name: value for name, value in found.items() if value is not None}
    return json.dumps({"runs": rows}, indent=2)


def _strict(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def summary_sections(run: RunBenchmark) -> list[summary.Section]:
    """Return titles and figures of a summary; the first section has no name."""
    (first, totals), (timing, speeds), (memory, figures) = summary.summary_sections(run)
    if run.mfu_peak is not None:
        speeds.append(("MFU of dense peak", summary.share_text(run.mfu_peak)))
    if run.mfu is not None:
        speeds.append(("MFU of 790 TFLOP/s", summary.share_text(run.mfu)))
    learning = [
        ("Reward first 5 steps", _fraction(run.reward_first)),
        ("Reward last 5 steps", _fraction(run.reward_last)),
        ("Accuracy held out", _fraction(run.held_out)),
        ("Checkpoint size", _size(run.checkpoint_bytes)),
    ]
    rss = ("Peak trainer RSS", summary.gigabytes_text(run.peak_rss_bytes))
    return [
        (first, [*_tokens(run), *totals]),
        (timing, speeds),
        (memory, [*figures, rss]),
        ("Learning", learning),
    ]


def _tokens(run: RunBenchmark) -> list[tuple[str, str]]:
    """Return the rows about the use of generated tokens, headline first."""
    rate, label = run.accepted_tokens_per_s_per_gpu, "Accepted tokens/s/GPU"
    if not run.gpus:
        rate, label = run.accepted_tokens_per_s, "Accepted tokens/s"
    if rate is None:
        return []
    gpus = f" ({counted(run.gpus, 'GPU')})" if run.gpus else ""
    rows = [(label, summary.whole_text(rate) + gpus)]
    if run.accepted_share is not None:
        rows.append(("Accepted of generated", summary.share_text(run.accepted_share)))
        thrown = summary.share_text(1.0 - run.accepted_share)
        rows.append(("Thrown away", f"{thrown}{reasons_text(run.thrown_away, ': ')}"))
    return rows


def origin(run: RunBenchmark) -> str:
    """Describe the source of computed figures; empty for the trainer's own summary."""
    if run.source == "trainer":
        return ""
    return f"{run.steps} steps, {counted(run.attempts, 'attempt')} of the trainer"


def _summary(run: RunBenchmark) -> str:
    made = f" - {words}" if (words := origin(run)) else ""
    return summary.summary_text(f"({run.mode or 'unknown mode'}){made}", summary_sections(run))


def _comparison(runs: Sequence[RunBenchmark]) -> str:
    table = [["", *(one_line(f"{run.run} ({run.mode or '?'})") for run in runs)]]
    for title, name, write in _ROWS:
        values = [getattr(run, name) for run in runs]
        times = [None, *(ratio(value, values[0]) for value in values[1:])]
        ends = ["" if found is None else f" (x{found:.2f})" for found in times]
        table.append([title, *(write(v) + end for v, end in zip(values, ends, strict=True))])
    thrown = (reasons_text(run.thrown_away) or summary.NO_DATA for run in runs)
    table.insert(4, ["Thrown away", *thrown])
    codes = ("no data" if run.exit_code is None else str(run.exit_code) for run in runs)
    return text_table([*table, ["Exit code", *codes]])


def ratio(value: float | None, base: float | None) -> float | None:
    """Return `value` over `base`; None if one is missing or not finite."""
    if value is None or not base or not math.isfinite(real(value)) or not math.isfinite(real(base)):
        return None
    return real(value) / real(base)


def _size(value: float | None) -> str:
    return summary.figure_text(value, bytes_text)


def _fraction(value: float | None) -> str:
    return summary.figure_text(value, lambda real: f"{real:.3f}")


# Title, field, formatter.
_ROWS = (
    ("Accepted tokens/s/GPU", "accepted_tokens_per_s_per_gpu", summary.whole_text),
    ("Accepted tokens/s", "accepted_tokens_per_s", summary.whole_text),
    ("Accepted of generated", "accepted_share", summary.share_text),
    ("Total time", "total_s", summary.seconds_text),
    ("Steps", "steps", summary.whole_text),
    ("Avg step", "avg_step_s", summary.seconds_text),
    ("Total step", "total_step_s", summary.seconds_text),
    ("Avg sync", "avg_sync_s", summary.seconds_text),
    ("Total sync", "total_sync_s", summary.seconds_text),
    ("Avg data fetch", "avg_data_wait_s", summary.seconds_text),
    ("Total data fetch", "total_data_wait_s", summary.seconds_text),
    ("Trainer waiting", "waiting_share", summary.share_text),
    ("Engine idle", "engine_idle_fraction", summary.share_text),
    ("Engine capacity used", "engine_capacity_used", summary.share_text),
    ("Tokens/s", "tokens_per_s", summary.whole_text),
    ("MFU of dense peak", "mfu_peak", summary.share_text),
    ("MFU of 790 TFLOP/s", "mfu", summary.share_text),
    ("Peak GPU memory", "peak_bytes", summary.gigabytes_text),
    ("Avg GPU memory", "avg_bytes", summary.gigabytes_text),
    ("Peak trainer RSS", "peak_rss_bytes", summary.gigabytes_text),
    ("Checkpoint size", "checkpoint_bytes", _size),
    ("Reward, first 5", "reward_first", _fraction),
    ("Reward, last 5", "reward_last", _fraction),
    ("Accuracy held out", "held_out", _fraction),
)


class Progress:
    """One-line progress of one of several stacks, from its files."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._feed, self._state = RunFeed(run), RunState()
        self._info: RunInfo | None = None
        self.components: dict[str, str] = {}  # last known state of each component

    def refresh(self) -> None:
        """Read the new records."""
        self._info = self._info or read_info(self._run)
        self._state = self._feed.catch_up(self._state)
        self.components = {record.component or "": record.new for record in self._state.transitions}

    def settled(self, component: str) -> bool:
        """Return True if `component` has ended, in any way."""
        return self.components.get(component) in SETTLED

    @property
    def phase(self) -> str:
        """Its end, the components it waits for, or training."""
        result = read_json(self._run.result_json)
        if result:
            code, reason = result.get("exit_code"), one_line(str(result.get("reason", "")))
            return "done" if code == 0 else f"ended with code {code}: {reason}"
        ill = [f"{name} {state}" for name, state in self.components.items() if state in ILL]
        if self._state.step:
            return ", ".join(ill) or "training"
        for found in gravest_first(self._state.standing.values()):
            if found.severity != "advice":
                return one_line(found.title)
        up = (*SETTLED, State.HEALTHY)
        planned = [part.name for part in self._info.components] if self._info else []
        waiting = [name for name in planned if self.components.get(name) not in up]
        return f"starting {', '.join(waiting)}" if waiting else "waiting for the first batch"

    def line(self) -> str:
        steps = self._info.training_steps if self._info else None
        now = pace(self._state, steps)
        reward = self._state.metric("reward_mean").values
        parts = (
            f"step {self._state.step:>4}{f'/{steps}' if steps else ''}",
            f"reward {number(reward[-1] if reward else None):>6}",
            f"{seconds_text(now.step_s):>8}/step",
            f"{duration(now.eta_s)} left" if now.eta_s else "",
            self.phase,
        )
        return "  ".join(filter(None, parts))
