"""Logs of several components as one: order of arrival, filters, nothing lost or repeated in
rotation."""

from __future__ import annotations

import itertools
import json
import os
import pty
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from atropos_common.protocol.record_tail import CHUNK_BYTES
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.manage import logs
from atropos_tui.errors import Exit, UserError
from atropos_tui.monitor.log_reader import HOLD_S, LogReader, MergedLogs
from atropos_tui.supervisor.processes.logs import LogFile

BIG = 1024 * 1024
NAMES = ["api", "vllm", "env"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = RunDir(tmp_path / "run")
    found.create()
    found.run_json.write_text(
        json.dumps({"run_id": "p-1", "name": "p", "mode": "none", "started_at": 5.0})
    )
    found.plan_json.write_text(
        json.dumps({"components": [{"name": name, "role": "other"} for name in NAMES]})
    )
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The wall clock of a process that writes logs; it runs faster than the true one, so that the
    log writes index entries."""
    monkeypatch.setattr("atropos_tui.supervisor.processes.logs.RESERVE", 1e9)
    now = [1_790_000_000.0]
    monkeypatch.setattr("atropos_tui.supervisor.processes.logs.time.time", lambda: now[0])

    def go(seconds: float) -> None:
        now[0] += seconds

    return go


def shown(run: RunDir, *arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main.run(["logs", *arguments, "--run-dir", str(run.root)]) == 0
    return capsys.readouterr().out.splitlines()


def interleaved(run: RunDir, count: int, go: Callable[[float], None], max_bytes: int = BIG) -> None:
    """`count` numbered lines, one a second, each by the next component."""
    files = {name: LogFile(run.log(name, 1), max_bytes) for name in NAMES}
    for number, name in zip(range(count), itertools.cycle(NAMES), strict=False):
        go(1)
        files[name].write(f"line {number:06d}\n".encode())
    for file in files.values():
        file.close()


def test_lines_come_in_order_of_arrival(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    interleaved(run, 30, clock)
    lines = shown(run, capsys=capsys)
    assert [line.split()[-1] for line in lines] == [f"{number:06d}" for number in range(30)]
    when = datetime.fromtimestamp(1_790_000_001)
    assert lines[0] == f"{when.date()} {when:%H:%M:%S}.000 api    line 000000"
    assert [line.split()[2] for line in lines[:3]] == NAMES
    assert shown(run, "--no-prefix", capsys=capsys)[0] == "line 000000"
    assert shown(run, "env", "-n", "2", capsys=capsys) == ["line 000026", "line 000029"]


def test_the_last_lines_are_those_of_the_whole(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    LogFile(run.log("env", 1), BIG).write(b"early\n" * 50)
    for name in ("api", "vllm"):
        clock(5)
        LogFile(run.log(name, 1), BIG).write(f"of {name}\n".encode())
    assert shown(run, "--no-prefix", "-n", "3", capsys=capsys) == ["early", "of api", "of vllm"]


def test_filters(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    interleaved(run, 30, clock)
    since = datetime.fromtimestamp(1_790_000_026).isoformat()
    numbers = [line.split()[-1] for line in shown(run, "--since", since, capsys=capsys)]
    assert numbers == ["000025", "000026", "000027", "000028", "000029"]
    found = shown(run, "--grep", "[05]$", "-n", "2", "--no-prefix", "api", "env", capsys=capsys)
    assert found == ["line 000015", "line 000020"], "the newest two of these components"
    assert shown(run, "--since", "1d", "--grep", "x", capsys=capsys) == []
    assert main.run(["logs", "--since", "2099-01-01", "--run-dir", str(run.root)]) == 0
    assert "no matching line since 2099-01-01" in capsys.readouterr().err


def test_a_colour_of_the_program_does_not_hide_a_line_from_grep(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    LogFile(run.log("env", 1), BIG).write(b"\x1b[31mERROR\x1b[0m it broke \x1b]52;c;x\x07\n")
    assert shown(run, "env", "--grep", "^ERROR it", capsys=capsys) == ["ERROR it broke "]


def test_attempts(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for attempt in (1, 2, 3):
        clock(1)
        LogFile(run.log("vllm", attempt), BIG).write(f"vllm attempt {attempt}\nlast words".encode())
        clock(1)
        if attempt < 3:
            LogFile(run.log("env", attempt), BIG).write(f"env attempt {attempt}\n".encode())
    assert shown(run, "vllm", "--attempt", "2", capsys=capsys) == ["vllm attempt 2", "last words"]
    assert shown(run, "--no-prefix", capsys=capsys) == [
        "env attempt 2",
        "vllm attempt 3",
        "last words",
    ]
    everything = shown(run, "--attempt", "all", capsys=capsys)
    assert [line.split(maxsplit=2)[2].strip() for line in everything] == [
        "vllm   vllm attempt 1",
        "vllm   last words",
        "env    env attempt 1",
        "vllm#2 vllm attempt 2",
        "vllm#2 last words",
        "env#2  env attempt 2",
        "vllm#3 vllm attempt 3",
        "vllm#3 last words",
    ]
    assert main.run(["logs", "--attempt", "7", "--run-dir", str(run.root)]) == Exit.USAGE
    assert "vllm: 1 2 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--grep", "("],
        ["--grep", "(?=x)"],
        ["--since", "yesterday"],
        ["--attempt", "one"],
        ["nobody", "env"],
        ["--since", "99:99"],
    ],
)
def test_mistakes(run: RunDir, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    LogFile(run.log("env", 1), BIG).write(b"x\n")
    assert main.run(["logs", *arguments, "--run-dir", str(run.root)]) == Exit.USAGE
    assert capsys.readouterr().out == ""


def test_moments() -> None:
    now = datetime(2026, 11, 2, 12, 0, 0)
    assert logs.moment("90s", now) == now.timestamp() - 90
    assert logs.moment("1.5h", now) == now.timestamp() - 5400
    assert logs.moment("11:59", now) == now.timestamp() - 60
    assert logs.moment("12:00:01", now) == now.timestamp() + 1 - 86400, (
        "yesterday: the latest such time"
    )
    assert logs.moment("2026-11-01", now) == now.timestamp() - 36 * 3600
    with pytest.raises(UserError):
        logs.moment("5 minutes", now)


@pytest.mark.parametrize("seed", range(6))
def test_beginning_late_shows_the_same_last_lines(
    tmp_path: Path, seed: int, clock: Callable[[float], None]
) -> None:
    """Whatever the counts: over two segments, several attempts, lines longer than a chunk."""
    rng = random.Random(seed)
    for attempt in (1, 2):
        file = LogFile(tmp_path / f"{attempt}.log", 2 * BIG)
        for number in range(rng.randrange(200, 6000)):
            clock(rng.random())
            length = rng.choice([3, 50, 900, 3 * BIG // 10]) if number % 50 == 0 else 40
            file.write(f"{attempt} {number} {'x' * length}\n".encode())
        file.close()
    everything = list(LogReader(tmp_path, "all").drain())
    for _ in range(20):
        count, since = rng.choice([1, 7, 300, 5000]), rng.choice(everything).time
        for kept in ({"count": count}, {"since": since}, {"count": count, "since": since}):
            late = LogReader(tmp_path, "all")
            late.skip(**kept)
            got = [line[:4] for line in late.drain() if line.time >= kept.get("since", 0)][
                -kept.get("count", 0) :
            ]
            wanted = [line[:4] for line in everything if line.time >= kept.get("since", 0)][
                -kept.get("count", 0) :
            ]
            assert got == wanted


def test_beginning_late_is_exact_at_the_edges_of_chunks(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    file = LogFile(tmp_path / "1.log", 100 * BIG)
    for number in range(30):
        clock(1)
        file.write(f"{number} {'x' * (CHUNK_BYTES // 4 + 7)}\n".encode())
    file.close()
    everything = list(LogReader(tmp_path).drain())
    for count in range(1, 30):
        by_count, by_time = LogReader(tmp_path), LogReader(tmp_path)
        by_count.skip(count)
        assert [line.text for line in by_count.drain()][-count:] == [
            line.text for line in everything[-count:]
        ]
        by_time.skip(since=everything[count].time)
        found = [line.text for line in by_time.drain() if line.time >= everything[count].time]
        assert found == [line.text for line in everything[count:]]


@pytest.mark.parametrize("rotate", [False, True])
def test_what_comes_while_it_is_read_waits_for_the_next_time(tmp_path: Path, rotate: bool) -> None:
    """Else a flood would hold a reader for ever, and with it the other components."""
    file = LogFile(tmp_path / "1.log", BIG)
    file.write(b"first\n" * 10)
    if rotate:
        file._rotate()
        file.write(b"second\n" * 10)
    for number, _ in enumerate(LogReader(tmp_path).drain()):
        file.write(b"later\n")
        if rotate:
            file._rotate()
        assert number < 1000
    file.close()


def test_beginning_late_reads_little(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    file = LogFile(run.log("env", 1), 64 * BIG)
    file.write(b"a needle\n" + b"a line of a log that is as long as lines are\n" * 600_000)
    file.close()
    late = LogReader(run.logs / "env")
    late.skip(10)
    assert len(list(late.drain())) < 20_000
    assert shown(run, "env", "--grep", "needle", "-n", "1", capsys=capsys) == ["a needle"], (
        "but a search reads all"
    )


def test_without_times_the_files_own_time_counts(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A lost index, a foreign file in its place, an index cut anywhere."""
    interleaved(run, 9, clock)
    for name, hours in (("vllm", 1), ("api", 2), ("env", 3)):
        path = run.log(name, 1)
        os.utime(path, (1_700_000_000 + 3600 * hours,) * 2)
        path.with_name("1.times").unlink()
    order = [line.split()[-1] for line in shown(run, capsys=capsys)]
    assert order == [f"00000{number}" for number in (1, 4, 7, 0, 3, 6, 2, 5, 8)]
    for junk in (b"", b"junk", b"x" * 1000):
        run.log("env", 1).with_name("1.times").write_bytes(junk)
        assert len(shown(run, capsys=capsys)) == 9


def test_a_torn_index_still_gives_the_times_before_the_tear(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    interleaved(run, 30, clock)
    index = run.log("vllm", 1).with_name("1.times")
    index.write_bytes(
        index.read_bytes()[: 16 + 4 * 16 + 5]
    )  # head, begin, three lines, a torn entry
    numbers = [int(line.split()[-1]) for line in shown(run, capsys=capsys)]
    assert sorted(numbers) == list(range(30))
    assert numbers[:7] == list(range(7)), "vllm's lines 1, 4 and 7 have their times"
    assert numbers[7:15] == [7, 10, 13, 16, 19, 22, 25, 28], (
        "the rest of vllm counts from its last known time"
    )


def test_a_copied_run_keeps_its_times(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    interleaved(run, 3000, clock, max_bytes=14_000)
    assert run.log("env", 1).with_name("1.log.1").exists(), "two segments each"
    expected = shown(run, "-n", "2500", capsys=capsys)
    shutil.copytree(run.root, tmp_path / "copy")
    assert shown(RunDir(tmp_path / "copy"), "-n", "2500", capsys=capsys) == expected
    numbers = [int(line.split()[-1]) for line in expected if "[atropos]" not in line]
    assert numbers == sorted(numbers)


def test_clocks_that_jump_back_keep_each_components_order(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = LogFile(run.log("env", 1), BIG)
    for number in range(10):
        clock(1 if number != 5 else -3600)
        file.write(f"{number}\n".encode())
    assert shown(run, "--no-prefix", capsys=capsys) == [str(number) for number in range(10)]
    times = [line.time for line in LogReader(run.logs / "env").drain()]
    assert times == sorted(times), "else merging with others would tear them apart"


def test_following_merged_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Three writers that rotate and start again; each line is out within the promised delay, in
    nearly exact order."""
    written: list[tuple[str, float]] = []
    stop = threading.Event()

    def writer(name: str) -> None:
        rng = random.Random(name)
        number, attempt = 0, 0
        while not stop.is_set():
            attempt += 1
            file = LogFile(tmp_path / name / f"{attempt}.log", 64 * BIG)
            for round_ in range(6):
                for _ in range(rng.randrange(10, 20)):
                    text = f"{name} {number}"
                    written.append((text, time.time()))
                    file.write(f"{text}\n".encode())
                    number += 1
                    time.sleep(rng.random() * 0.008)
                # Rotations are some 100 ms apart: lines lost by two between two reads are gone.
                if round_ % 2:
                    file._rotate()
            written.append((f"{name} end {attempt}", time.time()))
            file.write(f"{name} end {attempt}".encode())
            file.close()

    threads = [threading.Thread(target=writer, args=(name,)) for name in NAMES]
    merged = MergedLogs([LogReader(tmp_path / name, "all") for name in NAMES])
    got: list[tuple[str, float]] = []
    for thread in threads:
        thread.start()
    until = time.monotonic() + 2.0
    while any(thread.is_alive() for thread in threads):
        if time.monotonic() > until:
            stop.set()
        got += [(line.text, time.time()) for line in merged.ready()]
        time.sleep(logs.FOLLOW_S)
    got += [(line.text, time.time()) for line in merged.rest()]
    got = [(text, out) for text, out in got if not text.startswith("[atropos]")]
    texts = [text for text, _ in got]
    for name in NAMES:
        assert [t for t in texts if t.startswith(name)] == [
            t for t, _ in written if t.startswith(name)
        ]
    arrived = dict(written)
    delays = sorted(out - arrived[text] for text, out in got if "end" not in text)
    assert delays[len(delays) // 2] < 0.5, (
        "HOLD_S and a look every FOLLOW_S: 0.2 s where the machine is idle"
    )
    newest, late = 0.0, 0.0
    for text in texts:
        late = max(late, newest - arrived[text]) if "end" not in text else late
        newest = max(newest, arrived[text])
    assert late < 0.5, "a line is never shown much after one that came later"


def test_a_line_that_reaches_its_file_late_still_comes_in_its_turn(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    files = [LogFile(tmp_path / name / "1.log", BIG) for name in NAMES]
    merged = MergedLogs([LogReader(tmp_path / name) for name in NAMES])
    clock(1)
    files[0].write(b"second\n")
    assert list(merged.ready()) == [], "held back"
    clock(-HOLD_S / 2)
    files[1].write(b"first\n")
    clock(2 * HOLD_S)
    files[2].write(b"third\n")
    assert [line.text for line in merged.ready()] == ["first", "second"]
    assert [line.text for line in merged.rest()] == ["third"]


def test_lines_from_a_clock_that_runs_ahead_are_not_held_for_long(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    clock(time.monotonic() + 10**8)  # another machine's, seen over a network file system
    files = [LogFile(tmp_path / name / "1.log", BIG) for name in NAMES]
    merged = MergedLogs([LogReader(tmp_path / name) for name in NAMES])
    files[0].write(b"x\n")
    # (the reader's own clock is the same patched one, so it is set back for it)
    clock(-3600)
    assert list(merged.ready()) == []
    time.sleep(HOLD_S + 0.02)
    assert [line.text for line in merged.ready()] == ["x"]


def test_following_a_flood_is_not_held_up_by_it(tmp_path: Path) -> None:
    """One component floods and rotates; a line of the other appears in time, and memory does not
    grow."""
    flood = subprocess.Popen([sys.executable, "-c", FLOODER, str(tmp_path / "api" / "1.log")])
    try:
        time.sleep(0.5)
        merged = MergedLogs([LogReader(tmp_path / name) for name in NAMES])
        file = LogFile(tmp_path / "env" / "1.log", BIG)
        file.write(b"a word\n")
        began, seen, most = time.monotonic(), False, 0
        while not seen and time.monotonic() - began < 20:
            for line in merged.ready():
                seen = seen or line.text == "a word"
            most = max(most, len(merged._waiting))
            time.sleep(logs.FOLLOW_S)
        assert seen
        assert most < 3_000_000 * HOLD_S * 2
    finally:
        flood.kill()
        flood.wait()


FLOODER = """
import sys
from pathlib import Path
from atropos_tui.supervisor.processes.logs import LogFile
log = LogFile(Path(sys.argv[1]), 2_000_000)
while True:
    log.write(b"a line of a log that floods\\n" * 200)
"""


def on_a_terminal(run: RunDir, **env: str) -> str:
    """Return what `logs` writes to a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "atropos_tui", "logs", "--run-dir", str(run.root)]
    values = (
        {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        | {"TERM": "xterm"}
        | env
    )
    done = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower, env=values)
    done.wait(30)
    os.close(follower)
    return os.read(leader, 100_000).decode()


def test_colour_is_for_terminals_and_for_the_prefix_alone(
    run: RunDir, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    LogFile(run.log("api", 1), BIG).write(b"\x1b[2Jwiped\x1b]0;title\x07\n")
    coloured = on_a_terminal(run)
    assert re.fullmatch(r"\x1b\[36m[^\x1b]* api   \x1b\[0m wiped\r\n", coloured)
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_a_terminal(run, **env)
    assert "\x1b" not in shown(run, capsys=capsys)[0]
