"""Drive the real stack from tests: start it, watch its files, and look for what it left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.protocol.records import (
    EvalRecord,
    StateRecord,
    parse_line,
)
from atropos_common.system.run_dir import ENV_RUN_ID, RunDir
from benchmarks.demo import prepare
from tests.e2e.vllm_server_live import SHARED_NAME

STEPS_LIVE = 40
"""Steps of a run in which a command acts: more than are over before the command has started."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """The demo's model is made by one test process; the others wait, and find it."""
    with (Path(os.environ["ATROPOS_CACHE"]) / "preparing").open("w") as place:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield


def prepare_demo() -> None:
    """Make the demo's model, where it is not there."""
    with preparing():
        prepare("demo", 0)


def read_records(path: Path) -> list[Record]:
    """Every whole line of a stream."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found.append(parse_line(line))
        except RecordError as error:
            raise AssertionError(f"{path}: {error}") from error
    return found


def processes_of(run_id: str) -> list[str]:
    """Return the command lines of live processes that carry the run's marker, in any process
    tree."""
    marker = f"{ENV_RUN_ID}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(
                    f"{entry.name} "
                    f"{(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
                )
        except OSError:
            continue
    return found


def shared_files_in_use() -> set[str]:
    """Names in /dev/shm that a live process maps or holds open: another test's, since none of the
    run's is left."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        texts = []
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                texts.append((process / "maps").read_text())
                for descriptor in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):  # closed since
                        texts.append(str(descriptor.readlink()))
        found |= {name for text in texts for name in re.findall(r"/dev/shm/(\S+)", text)}
    return found


@dataclass
class LiveStack:
    """One `atropos-tui up --headless` of a shipped profile."""

    root: Path
    profile: str = "demo"
    sets: dict[str, Any] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    shared_before: set[str] = field(
        default_factory=lambda: {path.name for path in Path("/dev/shm").iterdir()}
    )

    @property
    def run(self) -> RunDir:
        return RunDir(self.root)

    @property
    def run_id(self) -> str:
        return str(json.loads(self.run.run_json.read_text())["run_id"])

    def up(self) -> LiveStack:
        api, engine = free_ports(2)
        sets = {"api.port": api, "vllm.port": engine} | self.sets
        flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        return self._start(self.profile, "--run-dir", str(self.root), *flags, *self.extra)

    def resume(self) -> LiveStack:
        """Go on with the run, under another supervisor."""
        return self._start("--resume", str(self.root))

    def _start(self, *arguments: str) -> LiveStack:
        self.started = time.time()
        with self.output.open(
            "wb"
        ) as output:  # a pipe that nobody reads would be full after some hundred steps
            self.process = subprocess.Popen(
                [sys.executable, "-m", "atropos_tui", "up", *arguments, "--headless"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait(self, timeout: float) -> tuple[int, str]:
        """Exit code and output."""
        assert self.process is not None
        return self.process.wait(timeout), self.output.read_text()

    @property
    def output(self) -> Path:
        """File with the output of the last start, beside the run's folder."""
        return self.root.with_name(f"{self.root.name}.output")

    def cli(self, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "atropos_tui", *args, "--run-dir", str(self.root)]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def close(self) -> None:
        """End it whatever state it is in."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def telemetry(self, kind: str) -> list[Any]:
        return [record for record in read_records(self.run.telemetry_jsonl) if record.kind == kind]

    def states(self, component: str | None = None) -> list[StateRecord]:
        records = read_records(self.run.supervisor_jsonl)
        return [
            r for r in records if isinstance(r, StateRecord) and component in (None, r.component)
        ]

    def evals(self) -> list[EvalRecord]:
        return [
            r
            for path in self.root.glob("eval.*.jsonl")
            for r in read_records(path)
            if isinstance(r, EvalRecord)
        ]

    def steps(self) -> list[Any]:
        """Step records as a reader sees them: a later attempt replaces what it repeats."""
        kept: list[Any] = []
        for record in self.telemetry("step"):
            kept = [old for old in kept if old.attempt == record.attempt or old.step < record.step]
            kept.append(record)
        return kept

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> Any:
        """Poll until `condition` gives something true; a stack that ends meanwhile fails at
        once."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if found := condition():
                return found
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(
                    f"the stack ended before: {what}\n{self.output.read_text()[-4000:]}"
                )
            time.sleep(0.05)
        raise AssertionError(f"timeout after {timeout} s: {what}")

    def until_step(self, step: int, timeout: float = 120) -> None:
        self.until(
            lambda: any(r.step >= step for r in self.telemetry("step")), timeout, f"step {step}"
        )

    def pid_of(self, component: str) -> int:
        status = json.loads(self.cli("ps", "--json").stdout)
        return int(next(c["pid"] for c in status["components"] if c["name"] == component))

    def assert_nothing_left(self) -> None:
        """No process with the run's marker, no shared memory, no socket."""
        deadline = time.monotonic() + 5
        while (left := processes_of(self.run_id)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, "processes left behind:\n" + "\n".join(left)
        # A semaphore that vLLM closed before it was killed (32 bytes) looks like one of another
        # program's.
        now = {
            path.name
            for path in Path("/dev/shm").iterdir()
            if not path.name.startswith(("sem.mp-", SHARED_NAME))
        }
        shared = sorted(now - self.shared_before - shared_files_in_use())
        assert not shared, f"left in /dev/shm: {shared}"
        assert not self.run.control_sock.exists()
