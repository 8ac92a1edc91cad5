"""Files of the supervisor: the journal, the process table, logs with rotation, a full disk."""

from __future__ import annotations

import asyncio
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.records import DiagnosisRecord, parse_line
from atropos_tui.supervisor.journal.store import Journal, ProcessTable, RunInUseError
from atropos_tui.supervisor.processes import logs
from atropos_tui.supervisor.processes.logs import LogDrain, LogFile, latest_attempt


@pytest.mark.parametrize("torn", [b"", b'{"kind": "sta', b"\xff\xfe\x00", b"x" * 200_000])
def test_a_torn_last_line_is_repaired_and_the_sequence_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "supervisor.jsonl"
    journal = Journal(path, "run")
    for number in range(3):
        journal.append(DiagnosisRecord(title=str(number)))
    journal.close()
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(torn)
    journal = Journal(path, "run")
    assert path.read_bytes() == whole
    assert journal.append(DiagnosisRecord(title="next")).seq == 3
    assert [parse_line(line).seq for line in journal.between(0, 2)] == [1, 2]
    journal.close()
    assert [parse_line(line).seq for line in path.read_bytes().splitlines()] == [0, 1, 2, 3]


def test_only_a_torn_line_and_garbage_within(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.jsonl"
    path.write_bytes(b"no newline at all")
    journal = Journal(path, "run")
    assert (path.read_bytes(), journal.seq) == (b"", -1)
    journal.close()
    path.write_bytes(b"garbage\n\n[]\n")
    journal = Journal(path, "run")
    assert journal.append(DiagnosisRecord(title="x")).seq == 0
    journal.close()


def test_one_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "supervisor.jsonl", "run")
    with pytest.raises(RunInUseError):
        Journal(tmp_path / "supervisor.jsonl", "run")
    journal.close()
    Journal(tmp_path / "supervisor.jsonl", "run").close()


