"""Log lines in memory: bound, filter, wrap, search, and the lines read from files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.log_buffer import Classifier, LogBuffer, LogEntry, LogFeed
from atropos_tui.monitor.patterns import compiled


def filled(*lines: str, capacity: int = 1000) -> LogBuffer:
    buffer, classifier = LogBuffer(capacity), Classifier()
    buffer.extend(LogEntry(classifier.kind(line), line) for line in lines)
    return buffer


def shown(buffer: LogBuffer) -> list[str]:
    return [row[3] for y in range(buffer.height) if (row := buffer.row(y))]


def test_the_oldest_lines_go_and_are_counted() -> None:
    buffer = LogBuffer(100)
    gone = sum(buffer.extend([LogEntry("plain", str(at))]) for at in range(1000))
    assert 100 <= len(buffer) <= 125
    assert buffer.entries[-1].text == "999"
    assert gone == buffer.dropped == 1000 - len(buffer)


def test_a_filter_shows_what_matches_and_keeps_doing_so() -> None:
    buffer = filled("apple", "pear", "pineapple")
    buffer.show(level="all", pattern=compiled("apple"), wrap=None)
    buffer.extend(
        [LogEntry("plain", "plum"), LogEntry("plain", "crab apple"), LogEntry("note", "attempt 2")]
    )
    assert shown(buffer) == ["apple", "pineapple", "crab apple", "attempt 2"]
    buffer.show(level="all", pattern=None, wrap=None)
    assert len(shown(buffer)) == 6


def test_levels() -> None:
    lines = [
        "INFO fine",
        "WARNING may be an OSError",
        "ERROR: no",
        "Traceback (most recent call last):",
        '  File "x"',
        "    f()",
        "ValueError: bad",
        "INFO after",
    ]
    buffer = filled(*lines)
    buffer.show(level="warning", pattern=None, wrap=None)
    assert shown(buffer) == lines[1:7]
    buffer.show(level="error", pattern=None, wrap=None)
    assert shown(buffer) == lines[2:7]


REFUSED = 'INFO:     127.0.0.1:{port} - "POST /generate HTTP/1.1" 400 Bad Request'


def test_a_line_that_repeats_itself_is_counted() -> None:
    buffer = filled(
        *(REFUSED.format(port=50_000 + at) for at in range(331)), "step 1/9", "step 2/9", "", ""
    )
    assert shown(buffer) == [
        f"{REFUSED.format(port=50_000)}  × 331",
        "step 1/9",
        "step 2/9",
        "",
        "",
    ]
    buffer.show(level="warning", pattern=None, wrap=None)
    assert len(shown(buffer)) == 1, "a refused request is worth a warning"
    said = "2026-11-23 10:04:{:02d},{} ERROR math: no answer"
    buffer = filled(
        "ERROR: other", said.format(1, 377), said.format(2, 9), "ERROR math: no answer, 7 left"
    )
    assert shown(buffer) == [
        "ERROR: other",
        f"{said.format(1, 377)}  × 2",
        "ERROR math: no answer, 7 left",
    ]


def test_a_repeated_line_at_the_end_counts_on_while_it_is_wrapped_or_filtered() -> None:
    buffer = filled("start", "four")
    buffer.show(level="all", pattern=compiled("four"), wrap=4)
    for _ in range(9):
        buffer.extend([LogEntry("plain", "four")])
    assert shown(buffer) == ["four", "  × ", "10"] and buffer.height == 3
    buffer.extend([LogEntry("plain", "four", "another")])
    assert shown(buffer)[-1] == "four", "another component's"


def test_polls_can_be_left_out() -> None:
    poll = 'INFO:     127.0.0.1:1 - "GET /status-env HTTP/1.1" 200 OK'
    buffer = filled("begin", poll, 'INFO:     127.0.0.1:2 - "POST /scored_data HTTP/1.1" 200 OK')
    buffer.show(level="most", pattern=None, wrap=None)
    assert poll not in shown(buffer) and len(shown(buffer)) == 2


def test_long_lines_wrap_into_rows_of_one_entry() -> None:
    buffer = filled("abcdefghij", "", "日本語")
    buffer.show(level="all", pattern=None, wrap=4)
    assert shown(buffer) == ["abcd", "efgh", "ij", "", "日本", "語"]
    assert buffer.row_of(1) == 3
    assert buffer.row(2)[:2] == (0, 2)  # type: ignore[index]


def test_search_goes_both_ways_and_around() -> None:
    buffer = filled("one error", "two", "three error", "four")
    wanted = compiled("error")
    assert buffer.find(wanted, 1, 1) == 2
    assert buffer.find(wanted, 3, 1) == 0
    assert buffer.find(wanted, 1, -1) == 0
    assert buffer.find(compiled("none"), 0, 1) is None
    assert buffer.count(wanted) == 2
    assert LogBuffer(5).find(wanted, 0, 1) is None


def test_a_wrapped_entry_is_left_behind_whole() -> None:
    buffer = filled("ERROR: " + "x" * 30, "fine", "ERROR: again", "end")
    for wrap in (None, 10):
        buffer.show(level="all", pattern=None, wrap=wrap)
        for step in (1, -1):
            start = buffer.next_row(0, step)
            assert start is not None
            assert buffer.find("error", start, step) == 2
    assert buffer.next_row(9, 1) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["plain", "error", "warning", "note"]), st.text(max_size=30)),
        max_size=60,
    ),
    st.sampled_from(["all", "warning", "error"]),
    st.sampled_from([None, "a", "."]),
    st.sampled_from([None, 1, 7]),
)
def test_rows_come_out_the_same_whether_lines_came_before_or_after_the_filter(
    lines: list[tuple[str, str]], level: str, pattern: str | None, wrap: int | None
) -> None:
    entries = [LogEntry(kind, text) for kind, text in lines]  # type: ignore[arg-type]
    how = {"level": level, "pattern": compiled(pattern) if pattern else None, "wrap": wrap}
    before, after = LogBuffer(20), LogBuffer(20)
    before.show(**how)  # type: ignore[arg-type]
    for entry in entries:
        before.extend([entry])
        after.extend([entry])
    after.show(**how)  # type: ignore[arg-type]
    assert shown(before) == shown(after)
    for y in range(before.height):
        number = before.row(y)[0]  # type: ignore[index]
        assert before.row_of(number) is not None


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for name in ("a", "b"):
        (run.logs / name).mkdir(parents=True)
    return run


def test_one_log_from_its_latest_lines_on_and_then_what_comes(run: RunDir) -> None:
    path = run.log("a", 1)
    path.write_text("one\ntwo\n")
    feed = LogFeed(run)
    assert [entry.text for entry in feed.read(("a",))] == ["one", "two"]
    with path.open("a") as file:
        file.write("thr")
    assert feed.read(("a",)) == []
    with path.open("a") as file:
        file.write("ee\n")
    assert [entry.text for entry in feed.read(("a",))] == ["three"]
    assert feed.path("a") == path


def test_the_end_of_an_attempt_is_read_before_the_next_one_begins(run: RunDir) -> None:
    run.log("a", 1).write_text("first\n")
    feed = LogFeed(run)
    feed.read(("a",))
    with run.log("a", 1).open("a") as file:
        file.write("last words\n")
    run.log("a", 2).write_text("again\n")
    texts = [entry.text for entry in feed.read(("a",))]
    assert texts == ["last words", "── attempt 2 of a ──", "again"]


def test_a_flood_is_skipped_with_a_marker(run: RunDir) -> None:
    path = run.log("a", 1)
    path.write_text("x\n")
    feed = LogFeed(run)
    feed.read(("a",))
    with path.open("a") as file:
        file.writelines(f"{at} {'y' * 50}\n" for at in range(100_000))
    found = feed.read(("a",))
    assert found[0].kind == "note"
    assert "skipped here" in found[0].text
    assert len(found) < 6000
    while more := feed.read(("a",)):
        found += more
    assert found[-1].text.startswith("99999 ")


def test_logs_are_merged_by_when_their_lines_arrived(run: RunDir) -> None:
    from atropos_tui.supervisor.processes.logs import LogFile

    files = {name: LogFile(run.log(name, 1), 1 << 20) for name in ("a", "b")}
    for at in range(6):
        files["ab"[at % 2]].write(f"{at}\n".encode())
        time.sleep(0.01)
    feed = LogFeed(run)
    found = feed.read(("a", "b"))
    time.sleep(0.2)
    found += feed.read(("a", "b"))
    assert [entry.text for entry in found] == [str(at) for at in range(6)]
    assert [entry.component for entry in found] == ["a", "b"] * 3


def test_what_rotation_dropped_is_marked(run: RunDir) -> None:
    path = run.log("a", 1)
    path.write_text("before\n" * 100)
    feed = LogFeed(run)
    feed.read(("a",))
    path.rename(path.with_name("1.log.1"))
    path.write_text("after\n")
    texts = [entry.text for entry in feed.read(("a",))]
    assert "rotated here" in texts[0]
    assert texts[-1] == "after"


def test_a_component_without_a_log_is_empty(run: RunDir) -> None:
    feed = LogFeed(run)
    assert feed.read(("nobody",)) == []
    assert feed.path("nobody") is None
