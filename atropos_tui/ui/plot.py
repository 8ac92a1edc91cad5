"""Curves, bars and sparklines in characters: from values to styled text.

A cell of a curve holds 2 x 4 Braille dots. No record can make a plot fail: non-finite values are
`×`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from atropos_tui.monitor.run.gauges import Split, cells
from atropos_tui.monitor.run.series import MOST_STEPS, SMALLEST, on_scale

TEXTURES = "█▓▒▚▞▤▥"
OTHER_TEXTURE, FREE = "░", "·"
_LEVELS = "▁▂▃▄▅▆▇█"
# Different characters, so that a bar is readable without colours.
_DONE, _LEFT = "━", "┄"
# Style of a part of a bar by its label; `free` is the unused part.
StyleOf = Callable[[str], Style]
# Character of a part of a bar by its label.
TextureOf = Callable[[str], str]
Line = list[Segment]
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class Curve:
    """Values over ascending steps; `scatter`: marks without lines."""

    steps: Sequence[float]
    values: Sequence[float]
    style: Style
    scatter: bool = False
    mark: str = ""
    """Character of a scatter's points, or at intervals on a line."""


@dataclass(frozen=True)
class Band:
    """Range of several curves at each step, drawn as background."""

    steps: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    style: Style


@dataclass(frozen=True)
class Axes:
    """Ranges of the plot; None: from the data."""

    first: float = 0
    last: float | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    healthy: tuple[float | None, float | None] | None = None
    """Shaded, with a dashed line at each end in view."""
    cursor: float | None = None
    marks: Sequence[tuple[float, str]] = ()
    """Place and glyph of events, most important first."""


@dataclass(frozen=True)
class PlotStyles:
    axis: Style
    grid: Style
    limit: Style
    bad: Style
    healthy: Style = field(default_factory=Style)
    cursor: Style = field(default_factory=Style)
    mark: Style = field(default_factory=Style)


