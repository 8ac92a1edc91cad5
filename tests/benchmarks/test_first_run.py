"""The pictures of docs/start/first-run.md, and the script that follows the page."""

from __future__ import annotations

import html
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.cockpit import first_run
from tests.e2e.live_stack import free_ports

PICTURE = re.compile(r"!\[[^\]]+\]\(\.\./images/(first-run-\w+\.svg)\)")
NAMES = ["first-run-starting.svg", "first-run-done.svg", "first-run-rollouts.svg"]


def words(picture: Path) -> str:
    """Return what a picture shows, less its line breaks."""
    spans = re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text(), re.DOTALL)
    return html.unescape(" ".join(spans)).replace("\xa0", " ")


def check(folder: Path, page: Path) -> None:
    """Check that the pictures show the run of the page's profile."""
    profile = tomllib.loads((page / "run.toml").read_text())
    starting, done, rollouts = (words(folder / name) for name in NAMES)
    for each in (starting, done, rollouts):
        assert re.search(rf"run\.toml {profile['name']}[-0-9a-f]* +· +{profile['mode']} ", each), (
            each[:200]
        )
    steps = profile["trainer"]["training_steps"]
    assert "starting" in starting and "vllm waits for its" in starting
    assert f"step {steps}/{steps}" in done and f"{steps} steps, reward" in done
    assert "answer ← question" in rollouts and re.search(r"← \d+\+\d+=", rollouts)


def test_the_pictures_of_the_page_show_its_run(tmp_path: Path) -> None:
    """After a change of the page or the screen: python -m benchmarks.cockpit.first_run."""
    first_run.write_files(tmp_path)
    assert PICTURE.findall(first_run.PAGE.read_text()) == NAMES
    check(first_run.ROOT / "docs/images", tmp_path)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # restored after the script sets it
    api, engine = free_ports(2)
    assert first_run.follow(tmp_path, {"api.port": api, "vllm.port": engine}) == 0
    first_run.write_files(tmp_path)
    check(tmp_path, tmp_path)
