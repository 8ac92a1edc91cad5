"""Every mark has a name: curves of one chart, and runs on the same axes, at every width, with and
without colour."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_common.protocol.records import EvalRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.overlay import Comparison
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.legend import Entry, RunsLegend, legend_line
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 60 + 0.4
SIZES = [(80, 24), (120, 40), (200, 50)]


def made(root: Path, lr: str, steps: int = 60, planned: int = 60) -> RunDir:
    run = make_run(root, steps=steps, training_steps=planned)
    run.profile_toml.write_text(f'name = "demo"\nmode = "shared_vllm"\n[trainer]\nlr = {lr}\n')
    evals = [
        EvalRecord(
            env="arithmetic",
            split="carries",
            accuracy=0.1 + at / 100,
            correct=1,
            questions=9,
            weight_version=at,
        )
        for at in range(0, steps + 1, 2)
    ]
    write_records(run.eval_jsonl("arithmetic"), list(evals), start=500)
    return run


@pytest.fixture(params=["colour", "no colour"])
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    if request.param == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    return made(tmp_path / "runs" / "mine", "2e-4")


def charts(screen: Screen) -> list[Chart]:
    return [chart for chart in screen.app.query(Chart) if chart.is_on_screen]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", ["1", "2", "7"])
async def test_every_curve_is_named(run: RunDir, size: tuple[int, int], key: str) -> None:
    """The second series of a chart lost its name at 120 columns, and without colours its mark
    too."""
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press(key)
        await screen.until(lambda: charts(screen) and all(one._traces for one in charts(screen)))
        for chart in charts(screen):
            words = (
                f"{chart.border_title} "
                f"{chart._strips[0].text if chart._has_legend and chart._strips else ''}"
            )
            traces = [trace for trace in chart._traces if len(trace.values)]
            assert all(trace.label in words and trace.mark in words for trace in traces), (
                words,
                traces,
            )
            marks = [trace.mark for trace in traces]
            colours = [trace.colour for trace in traces]
            told_by = marks if screen.app.no_color else list(zip(marks, colours, strict=True))
            assert len(set(told_by)) == len(traces), "told apart"


@pytest.mark.parametrize("size", SIZES)
async def test_one_line_names_the_runs_by_what_differs(run: RunDir, size: tuple[int, int]) -> None:
    """Labels were cut to four letters: `shar`, `shar`, `lora`."""
    others = [
        made(run.root.parent / name, lr).root
        for name, lr in (("twin-of-mine", "1e-3"), ("twin-too", "5e-3"))
    ]
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        screen.app.comparison = Comparison().with_runs(others, run)
        screen.app.painter.draw_now()
        await screen.press("2")
        await screen.until(lambda: "lr 0.005" in screen.text())
        lines = [line for line in screen.text().splitlines() if "lr 0.005" in line]
        assert len(lines) == 1 and "lr 0.0002" in lines[0] and "lr 0.001" in lines[0]
        assert screen.app.query_one(RunsLegend).size.height == 1
        marks = [trace.mark for trace in charts(screen)[0]._traces]
        assert all(f"{mark} " in lines[0] for mark in marks)
        assert marks == ["1", "2", "3"]
        screen.app.comparison = Comparison()
        screen.app.painter.draw_now()
        await screen.until(lambda: "lr 0.005" not in screen.text())


async def test_titles_have_the_newest_value_and_only_noisy_curves_are_smoothed(run: RunDir) -> None:
    async with cockpit(run, (200, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press("2")
        await screen.until(lambda: charts(screen) and all(one._traces for one in charts(screen)))
        by_name = {chart.spec.name: chart for chart in screen.app.query(Chart) if chart._traces}
        for name in ("Learning rate", "Policy lag", "Ratio max", "Logprob |diff| max"):
            if name in by_name:
                assert not any(trace.span for trace in by_name[name]._traces), name
        reward = by_name["Reward"]._traces[0]
        assert reward.span == 10 and reward.last == screen.app.state.metric("reward_mean").last


async def test_the_axis_grows_and_evaluations_leave_the_curve_in_sight(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "2e-4", steps=60, planned=5000)
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/5000")
        await screen.press("2")
        reward = charts(screen)[0]
        await screen.until(lambda: reward._strips)
        assert 60 < reward._last <= 1.4 * 60
        text = "\n".join(strip.text for strip in reward._strips[1:])
        braille = sum(0x2800 < ord(char) <= 0x28FF for char in text)
        points = sum(char in "◆●" for char in text)
        assert 2 <= points < braille, text
        await screen.press("W")
        assert reward._last == 5000
        await screen.press("W")
        assert reward._last < 100


@pytest.mark.parametrize("width", range(12, 90, 7))
def test_a_legend_line_leaves_none_out(width: int) -> None:
    from rich.style import Style

    entries = [Entry(mark, Style(), (f"run {mark}: lr 0.{mark}", f"lr 0.{mark}")) for mark in "abc"]
    line = legend_line(entries, width)
    assert line.cell_len <= max(width, 3 * 4)
    assert all(mark in line.plain for mark in "abc")
