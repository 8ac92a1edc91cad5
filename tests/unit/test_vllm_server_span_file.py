"""Weight versions of completions survive the server that made them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from vllm_server.versions import SpanFile, SpanStore


def test_a_later_server_knows_what_an_earlier_one_generated(tmp_path: Path) -> None:
    path = tmp_path / "versions.txt"
    first = SpanFile(path, SpanStore())
    first.remember("aa", (3, 4))
    first.remember("bb", (5, 5))
    store = SpanStore()
    SpanFile(path, store).remember("cc", (6, 6))
    assert store.look_up(["aa", "bb", "cc"]) == [(3, 4), (5, 5), (6, 6)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_at_a_rewrite_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "versions.txt"
    kept = SpanFile(path, SpanStore(capacity=2))
    for number in range(3):
        kept.remember(f"{number}", (number, number))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vllm_server.versions.write_private", full)
    for number in range(3, 12):
        kept.remember(f"{number}", (number, number))
    SpanFile(tmp_path / "none" / "versions.txt", SpanStore()).remember("a", (1, 1))
    monkeypatch.undo()
    for number in range(12, 16):
        kept.remember(f"{number}", (number, number))
    again = SpanStore(capacity=2)
    SpanFile(path, again)
    assert again.look_up(["15", "14", "13"]) == [(15, 15), (14, 14), None]


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "versions.txt"
    path.write_bytes(b"aa 1 2\n\xff\xfe\nbb x 2\ncc 1\ndd 3 3\nee 4 ")
    store = SpanStore()
    SpanFile(path, store)
    assert store.items() == [("aa", (1, 2)), ("dd", (3, 3))]


def test_the_file_stays_as_bounded_as_the_store(tmp_path: Path) -> None:
    path = tmp_path / "versions.txt"
    store = SpanStore(capacity=10)
    kept = SpanFile(path, store)
    for number in range(100):
        kept.remember(f"{number:02}", (number, number))
    assert len(path.read_text().splitlines()) <= 20
    again = SpanStore(capacity=10)
    SpanFile(path, again)
    assert again.look_up(["99", "90", "10"]) == [(99, 99), (90, 90), None]
