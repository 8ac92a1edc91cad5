"""Other runs beside this one, to compare with. Reads small files only; what cannot be read is left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui.monitor.run_info import moment, read_info, read_json

MOST = 100


@dataclass(frozen=True)
class Neighbour:
    """A run directory in the same folder."""

    root: Path
    name: str
    mode: str
    model: str
    started_at: float
    exit_code: int | None
    """None while it runs, and where nothing tells."""


def neighbours(root: Path) -> list[Neighbour]:
    """The newest runs beside `root` that have records of a trainer, newest first."""
    found = []
    for path in _beside(root):
        try:
            if path.name != root.name and (run := RunDir(path)).telemetry_jsonl.is_file():
                started = moment(read_json(run.run_json).get("started_at"))
                found.append((path.stat().st_mtime if started is None else started, run))
        except OSError:  # another user's, or gone by now
            continue
    found.sort(key=lambda item: item[0], reverse=True)
    return [_described(run, at) for at, run in found[:MOST]]


def _beside(root: Path) -> list[Path]:
    try:
        return list(root.parent.iterdir())
    except OSError:
        return []


def _described(run: RunDir, started_at: float) -> Neighbour:
    info = read_info(run)
    code = read_json(run.result_json).get("exit_code")
    return Neighbour(
        run.root, run.root.name, info.mode, info.model, started_at, code if isinstance(code, int) else None
    )
