"""A panel on the whole screen, the folded table, the footer, the words of the help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.widget import Widget

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.glossary import WORDS
from atropos_tui.ui import user_files
from atropos_tui.ui.views import VIEWS, visible
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.footer import MOST_KEYS, Footer
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.panel import Guarded
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run

NOW = T0 + 31 + 0.33 * 37 + 0.4


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def panels(screen: Screen) -> list[Widget]:
    main = screen.app.screen_stack[0]
    shown = [widget for widget in visible(main) if widget.has_class("panel") and widget.size.height]
    return [widget for widget in shown if widget.region]


async def settled(screen: Screen) -> list[Widget]:
    """Return the panels once the layout of the view is done."""
    while True:
        found = panels(screen)
        await screen.pilot.pause(0.2)
        if panels(screen) == found:
            return found


def words_of(screen: Screen) -> list[str]:
    return [offer.words for offer in screen.app.query_one(Footer).offers]


async def test_z_gives_every_panel_the_screen_and_back(run: RunDir) -> None:
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        # A chart has a full screen of its own, with the values of the step.
        others = [at for at, view in enumerate(VIEWS.values(), 1) if view.focus is not Chart]
        assert len(others) > 5
        for at in others:
            await screen.press(str(at))
            before = await settled(screen)
            focused = screen.app.focused
            assert isinstance(focused, Guarded)
            await screen.press("z")
            await screen.until(lambda: len(panels(screen)) == 1)
            assert panels(screen) == [focused] and screen.app.focused is focused
            assert focused.region.width == 100 and focused.region.height >= 20
            await screen.press("z")
            await screen.until(lambda: panels(screen) == before)  # noqa: B023
            assert screen.app.focused is focused


async def test_escape_and_a_view_end_the_full_screen(run: RunDir) -> None:
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        await screen.press("3", "z", "escape")
        await screen.until(lambda: len(panels(screen)) > 1)
        assert screen.app.views.name == "logs"
        await screen.press("z", "8")
        await screen.until(lambda: len(panels(screen)) > 1)
        assert screen.app.views.alone is None


async def test_folded_components_stay_folded_and_take_commands(run: RunDir) -> None:
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (100, 30), control, lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        await screen.press("3")
        log = screen.app.query_one(LogView)
        # Its height is final once the table of components has its rows.
        await screen.shows("memory")
        await screen.until(lambda: screen.app.focused is log and 0 < log.size.height < 20)
        height = log.size.height
        await screen.press("F")
        await screen.shows("● run-api  ● vllm  ● env  ● trainer")
        assert "memory" not in screen.text()
        await screen.until(lambda: screen.app.query_one(LogView).size.height >= height + 5)
        assert screen.app.focused is screen.app.query_one(LogView)
        # The keys still act on the selected component, with its newest state.
        await screen.press("left_square_bracket", "left_square_bracket", "r")
        await screen.shows("Restart vllm?")
        await screen.press("escape")
    assert json.loads(user_files.choices_file().read_text())["folded"] is True
    async with cockpit(run, (100, 30), control, lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        await screen.shows("● run-api  ● vllm")
        assert screen.app.focused is not None and not isinstance(screen.app.focused, Components)
        await screen.press("F")
        await screen.shows("healthy")
    assert json.loads(user_files.choices_file().read_text())["folded"] is False


async def test_the_footer_has_the_best_keys_of_the_focused_panel(run: RunDir) -> None:
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        expected = {
            "1": ["Restart", "Stop/start", "Kill", "Open", "Last words"],
            "2": ["Full screen", "Previous point", "Rollouts", "Compare", "Smooth"],
            "3": ["Search", "Filter", "Level", "Next error", "Follow"],
            "8": ["Open", "Log", "Search", "Copy", "Full screen"],
        }
        for key, words in expected.items():
            await screen.press(key)
            await screen.until(lambda: words_of(screen) == [*words, "Settings", "Quit", "Help"])  # noqa: B023
            assert len(words) <= MOST_KEYS
        await screen.press("3", "slash")
        await screen.until(lambda: words_of(screen) == ["Drop the search"])


async def test_components_are_described_and_logged_with_one_key(run: RunDir) -> None:
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        for key, view in {"d": "component", "l": "logs"}.items():
            await screen.press("1", key)
            await screen.until(lambda: screen.app.views.name == view)  # noqa: B023
        await screen.press("d")
        assert screen.app.is_running and screen.app.views.name == "logs"
        await screen.press("colon")
        await screen.until(lambda: isinstance(screen.app.screen, CommandPalette))


async def test_a_narrow_footer_keeps_quit_and_help(run: RunDir) -> None:
    async with cockpit(run, (44, 24), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        last = screen.text().splitlines()[-1]
        assert "r Restart" in last and "q Quit" in last and "? Help" in last


async def test_a_click_on_a_key_presses_it(run: RunDir) -> None:
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        at = screen.text().splitlines()[-1].index("? Help")
        await screen.pilot.click(Footer, offset=(at, 0))
        await screen.shows("w words and marks")


async def test_help_explains_words_and_marks(run: RunDir) -> None:
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        await screen.press("question_mark")
        await screen.shows("Restart the selected component")
        await screen.press("w")
        await screen.shows("Words and marks")
        await screen.shows("Restart of the trainer")
        await screen.press("y")
        assert all(word in screen.app.clipboard for word in WORDS)
        await screen.press("w")
        await screen.shows("Restart the selected component")


async def test_help_shows_the_keys_of_one_action_together(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.press("2", "question_mark")
        await screen.shows("← h   read the values at the previous point")
        await screen.press("y")
        lines = screen.app.clipboard.splitlines()
        assert sum("Show or hide a compared run" in line for line in lines) == 1
        assert any(line.strip().startswith("f1 to f9") for line in lines)


async def test_the_way_back_from_a_full_screen_is_in_the_footer(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        for keys in (("2", "enter"), ("3", "z"), ("4", "z")):
            await screen.press(keys[0])
            await screen.until(lambda: "Back" not in words_of(screen))
            await screen.press(keys[1])
            await screen.until(lambda: words_of(screen)[0] == "Back")
            assert "Full screen" not in words_of(screen)
            await screen.press("escape")
            await screen.until(lambda: "Back" not in words_of(screen))


async def test_the_focused_chart_names_its_marks_and_counts_are_whole(run: RunDir) -> None:
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(lambda: screen.app.loaded)
        await screen.press("2")
        await screen.shows("◇ evaluation")
        assert screen.text().count("◇ evaluation") == 1, "on the others it would be noise"
        await screen.press("enter")
        await screen.until(lambda: screen.app.views.name == "enlarged")
        await screen.shows("◇ evaluation")
        counts = [line for line in screen.text().splitlines() if "optimizer_steps" in line]
        assert counts and counts[0].rstrip(" │").endswith(" 1")
