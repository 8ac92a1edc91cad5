"""The documents: no broken link, and a coverage table that is complete and names only what
exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from trainer_core.config import TrainingConfig

ROOT = Path(__file__).parents[2]
SKIPPED = {"build", "site", "runs", "node_modules"}
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("*.md")
    if not SKIPPED & set(path.relative_to(ROOT).parts)
    and not any(
        part.startswith(".") or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts
    )
)
COVERAGE = ROOT / "docs/internals/coverage.md"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FOLDERS = (
    "tests|docs|profiles|atropos_common|trainer_core|vllm_server|atropos_tui|atropos_envs|"
    "atropos_api|benchmarks"
)
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")

ITEMS = [
    line
    for line in (Path(__file__).parent / "guide_items.txt").read_text().splitlines()
    if line and not line.startswith("# ")
]


@cache
def anchors(path: Path) -> set[str]:
    """The headings of a document as GitHub names them."""
    found: dict[str, int] = {}
    names = set()
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(name if count == 0 else f"{name}-{count}")
    return names


def broken_links(document: Path) -> list[str]:
    """Relative links of `document` without a file or a heading behind them."""
    broken = []
    for target in LINK.findall(
        re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    ):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        outside = document.is_relative_to(ROOT) and not path.is_relative_to(ROOT)
        if outside or not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_document_shows_how_to_publish_run_directories(document: str) -> None:
    """They are private (0700); an example served them to every local user."""
    assert "http.server" not in (ROOT / document).read_text()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert broken_links(ROOT / document) == []


def test_the_link_check_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A `b` & c\n# Twice\n# Twice\n")
    good = (
        "[1](b.md) [2](b.md#a-b--c) [3](b.md#twice-1) "
        "[4](https://example.org/x#y)\n```\n[no](link.md)\n```\n"
    )
    (tmp_path / "a.md").write_text(
        f"# Here\n[0](#here)\n{good}[x](c.md) [y](b.md#none) ![z](d.svg) [w](#there)\n"
    )
    assert broken_links(tmp_path / "a.md") == ["c.md", "b.md#none", "d.svg", "#there"]


def coverage_rows() -> list[list[str]]:
    """The cells of each row of the coverage tables."""
    rows = []
    for line in COVERAGE.read_text().splitlines():
        if line.startswith("|") and not line.startswith(("| item", "|---")):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
    return rows


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_row_says_where_and_what_shows_it() -> None:
    for row in coverage_rows():
        assert len(row) == 3 and all(row), row
        item, where, proof = row
        shown = TEST.search(proof) or proof.startswith(("planned: ", "measured: "))
        assert shown, f"{item}: neither a test, nor a measured fact, nor planned"
        if "planned" in proof:
            assert "planned" in where or "no test" in where, f"{item}: only the proof is planned"


def test_the_coverage_names_only_files_and_tests_that_exist() -> None:
    text = COVERAGE.read_text()
    for path in FILE.findall(text):
        assert (ROOT / path).exists(), path
    tests = TEST.findall(text)
    assert len(tests) > 80
    for path, name in tests:
        assert name.startswith("test_") and name in functions(path), f"{path}::{name}"


def test_every_attack_has_a_test_that_exists() -> None:
    with_tests = (ROOT / "docs/internals/attacks.md").read_text().partition("## Tried on")[0]
    rows = [row for row in with_tests.splitlines() if re.match(r"\| (?!attack|fault)", row)]
    assert len(rows) >= 65
    for row in rows:
        tests = TEST.findall(row)
        assert tests, row
        for path, name in tests:
            assert name in functions(path), f"{path}::{name}"


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_of_the_guides_is_answered(item: str) -> None:
    """Flags, variables and routes as whole words; anything else as it stands."""
    whole = (
        rf"(?<![\w/-]){re.escape(item)}(?![\w/-])"
        if re.match(r"--|/|[A-Z_0-9]+$", item)
        else re.escape(item)
    )
    assert [row for row in coverage_rows() if re.search(whole, row[0])]


@pytest.mark.parametrize("flag", [item for item in ITEMS if item.startswith("--")])
def test_every_flag_of_the_guides_is_one_of_ours(flag: str) -> None:
    known = set(TrainingConfig.model_fields) | set(TrainingConfig.ALIASES)
    assert flag.removeprefix("--").replace("-", "_") in known
