"""`logs`: nothing lost or repeated over rotation, restarts and the end of the run."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    StateRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.manage import logs, runs
from atropos_tui.cli.parser import build_parser
from atropos_tui.errors import Exit, UserError
from atropos_tui.monitor.log_reader import LogReader
from atropos_tui.supervisor.processes.logs import LogFile

BIG = 1024 * 1024


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(logs, "FOLLOW_S", 0.01)
    monkeypatch.setattr(logs, "LIVE_S", 0.02)
    found = RunDir(tmp_path / "run")
    found.create()
    found.run_json.write_text(
        json.dumps({"run_id": "p-1", "name": "p", "mode": "none", "started_at": 5.0})
    )
    found.plan_json.write_text(json.dumps({"components": [{"name": "env", "role": "env"}]}))
    return found


@pytest.fixture
def listener(run: RunDir) -> Iterator[socket.socket]:
    """Somebody who listens on the run's socket, so that it is live until closed."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/{run.socket_name}")
        server.listen(128)
        run.control_sock.symlink_to(f"{folder}/{run.socket_name}")
        yield server


def options(
    run: RunDir, *components: str, follow: bool = False, lines: int = 200
) -> argparse.Namespace:
    command = [
        "logs",
        *(components or ["env"]),
        "--run-dir",
        str(run.root),
        "-n",
        str(lines),
        *["-f"] * follow,
    ]
    return build_parser().parse_args(command)


def numbered(start: int, count: int) -> list[str]:
    return [f"line {number:06d} of the log" for number in range(start, start + count)]


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


Printed = Callable[[str], Awaitable[None]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], Printed]:
    """Return the list of printed lines and a function that waits for the next one."""
    seen: list[str] = []

    async def until(line: str) -> None:
        async with asyncio.timeout(5):
            while line not in seen:
                seen.extend(capsys.readouterr().out.splitlines())
                await asyncio.sleep(0.005)

    return seen, until


async def test_the_last_lines_reach_over_a_rotation(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = LogFile(run.log("env", 1), 6000)
    expected = numbered(0, 150)
    log.write(text(expected) + b"no newline")
    log.close()
    assert log.older.exists()
    assert await logs.logs(options(run, lines=100)) == 0
    assert capsys.readouterr().out.splitlines() == [*expected[-99:], "no newline"]


async def test_following_loses_and_repeats_nothing(
    run: RunDir, listener: socket.socket, printed: tuple[list[str], Printed]
) -> None:
    """No log yet, a first line, many rotations, a line in two pieces, a restart, an end without a
    newline."""
    seen, until = printed
    following = asyncio.create_task(logs.logs(options(run, follow=True, lines=5)))
    await asyncio.sleep(0.05)
    assert not following.done(), "it waits for the first start"
    first, second = LogFile(run.log("env", 1), BIG), numbered(500, 40)
    for start in range(0, 500, 100):
        if start:
            first._rotate()
        first.write(text(numbered(start, 100)))
        await until(numbered(start + 99, 1)[0])
    first.write(b"one piece")
    await asyncio.sleep(0.03)
    first.write(b", one line\ncut")
    await until("one piece, one line")
    first.close()
    other = LogFile(run.log("env", 2), BIG)
    other.write(text(second))
    await until(second[-1])
    other.write(b"last words")
    other.close()
    listener.close()
    async with asyncio.timeout(5):
        assert await following == 0
    await until("last words")
    own = [line for line in seen if not line.startswith("[atropos]")]
    assert own == [*numbered(0, 500), "one piece, one line", "cut", *second, "last words"]


async def test_what_came_between_the_first_lines_and_following_is_not_lost(
    run: RunDir, listener: socket.socket, printed: tuple[list[str], Printed]
) -> None:
    seen, until = printed
    log = LogFile(run.log("env", 1), BIG)
    log.write(text(numbered(0, 10)))
    following = asyncio.create_task(logs.logs(options(run, follow=True, lines=2)))
    await until(numbered(9, 1)[0])
    log.write(text(numbered(10, 3)))
    listener.close()
    async with asyncio.timeout(5):
        await following
    await until(numbered(12, 1)[0])
    log.close()
    assert seen == numbered(8, 5)


def test_two_rotations_between_two_looks(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "1.log", BIG)
    follower = LogReader(tmp_path)
    log.write(text(numbered(0, 3)))
    got = [line.text for line in follower.drain()]
    for start in (3, 6):
        log.write(text(numbered(start, 3)))
        log._rotate()
    log.write(text(numbered(9, 3)))
    log.close()
    got += [line.text for line in follower.drain()]
    assert [line for line in got if not line.startswith("[atropos]")] == numbered(0, 12)


@pytest.mark.parametrize("name", ["nobody", "..", "../env", "", ".", "env/../env"])
async def test_a_component_that_is_not_there(run: RunDir, name: str) -> None:
    with pytest.raises(UserError) as caught:
        await logs.logs(options(run, name))
    assert caught.value.exit_code == Exit.USAGE
    assert "env" in str(caught.value)


async def test_a_run_that_ended_before_a_word(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(5):
        assert await logs.logs(options(run, follow=True)) == 0
    assert "not printed anything" in capsys.readouterr().err


@pytest.mark.parametrize("since", ["99999999d", "9" * 400 + "h"])
def test_longer_ago_than_any_run(
    run: RunDir, since: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["logs", "--since", since, "--run-dir", str(run.root)]) == 0
    assert "no matching line since 1970" in capsys.readouterr().err


def test_live_is_who_listens(run: RunDir, listener: socket.socket) -> None:
    entry = runs.pick(run.root)
    assert entry.is_live
    target = run.control_sock.readlink()
    listener.close()
    assert target.exists() and not entry.is_live, (
        "a killed supervisor leaves its socket file behind"
    )
    target.unlink()
    assert not entry.is_live
    run.control_sock.unlink()
    assert not entry.is_live


def test_events_by_kind_component_and_text(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        StateRecord(component="env", role="env", old="pending", new="starting", seq=0),
        StateRecord(component="env", role="env", old="starting", new="healthy", seq=1),
        DiagnosisRecord(component="vllm", title="out of memory", seq=2),
        CommandRecord(command_id="c", action="down", status="accepted", seq=3),
    ]
    run.supervisor_jsonl.write_text("".join(record.to_line() for record in records))

    def seen(*arguments: str) -> list[int]:
        assert main.run(["events", "--json", *arguments, "--run-dir", str(run.root)]) == 0
        return [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()]

    assert seen() == [0, 1, 2, 3]
    assert seen("--kind", "state") == [0, 1]
    assert seen("--kind", "state", "--grep", "→ healthy") == [1]
    assert seen("--component", "env") == [0, 1]
    assert seen("--grep", "memory") == [2]
    for wrong in (["--kind", "step"], ["--component", "nobody"], ["--grep", "("]):
        assert main.run(["events", *wrong, "--run-dir", str(run.root)]) == Exit.USAGE
