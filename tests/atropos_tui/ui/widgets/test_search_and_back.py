"""Searches and filters: Enter goes to the match, titles name it, Esc first takes it back, then
leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.format import counted
from atropos_tui.monitor.log_buffer import LogEntry
from atropos_tui.monitor.patterns import compiled
from atropos_tui.ui.widgets.bars import SearchBar
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.rollouts import Rollouts
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run

NOW = T0 + 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


async def filled_log(screen: Screen) -> LogView:
    """The view of the logs, with 300 lines, one of which is an error."""
    await screen.shows("step 37/60")
    await screen.press("3")
    log = screen.app.query_one(LogView)
    await screen.until(lambda: len(log.buffer) > 30)
    log.buffer.clear()
    lines = [
        LogEntry("plain", f"weights {at}" if at % 50 == 7 else f"line {at}") for at in range(300)
    ]
    log.extend([*lines[:120], LogEntry("error", "an error line"), *lines[120:]], None)
    await screen.shows("line 299")
    return log


NAMES = {" ": "space", ":": "colon", "(": "left_parenthesis", "[": "left_square_bracket"}


async def typed(screen: Screen, key: str, text: str, *end: str) -> None:
    await screen.press(key)
    for char in text:
        await screen.press(NAMES.get(char, char))
    await screen.press(*end)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_enter_goes_to_the_match(run: RunDir, size: tuple[int, int]) -> None:
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        log = await filled_log(screen)
        await typed(screen, "slash", "an error")
        await screen.shows("1 line")
        assert "1 lines" not in screen.text() and "an error line" not in screen.text()
        await screen.press("enter")
        await screen.shows("an error line")
        assert screen.app.focused is log and not log.following
        await typed(screen, "slash", "weights", "enter")
        await screen.until(lambda: log._marked is not None)
        await screen.shows("weights 157")  # the next one below, not the newest


async def test_escape_drops_filter_search_and_mark_and_then_leaves(run: RunDir) -> None:
    """The view went back and the filter stayed, in this view and in the overview."""
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        log = await filled_log(screen)
        await typed(screen, "slash", "weights", "enter")
        await typed(screen, "ampersand", "7", "enter")
        await screen.until(lambda: "& 7" in screen.text() and "/ weights" in screen.text())
        log._find(log.pattern, -1, "")  # type: ignore[arg-type]
        await screen.press("escape")
        await screen.until(lambda: "& 7" not in screen.text() and "/ weights" in screen.text())
        await screen.press("escape")
        await screen.until(lambda: "/ weights" not in screen.text())
        assert log._marked is not None
        await screen.press("escape")
        assert log._marked is None and screen.app.views.name == "logs"
        await screen.press("escape")
        assert screen.app.views.name == "overview"


async def test_escape_drops_a_filter_from_whatever_panel_has_the_keys(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        log = await filled_log(screen)
        await typed(screen, "ampersand", "weights", "enter")
        await screen.press("1")
        screen.app.query_one(Components).focus()
        await screen.shows("& weights")
        await screen.press("escape")
        await screen.until(lambda: "& weights" not in screen.text() and log._filter is None)


@pytest.mark.parametrize(("key", "kind", "word"), [("4", Rollouts, "1+"), ("8", Events, "healthy")])
async def test_titles_of_lists_name_their_search(
    run: RunDir, key: str, kind: type[Rollouts | Events], word: str
) -> None:
    """Rollouts said `14 of 480` and not of what."""
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press(key)
        listing = screen.app.query_one(kind)
        await screen.until(lambda: len(listing.items) > 3)
        await screen.press("slash")
        screen.app.query_one(SearchBar).query_one("Input").value = word  # type: ignore[attr-defined]
        await screen.press("enter")
        await screen.until(lambda: f"/ {word}" in str(listing.border_title) and listing.cursor == 0)
        await screen.press("escape")
        await screen.until(lambda: f"/ {word}" not in str(listing.border_title))
        assert screen.app.views.name != "overview"
        await screen.press("escape")
        assert screen.app.views.name == "overview"


async def test_rollouts_drop_what_narrows_them_one_by_one(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("4")
        await screen.shows("newest of 148")
        await screen.press("m", "v")
        await screen.shows("worse than their group")
        await screen.press("escape")
        await screen.until(
            lambda: "worse than" not in screen.text() and "marked: step" in screen.text()
        )
        await screen.press("escape")
        await screen.until(lambda: "marked: step" not in screen.text())
        assert screen.app.views.name == "rollouts"


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_half_a_pattern_is_said_to_be_no_regular_expression(
    run: RunDir, size: tuple[int, int]
) -> None:
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await filled_log(screen)
        await typed(screen, "slash", "a([")
        await screen.shows("not a regular expression, searched as plain text: 0 lines")


async def test_the_search_of_rollouts_takes_a_step(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.press("4")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) > 8)
        every = len(listing.items)
        wanted = sorted({item.rollout.step for item in listing.items})[1]
        await screen.press("slash")
        await screen.shows("or a step: step:31")
        await screen.press("escape")
        await typed(screen, "slash", f"step:{wanted}", "enter")
        assert {item.rollout.step for item in listing.items} == {wanted}
        assert f"step {wanted}" in str(listing.border_title)
        await typed(screen, "slash", "step:999", "enter")
        assert not listing.items
        await screen.press("escape")
        assert len(listing.items) == every
        assert "are here" in listing.search(compiled("step:999"))
        assert listing.search(None) == counted(every, "completion")
