"""Draw held-out accuracy over minutes of training as SVG, readable on light and dark pages."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import Any

WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 64, 770, 80, 330
"""Edges of the plot; the last accuracies stand to the right of it, the key below it."""
LINE_PX, KEY_PX = 20, 46
COLOURS = (("#0550ae", "#58a6ff"), ("#bc4c00", "#f0883e"), ("#1a7f37", "#56d364"))
"""Colours of the curves, on a light and on a dark page."""
BASE = """
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
.heading { font-size: 17px } .heading, .name { font-weight: 600 }
.line { fill: none; stroke-width: 2.5 } .error { stroke-opacity: .4 }
""".strip()
LIGHT = """
.page { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e }
.grid { stroke: #d8dee4 } .axis { stroke: #59636e }
""".strip()
DARK = """
.page { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .soft { fill: #9198a1 }
.grid { stroke: #262c34 } .axis { stroke: #9198a1 }
""".strip()
DASHES = ("", "7 4", "2 4")
"""Patterns, so that curves differ without colour."""


def draw(results: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the SVG of result files of `benchmarks.gsm8k`, and its text for readers who do not
    see it.

    Raises:
        ValueError: no result, more than three, or one without an evaluation.
    """
    if not 1 <= len(results) <= len(DASHES):
        raise ValueError(f"1 to {len(DASHES)} results can be drawn, not {len(results)}")
    for each in results:
        if not each["held_out"]:
            raise ValueError(f"{each['label']}: no evaluation to draw")
    curves = [points_of(each) for each in results]
    points = [point for curve in curves for point in curve]
    x_step = nice(max(x for x, _ in points) / 6)
    x_most = x_step * math.ceil(max(x for x, _ in points) / x_step)
    y_step = nice((max(y for _, y in points) - min(y for _, y in points) or 1) / 4)
    y_least = y_step * math.floor(min(y for _, y in points) / y_step)
    y_most = y_step * math.ceil(max(y for _, y in points) / y_step)
    y_most = max(y_most, y_least + y_step)

    def x_at(minutes: float) -> float:
        return LEFT + (RIGHT - LEFT) * minutes / x_most

    def y_at(percent: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (percent - y_least) / (y_most - y_least)

    alt = description(results)
    height = BOTTOM + 56 + KEY_PX * len(results)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(heading(results))}</title>',
        f'<desc id="desc">{escape(alt)}</desc>',
        f"<style>{style()}</style>",
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(LEFT - 40, 32, heading(results), "text heading"),
        text(LEFT - 40, 54, subtitle(results), "soft"),
    ]
    for number in range(round((y_most - y_least) / y_step) + 1):
        value = y_least + number * y_step
        y = y_at(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(text(LEFT - 8, y + 5, f"{value:g} %", "soft", 'text-anchor="end"'))
    for number in range(round(x_most / x_step) + 1):
        x = x_at(number * x_step)
        parts.append(f'<path class="axis" d="M{x:.1f} {BOTTOM}v5"/>')
        label = f"{number * x_step:g}"
        parts.append(text(x, BOTTOM + 20, label, "soft", 'text-anchor="middle"'))
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    middle = (LEFT + RIGHT) / 2
    parts.append(text(middle, BOTTOM + 40, "minutes of training", "soft", 'text-anchor="middle"'))
    ends = apart([y_at(curve[-1][1]) for curve in curves])
    for index, (result, curve) in enumerate(zip(results, curves, strict=True)):
        way = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in curve)
        parts.append(f'<g class="c{index}">')
        parts.append(f'<polyline class="line" points="{way}" stroke-dasharray="{DASHES[index]}"/>')
        for (x, y), measured in zip(curve, result["held_out"], strict=True):
            error = standard_error(measured)
            top, bottom = max(TOP, y_at(y + error)), min(BOTTOM, y_at(y - error))
            parts.append(f'<path class="error" d="M{x_at(x):.1f} {top:.1f}V{bottom:.1f}"/>')
            parts.append(f'<circle class="mark" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3.5"/>')
        end = f"{curve[-1][1]:.1f} %"
        parts.append(text(x_at(curve[-1][0]) + 10, ends[index] + 5, end, "name"))
        # The key below the plot, with the pace of the run.
        y = BOTTOM + 70 + KEY_PX * index
        parts.append(
            f'<path class="line" d="M{LEFT - 40} {y - 5}h30" stroke-dasharray="{DASHES[index]}"/>'
        )
        parts.append(text(LEFT, y, result["label"], "name"))
        parts.append(text(LEFT, y + LINE_PX, cost(result), "soft"))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""]), alt


def style() -> str:
    """Return the rules for light pages and, where the reader prefers them, dark ones."""
    rules = []
    for base, shade in ((LIGHT, 0), (DARK, 1)):
        lines = [base]
        for index, colours in enumerate(COLOURS):
            colour, curve = colours[shade], f".c{index}"
            lines.append(f"{curve} .line, {curve} .error {{ stroke: {colour} }}")
            lines.append(f"{curve} .mark, {curve} .name {{ fill: {colour} }}")
        rules.append("\n".join(lines))
    light, dark = rules
    return f"{BASE}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


def text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def nice(step: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= step * (1 - 1e-9))


def apart(positions: list[float]) -> list[float]:
    """Move positions apart until neighbours are a line of text away from each other."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    moved = list(positions)
    for _ in range(50):
        for upper, lower in pairwise(order):
            if (missing := LINE_PX - (moved[lower] - moved[upper])) > 0:
                moved[upper] -= missing / 2
                moved[lower] += missing / 2
    return moved


def standard_error(measured: dict[str, Any]) -> float:
    """Return the standard error of an accuracy, in percent; 0 without a number of questions."""
    share, asked = measured["accuracy"], measured["asked"]
    return 100 * math.sqrt(share * (1 - share) / asked) if asked else 0.0


def heading(results: list[dict[str, Any]]) -> str:
    asked = results[0]["held_out"][-1]["asked"]
    return f"GSM8K: accuracy on {asked} held-out problems over minutes of training"


def points_of(result: dict[str, Any]) -> list[tuple[float, float]]:
    """Return minutes and per cent; the base model is evaluated before minute 0."""
    return [(max(0.0, each["minutes"]), 100 * each["accuracy"]) for each in result["held_out"]]


def subtitle(results: list[dict[str, Any]]) -> str:
    """Return models, GPUs and what the thin lines are."""
    models = sorted({each["model"] for each in results})
    gpus = sorted({gpu for each in results for gpu in each.get("gpu") or []})
    where = ", ".join([*models, *(gpus or ["CPU"])])
    return f"{where}; greedy answers, thin lines: standard error"


def cost(result: dict[str, Any]) -> str:
    """Describe the pace of a run in a few figures."""
    known = (
        ("step_s", "{:.2f} s a step"),
        ("tokens_per_s_per_gpu", "{:,.0f} trained tokens/s and GPU"),
        ("trainer_waits", "trainer waits {:.0%}"),
        ("engine_capacity_used", "engine capacity used {:.0%}"),
    )
    parts = [form.format(result[name]) for name, form in known if result.get(name) is not None]
    return ", ".join([f"{result['steps']} steps", *parts])


def description(results: list[dict[str, Any]]) -> str:
    """Return the picture in words."""
    said = []
    for each in results:
        first, last = each["held_out"][0], each["held_out"][-1]
        said.append(
            f"{each['label']}: from {first['accuracy']:.1%} to {last['accuracy']:.1%} after "
            f"{last['minutes']:.1f} minutes ({cost(each)})"
        )
    return f"{heading(results)}. {'. '.join(said)}."
