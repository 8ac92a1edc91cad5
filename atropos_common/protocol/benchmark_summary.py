"""The BENCHMARK SUMMARY as text, for the end of a run and `bench`. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

RULE = "=" * 70
GB = 1e9
NO_DATA = "no data"
# Only a damaged or foreign recording has such figures.
FOREIGN = 1e15

Section = tuple[str, list[tuple[str, str]]]
"""Title ("" for the first), and figures by name."""


def summary_sections(figures: Any, *, no_memory: str = NO_DATA) -> list[Section]:
    """`figures`: a `benchmark` record or an object with its fields, None without data."""
    # The guides print minutes as well.
    minutes = "" if figures.total_s is None else f" ({figures.total_s / 60:.2f} min)"
    return [
        (
            "",
            [
                ("Total training time", seconds_text(figures.total_s) + minutes),
                ("Total steps", str(figures.steps)),
            ],
        ),
        (
            "Timing breakdown",
            [
                ("Avg step time", seconds_text(figures.avg_step_s)),
                ("Total step time", seconds_text(figures.total_step_s)),
                ("Avg sync time", f"{seconds_text(figures.avg_sync_s)} (x{figures.syncs} syncs)"),
                ("Total sync time", seconds_text(figures.total_sync_s)),
                ("Avg data fetch time", seconds_text(figures.avg_data_wait_s)),
                ("Total data fetch time", seconds_text(figures.total_data_wait_s)),
                ("Trainer waiting", share_text(waiting_share(figures))),
                ("Engine idle", share_text(figures.engine_idle_fraction)),
                ("Engine capacity used", share_text(figures.engine_capacity_used)),
                ("Tokens per second", whole_text(figures.tokens_per_s)),
                ("Accepted tokens/s", whole_text(figures.accepted_tokens_per_s)),
            ],
        ),
        (
            "Memory",
            [
                ("Peak GPU memory", gigabytes_text(figures.peak_bytes, no_memory)),
                ("Avg GPU memory", gigabytes_text(figures.avg_bytes, no_memory)),
            ],
        ),
    ]


def summary_text(title: str, sections: Sequence[Section]) -> str:
    lines = [f"BENCHMARK SUMMARY {title}"]
    for name, figures in sections:
        indent = "    " if name else "  "
        lines += ["", f"  {name.upper()}:"] if name else [RULE]
        lines += [f"{indent + what + ':':<27}{value}" for what, value in figures]
    return "\n".join([RULE, *lines, RULE])


def seconds_text(value: float | None) -> str:
    return figure_text(
        value, lambda real: f"{real:.2f}s" if not abs(real) < 0.1 else f"{real:.4f}s"
    )


def whole_text(value: float | None) -> str:
    return figure_text(value, lambda real: f"{real:,.0f}")


def share_text(value: float | None) -> str:
    return figure_text(value, lambda real: f"{real:.0%}")


def waiting_share(figures: Any) -> float | None:
    """Share of the steps' time in which the trainer waited for rollouts."""
    wait, whole = figures.total_data_wait_s, figures.total_step_s
    # `not whole` also covers a recording without steps.
    return None if wait is None or not whole else wait / whole


def gigabytes_text(value: float | None, no_data: str = NO_DATA) -> str:
    return figure_text(value, lambda real: f"{real / GB:.2f} GB", no_data)


def figure_text(value: float | None, write: Callable[[float], str], no_data: str = NO_DATA) -> str:
    """Infinite, NaN and implausible values become short texts."""
    if value is None:
        return no_data
    # True for NaN alone.
    if value != value:
        return "NaN"
    if abs(value) < FOREIGN:
        return write(value)
    return f"{value:.1e}" if abs(value) <= sys.float_info.max else "∞" if value > 0 else "-∞"
