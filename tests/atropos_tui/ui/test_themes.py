"""Every theme: readable bars, visible lines, legible labels. Computed, without pictures."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.color import Color

from atropos_tui.ui import theme, user_files
from atropos_tui.ui.app import CockpitApp, with_theme
from atropos_tui.ui.theme import LIGHT, THEME, named_style
from atropos_tui.ui.widgets.benchmark import Benchmark
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.header import Header
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run

NOW = T0 + 31 + 0.33 * 37 + 0.4
LABEL, LINE = 3.0, 1.25
"""Least contrast of what is read (WCAG's for large text and marks), and of lines that are only to
be seen."""


def contrast(one: Color, other: Color) -> float:
    """As WCAG defines it: 1 is none, 21 is black on white."""

    def luminance(colour: Color) -> float:
        shares = [
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
            for part in colour.normalized
        ]
        return 0.2126 * shares[0] + 0.7152 * shares[1] + 0.0722 * shares[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def bars(panel: Header | Benchmark) -> list[tuple[Segment, Segment]]:
    """Return the done and the remaining part of each bar of a panel that has both."""
    lines = Console(width=400, color_system="truecolor").render_lines(panel.render(), pad=False)
    found = []
    for line in lines:
        done = [piece for piece in line if piece.text.startswith("━")]
        if done:
            left = line[line.index(done[0]) + 1]
            found.append((done[0], left))
    return found


@pytest.mark.slow
async def test_in_every_theme_a_bar_shows_its_share_and_labels_can_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.shows("checkpoint")
        themes = list(screen.app.available_themes)
        assert len(themes) > 15 and THEME.name in themes
        for name in themes:
            screen.app.theme = name
            await screen.pilot.pause()
            found = bars(screen.app.query_one(Header)) + bars(
                screen.app.query_one("#benchmark", Benchmark)
            )
            assert len(found) >= 4, name
            for done, left in found:
                assert set(done.text) == {"━"} and set(left.text) == {"┄"}, (
                    f"{name}: told apart without colours"
                )
                assert colour(done) != colour(left), f"{name}: and with them"
            if not screen.app.current_theme.ansi:
                await drawn(screen)
                can_be_seen(screen, name)


def colour(segment: Segment) -> object:
    assert isinstance(segment.style, Style)
    return segment.style.color


async def test_what_is_drawn_at_the_moment_of_a_choice_has_the_new_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those of the theme before kept for it."""
    run = make_run(tmp_path / "run")
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        for name in ("atom-one-dark", "atom-one-light"):
            screen.app.theme = name
            await drawn(screen)
            monkeypatch.setattr(theme, "_made", {})
            right = named_style(screen.app, "plain")
            screen.app.theme = THEME.name
            await drawn(screen)
            named_style(screen.app, "plain")
            monkeypatch.setattr(theme, "_made", {})
            screen.app.theme = name
            assert named_style(screen.app, "plain") == right != Style()


async def drawn(screen: Screen) -> None:
    """Wait until the theme has reached the ground that all stands on."""
    wanted = Color.parse(screen.app.get_css_variables()["background"])
    async with asyncio.timeout(30):
        while screen.app.screen.styles.background != wanted:
            await screen.pilot.pause(0.02)


def can_be_seen(screen: Screen, name: str) -> None:
    """Contrast against the ground, of every style that says something or draws a line."""
    ground = screen.app.screen.styles.background
    for least, inks in {LABEL: ("dim", "plain"), LINE: ("track", "grid")}.items():
        for wanted in inks:
            assert contrast(ink_colour(screen, wanted), ground) >= least, f"{wanted} in {name}"
    chart = screen.app.query(Chart).first()
    assert contrast(chart.styles.border_top[1], ground) >= LINE, f"frames in {name}"
    assert chart.styles.border_top[1] != ink_colour(screen, "primary"), f"curve and frame in {name}"
    for tone in ("good", "busy", "warn", "bad"):
        assert contrast(ink_colour(screen, f"text-{tone}"), ground) >= LABEL, (
            f"the sentence, {tone}, in {name}"
        )


def ink_colour(screen: Screen, name: str) -> Color:
    shown = named_style(screen.app, name).color
    assert shown is not None
    return Color.from_rich_color(shown)


async def test_in_the_terminal_s_own_colours_no_ground_hides_a_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        for name in ("ansi-light", "ansi-dark"):
            screen.app.theme = name
            await screen.pilot.pause()
            ground = named_style(screen.app, "healthy").bgcolor
            assert ground not in [
                named_style(screen.app, curve).color for curve in ("primary", "success", "warning")
            ]


@pytest.mark.parametrize(
    ("answer", "ground"),
    [
        (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;22c", "light"),
        (b"\x1b]11;rgb:1010/1414/1a1a\x07\x1b[?62;22c", "dark"),
        (b"\x1b[?1;2c", None),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (b"\x1b]11;rgb:fd/f6/e3\x1b\\\x1b[?1;2c", "light"),
                (b"\x1b]11;rgb:zz/f6/e3\x1b\\", None),
                (b"", None),
            )
        ),
    ],
)
def test_a_terminal_is_asked_for_its_ground(answer: bytes, ground: str | None) -> None:
    """A process of its own on a pseudo terminal, whose other side answers the two questions or
    keeps silent."""
    ask = "from atropos_tui.ui.terminal import ground; print('GROUND', ground(2.0), flush=True)"
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.environ["TERM"] = "xterm-256color"
        os.environ.pop("COLORFGBG", None)
        os.execv(sys.executable, [sys.executable, "-c", ask])
    seen, answered = b"", False
    while not re.search(rb"GROUND \w+\r", seen):
        seen += os.read(terminal, 4096)
        if seen.endswith(b"\x1b[c") and not answered:
            answered = bool(os.write(terminal, answer))
    os.waitpid(child, 0)
    os.close(terminal)
    assert f"GROUND {ground}".encode() in seen


def test_what_the_user_chose_goes_before_what_the_terminal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLORFGBG", "0;15")
    monkeypatch.delenv("ATROPOS_THEME", raising=False)
    run = make_run(tmp_path / "run")
    assert with_theme(CockpitApp(run.root)).theme == LIGHT.name
    user_files.keep(theme="nord")
    assert with_theme(CockpitApp(run.root)).theme == "nord"
    monkeypatch.setenv("ATROPOS_THEME", "dracula")
    assert with_theme(CockpitApp(run.root)).theme == "dracula"
    monkeypatch.setenv("ATROPOS_THEME", "no such theme")
    assert with_theme(CockpitApp(run.root)).theme == LIGHT.name
    user_files.choices_file().write_text("[not an object]")
    monkeypatch.setenv("COLORFGBG", "15;0")
    assert with_theme(CockpitApp(run.root)).theme == THEME.name


async def test_a_theme_that_is_chosen_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    run = make_run(tmp_path / "run")
    app = CockpitApp(run.root, control=FakeControl(live_status(run, NOW)))
    app.keep_theme = lambda name: user_files.keep(theme=name)
    async with app.run_test() as pilot:
        app.theme = LIGHT.name
        await pilot.pause()
    assert user_files.theme() == LIGHT.name
    assert user_files.choices_file().stat().st_mode & 0o777 == 0o600
