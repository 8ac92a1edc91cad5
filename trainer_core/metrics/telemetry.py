"""The only writer of `telemetry.jsonl`: one record a line, flushed at once. A write that fails never stops training."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, TextIO

from atropos_common.records import RecordError, TrainerRecord, parse_line
from atropos_common.run_dir import ENV_ATTEMPT, ENV_RUN_ID, RunDir

_TAIL = 1 << 20


class Telemetry:
    """Stamps records and appends them. `seq` continues where the file ends, also over attempts."""

    def __init__(self, path: Path, *, run_id: str = "", attempt: int = 1, rank: int = 0) -> None:
        self.path = path
        self.run_id = run_id
        self.attempt = attempt
        self.rank = rank
        self.seq = 0
        self._file: TextIO | None = None
        self._warned = False

    def write(self, kind: type[TrainerRecord], step: int, **fields: Any) -> None:
        """Append one record of `kind` that belongs to optimizer step `step`."""
        try:
            file = self._open()
            stamp = {"run_id": self.run_id, "time": time.time(), "attempt": self.attempt, "rank": self.rank}
            record = kind(**stamp, seq=self.seq, step=step, **fields)
            file.write(record.to_line())
            file.flush()
            self.seq += 1
        except OSError as error:
            self._forget()
            if not self._warned:
                self._warned = True
                print(f"Warning: cannot write {self.path} ({error}); training goes on without telemetry")

    def close(self) -> None:
        self._forget()

    def _open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.seq = _repair(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        return self._file

    def _forget(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def open_telemetry(save_path: str, rank: int) -> Telemetry:
    """The stream of the run directory, or one beside the checkpoints when the trainer runs alone."""
    run_dir = RunDir.from_env()
    path = run_dir.telemetry_jsonl if run_dir else Path(save_path) / "telemetry.jsonl"
    run_id = os.environ.get(ENV_RUN_ID) or (run_dir.root.name if run_dir else "")
    attempt = os.environ.get(ENV_ATTEMPT, "1")
    return Telemetry(path, run_id=run_id, attempt=int(attempt) if attempt.isdigit() else 1, rank=rank)


def _repair(path: Path) -> int:
    """Cut a torn last line off; returns the `seq` that comes next."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL)
        file.seek(start)
        tail = file.read(size - start)
        whole = tail.rfind(b"\n") + 1
        if whole < len(tail):
            file.truncate(start + whole)
    for line in reversed(tail[:whole].splitlines()):
        try:
            return parse_line(line).seq + 1
        except RecordError:
            continue
    return 0
