"""Readers of growing files count torn, foreign, huge, cut and replaced input, and never raise."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_common.protocol import record_tail
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import StateRecord
from atropos_common.protocol.trainer_records import MemoryRecord


def line(seq: int) -> str:
    return MemoryRecord(seq=seq, step=seq, rss_bytes=1000 + seq).to_line()


def drain(tail: RecordTail) -> list[Record]:
    records = tail.read()
    while tail.behind:
        records += tail.read()
    return records


def test_a_missing_file_is_no_data_until_it_appears(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "t.jsonl")
    assert tail.read() == []
    tail.path.write_text(line(0))
    assert [r.seq for r in tail.read()] == [0]
    assert tail.read() == []


def test_a_torn_line_waits_for_its_newline(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "t.jsonl")
    whole = line(0) + line(1)
    tail.path.write_text(whole[:-20])
    assert [r.seq for r in tail.read()] == [0]
    with tail.path.open("a") as file:
        file.write(whole[-20:])
    assert [r.seq for r in tail.read()] == [1]
    assert tail.bad_lines == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 64))
def test_any_cut_of_the_bytes_gives_every_record_once(
    tmp_path_factory, cuts: list[int], limit: int
) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("cuts") / "t.jsonl"
    data = "".join(line(seq) for seq in range(5)).encode()
    tail, got, at = RecordTail(path), [], 0
    path.touch()
    for cut in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[at : at + cut])
        at += cut
        got += tail.read(limit)
    for _ in range(len(data)):
        got += tail.read(limit)
    assert [record.seq for record in got] == [0, 1, 2, 3, 4]


def test_foreign_lines_are_counted_and_the_rest_survives(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "t.jsonl")
    foreign = [
        b"not json",
        b"\xff\xfe\x00",
        b"[1]",
        b'{"kind": 3}',
        b'{"kind": "step"}',
        b"[" * 5000,
    ]
    tail.path.write_bytes(line(0).encode() + b"\n".join(foreign) + b"\n\n" + line(1).encode())
    assert [r.seq for r in drain(tail)] == [0, 1]
    assert tail.bad_lines == len(foreign)


def test_a_newer_writer_is_read(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "t.jsonl")
    tail.path.write_text(json.dumps({"v": 9, "kind": "hologram", "seq": 4, "x": [1]}) + "\n")
    assert [(r.kind, r.seq) for r in tail.read()] == [("hologram", 4)]
    assert tail.bad_lines == 0


def test_a_huge_line_is_skipped_in_bounded_memory(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(record_tail, "MAX_LINE_BYTES", 10_000)
    tail = RecordTail(tmp_path / "t.jsonl")
    tail.path.write_text(line(0) + "x" * 200_000 + "\n" + line(1))
    got: list[Record] = []
    held = 0
    while not got or tail.behind:
        got += tail.read(4096)
        held = max(held, len(tail._partial))
    assert [r.seq for r in got] == [0, 1]
    assert tail.bad_lines == 1
    assert held <= 10_000 + 4096


def test_a_cut_file_and_a_replaced_file_are_read_anew(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "t.jsonl")
    tail.path.write_text(line(0) + line(1))
    drain(tail)
    tail.path.write_text(line(2))
    assert [r.seq for r in drain(tail)] == [2]
    other = tmp_path / "new"
    other.write_text("".join(line(seq) for seq in range(3, 9)))
    other.replace(tail.path)
    assert [r.seq for r in drain(tail)] == [3, 4, 5, 6, 7, 8]
    assert tail.restarts == 2


def test_supervisor_records_come_typed(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "s.jsonl")
    tail.path.write_text(StateRecord(component="vllm", old="starting", new="healthy").to_line())
    (record,) = tail.read()
    assert isinstance(record, StateRecord)
    assert record.new == "healthy"


def test_of_a_long_file_only_whole_lines_of_its_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(map(line, range(200))))
    tail = RecordTail(path, from_end=True, keep=3 * len(line(199)) + 10)
    assert [r.seq for r in drain(tail)] == [197, 198, 199]
    assert tail.bad_lines == 0
    assert [r.seq for r in drain(RecordTail(path, from_end=True, keep=1 << 20))] == list(range(200))
    assert drain(RecordTail(path, from_end=True)) == []