def test_a_full_disk_delays_records_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "supervisor.jsonl", "run")
    write = os.write
    room = 500

    def short(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = write(descriptor, bytes(data)[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", short)
    for number in range(20):
        journal.append(DiagnosisRecord(title=f"record {number}"))
    assert journal.path.stat().st_size == 500
    monkeypatch.setattr(os, "write", write)
    journal.append(DiagnosisRecord(title="room again"))
    journal.close()
    assert [parse_line(line).seq for line in journal.path.read_bytes().splitlines()] == list(
        range(21)
    )


def test_the_process_table_survives_what_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    assert ProcessTable.load(path) is None
    for text in ("", "[]", "{", '{"components": 3}'):
        path.write_text(text)
        assert ProcessTable.load(path) is None
    ProcessTable(run_id="a").write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    found = ProcessTable.load(path)
    assert found is not None
    assert found.run_id == "a"


def lines_of(first: int, last: int) -> bytes:
    return b"".join(b"line %06d\n" % number for number in range(first, last))


def test_nothing_is_dropped_below_max_bytes(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "1.log", 12 * 1000)
    log.write(lines_of(0, 1000))
    log.close()
    assert log.older.read_bytes() + log.path.read_bytes() == lines_of(0, 1000)
    assert (log.dropped_bytes, log.dropped_lines) == (0, 0)


def test_rotation_keeps_the_newest_whole_lines_and_counts_the_rest(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "1.log", 12_000)
    for start in range(0, 5000, 37):
        log.write(lines_of(start, min(start + 37, 5000)))
    log.close()
    text = log.older.read_bytes() + log.path.read_bytes()
    assert len(text) <= 12_000 + 2 * 250
    kept = [line for line in text.splitlines(keepends=True) if line.startswith(b"line ")]
    assert b"".join(kept) == lines_of(5000 - len(kept), 5000)
    notes = [line for line in text.splitlines() if line.startswith(b"[atropos]")]
    assert notes
    assert log.path.read_bytes().splitlines()[0] == notes[-1]
    assert log.dropped_bytes + sum(map(len, kept)) == 5000 * len(b"line 000000\n")
    assert log.dropped_lines + len(kept) == 5000
    assert f"{log.dropped_bytes} bytes ({log.dropped_lines} lines)".encode() in notes[-1]


def test_lines_longer_than_a_segment_and_tiny_limits(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "1.log", 10)
    log.write(b"x" * 1000 + b"\n")
    log.write(b"end\n")
    log.close()
    assert log.dropped_bytes == 1005 - len(b"xxxxx" + b"\nend\n")


def test_a_full_disk_counts_what_the_log_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = LogFile(tmp_path / "1.log", 1000)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atropos_tui.supervisor.processes.logs.os.write", full)
    assert "No space left" in log.write(b"12345\n")
    monkeypatch.undo()
    assert log.lost_bytes == 6
    assert log.write(b"room\n") == ""
    log.close()
    note = b"[atropos] 6 bytes of output are missing here: the disk did not take them\n"
    assert log.path.read_bytes() == note + b"room\n"


def test_latest_attempt(tmp_path: Path) -> None:
    assert latest_attempt(tmp_path) is None
    for name in ("2.log", "10.log", "10.log.1", "x.log"):
        (tmp_path / name).touch()
    assert latest_attempt(tmp_path) == tmp_path / "10.log"


async def test_a_drain_sees_patterns_across_chunks_and_keeps_a_tail(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    drain = LogDrain(reading, LogFile(tmp_path / "1.log", 1_000_000))
    drain.watch(r"^Application startup (complete|done)$")
    for piece in (b"INFO\nApplication sta", b"rtup compl", b"ete\nmore\n", b"\xff\xfe broken\n"):
        assert not drain.seen(r"never watched")
        os.write(writing, piece)
        await asyncio.sleep(0.02)
    assert drain.seen(r"^Application startup (complete|done)$")
    assert drain.tail(2) == ["more", "\ufffd\ufffd broken"]
    os.write(writing, b"still in the pipe")
    drain.finish()
    os.close(writing)
    assert (tmp_path / "1.log").read_bytes().endswith(b"still in the pipe")


def test_times_of_a_flood_cost_nothing_and_are_private(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "1.log", 1_000_000)
    began = time.monotonic()
    for number in range(20_000):
        log.write(b"line %06d\n" % number)
    most = logs.RESERVE + logs.RATE * (time.monotonic() - began) + 2
    log.close()
    index = tmp_path / "1.times"
    assert (index.stat().st_size - 16) / 16 <= most < 1000
    assert index.stat().st_mode & 0o777 == 0o600


def test_times_are_those_of_the_lines_end_over_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(logs.time, "time", lambda: now)
    log = LogFile(tmp_path / "1.log", 120)
    for number in range(12):
        now = 1000.0 + number
        log.write(b"%02d begins " % number)
        now += 0.5
        log.write(b"and ends\n")
    log.close()
    found = []
    for path in (log.older, log.path):
        with path.open("rb") as file:
            times = logs.LogTimes(path, file)
            data = file.read()
            times.refresh()
            ends = [match.start() for match in re.finditer(rb"\n", data)]
            lines = zip(data.splitlines(), ends, strict=True)
            found += [(int(line[:2]), times.at(end)) for line, end in lines if line[:1] != b"["]
            times.close()
    assert len(found) >= 4 and found[-1][0] == 11
    assert found == [(number, 1000.5 + number) for number, _ in found]


TORN = """
import resource, sys
from pathlib import Path
from atropos_tui.supervisor.processes.logs import TimesWriter
log = open(sys.argv[1], "wb")
times = TimesWriter(Path(sys.argv[1]))
times.begin(log.fileno())
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
for offset in range(10):
    times.mark(offset)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
times.mark(99)
times.close()
"""


def test_a_disk_that_takes_half_an_entry_does_not_shift_the_others(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    subprocess.run([sys.executable, "-c", TORN, str(path)], check=True)
    data = (tmp_path / "1.times").read_bytes()
    offsets = [struct.unpack("<Qd", data[at : at + 16])[0] for at in range(16, len(data), 16)]
    assert offsets == [0, 1, 2, 3, 4, 99]


def test_a_log_that_somebody_removed_is_begun_again(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "1.log", 24)
    log.write(b"first line\n")
    log.path.unlink()
    log.write(b"second line\nthird\n")
    log.close()
    assert log.path.read_bytes().endswith(b"third\n")


def test_a_disk_problem_is_told_once_a_minute_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drain() -> list[str]:
        told: list[str] = []
        reading, writing = os.pipe()
        log = LogFile(tmp_path / "1.log", 1_000_000)
        monkeypatch.setattr(log, "_append", lambda data: (0, "no room"))
        found = LogDrain(reading, log, told.append)
        for _ in range(5):
            os.write(writing, b"12345\n")
            await asyncio.sleep(0.02)
        os.close(writing)
        found.finish()
        return told

    first, last = asyncio.run(drain())
    assert first == "no room; 6 bytes of output are lost so far"
    assert (
        last.startswith(f"{tmp_path}/1.log: the disk was full (")
        and "30 bytes of output are lost" in last
    )


async def test_a_line_that_was_begun_before_somebody_looks_for_it_is_seen(tmp_path: Path) -> None:
    """The pattern is added in the middle of a line."""
    log = tmp_path / "1.log"
    log.write_bytes(b"up\nloading weights ... ")
    drain = LogDrain(None, None)
    drain.take(log.read_bytes())
    drain.watch("^loading .* done$")
    drain.take(b"done\n")
    assert drain.seen("^loading .* done$")