@dataclass
class _Canvas:
    """Braille dots and characters by cell number, row by row."""

    width: int
    height: int
    dots: dict[int, int] = field(default_factory=dict)
    marks: dict[int, tuple[str, Style]] = field(default_factory=dict)
    styles: dict[int, Style] = field(default_factory=dict)
    # Characters for cells without a curve.
    under: dict[int, tuple[str, Style]] = field(default_factory=dict)
    ground: dict[int, Style] = field(default_factory=dict)

    def dot(self, x: int, y: int, style: Style) -> None:
        if 0 <= x < 2 * self.width and 0 <= y < 4 * self.height:
            cell = (y >> 2) * self.width + (x >> 1)
            self.dots[cell] = self.dots.get(cell, 0) | _DOTS[y & 3][x & 1]
            self.styles[cell] = style

    def line(self, start: tuple[int, int], end: tuple[int, int], style: Style) -> None:
        # Two dots thick.
        (x, y), lowest = start, 4 * self.height - 1
        across, down = end[0] - x, end[1] - y
        steps = max(abs(across), abs(down), 1)
        half, width, dots, styles = steps // 2, self.width, self.dots, self.styles
        # Integer arithmetic without calls: most of the time of a chart is spent here.
        for at in range(steps + 1):
            here_x, here_y = x + (at * across + half) // steps, y + (at * down + half) // steps
            # The second dot lies below, or above in the lowest row.
            for row in (here_y, here_y + 1 if here_y < lowest else here_y - 1):
                cell = (row >> 2) * width + (here_x >> 1)
                dots[cell] = dots.get(cell, 0) | _DOTS[row & 3][here_x & 1]
                styles[cell] = style

    def mark(self, x: int, y: int, glyph: str, style: Style) -> None:
        column, row = min(max(x // 2, 0), self.width - 1), min(max(y // 4, 0), self.height - 1)
        self.marks[row * self.width + column] = (glyph, style)


@dataclass(frozen=True)
class _Scale:
    # `low` is the bottom row of dots, `high` the top row.
    low: float
    high: float
    log: bool
    rows: int

    def of(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    @cached_property
    def _ends(self) -> tuple[float, float]:
        low = self.of(self.low)
        return low, self.of(self.high) - low

    def y(self, value: float) -> int:
        low, length = self._ends
        share = (self.of(value) - low) / length
        return round((1 - min(max(share, 0.0), 1.0)) * (self.rows - 1))


# Columns between two points of a scatter; closer points would hide the curve behind them.
POINT_COLUMNS = 4
MARK_COLUMNS = 16
# A plot of fewer lines has no line of its own for marks.
LOW = 8


def plot(
    curves: Sequence[Curve],
    axes: Axes,
    styles: PlotStyles,
    width: int,
    height: int,
    bands: Sequence[Band] = (),
) -> list[Line]:
    """Draw `curves`, the first on top, as `height` lines."""
    # Steps beyond MOST_STEPS come from corrupt records and would compress the whole plot.
    ends = [step for curve in curves for step in curve.steps if abs(step) <= MOST_STEPS]
    last = max(ends, default=axes.first) if axes.last is None else axes.last
    last = last if last - axes.first > SMALLEST else axes.first + 1
    curves = [_in_view(curve, axes.first, last) for curve in curves]
    # One line is the x axis; marks take another one if the plot is high enough.
    rows = height - 1 - bool(axes.marks and height >= LOW)
    # Four rows of dots a cell.
    scale = _scale([*curves, *_edges(bands, axes.first, last)], axes, 4 * rows)
    ticks = _even_ticks(scale, max(2, (rows + 1) // 2))
    labels = {scale.y(value) // 4: tick_label(value, scale.log, ticks) for value in ticks}
    # Width of the labels on the left; two more cells hold the axis and the space before it.
    gutter = max((len(label) for label in labels.values()), default=0)
    columns = width - gutter - 2
    if columns < 4 or height < 3:
        return [[]] * height
    canvas = _Canvas(columns, rows)
    for band in bands:
        _fill_band(canvas, band, scale, axes.first, last)
    # The first curve is drawn last, so it is on top. Points follow, because a line must not cover
    # them.
    for curve in reversed(curves):
        if not curve.scatter:
            _draw(canvas, curve, scale, axes.first, last)
    _draw_points(canvas, [curve for curve in curves if curve.scatter], scale, axes.first, last)
    marked = [curve for curve in curves if curve.mark and not curve.scatter]
    _mark_lines(canvas, marked, scale, axes.first, last)
    below = _draw_cursor_and_marks(canvas, axes, last, styles, own_line=rows < height - 1)
    healthy, limits = _healthy_rows(scale, axes.healthy)
    lines = []
    for row in range(rows):
        start = f"{labels.get(row, ''):>{gutter}} {'┤' if row in labels else '│'}"
        blank = "╌" if row in limits else "┈" if row in labels else " "
        lines.append(
            [Segment(start, styles.axis), *_row(canvas, row, blank, styles, row in healthy)]
        )
    under = [[Segment(" " * (gutter + 2) + below, styles.mark)]] if below else []
    return [*lines, *under, _x_axis(axes.first, last, columns, gutter, styles.axis)]


def column_of(place: float, first: float, last: float, columns: int) -> int:
    return round((place - first) / (last - first) * (2 * columns - 1)) // 2


def _draw_cursor_and_marks(
    canvas: _Canvas, axes: Axes, last: float, styles: PlotStyles, *, own_line: bool
) -> str:
    # Returns the line of marks, empty without `own_line`.
    line = [" "] * canvas.width
    # In reverse, so that the most important mark wins a shared column.
    for place, glyph in reversed(axes.marks):
        if axes.first <= place <= last:
            column = column_of(place, axes.first, last, canvas.width)
            line[column] = glyph
            canvas.under[(canvas.height - 1) * canvas.width + column] = (glyph, styles.mark)
    if own_line:
        canvas.under.clear()
    if axes.cursor is not None and axes.first <= axes.cursor <= last:
        column = column_of(axes.cursor, axes.first, last, canvas.width)
        for row in range(canvas.height):
            canvas.under[row * canvas.width + column] = ("│", styles.cursor)
    return "".join(line) if own_line else ""


def _edges(bands: Sequence[Band], first: float, last: float) -> list[Curve]:
    edges = [
        Curve(band.steps, values, band.style) for band in bands for values in (band.low, band.high)
    ]
    return [_in_view(edge, first, last) for edge in edges]


def _fill_band(canvas: _Canvas, band: Band, scale: _Scale, first: float, last: float) -> None:
    for step, low, high in zip(band.steps, band.low, band.high, strict=True):
        if first <= step <= last and math.isfinite(low) and math.isfinite(high):
            column = column_of(step, first, last, canvas.width)
            for row in range(scale.y(high) // 4, scale.y(low) // 4 + 1):
                canvas.ground[row * canvas.width + column] = band.style


def _in_view(curve: Curve, first: float, last: float) -> Curve:
    # `on_scale` turns values beyond any scale into infinities.
    pairs = zip(curve.steps, curve.values, strict=True)
    points = [(step, on_scale(value)) for step, value in pairs if first <= step <= last]
    return replace(curve, steps=[step for step, _ in points], values=[value for _, value in points])


def _healthy_rows(
    scale: _Scale, healthy: tuple[float | None, float | None] | None
) -> tuple[range, set[int]]:
    if healthy is None:
        return range(0), set()
    low, high = healthy
    if (low is not None and low > scale.high) or (high is not None and high < scale.low):
        return range(0), set()
    top = 0 if high is None else scale.y(high) // 4
    bottom = (scale.rows - 1 if low is None else scale.y(low)) // 4
    ends = (end for end in healthy if end is not None and scale.low < end < scale.high)
    return range(top, bottom + 1), {scale.y(end) // 4 for end in ends}


def y_ticks(low: float, high: float, log: bool, most: int) -> list[float]:
    """Return round values between `low` and `high`."""
    if log:
        # The small tolerance keeps ends that rounding moved just past a decade.
        decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        return [10.0**power for power in decades][:: max(1, math.ceil(len(decades) / most))]
    step = nice_step((high - low) / max(1, most - 1))
    while True:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        # At least three ticks, where that many are wanted: halve the step until they fit.
        if last - first + 1 >= min(most, 3) or most < 2:
            return [at * step for at in range(first, last + 1)]
        step /= 2


def _even_ticks(scale: _Scale, most: int) -> list[float]:
    # Rounding to rows may make the distances of the usual ticks unequal.
    ticks = y_ticks(scale.low, scale.high, scale.log, most)
    if scale.log or _is_even(ticks, scale):
        return ticks
    # Try other steps and take the one whose number of ticks is closest to the usual one.
    power = 10.0 ** math.floor(math.log10(scale.high - scale.low))
    found = []
    for factor in (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5):
        step = factor * power
        first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
        others = [at * step for at in range(first, last + 1)] if last - first < most else []
        if len(others) >= min(most, 3) and _is_even(others, scale):
            found.append(others)
    return min(found, key=lambda others: abs(len(others) - len(ticks)), default=ticks)


def _is_even(ticks: Sequence[float], scale: _Scale) -> bool:
    rows = [scale.y(value) // 4 for value in ticks]
    return len({before - after for before, after in pairwise(rows)}) <= 1


def nice_step(rough: float) -> float:
    """Return the next of 1, 2, 2.5, 5, 10 or 20 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (factor * power for factor in (1, 2, 2.5, 5, 10, 20))
    return next(step for step in steps if step >= rough * (1 - 1e-9))


def tick_label(value: float, log: bool, ticks: Sequence[float]) -> str:
    if log:
        return f"1e{round(math.log10(value))}" if not 0.01 <= value <= 100 else f"{value:g}"
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(value) or 1.0
    if max(map(abs, ticks)) >= 1e4 or step < 1e-3:
        return f"{value:.1e}" if value else "0"
    digits = next((d for d in range(5) if abs(round(step, d) - step) < 1e-9 * max(1.0, step)), 4)
    return f"{value:.{digits}f}"


def _scale(curves: Sequence[Curve], axes: Axes, rows: int) -> _Scale:
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if axes.log:
        finite = [value for value in finite if value > 0]
        low = axes.low or 10.0 ** math.floor(math.log10(min(finite, default=1e-3)))
        high = axes.high or 10.0 ** math.ceil(math.log10(max(finite, default=1.0)) + 1e-9)
        return _Scale(low, high if high > low else low * 10, True, max(rows, 1))
    low = axes.low if axes.low is not None else min(finite, default=0.0)
    high = axes.high if axes.high is not None else max(finite, default=1.0)
    # A constant curve: widen the range, which also avoids a division by zero.
    if not high - low > 1e-12 * max(abs(high), abs(low)):
        pad = abs(high) / 10 or 1.0
        low, high = (low if axes.low is not None else low - pad), high + pad
    return _Scale(low, high, False, max(rows, 1))


def _draw(canvas: _Canvas, curve: Curve, scale: _Scale, first: float, last: float) -> None:
    width = 2 * canvas.width - 1
    before: tuple[int, int] | None = None
    # Extent of the points in the current column of dots: many points in one column make a single
    # stroke.
    highest = lowest = 0
    for step, value in zip(curve.steps, curve.values, strict=True):
        x = round((step - first) / (last - first) * width)
        if not math.isfinite(value):
            # NaN compares false, so it is marked at the bottom; infinity at the top.
            canvas.mark(x, 0 if value > 0 else scale.rows - 1, "×", curve.style)
            before = None
            continue
        here = (x, scale.y(value))
        if before is None or before[0] != x:
            if before is None:
                canvas.dot(*here, curve.style)
            else:
                canvas.line(before, here, curve.style)
            highest = lowest = here[1]
        # Row numbers grow downwards, so `highest` is the smaller one. Draw only what the stroke
        # does not cover yet.
        elif not highest <= here[1] <= lowest:
            canvas.line((x, highest if here[1] > lowest else lowest), here, curve.style)
            highest, lowest = min(highest, here[1]), max(lowest, here[1])
        if value > scale.high or (value < scale.low and not scale.log):
            canvas.mark(*here, "▴" if value > scale.high else "▾", curve.style)
        before = here


def _draw_points(
    canvas: _Canvas, curves: Sequence[Curve], scale: _Scale, first: float, last: float
) -> None:
    points = [
        (column_of(step, first, last, canvas.width), value, curve)
        for curve in curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    free = canvas.width
    kept = set()
    # From the right, so that the newest point is always kept.
    for column in sorted({column for column, _, _ in points}, reverse=True):
        if column <= free:
            kept.add(column)
            free = column - POINT_COLUMNS
    for column, value, curve in points:
        if column in kept:
            y = scale.y(value) if math.isfinite(value) else 0 if value > 0 else scale.rows - 1
            glyph = (curve.mark or "◆") if math.isfinite(value) else "×"
            if math.isfinite(value) and not scale.low <= value <= scale.high and not scale.log:
                glyph = "▴" if value > scale.high else "▾"
            canvas.mark(2 * column, y, glyph, curve.style)


def _mark_lines(
    canvas: _Canvas, curves: Sequence[Curve], scale: _Scale, first: float, last: float
) -> None:
    # At the end of each line, and in columns that no other line uses.
    for at, curve in enumerate(curves):
        points = {
            column_of(step, first, last, canvas.width): value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if math.isfinite(value)
        }
        end = max(points, default=0)
        for column, value in points.items():
            # Offset by line, so that neighbouring lines mark different columns.
            if (column - 4 * at) % MARK_COLUMNS == 0 or column == end:
                canvas.mark(2 * column, scale.y(value), curve.mark, curve.style)


def _row(canvas: _Canvas, row: int, blank: str, styles: PlotStyles, is_healthy: bool) -> Line:
    # `blank` is drawn where no curve is.
    under, style = (
        styles.healthy if is_healthy else Style(),
        styles.limit if blank == "╌" else styles.grid,
    )
    line: Line = []
    first, end = row * canvas.width, (row + 1) * canvas.width
    run, run_style, run_ground = "", style, under
    for cell in range(first, end):
        here, cell_style = _cell(canvas, cell, styles) or (blank, style)
        ground = canvas.ground.get(cell, under)
        # Merge neighbouring cells of one style: the cost of a line grows with its segments.
        if cell_style is not run_style or ground is not run_ground:
            if run:
                line.append(Segment(run, run_ground + run_style))
            run, run_style, run_ground = "", cell_style, ground
        run += here
    line.append(Segment(run, run_ground + run_style))
    return line


def _cell(canvas: _Canvas, cell: int, styles: PlotStyles) -> tuple[str, Style] | None:
    # Order of layers: marks, curves, then what shows where no curve is.
    if cell in canvas.marks:
        glyph, style = canvas.marks[cell]
        return glyph, styles.bad if glyph == "×" else style
    if cell in canvas.dots:  # U+2800 is the empty Braille cell
        return chr(0x2800 + canvas.dots[cell]), canvas.styles[cell]
    return canvas.under.get(cell)


def _x_axis(first: float, last: float, columns: int, gutter: int, style: Style) -> Line:
    # Round places at equal distances, centred if they fit.
    cells = [" "] * (gutter + 2 + columns)
    step = nice_step((last - first) / max(1, columns // 8))
    while True:
        numbers = range(math.ceil(first / step), math.floor(last / step + 1e-9) + 1)
        ticks = [number * step for number in numbers]
        texts = _label_columns(ticks, first, last, columns, gutter)
        pairs = pairwise(texts.values())
        # Widen the step until no two labels touch.
        if len(ticks) < 2 or all(end + 1 < start for (_, end), (start, _) in pairs):
            break
        step = nice_step(step * 1.5)
    for text, (start, end) in texts.items():
        cells[start:end] = text
    return [Segment("".join(cells), style)]


def _label_columns(
    ticks: Sequence[float], first: float, last: float, columns: int, gutter: int
) -> dict[str, tuple[int, int]]:
    # Start and end column by label; one that would pass the end of the plot moves left.
    found: dict[str, tuple[int, int]] = {}
    whole = gutter + 2 + columns
    for value in ticks:
        text = place_label(value, ticks[1] - ticks[0] if len(ticks) > 1 else 1)
        if len(text) < whole - gutter:
            middle = gutter + 2 + round((value - first) / (last - first) * (columns - 1))
            at = min(max(middle - len(text) // 2, gutter + 1), whole - len(text))
            found[text] = at, at + len(text)
    return found


def place_label(value: float, step: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    if step >= 1:
        return f"{value:,.0f}"
    return f"{value:.{min(3, math.ceil(-math.log10(step)))}f}"


def textures(order: Sequence[str], *, colours: bool) -> TextureOf:
    """Return the texture of each component, the same in every bar."""

    def texture(label: str) -> str:
        if label not in order:
            return OTHER_TEXTURE
        return TEXTURES[0 if colours else order.index(label) % len(TEXTURES)]

    return texture


def progress_bar(share: float, width: int, done: Style, left: Style) -> Text:
    """Return a line of `width` cells, done up to `share` (0 to 1)."""
    count = round(share * width)
    bar = Text(no_wrap=True, end="").append(_DONE * count, done)
    return bar.append(_LEFT * (width - count), left)


def split_bar(split: Split, texture: TextureOf, style: StyleOf, width: int) -> Text:
    bar = Text(no_wrap=True, end="")
    taken = 0
    for part, count in zip(split.parts, cells(split, width), strict=True):
        bar.append(texture(part.label) * count, style(part.label))
        taken += count
    return bar.append(FREE * (width - taken), style("free"))


def legend(
    split: Split, texture: TextureOf, style: StyleOf, write: Callable[[float], str], width: int
) -> list[Text]:
    """Return a legend such as `█ vllm 60 GB  ▓ trainer 12 GB`."""
    lines = [Text(no_wrap=True, end="")]
    for part in split.parts:
        entry = Text.assemble(
            (texture(part.label), style(part.label)), f" {part.label} {write(part.amount)}"
        )
        if lines[-1].cell_len and lines[-1].cell_len + 2 + entry.cell_len > width:
            lines.append(Text(no_wrap=True, end=""))
        if lines[-1].cell_len:
            lines[-1].append("  ")
        lines[-1].append_text(entry)
    return lines


def sparkline(values: Iterable[float | None], width: int) -> str:
    """Return the newest `width` values (0 to 1), right-aligned; unknown values are blank."""
    newest = list(values)[-width:] if width > 0 else []
    drawn = "".join(_level(value) for value in newest)
    return f"{drawn:>{max(width, 0)}}"


def _level(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return " "
    return _LEVELS[min(int(min(max(value, 0.0), 1.0) * len(_LEVELS)), len(_LEVELS) - 1)]
