"""Curves in block characters: where points land, what is never joined, what always fits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.style import Style

from atropos_tui.ui.plot import Axes, Curve, Line, PlotStyles, nice_step, plot, tick_label, y_ticks
from tests.support.thorough import examples

INK = PlotStyles(*(Style() for _ in range(4)))


def draw(
    values: list[float], width: int = 40, height: int = 10, scatter: bool = False, **axes: object
) -> list[str]:
    curve = Curve(list(range(1, len(values) + 1)), values, Style(), scatter)
    return [_text(line) for line in plot([curve], Axes(**axes), INK, width, height)]  # type: ignore[arg-type]


def _text(line: Line) -> str:
    return "".join(segment.text for segment in line)


def braille(line: str) -> int:
    return sum(0x2800 < ord(char) <= 0x28FF for char in line)


def test_a_rising_line_goes_from_the_bottom_left_to_the_top_right() -> None:
    lines = draw([0.0, 0.5, 1.0], low=0, high=1)
    columns = [
        next((at for at, char in enumerate(line) if ord(char) > 0x2800), None)
        for line in lines[:-1]
    ]
    drawn = [column for column in columns if column is not None]
    assert drawn == sorted(drawn, reverse=True)
    assert braille(lines[0])
    assert braille(lines[-2])


def test_nan_breaks_the_line_and_is_marked() -> None:
    whole, broken = (
        draw([1.0] * 9, low=0, high=2),
        draw([1.0] * 4 + [math.nan] + [1.0] * 4, low=0, high=2),
    )
    assert sum(map(braille, broken)) < sum(map(braille, whole))
    assert sum(line.count("×") for line in broken) == 1
    assert "×" in draw([1.0, math.inf, 1.0], low=0, high=2)[0]


def test_a_logarithmic_axis_shows_seven_decades_apart() -> None:
    high, low = Curve([1, 2], [1e-2, 1e-2], Style()), Curve([1, 2], [4e-7, 0.0], Style())
    lines = [_text(line) for line in plot([high, low], Axes(log=True, high=1.0), INK, 40, 12)]
    rows = [at for at, line in enumerate(lines) if braille(line)]
    assert max(rows) - min(rows) >= 5
    assert any("1e-" in line for line in lines)


def test_the_limit_is_drawn_where_it_is_in_range() -> None:
    assert any("╌" in line for line in draw([0.01, 0.02], log=True, high=1.0, healthy=(None, 0.1)))
    assert not any(
        "╌" in line for line in draw([0.01, 0.02], high=0.05, low=0.0, healthy=(None, 0.1))
    )


def test_a_constant_and_nothing_at_all_have_axes() -> None:
    for values in ([3.0, 3.0], [0.0], [math.nan], []):
        lines = draw(values)
        assert any("┤" in line for line in lines)


def test_scattered_points_are_not_joined() -> None:
    lines = draw([0.1, 0.9], scatter=True, low=0, high=1)
    assert sum(line.count("◆") for line in lines) == 2
    assert sum(map(braille, lines)) == 0


number = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(number, max_size=60), st.integers(0, 60), st.integers(0, 20), st.booleans())
def test_any_values_fit_any_size(values: list[float], width: int, height: int, log: bool) -> None:
    lines = draw(values, width, height, log=log)
    assert len(lines) == height
    assert all(len(line) <= max(width, 0) for line in lines)


any_float = st.floats() | st.sampled_from([5e-324, 1e-300, 1e300, 1.7e308, -1.7e308])
any_step = (
    st.integers() | st.floats() | st.sampled_from([-(10**400), -(2**53), 2**53, 10**300, 10**400])
)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.tuples(any_step, any_float), max_size=40),
    st.sampled_from([None, 0, 60, 2**53]),
    st.sampled_from([None, 0.0]),
    st.sampled_from([None, 1.0]),
    st.booleans(),
)
def test_no_record_ends_what_draws_it(
    points: list[tuple[float, float]],
    last: float | None,
    low: float | None,
    high: float | None,
    log: bool,
) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not log and low is not None and min(filter(math.isfinite, values), default=0) < low:
        low = None  # a chart lets go of its ends where a value lies beyond them
    if not log and high is not None and max(filter(math.isfinite, values), default=0) > high:
        high = None
    curve, axes = (
        Curve(steps, values, Style()),
        Axes(last=last, low=low, high=high, log=log, healthy=(None, 0.1)),
    )
    lines = [_text(line) for line in plot([curve], axes, INK, 40, 10)]
    assert len(lines) == 10
    assert all(len(line) <= 40 for line in lines)


def test_figures_beyond_any_scale_leave_the_others_their_room() -> None:
    steps = [-(10**400), -5, 1, 2, 3, 4, 10**400]
    curve = Curve(steps, [9.0, 9.0, 0.0, 1.7e308, 5e-324, 1.0, 9.0], Style())
    lines = [_text(line) for line in plot([curve], Axes(), INK, 40, 10)]
    assert "1.00 ┤" in lines[0]
    assert sum(line.count("×") for line in lines) == 1
    assert lines[-1].endswith("4")


@pytest.mark.parametrize(
    ("rough", "nice"), [(0.3, 0.5), (1.0, 1.0), (0.21, 0.25), (7, 10), (1.2e-8, 2e-8)]
)
def test_steps_are_round(rough: float, nice: float) -> None:
    assert nice_step(rough) == pytest.approx(nice)


def test_ticks_are_labelled_shortly() -> None:
    assert [tick_label(v, False, y_ticks(0, 1, False, 5)) for v in y_ticks(0, 1, False, 5)] == [
        "0.00",
        "0.25",
        "0.50",
        "0.75",
        "1.00",
    ]
    assert [tick_label(v, True, []) for v in y_ticks(1e-4, 1, True, 9)] == [
        "1e-4",
        "1e-3",
        "0.01",
        "0.1",
        "1",
    ]
