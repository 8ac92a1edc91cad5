"""Pictures of the screen: a name of their own, and nothing that a file cannot hold."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from atropos_tui.ui.terminal import save_screenshot as save


def test_pictures_of_one_second_keep_the_name_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    names = [save("<svg/>", "my_run", tmp_path).name for _ in range(3)]
    stem = "atropos-my_run-20260101-000000"
    assert names == [f"{stem}.svg", f"{stem}_2.svg", f"{stem}_3.svg"]


def test_half_a_surrogate_pair_does_not_keep_a_picture_from_being_written(tmp_path: Path) -> None:
    assert (
        save("<svg>größe \ud800</svg>", "\ud800", tmp_path).read_text(encoding="utf-8")
        == "<svg>größe ?</svg>"
    )
