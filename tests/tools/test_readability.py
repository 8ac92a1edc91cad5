"""The measurement of readability, and the lint of its forbidden phrases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import readability


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        ("Of its far end.", "Of ..."),
        ("Whether it answers.", "Whether ..."),
        ("By rank.", "By ..."),
        ("Offsets of the parts.", None),
        ("The server is told the version.", "is told"),
        ("Ready as soon as it was\nasked.", "was asked"),
        ("Start anew.", "anew"),
        ("So long a start waits.", "So long"),
        ("It waits as long as needed, so long as it lives.", None),
        ("Besides the host, the port.", None),
        ("It has a port besides.", "besides"),
        ("The newest step; null before the first.", "null"),
        ("The field is null in the JSON record.", None),
        ("Return the newest checkpoint that passes its checksum.", None),
    ],
)
def test_a_forbidden_phrase_is_found(words: str, phrase: str | None) -> None:
    assert readability.wrong_phrase(words, docstring=True) == phrase


def test_docstrings_attribute_strings_and_comments_are_read_but_no_other_strings(
    tmp_path: Path,
) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""What this is."""\n\nLIMIT = 3\n"""So many."""\nNAME = "whoever"\n\n\n'
        'def f() -> None:\n    """Return."""\n    f()  # anew\n    f()  # noqa: mend\n'
    )
    found = [(one.line, one.phrase) for one in readability.lint_python(module)]
    assert found == [(1, "What ..."), (4, "So many"), (10, "anew")]
    assert len(list(readability.texts(module))) == 3


def test_code_blocks_of_a_page_are_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It shall run.\n```\nwhoever\n```\nIt runs.\n")
    assert [(one.line, one.phrase) for one in readability.lint_markdown(page)] == [(1, "shall")]


def test_the_table_measures_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "trainer_core"
    package.mkdir()
    (package / "module.py").write_text('"""A module."""\n\nx = [1, 2]  # fmt: skip\n# a comment\n')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text("one\ntwo\n")
    figures = readability.measure(tmp_path)
    assert figures["modules"] == figures["texts"] == figures["fmt: skip"] == 1
    assert figures["words of texts"] == 2
    assert figures["comments per 100 non-blank lines"] == 33.33
    assert figures["lines of docs/architecture.md"] == 2


def test_a_long_file_and_a_long_function_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = Path("module.py")
    body = "    x = 1\n" * readability.MOST_FUNCTION_LINES
    module.write_text(f"def short():\n    x = 1\n\n\nasync def long():\n{body}")
    assert [str(one) for one in readability.too_long(module)] == [
        "module.py:5: long() has 61 lines, of at most 60"
    ]
    module.write_text("x = 1\n" * (readability.MOST_LINES + 1))
    assert [(one.name, one.lines) for one in readability.too_long(module)] == [("", 701)]
    monkeypatch.setitem(readability.LONGER, "module.py", 701)
    assert list(readability.too_long(module)) == []


def test_an_exception_that_is_no_longer_needed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = Path("module.py")
    module.write_text("def short():\n    x = 1\n\n\ndef other():\n    x = 1\n")
    monkeypatch.setitem(readability.LONGER, "module.py", 701)
    monkeypatch.setitem(readability.LONGER, "module.py:other", 61)
    assert [str(one) for one in readability.too_long(module)] == [
        "module.py:1: the file has 6 lines, so delete it in LONGER",
        "module.py:5: other() has 2 lines, so delete it in LONGER",
    ]


def test_every_exception_of_length_names_what_exists() -> None:
    root = Path(__file__).parents[2]
    for name in readability.LONGER:
        path, _, function = name.partition(":")
        assert f"def {function}(" in (root / path).read_text() or not function
