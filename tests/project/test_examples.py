"""The profiles of `examples/` are valid from the root of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_tui.cli import main

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/*.toml"))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_valid(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main.run(["validate", profile]) == 0


def test_every_example_has_a_readme_and_a_line_in_the_list() -> None:
    listed = (ROOT / "examples/README.md").read_text()
    folders = [path for path in (ROOT / "examples").iterdir() if path.is_dir()]
    assert len(folders) >= 4 and len(PROFILES) >= 2
    for folder in folders:
        assert (folder / "README.md").is_file() and f"({folder.name}/README.md)" in listed, folder
