"""Charts: cursor, window, smoothing, axes, a single chart, other curves, other runs, links from
them."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest
from textual import events
from textual.app import RenderResult

from atropos_common.protocol.records import DiagnosisRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.charts import Along
from atropos_tui.monitor.format import clock
from atropos_tui.monitor.log_buffer import LogEntry
from atropos_tui.monitor.run.series import MOST_POINTS
from atropos_tui.ui import user_files
from atropos_tui.ui.dialogs import ChooseCurvesDialog, ChooseRunsDialog
from atropos_tui.ui.views import ENLARGED
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.footer import Footer, Offer
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.rollouts import Rollouts
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 120 + 0.4


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "mine", steps=120, training_steps=120)


def chart(screen: Screen) -> Chart:
    assert isinstance(screen.app.focused, Chart)
    return screen.app.focused


async def test_a_cursor_reads_all_charts_at_one_step_and_leads_to_its_rollouts(run: RunDir) -> None:
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("2", "right", "shift+left", "left")
        lens = screen.app.shared.lens
        assert lens.cursor == 109.0
        shown = screen.app.state.metric("grad_norm")
        await screen.shows("@109")
        norm = next(
            one
            for one in screen.app.query(Chart)
            if one.spec.name == "Gradient norm" and one.is_on_screen
        )
        assert (
            any(trace.at(109.0) is not None for trace in norm._traces) and shown.at(109) is not None
        )
        assert "@109" in str(norm.border_title)
        await screen.press("g")
        rollouts = screen.app.query_one(Rollouts)
        await screen.until(
            lambda: rollouts.has_focus and rollouts.current and rollouts.current.rollout.step == 109
        )
        await screen.press("2", "escape")
        assert screen.app.shared.lens.cursor is None


async def test_from_between_two_points_the_cursor_goes_to_the_nearest_on_either_side(
    run: RunDir,
) -> None:
    """Where the mouse put it: the next point was passed over."""
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("2", "home")
        for key, step in (("right", 61.0), ("left", 60.0)):
            chart(screen)._change_lens(cursor=60.4)
            await screen.press(key)
            assert screen.app.shared.lens.cursor == step


async def test_of_a_long_run_the_cursor_says_how_many_steps_its_values_are_the_means_of(
    run: RunDir,
) -> None:
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        rng = random.Random(7)
        for step in range(121, MOST_POINTS + 100):
            values = [rng.random(), 1.0]
            for name, value in zip(("reward_mean", "step_s"), values, strict=True):
                screen.app.state.series[name].put(step, value, NOW + step)
        rewards = screen.app.state.metric("reward_mean")
        at = len(rewards.counts) // 2
        first, last = rewards.reach(rewards.steps[at])
        assert last > first
        await screen.press("2", "home", "m", "m")  # as it is, not smoothed
        chart(screen)._change_lens(cursor=float(first))
        await screen.shows(f"@{first:,}, mean of {last - first + 1}")
        trace = chart(screen)._traces[0]
        assert trace.smooth is None and trace.at(float(first)) == rewards.values[at]
        drawn = {
            value for place, value in zip(trace.places, trace.values, strict=True) if place == first
        }
        assert drawn <= {rewards.lows[at], rewards.highs[at]}, "the picture keeps the extremes"
        await screen.press("z")
        await screen.shows(f"Steps  {first:,} to {last:,}, means")
        await screen.press("right")
        assert (screen.app.shared.lens.cursor or 0) > first


async def test_a_step_leads_to_the_trainer_s_log_and_to_the_events_of_its_time(run: RunDir) -> None:
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        when = screen.app.state.metric("step_s").times[9]
        await screen.press("2", "home")
        chart(screen)._change_lens(cursor=10.0)
        await screen.press("v")
        shown = screen.app.query_one(Events)
        await screen.until(lambda: shown.has_focus and shown.current is not None)
        assert shown.current and shown.current.time <= when
        assert all(later.time > when for later in shown.items[: shown.cursor])
        asked: list[tuple[str, float]] = []

        async def go_to_log(component: str, time: float) -> None:
            asked.append((component, time))

        screen.app._go_to_log = go_to_log  # type: ignore[method-assign]
        await screen.press("2", "o")
        await screen.until(lambda: bool(asked))
        assert asked == [("trainer", when)]


async def test_lines_of_the_log_say_when_they_came(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.press("3")
        log = screen.app.query_one(LogView)
        log.switch("trainer")
        log.extend(
            [LogEntry("plain", "a line of now", "trainer", NOW), LogEntry("note", "of no time")],
            None,
        )
        await screen.shows("a line of now")
        assert f"{clock(NOW)} a line" not in screen.text()
        await screen.press("T")
        await screen.shows(f"{clock(NOW)} a line of now")
        await screen.shows("         of no time")


async def test_window_smoothing_and_axes_are_of_all_charts_and_kept(run: RunDir) -> None:
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("2")
        await screen.shows("~10")
        await screen.press("plus")
        assert (screen.app.shared.lens.first, screen.app.shared.lens.last) == (60.0, 120.0)
        await screen.press("less_than_sign")
        assert screen.app.shared.lens.first == 45.0
        await screen.press("w", "w")
        assert screen.app.shared.lens.window(0, 120) == (70.0, 120.0)
        await screen.press("escape", "m")
        assert screen.app.shared.lens == screen.app.chosen.through(screen.app.shared.lens).lens()
        await screen.press("m")
        await screen.until(lambda: "~" not in str(chart(screen).border_title))
        await screen.press("l")
        await screen.shows("Reward  ━ mean")
        assert "Reward" in screen.app.shared.lens.other_axis and "log" in str(
            chart(screen).border_title
        )
        await screen.press("x")
        await screen.shows("over tokens")
    assert user_files.charts().smoothing == 0 and user_files.charts().along is Along.TOKENS


async def test_one_chart_alone_with_every_number_of_the_step(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("2", "tab", "tab", "z")
        await screen.shows("Step  120")
        assert chart(screen).spec.name == "Loss" and any(
            node.id == f"view-{ENLARGED}" for node in chart(screen).ancestors
        )
        await screen.shows("weights 120")
        await screen.press("left", "left")
        await screen.shows("Step  119")
        loss = screen.app.state.metric("loss").at(119)
        assert loss is not None
        await screen.shows(f"{loss:.3f}" if abs(loss) >= 1e-3 else f"{loss:.1e}")
        await screen.press("escape", "escape")
        await screen.until(
            lambda: chart(screen).spec.name == "Loss" and "Useful groups" in screen.text()
        )


async def test_other_curves_are_chosen_drawn_and_kept(run: RunDir) -> None:
    async with cockpit(run, (160, 60), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("M")
        await screen.until(lambda: isinstance(screen.app.screen, ChooseCurvesDialog))
        names = screen.app.state.names()
        await screen.press(*["down"] * names.index("checkpoint_s"), "space", "enter")
        await screen.until(
            lambda: any(one.spec.name == "checkpoint_s" for one in screen.app.query(Chart))
        )
    assert user_files.charts().metrics == ("checkpoint_s",)
    async with cockpit(run, (160, 60), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.until(
            lambda: any(one.spec.name == "checkpoint_s" for one in screen.app.query(Chart))
        )


async def test_other_runs_lie_on_the_same_axes(run: RunDir) -> None:
    other = make_run(run.root.parent / "other", steps=60, seed=1)
    other.profile_toml.write_text('name = "demo"\nmode = "none"\n')
    async with cockpit(run, (180, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("2", "c")
        await screen.until(lambda: isinstance(screen.app.screen, ChooseRunsDialog))
        await screen.press("enter")
        reward = chart(screen)
        await screen.until(lambda: len(reward._traces) == 2)
        mine, theirs = reward._traces
        assert (max(mine.places), max(theirs.places)) == (120, 60) and mine.colour != theirs.colour
        await screen.press("5")
        await screen.shows("Steps  ")
        assert screen.app.comparison.first is not None


async def test_the_mouse_sets_the_cursor_zooms_and_enlarges(run: RunDir) -> None:
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("2")
        reward = chart(screen)
        await screen.pilot.click(reward, offset=(reward.outer_size.width // 2, 3))
        cursor = screen.app.shared.lens.cursor
        assert cursor is not None and 40 < cursor < 80
        await screen.pilot._post_mouse_events([events.MouseScrollUp], reward, (20, 3))
        await screen.until(lambda: screen.app.shared.lens.first is not None)
        await screen.pilot.click(reward, offset=(20, 3), times=2)
        await screen.until(lambda: chart(screen) is not reward)


async def test_an_event_leads_to_the_log_at_that_second_and_is_copied(run: RunDir) -> None:
    """Lines of a log that has no index of times carry that of its last change; what came after that
    second does not."""
    said = DiagnosisRecord(
        time=4e9, component="vllm", title="the engine is slow", fix="do this", evidence="why"
    )
    write_records(run.supervisor_jsonl, [said], start=100)
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        await screen.press("8")
        await screen.shows("the engine is slow")
        await screen.press("y")
        assert "fix: do this" in screen.app.clipboard
        await screen.press("o")
        log = screen.app.query_one(LogView)
        await screen.until(
            lambda: log.has_focus and log.component == "vllm" and log._marked is not None
        )
        await screen.shows("vllm line 199")


async def test_what_is_copied_travels_encoded(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of a model reaches the terminal by the user's own key alone, and as base64."""
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 120/120")
        written: list[str] = []
        assert screen.app._driver is not None
        monkeypatch.setattr(screen.app._driver, "write", written.append)
        await screen.press("4", "y")
        codes = [text for text in written if text.startswith("\x1b]52;c;")]
        rollout = screen.app.state.rollouts[-1]
        assert codes and codes[0][7:].rstrip("\a") in {
            base64.b64encode(f"{one.prompt}{one.completion}".encode()).decode()
            for one in screen.app.state.rollouts
        }, rollout


async def test_the_footer_is_drawn_again_only_where_it_offers_other_keys(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[Offer]] = []
    render = Footer.render

    def counted(footer: Footer) -> RenderResult:
        drawn.append(footer.offers)
        return render(footer)

    monkeypatch.setattr(Footer, "render", counted)
    async with cockpit(run, (160, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("Restart")
        await screen.press("2")
        await screen.shows("Smooth")
        drawn.clear()
        await screen.press("tab", "m", "tab")
        await screen.pilot.pause(0.2)
        assert not drawn
        await screen.press("3")
        await screen.shows("Next error")
        assert drawn
