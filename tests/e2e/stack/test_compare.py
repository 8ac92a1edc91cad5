"""`compare` with the real programs: two demos side by side on different ports, one table.

python -m pytest -m "e2e and slow" tests/e2e/stack/test_compare.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.live_stack import free_ports, processes_of, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_demos_side_by_side(tmp_path: Path) -> None:
    api, engine = free_ports(2)
    base = tmp_path / "compared"
    command = [
        sys.executable,
        "-m",
        "atropos_tui",
        "compare",
        "demo",
        "demo",
        "--steps",
        "4",
        "--run-dir",
        str(base),
    ]
    command += [
        "--set",
        f"api.port={api}",
        "--set",
        f"vllm.port={engine}",
        "--set",
        "demo-2:trainer.lr=0.0",
        "--json",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = json.loads(done.stdout)["runs"]
    assert [(run["run"], run["steps"], run["exit_code"]) for run in runs] == [
        ("demo", 4, 0),
        ("demo-2", 4, 0),
    ]
    for run in runs:
        assert (
            run["avg_step_s"] > 0 and run["avg_sync_s"] > 0 and run["checkpoint_bytes"] > 1_000_000
        )
    rates = {
        name: {
            record.lr
            for record in read_records(base / name / "telemetry.jsonl")
            if record.kind == "step"
        }
        for name in ("demo", "demo-2")
    }
    assert rates["demo-2"] == {0.0} and max(rates["demo"]) > 0
    for name in ("demo", "demo-2"):
        assert not processes_of(json.loads((base / name / "run.json").read_text())["run_id"])
