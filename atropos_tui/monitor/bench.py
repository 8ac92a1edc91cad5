"""The guides' BENCHMARK SUMMARY from a run's telemetry, for one run or several side by side.

    atropos-tui bench RUN... [--json]

A finished run of one attempt shows the trainer's own summary record. Otherwise (still running, stopped, restarted) the
same figures are computed from the records that stand, and the title says so.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from atropos_common.run_dir import RunDir
from atropos_tui.monitor.feed import load_run
from atropos_tui.monitor.pace import tokens_per_second
from atropos_tui.monitor.plain import bytes_text, counted, number, one_line
from atropos_tui.monitor.run_info import read_json
from atropos_tui.monitor.series import Series, mean, real
from atropos_tui.monitor.state import RunState

RULE = "=" * 70
GB = 1e9
FOREIGN = 1e15
"""No run has lasted so many seconds or taken so many bytes."""


@dataclass(frozen=True)
class RunBenchmark:
    """Figures of one run: seconds, bytes, tokens per second. None where there is no data."""

    run: str
    mode: str
    source: str
    """`trainer`: its own summary; `records`: computed from what it wrote."""
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
    peak_bytes: int | None
    avg_bytes: int | None
    peak_rss_bytes: int | None
    """Of the trainer process, in main memory."""
    tokens_per_s: float | None
    reward_first: float | None
    """Mean reward of the first five steps."""
    reward_last: float | None
    """Mean reward of the last five steps."""
    held_out: float | None = None
    """Newest held-out accuracy, of the first environment that reports one."""
    checkpoint_bytes: int | None = None
    """Of the newest checkpoint."""
    exit_code: int | None = None
    """None while it runs, and where nothing tells."""


def benchmark_run(root: Path) -> RunBenchmark:
    """Read the run directory `root` and measure it. Missing files give None, not an error."""
    info, state, _ = load_run(root)
    code = read_json(RunDir(root).result_json).get("exit_code")
    figures = benchmark_state(state, run=root.name, mode=info.mode)
    return replace(figures, exit_code=code if isinstance(code, int) else None)


def benchmark_runs(roots: Sequence[Path]) -> list[RunBenchmark]:
    """Measure several runs; those whose directories have the same name go by the folder above, too."""
    figures = [benchmark_run(root) for root in roots]
    count = Counter(run.run for run in figures)
    return [
        replace(run, run=f"{root.parent.name}/{run.run}") if count[run.run] > 1 else run
        for run, root in zip(figures, roots, strict=True)
    ]


def benchmark_state(state: RunState, *, run: str, mode: str) -> RunBenchmark:
    """Measure a run that is already in memory."""
    reward = state.metric("reward_mean").values
    common = {
        "run": run,
        "attempts": len(state.attempt_steps),
        "peak_rss_bytes": _peak(state.metric("rss_bytes")),
        "reward_first": mean(reward[:5]),
        "reward_last": mean(reward[-5:]),
        "held_out": next((series.last for series in state.evals.values()), None),
        "checkpoint_bytes": state.checkpoints[-1].bytes if state.checkpoints else None,
    }
    record = state.benchmark
    mode = one_line((record.mode if record else "") or mode)
    if record is None or len(state.attempt_steps) > 1:
        return _possible(RunBenchmark(mode=mode, source="records", **common, **_computed(state)))  # type: ignore[arg-type]
    figures = record.model_dump(include=set(RunBenchmark.__dataclass_fields__) - {"mode"})
    return _possible(RunBenchmark(mode=mode, source="trainer", **common, **figures))  # type: ignore[arg-type]


def _computed(state: RunState) -> dict[str, float | int | None]:
    step, wait = state.metric("step_s"), state.metric("data_wait_s")
    syncs = [seconds for _, _, seconds in state.syncs]
    return {
        "steps": state.step,
        "total_s": _span(step),
        "avg_step_s": mean(step.values),
        "total_step_s": _total(step.values),
        "avg_sync_s": mean(syncs),
        "syncs": len(syncs),
        "total_sync_s": _total(syncs),
        "avg_data_wait_s": mean(wait.values),
        "total_data_wait_s": _total(wait.values),
        "peak_bytes": _peak(state.metric("peak_bytes")),
        "avg_bytes": _whole(mean(state.metric("allocated_bytes").values)),
        "tokens_per_s": tokens_per_second(state),
    }


def _span(step: Series) -> float | None:
    """Seconds from the first step's start to the last one's end; None where the clock was set back in between."""
    if not step.times or any(later < earlier for earlier, later in pairwise(step.times)):
        return None
    return step.times[-1] - step.times[0] + step.values[0]


def _possible(figures: RunBenchmark) -> RunBenchmark:
    """Without negative times and rates: clocks that run backwards leave such, and they say nothing."""
    nothing: dict[str, Any] = {
        name: None
        for name in RunBenchmark.__dataclass_fields__
        if name.endswith("_s") and (getattr(figures, name) or 0) < 0
    }
    return replace(figures, **nothing)


def _total(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _peak(series: Series) -> int | None:
    return _whole(max(series.values, default=None))


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None and math.isfinite(value) else None


def render_benchmarks(runs: Sequence[RunBenchmark]) -> str:
    """The summary of one run; a table with a ratio to the first run per row for several."""
    return _summary(runs[0]) if len(runs) == 1 else _comparison(runs)


def benchmarks_json(runs: Sequence[RunBenchmark]) -> str:
    """`{"runs": [...]}`; a non-finite number is a string, as in the streams.

    Of several, each after the first has `ratios` to it, where both have a figure.
    """
    rows: list[dict[str, object]] = [{key: _strict(value) for key, value in asdict(run).items()} for run in runs]
    for row, run in zip(rows[1:], runs[1:], strict=True):
        row["ratios"] = {
            name: found
            for _, name, _ in _ROWS
            if (found := ratio(getattr(run, name), getattr(runs[0], name))) is not None
        }
    return json.dumps({"runs": rows}, indent=2)


def _strict(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def summary_sections(run: RunBenchmark) -> list[tuple[str, list[tuple[str, str]]]]:
    """The summary of one run as titles and figures, ready to show; the first section has no name."""
    minutes = "" if run.total_s is None else f" ({run.total_s / 60:.2f} min)"
    return [
        ("", [("Total training time", _seconds(run.total_s) + minutes), ("Total steps", str(run.steps))]),
        (
            "Timing breakdown",
            [
                ("Avg step time", _seconds(run.avg_step_s)),
                ("Total step time", _seconds(run.total_step_s)),
                ("Avg sync time", f"{_seconds(run.avg_sync_s)} (x{run.syncs} syncs)"),
                ("Total sync time", _seconds(run.total_sync_s)),
                ("Avg data fetch time", _seconds(run.avg_data_wait_s)),
                ("Total data fetch time", _seconds(run.total_data_wait_s)),
                ("Tokens per second", _plain(run.tokens_per_s)),
            ],
        ),
        (
            "Memory",
            [
                ("Peak GPU memory", _gigabytes(run.peak_bytes)),
                ("Avg GPU memory", _gigabytes(run.avg_bytes)),
                ("Peak trainer RSS", _gigabytes(run.peak_rss_bytes)),
            ],
        ),
        (
            "Learning",
            [
                ("Reward first 5 steps", _fraction(run.reward_first)),
                ("Reward last 5 steps", _fraction(run.reward_last)),
                ("Accuracy held out", _fraction(run.held_out)),
                ("Checkpoint size", _size(run.checkpoint_bytes)),
            ],
        ),
    ]


def origin(run: RunBenchmark) -> str:
    """What the figures were computed from; empty where they are the trainer's own summary."""
    return "" if run.source == "trainer" else f"{run.steps} steps, {counted(run.attempts, 'attempt')} of the trainer"


