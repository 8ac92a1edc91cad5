"""The screen's log reader: begins near the end, skips ahead in a flood, survives rotation, cuts and
clock changes."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from atropos_common.protocol.record_tail import CHUNK_BYTES
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.log_buffer import LogFeed
from atropos_tui.monitor.log_reader import FLOOD_BYTES, HOLD_S, MAX_BEHIND_BYTES, LogReader
from atropos_tui.supervisor.processes.logs import LogFile


def test_merged_lines_are_shown_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = RunDir(tmp_path), time.time()
    for name in ("a", "b"):
        LogFile(run.log(name, 1), 1 << 20).write(f"{name}\n".encode())
    monkeypatch.setattr("atropos_tui.monitor.log_reader.time.time", lambda: now - 3600)
    feed = LogFeed(run)
    assert feed.read(("a", "b")) == [], "held back"
    time.sleep(HOLD_S + 0.02)
    assert [entry.text for entry in feed.read(("a", "b"))] == ["a", "b"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "api" / "1.log"
    path.parent.mkdir()
    return path


def numbered(start: int, count: int) -> bytes:
    return b"".join(b"line %07d\n" % number for number in range(start, start + count))


def read(reader: LogReader) -> tuple[list[str], list[str]]:
    """Notes of the reader, and lines."""
    found = list(reader.drain())
    return [line.text for line in found if line.is_note], [
        line.text for line in found if not line.is_note
    ]


def test_a_log_starts_near_its_end_on_a_whole_line(log: Path) -> None:
    count = 100_000
    log.write_bytes(numbered(0, count))
    notes, lines = read(LogReader(log.parent, lossy=True))
    assert lines == numbered(count - len(lines), len(lines)).decode().splitlines()
    assert CHUNK_BYTES - 26 <= 13 * len(lines) <= CHUNK_BYTES
    assert notes == ["··· 1 MB earlier, in api/1.log ···"]


def test_a_reader_that_is_left_behind_jumps_and_says_so(log: Path) -> None:
    log.write_bytes(b"first\n")
    reader = LogReader(log.parent, lossy=True)
    assert read(reader) == ([], ["first"])
    with log.open("ab") as file:
        file.write(numbered(0, MAX_BEHIND_BYTES // 13 + 100))
    notes, lines = read(reader)
    assert len(notes) == 1 and notes[0].startswith("··· 788 kB skipped here, in api/1.log")
    assert lines[-1] == f"line {MAX_BEHIND_BYTES // 13 + 99:07d}"
    with log.open("ab") as file:
        file.write(numbered(0, 10_000))
    assert 0 < len(read(reader)[1]) <= FLOOD_BYTES // 13, "in a flood it reads less at once"


def test_a_rotated_log_goes_on_with_a_mark_and_loses_nothing_unread(log: Path) -> None:
    log.write_bytes(b"old\n")
    reader = LogReader(log.parent, lossy=True)
    read(reader)
    with log.open("ab") as file:
        file.write(b"unread\n")
    log.rename(log.with_name("1.log.1"))
    log.write_bytes(b"new\n")
    _, lines = read(reader)
    assert (lines[0], lines[2:]) == ("unread", ["new"]) and "rotated" in lines[1]


@pytest.mark.parametrize("lossy", [False, True])
def test_a_log_that_was_cut_is_read_from_its_start(log: Path, lossy: bool) -> None:
    log.write_bytes(b"a line\nhalf a")
    reader = LogReader(log.parent, lossy=lossy)
    read(reader)
    log.write_bytes(b"new\n")
    _, lines = read(reader)
    assert lines[1:] == ["new"] and "rotated" in lines[0]


def test_the_end_of_an_attempt_is_read_though_it_was_flooding(log: Path) -> None:
    log.write_bytes(b"first\n")
    reader = LogReader(log.parent, lossy=True)
    read(reader)
    with log.open("ab") as file:
        file.write(numbered(0, 500_000) + b"last words, without a newline")
    log.with_name("2.log").write_bytes(b"again\n")
    notes, lines = read(reader)
    assert len(notes) == 1 and "skipped here" in notes[0]
    assert lines[-3:] == ["line 0499999", "last words, without a newline", "again"]


def test_bytes_that_are_no_text_become_lines_and_a_pipe_holds_up_nobody(log: Path) -> None:
    log.write_bytes(random.Random(0).randbytes(5000) + b"\n")
    before = read(LogReader(log.parent, lossy=True))
    assert before[1]
    os.mkfifo(log.with_name("2.log"))
    assert read(LogReader(log.parent)) == read(LogReader(log.parent, lossy=True)) == before, (
        "a pipe is no attempt"
    )


def test_the_newest_attempt_is_found_by_number(tmp_path: Path) -> None:
    assert LogReader(tmp_path / "none").path is None
    for name in ("1.log", "9.log", "10.log", "10.log.1", "notes.log"):
        (tmp_path / name).touch()
    assert LogReader(tmp_path).path == tmp_path / "10.log"
