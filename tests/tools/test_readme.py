"""The README of a package: its links lead to the repository."""

from __future__ import annotations

from pathlib import Path

from tools.readme import LINK, absolute

ROOT = Path(__file__).parents[2]


def test_relative_links_become_links_to_the_tag() -> None:
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](https://example.org) [e](#f)"
    assert absolute(text, "https://host/us/it", "v1") == (
        "![a](https://host/us/it/raw/v1/docs/a.svg) [b](https://host/us/it/blob/v1/docs/b.md#c) "
        "[d](https://example.org) [e](#f)"
    )


def test_every_link_of_our_readme_leads_to_a_file() -> None:
    text = (ROOT / "README.md").read_text()
    targets = [found[3].rstrip(")").partition("#")[0] for found in LINK.finditer(text)]
    assert targets and all((ROOT / target).exists() for target in targets)
    assert not LINK.search(absolute(text, "https://host/us/it", "v1"))
