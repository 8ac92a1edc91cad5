"""Files that the screen writes: into the run's folder, never over another."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.ui.exports import new_file, write_new
from tests.atropos_tui.ui.conftest import cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import make_run


def test_files_of_one_second_get_numbers_and_keep_the_name_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    paths = [write_new(tmp_path, "my run", "", ".svg", f"{number}") for number in range(3)]
    stem = "atropos-my-run-20260101-000000"
    assert [path.name for path in paths] == [f"{stem}.svg", f"{stem}_2.svg", f"{stem}_3.svg"]
    assert [path.read_text() for path in paths] == ["0", "1", "2"]
    assert all(path.parent == RunDir(tmp_path).exports for path in paths)
    assert stat.S_IMODE(paths[0].stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_replaced_by_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run := tmp_path / "run").mkdir()
    # A file in its place refuses root too.
    RunDir(run).exports.write_text("")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert new_file(run, "demo", "rollouts", ".jsonl").parent == here
    assert new_file(tmp_path / "gone", "demo", "rollouts", ".jsonl").parent == here


def test_half_a_surrogate_pair_does_not_keep_a_file_from_being_written(tmp_path: Path) -> None:
    path = write_new(tmp_path, "\ud800", "", ".svg", "<svg>größe \ud800</svg>")
    assert path.read_text(encoding="utf-8") == "<svg>größe ?</svg>"


async def test_p_writes_a_picture_into_the_run_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    async with cockpit(run, (120, 40), FakeControl(None)) as screen:
        await screen.shows("37/60")
        await screen.press("p")
        await screen.until(lambda: any("picture written" in words for words in screen.toasts()))
        (path,) = run.exports.iterdir()
        svg = path.read_text()
        assert "37/60" in svg and path.suffix == ".svg"
        known = ("http://www.w3.org", "https://www.textualize.io")
        assert "http" not in svg.replace(known[0], "").replace(known[1], ""), "it fetches nothing"
        assert any(str(path) in words for words in screen.toasts())
    assert not list(here.iterdir())
