"""A short round of `benchmarks/chaos.py`: under seeded faults the real stack goes on, shows the
truth, loses no line and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_seeded_round(tmp_path: Path) -> None:
    records = tmp_path / "chaos.jsonl"
    command = [
        sys.executable,
        "-m",
        "benchmarks.chaos",
        "--minutes",
        "2",
        "--seed",
        "7",
        "--records",
        str(records),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert rows, done.stderr[-4000:]
    wrong = [row for row in rows if row["wrong"]]
    assert not wrong, json.dumps(wrong, indent=1)
    assert all(row["next_step_s"] > 0 for row in rows)
    assert done.returncode == 0, done.stderr[-4000:]
