"""What a screen reads of logs when the clocks disagree."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from atropos_tui.monitor.log_feed import LogFeed
from atropos_tui.monitor.merged import HOLD_S
from atropos_tui.supervisor.log_file import LogFile
from trainer_core.contracts.run_dir import RunDir


def test_merged_lines_are_shown_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = RunDir(tmp_path), time.time()
    for name in ("a", "b"):
        LogFile(run.log(name, 1), 1 << 20).write(f"{name}\n".encode())
    monkeypatch.setattr("atropos_tui.monitor.merged.time.time", lambda: now - 3600)
    feed = LogFeed(run)
    assert feed.read(("a", "b")) == [], "held back"
    time.sleep(HOLD_S + 0.02)
    assert [entry.text for entry in feed.read(("a", "b"))] == ["a", "b"]