def _summary(run: RunBenchmark) -> str:
    lines = [f"BENCHMARK SUMMARY ({run.mode or 'unknown mode'}){f' - {made}' if (made := origin(run)) else ''}"]
    for name, figures in summary_sections(run):
        indent = "    " if name else "  "
        lines += ["", f"  {name.upper()}:"] if name else [RULE]
        lines += [f"{indent + title + ':':<27}{value}" for title, value in figures]
    return "\n".join([RULE, *lines, RULE])


_ROWS = (
    ("Total time", "total_s", "seconds"),
    ("Steps", "steps", "plain"),
    ("Avg step", "avg_step_s", "seconds"),
    ("Total step", "total_step_s", "seconds"),
    ("Avg sync", "avg_sync_s", "seconds"),
    ("Total sync", "total_sync_s", "seconds"),
    ("Avg data fetch", "avg_data_wait_s", "seconds"),
    ("Total data fetch", "total_data_wait_s", "seconds"),
    ("Tokens/s", "tokens_per_s", "plain"),
    ("Peak GPU memory", "peak_bytes", "gigabytes"),
    ("Avg GPU memory", "avg_bytes", "gigabytes"),
    ("Peak trainer RSS", "peak_rss_bytes", "gigabytes"),
    ("Checkpoint size", "checkpoint_bytes", "size"),
    ("Reward, first 5", "reward_first", "fraction"),
    ("Reward, last 5", "reward_last", "fraction"),
    ("Accuracy held out", "held_out", "fraction"),
)


def _comparison(runs: Sequence[RunBenchmark]) -> str:
    """Rows of figures, a column per run; `x` is the ratio to the first run."""
    formats = {"seconds": _seconds, "plain": _plain, "gigabytes": _gigabytes, "fraction": _fraction, "size": _size}
    table = [["", *(one_line(f"{run.run} ({run.mode or '?'})") for run in runs)]]
    for title, name, kind in _ROWS:
        values = [getattr(run, name) for run in runs]
        times = [None, *(ratio(value, values[0]) for value in values[1:])]
        cells = [
            formats[kind](value) + (f" (x{found:.2f})" if found is not None else "")
            for value, found in zip(values, times, strict=True)
        ]
        table.append([title, *cells])
    table.append(["Exit code", *("no data" if run.exit_code is None else str(run.exit_code) for run in runs)])
    widths = [max(len(row[column]) for row in table) for column in range(len(runs) + 1)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` over `base`; None where that says nothing."""
    if value is None or not base or not math.isfinite(real(value)) or not math.isfinite(real(base)):
        return None
    return real(value) / real(base)


def _seconds(value: float | None) -> str:
    return _shown(value, lambda real: f"{real:.2f}s" if not abs(real) < 0.1 else f"{real:.4f}s")


def _plain(value: float | None) -> str:
    return _shown(value, lambda real: f"{real:,.0f}")


def _gigabytes(value: float | None) -> str:
    return _shown(value, lambda real: f"{real / GB:.2f} GB")


def _size(value: float | None) -> str:
    return _shown(value, bytes_text)


def _fraction(value: float | None) -> str:
    return _shown(value, lambda real: f"{real:.3f}")


def _shown(value: float | None, write: Callable[[float], str]) -> str:
    """`no data` where there is none; what is not finite, or foreign in its size, in few characters."""
    if value is None:
        return "no data"
    return write(value) if abs(value) < FOREIGN else number(value)
