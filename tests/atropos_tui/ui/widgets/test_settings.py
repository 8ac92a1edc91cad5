"""The settings of a run beside its profile and a compared run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.overlay import Comparison
from atropos_tui.monitor.settings import SettingRow, settings_table
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.ui.widgets.settings import Settings
from tests.atropos_tui.ui.conftest import cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.atropos_tui.ui.widgets.test_legends import NOW, made
from tests.support.run_maker import live_status


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the shipped profile `demo` with another learning rate."""
    run = made(tmp_path / "runs" / "mine", "1e-3")
    text = shipped_profiles()["demo"].read_text().replace("lr = 2e-4", "lr = 1e-3")
    assert "lr = 1e-3" in text
    # As a run writes it.
    run.profile_toml.write_text(text.replace("[env]\n", "[[env]]\n").replace("[vllm]", "[[vllm]]"))
    run.run_json.write_text(json.dumps({"name": "demo"}))
    return run


def row(rows: tuple[SettingRow, ...], key: str) -> SettingRow:
    return next(row for row in rows if row.key == key)


def test_what_differs_from_the_shipped_profile_comes_first(run: RunDir) -> None:
    table = settings_table(run)
    assert table.profile == "shipped demo"
    assert [row.key for row in table.rows if row.differs] == ["trainer.lr"]
    assert table.rows[0] == SettingRow("trainer.lr", "0.001", "0.0002", "", True, False)
    assert row(table.rows, "env.args.env.group_size").value == "8"


def test_a_default_that_is_written_out_is_no_difference(run: RunDir, tmp_path: Path) -> None:
    other = made(tmp_path / "runs" / "other", "1e-3")
    other.profile_toml.write_text(run.profile_toml.read_text() + "\nepochs = 1\n")
    table = settings_table(run, other, "other")
    assert not any(row.differs_from_other for row in table.rows if row.key == "trainer.epochs")


def test_the_file_of_a_run_stands_in_for_a_shipped_profile(run: RunDir, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "sums"\n[trainer]\nlr = 3e-4\n')
    run.run_json.write_text(json.dumps({"name": "sums", "profile": str(mine)}))
    table = settings_table(run)
    assert table.profile == "mine.toml" and row(table.rows, "trainer.lr").profile == "0.0003"
    mine.unlink()
    table = settings_table(run)
    assert table.profile == "" and not any(row.differs for row in table.rows)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_the_view_marks_what_differs(
    run: RunDir, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    other = made(run.root.parent / "other", "5e-3").root
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press("i")
        await screen.shows("≠ 1 differ from shipped demo")
        lines = [line for line in screen.text().splitlines() if "≠ trainer.lr" in line]
        assert len(lines) == 1 and "0.001" in lines[0] and "0.0002" in lines[0]
        await screen.press("v")
        assert [row.key for row in screen.app.query_one(Settings).items] == ["trainer.lr"]
        await screen.press("escape", "slash", *"offpolicy", "enter")
        assert len(screen.app.query_one(Settings).items) == 1
        await screen.press("escape")
        screen.app.comparison = Comparison().with_runs([other], run)
        await screen.press("i")
        await screen.shows("≠ 0.005")
        await screen.press("escape", "escape")
        assert screen.app.views.name == "overview"
