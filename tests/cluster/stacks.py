"""Runs of the cluster tests: a user's command line, and what is left on the nodes afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import (
    DiagnosisRecord,
    StateRecord,
    parse_line,
)
from atropos_common.system.run_dir import ENV_RUN_ID, RunDir
from tests.cluster.processes import wait_until
from tests.cluster.slurm_nodes import SlurmNodes

ATROPOS = [sys.executable, "-P", "-m", "atropos_tui"]


class User:
    """Somebody at a shell, with a state folder of his own."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**(env or os.environ), "XDG_STATE_HOME": str(folder / "state"), "PATH": path}

    def gives(
        self, *words: str, timeout_s: float = 60, before: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """The end of `atropos-tui WORDS`; `before` is a command that it is given to, such as
        salloc."""
        return subprocess.run(
            [*before, *ATROPOS, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def begins(self, *words: str) -> subprocess.Popen[bytes]:
        """`atropos-tui WORDS`, which goes on; what it prints lands in `said.txt`."""
        with (self.folder / "said.txt").open("ab") as out:
            return subprocess.Popen(
                [*ATROPOS, *words],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )


class Observed:
    """A run, from outside: by its files, and by the processes that bear its id."""

    def __init__(self, root: Path) -> None:
        self.dir = RunDir(root)

    @property
    def id(self) -> str:
        return str(json.loads(self.dir.run_json.read_text())["run_id"])

    def records(self) -> list[Record]:
        file = self.dir.supervisor_jsonl
        return (
            [parse_line(line) for line in file.read_bytes().splitlines()] if file.exists() else []
        )

    def state(self, component: str) -> str:
        found = [
            each.new
            for each in self.records()
            if isinstance(each, StateRecord) and each.component == component
        ]
        return found[-1] if found else ""

    def until(self, component: str, state: str, timeout_s: float = 40) -> None:
        wait_until(lambda: self.state(component) == state, f"{component} {state}", timeout_s)

    def until_said(self, words: str, timeout_s: float = 20) -> float:
        """Seconds until a record, of a state or of a diagnosis, holds `words`."""
        began = time.monotonic()
        wait_until(
            lambda: any(words in text for text in self.said()), f"a word of {words!r}", timeout_s
        )
        return time.monotonic() - began

    def said(self) -> list[str]:
        rows = self.records()
        states = [row.reason for row in rows if isinstance(row, StateRecord)]
        return states + [
            f"{row.title}; {row.evidence}; {row.fix}"
            for row in rows
            if isinstance(row, DiagnosisRecord)
        ]

    def result(self) -> dict[str, object]:
        return json.loads(self.dir.result_json.read_text())

    def steps(self) -> list[int]:
        rows = [json.loads(line) for line in self.dir.telemetry_jsonl.read_text().splitlines()]
        return [row["step"] for row in rows if row["kind"] == "step"]

    def processes(self) -> list[psutil.Process]:
        """All that bear the run's id, on whichever of the nodes: they are all on this host."""
        return processes_where(lambda process: process.environ().get(ENV_RUN_ID) == self.id)

    def main(self, component: str) -> psutil.Process:
        """The component's process: the nodes are this host."""
        rows = [
            row
            for row in self.records()
            if isinstance(row, StateRecord) and row.component == component
        ]
        return psutil.Process(next(row.pid for row in reversed(rows) if row.pid))

    def supervisor(self) -> psutil.Process:
        """The supervisor, by the pid in its own table."""
        table = json.loads(self.dir.journal_json.read_text())
        return psutil.Process(table["supervisor"]["pid"])

    def until_nothing_is_left(
        self, slurm: SlurmNodes | None = None, timeout_s: float = 30
    ) -> float:
        """Seconds until no process is left and, with SLURM, all nodes are idle again."""
        began = time.monotonic()
        wait_until(lambda: not self.processes(), "the end of all processes", timeout_s)
        if slurm is not None:
            wait_until(
                lambda: not slurm.jobs() and set(slurm.states().values()) == {"idle"},
                "idle nodes",
                timeout_s,
            )
        return time.monotonic() - began


def processes_where(fits: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Living processes that fit; one that ends meanwhile does not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and fits(process):
                found.append(process)
        except psutil.Error:
            continue
    return found
