"""Patterns that users type: no error while typing, no endless match, many lines at once as one by
one."""

from __future__ import annotations

import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_tui.monitor.patterns import (
    Pattern,
    PatternError,
    UnsupportedPatternError,
    compiled,
)


def test_a_pattern_is_case_sensitive_only_with_capitals_and_never_an_error() -> None:
    assert compiled("error").search("ERROR")
    assert not compiled("Error").search("error")
    assert compiled("[oops").search("x [oops") and compiled("[oops").is_literal
    assert not compiled("o+ps").is_literal


@pytest.mark.parametrize("pattern", ["a{4294967296}", "(" * 3000 + ")" * 3000, "[[a", "a\\"])
def test_what_is_half_typed_or_too_much_raises_and_warns_of_nothing(
    pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(pattern).search(f"x {pattern}")
    assert capfd.readouterr() == ("", ""), "it would be written over the screen"


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "(?<!x)y", "a{2000}"])
def test_what_python_takes_and_re2_does_not_is_said_in_one_line(pattern: str) -> None:
    for make in (compiled, Pattern):
        with pytest.raises(UnsupportedPatternError, match="not supported") as caught:
            make(pattern)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["(", "a\udcff"])
def test_what_is_no_pattern_is_an_error_where_it_is_not_being_typed(pattern: str) -> None:
    with pytest.raises(PatternError):
        Pattern(pattern)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*c", "(?:.*,)*x", "(.*.*.*.*)*=x"])
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    lines = ["a" * 2000 + "b" + "," * 2000] * 100
    began = time.process_time()
    assert list(compiled(pattern).matching(lines)) == []
    assert not any(compiled(pattern).search(line) for line in lines)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        "",
        "^",
        "$",
        "^$",
        "a|^b",
        r"a\sb",
        "[^x]*b",
        "a.*b",
        r"\Aa",
        r"b\z",
        "é",
        "(?i)A",
        r"a\nb",
        "b$",
    ],
)
@given(lines=st.lists(st.text("ab xé\ud800\n", max_size=4), max_size=12))
def test_many_lines_at_once_are_as_each_by_itself(pattern: str, lines: list[str]) -> None:
    wanted = compiled(pattern)
    assert list(wanted.matching(lines)) == [
        at for at, line in enumerate(lines) if wanted.search(line)
    ]


@given(st.text("aé日\ud800 b", max_size=20))
def test_spans_count_characters(text: str) -> None:
    assert [text[start:end] for start, end in compiled("a|é+|日").spans(text)] == [
        part for part in _runs(text) if part[0] in "aé日"
    ]


def _runs(text: str) -> list[str]:
    """Runs of é as one, every other character by itself."""
    parts: list[str] = []
    for letter in text:
        if letter == "é" and parts and parts[-1][0] == "é":
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts
