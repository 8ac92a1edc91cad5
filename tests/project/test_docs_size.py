"""Bounds of the documents: a page is short, and a user finds no more than can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.test_docs import ROOT

MOST_LINES = 250
MOST_WORDS = 28_000
GENERATED = {"docs/json.md", "docs/keys.md"}
"""Reference pages that a program writes."""
MAINTAINERS = ("docs/internals/", "docs/reference/")
OTHERS = {"docs/architecture.md", "docs/benchmarks.md"}
"""Pages that a user need not read."""
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
"""Programs, profiles and screens: symbols and bars of frames are no words."""

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if path.relative_to(ROOT).as_posix() not in GENERATED
)


def words(page: str) -> int:
    """Words of a page outside of code blocks."""
    return len(CODE.sub("", (ROOT / page).read_text()).split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= MOST_LINES


def test_the_pages_for_users_stay_within_their_budget() -> None:
    counts = {
        page: words(page)
        for page in PAGES
        if page not in OTHERS and not page.startswith(MAINTAINERS)
    }
    assert len(counts) > 35
    longest = sorted(counts.items(), key=lambda item: -item[1])[:5]
    assert sum(counts.values()) <= MOST_WORDS, f"longest: {longest}"


def test_every_page_is_in_the_navigation() -> None:
    """The navigation lists paths below `docs/`, and those of the checkout for other pages."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"- ([\w./-]+\.md)$", navigation, flags=re.MULTILINE))
    pages = {Path(page).relative_to("docs").as_posix() for page in PAGES if page != "README.md"}
    assert pages - listed == set()
