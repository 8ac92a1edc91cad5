"""A really full disk: the run goes on, says so, counts what is lost, and writes again when there is
room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atropos_common.protocol.control import CommandRequest
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    DiagnosisRecord,
    StateRecord,
    parse_line,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import StackSpec
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.processes.logs import LogFile
from tests.support.harness import NOTE, check_log, part, python, ready, wait_until
from tests.support.tmpfs import mounted

TALK = (
    "import time\nprint('up')\nfor n in range(10**6):\n print(f'line {n:06d}', flush=True)\n "
    "time.sleep(0.002)"
)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB with 60 inodes."""
    with mounted(tmp_path / "disk", "size=256k", "nr_inodes=60") as folder:
        yield folder


class Supervisor:
    """One in a process of its own, with a component that talks and one that sleeps."""

    def __init__(self, root: Path) -> None:
        parts = [part("talk", python(TALK), probes=ready()), part("stay", probes=ready())]
        self.stack = StackSpec(
            run_id=f"test-{secrets.token_hex(6)}",
            name="test",
            mode="none",
            run_dir=str(root),
            components=parts,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atropos_tui.supervisor"], stdin=subprocess.PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(self.stack.model_dump_json().encode())
        self.process.stdin.close()
        self.run = RunDir(root)
        self.client = ControlClient(root)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        tracker.reap_leftovers(self.stack.run_id)


class Tmpfs:
    """Fills its file system with a file."""

    def __init__(self, root: Path, _: int) -> None:
        self._ballast = root.parent / "ballast"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1000))
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"x")

    def free(self) -> None:
        self._ballast.unlink()


class FileSizes:
    """Where nothing may be mounted: the kernel refuses the supervisor any byte more in any file."""

    def __init__(self, _: Path, pid: int) -> None:
        self._process = psutil.Process(pid)

    def fill(self) -> None:
        self._process.rlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def free(self) -> None:
        self._process.rlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )


@pytest.fixture(params=[Tmpfs, FileSizes])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run directory on the disk that gets full."""
    folder: Path = request.getfixturevalue("tmpfs") if request.param is Tmpfs else tmp_path
    return folder / "run"


@pytest.fixture
def supervisor(place: Path) -> Iterator[Supervisor]:
    started = Supervisor(place)
    yield started
    started.close()


async def restarted(client: ControlClient) -> None:
    """Restart a component by hand and wait until that is done."""
    accepted = await client.command(CommandRequest(action="restart", component="stay"))
    async with asyncio.timeout(20):
        while (await client.command_status(accepted.command_id)).status != "done":
            await asyncio.sleep(0.02)


async def test_the_run_goes_on_and_says_what_it_lost(
    supervisor: Supervisor, request: pytest.FixtureRequest
) -> None:
    run, client = supervisor.run, supervisor.client
    await wait_until(run.control_sock.exists, 20)
    assert (await client.wait("ready", 20)).outcome == "reached"
    disk = request.node.callspec.params["place"](run.root, supervisor.process.pid)
    heard: list[Record] = []
    listening = asyncio.create_task(listen(ControlClient(run.root), heard))
    await asyncio.sleep(0.2)
    disk.fill()
    await wait_until(lambda: bool(told(heard)))
    await restarted(client)
    restarts = 1
    while (
        f'"seq":{heard[-1].seq},'.encode() in run.supervisor_jsonl.read_bytes()
    ):  # its last block still has room
        await restarted(client)
        restarts += 1
        assert restarts < 30, "the journal is written although the disk is full"
    assert (await client.status()).phase == "running"
    disk.free()
    talk = run.log("talk", 1)
    await wait_until(lambda: NOTE.search(talk.read_bytes()) is not None)
    await asyncio.sleep(0.1)
    await client.command(CommandRequest(action="down"))
    assert await asyncio.to_thread(supervisor.process.wait, 30) == 130
    await listening
    assert json.loads(run.result_json.read_text())["exit_code"] == 130
    check_journal(run, restarts)
    assert check_log(talk.read_bytes(), b"line 000000\n", b"up\n") > 0


async def listen(client: ControlClient, heard: list[Record]) -> None:
    async for item in client.events():
        if isinstance(item, Record):
            heard.append(item)
    await client.close()


def told(records: list[Record]) -> list[DiagnosisRecord]:
    """Return the diagnoses about the log of `talk`."""
    diagnoses = [
        record
        for record in records
        if isinstance(record, DiagnosisRecord) and record.component == "talk"
    ]
    return [record for record in diagnoses if record.title == "the log cannot be written"]


def check_journal(run: RunDir, restarts: int) -> None:
    """Every record is there, in order, those of the time without room too."""
    records = [parse_line(line) for line in run.supervisor_jsonl.read_bytes().splitlines()]
    assert [record.seq for record in records] == list(range(len(records)))
    assert [record.time for record in records] == sorted(record.time for record in records)
    first, at_the_end = told(records)
    assert re.search(r"[\d,.]+ MB of [\d,.]+ MB and [\d,]+ inodes are free there", first.evidence)
    for diagnosis in (first, at_the_end):
        assert re.search(r"; [\d,]+ bytes of output are lost", diagnosis.evidence)
    stay = [
        record.new
        for record in records
        if isinstance(record, StateRecord) and record.component == "stay"
    ]
    assert stay.count("healthy") == 1 + restarts


def test_without_inodes_a_log_begins_when_there_are(tmpfs: Path) -> None:
    folder = tmpfs / "talk"
    folder.mkdir()
    taken = [tmpfs / f"taken{number}" for number in range(60)]
    with contextlib.suppress(OSError):
        for path in taken:
            path.touch()
    log = LogFile(folder / "1.log", 1000)
    assert "No space left on device" in log.write(b"lost\n")
    assert " 0 inodes are free" in log.write(b"lost too\n")
    for path in taken:
        path.unlink(missing_ok=True)
    assert log.write(b"kept\n") == ""
    log.close()
    assert NOTE.sub(b"<missing \\1>", (folder / "1.log").read_bytes()) == b"<missing 14>kept\n"


def test_a_rotation_without_inodes_keeps_on_writing(tmpfs: Path) -> None:
    log = LogFile(tmpfs / "1.log", 1000)
    log.write(b"first\n")
    taken = [tmpfs / f"taken{number}" for number in range(60)]
    with contextlib.suppress(OSError):
        for path in taken:
            path.touch()
    lines = b"".join(b"line %06d\n" % number for number in range(100))
    assert log.write(lines) == ""
    assert (tmpfs / "1.log").read_bytes() == b"first\n" + lines, (
        "longer than its half, and nothing lost"
    )
    for path in taken:
        path.unlink(missing_ok=True)
    log.write(b"last\n")
    log.close()
    assert (tmpfs / "1.log").read_bytes() == b"last\n"
    assert (tmpfs / "1.log.1").read_bytes() == b"first\n" + lines
    assert log.lost_bytes == 0
