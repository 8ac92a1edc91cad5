"""The profiles of `examples/` are valid from the root of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_tui.cli import main
from tests.e2e.live_stack import free_ports

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/*.toml"))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_valid(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # A run on this machine may use the profile's own.
    api, engine = free_ports(2)
    ports = ["--set", f"api.port={api}", "--set", f"vllm.port={engine}"]
    assert main.run(["validate", profile, *ports]) == 0


def test_every_example_has_a_readme_and_a_line_in_the_list() -> None:
    listed = (ROOT / "examples/README.md").read_text()
    folders = [path for path in (ROOT / "examples").iterdir() if path.is_dir()]
    assert len(folders) >= 4 and len(PROFILES) >= 2
    for folder in folders:
        assert (folder / "README.md").is_file() and f"({folder.name}/README.md)" in listed, folder
