"""Foreign text is made plain; figures are written in few characters."""

from __future__ import annotations

import json
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_common.protocol.records import StateRecord, parse_line
from atropos_tui.cli import show
from atropos_tui.monitor.format import (
    MAX_COLUMNS,
    bytes_text,
    counted,
    duration,
    masked_line,
    number,
    one_line,
    plain_lines,
    plain_text,
    seconds_text,
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]52;c;ZXZpbA==\x07after", "after"),
        ("\x1b]52;c;ZXZpbA==\x1b\\after", "after"),
        ("\x9d52;c;ZXZpbA==\x9cafter", "after"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$q\x1b\\x", "x"),
        ("\x1b]52;c;never ended", ""),
        ("\x1b[2J\x1b[H\x1bc", ""),
        ("\x9b31mred", "red"),
        ("  1%\r 50%\r100%", "100%"),
        ("done\r", "done"),
        ("a\tb", "a       b"),
        ("bell\x07 null\x00 back\x08", "bell null back"),
        ("safe \u202egnp.exe", "safe gnp.exe"),
        ("[bold red]markup[/] stays", "[bold red]markup[/] stays"),
        ("half \ud800 a pair \udfff", "half ? a pair ?"),
        ("</script>", "</script>"),
        ("größe 大きい 😀", "größe 大きい 😀"),
    ],
)
def test_what_a_terminal_would_obey_is_gone(raw: str, shown: str) -> None:
    assert plain_text(raw) == shown


@given(st.text())
def test_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    for shown in (plain_text(text), one_line(text)):
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
        assert len(shown) <= MAX_COLUMNS


@given(st.text(st.characters()))
def test_what_is_shown_can_be_written(text: str) -> None:
    for shown in (plain_text(text), one_line(text), plain_lines(text)):
        shown.encode()


def test_several_lines_stay_and_none_hides_the_next() -> None:
    assert plain_lines("a\x1b]52;c;eA==\nb\x1b[2J\r\n10%\r20%") == "a\nb\n20%"


def test_whole_numbers_beyond_any_float_are_infinite() -> None:
    assert (number(10**400), number(-(10**400)), bytes_text(10**400)) == ("∞", "-∞", "inf GB")


def test_a_very_long_line_is_cut_with_a_mark() -> None:
    shown = plain_text("x" * 10_000_000)
    assert len(shown) == MAX_COLUMNS
    assert shown.endswith("…")


def test_lines_become_one() -> None:
    assert one_line("a\nb\r\nc") == "a⏎b⏎c"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (9.31, "9.3 s"),
        (59.4, "59 s"),
        (125, "2:05"),
        (3725, "1:02:05"),
        (-3, "0.0 s"),
        (200 * 3600, "8 d 08 h"),
        (math.inf, "inf"),
    ],
)
def test_durations(value: float | None, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0.000"),
        (0.9123, "0.912"),
        (4.1e-7, "4.1e-07"),
        (12300, "12,300"),
        (-0.5, "-0.500"),
        (2.5e9, "2.5e+09"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_bytes_and_seconds() -> None:
    assert [bytes_text(v) for v in (None, 12, 512e6, 1.48e9)] == ["–", "12 B", "512 MB", "1.5 GB"]
    assert [seconds_text(v) for v in (None, 0.0042, 0.31, 0.0, math.nan)] == [
        "–",
        "4.2 ms",
        "0.31 s",
        "0.00 s",
        "NaN",
    ]


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "process", "0 processes"),
        (1, "process", "1 process"),
        (2, "run", "2 runs"),
        (1200, "box", "1,200 boxes"),
    ],
)
def test_counted(count: int, noun: str, words: str) -> None:
    assert counted(count, noun) == words


def test_a_masked_line_leaves_tokens_out() -> None:
    assert masked_line("key hf_abcdefghijklmnopqrstuvwxyz\nnext") == "key (redacted)⏎next"


def test_every_character_that_changes_how_others_are_read_is_gone() -> None:
    harmful = [
        chr(code)
        for code in range(0x110000)
        if unicodedata.category(chr(code)) in ("Cf", "Zl", "Zp")
    ]
    assert len(harmful) > 100
    assert plain_text("a" + "".join(harmful[:1000]) + "b") == "ab"


def test_names_of_a_foreign_file_are_words() -> None:
    """`events` printed component names as they stood in the file: a clipboard was written through
    one."""
    line = (
        '{"kind": "state", "component": "a\\u001b]52;c;ZXZpbA==\\u0007", "old": "\\u009b2J", '
        '"new": "' + 99 * "x" + '"}'
    )
    record = parse_line(line)
    assert isinstance(record, StateRecord)
    shown = show.event_line(record)
    assert shown.isprintable() and "\x1b" not in shown and len(shown) < 200
    assert record.component == "a?]52;c;ZXZpbA==?"


def test_json_on_a_terminal_is_ascii() -> None:
    text = json.dumps({"a": "\x9b2J \u202e é", "b": 'x"\\'}, ensure_ascii=False, indent=1)
    assert show.ascii_json(text).isascii() and json.loads(show.ascii_json(text)) == json.loads(text)
