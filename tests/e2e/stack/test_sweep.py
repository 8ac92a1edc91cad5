"""`sweep` with the real programs: two demos with different learning rates at a time, one table.

python -m pytest -m "e2e and slow" tests/e2e/stack/test_sweep.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.atropos_tui.cli.test_json import check
from tests.e2e.live_stack import free_ports, processes_of, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_learning_rates_side_by_side(tmp_path: Path) -> None:
    api, engine, figures = free_ports(3)
    base = tmp_path / "swept"
    command = [
        sys.executable,
        "-m",
        "atropos_tui",
        "sweep",
        "demo",
        "--set",
        "trainer.lr=0.0,2e-4",
        "--steps",
        "3",
    ]
    command += [
        "--set",
        f"api.port={api}",
        "--set",
        f"vllm.port={engine}",
        "--set",
        f"metrics.port={figures}",
    ]
    command += ["--parallel", "2", "--run-dir", str(base), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    check("sweep", done.stdout)
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["label"], cell["settings"], cell["state"]) for cell in cells] == [
        ("lr-0.0", {"trainer.lr": "0.0"}, "done"),
        ("lr-2e-4", {"trainer.lr": "2e-4"}, "done"),
    ]
    assert [cell["benchmark"]["steps"] for cell in cells] == [3, 3]
    for cell, lr in zip(cells, (0.0, 2e-4), strict=True):
        steps = [
            record
            for record in read_records(base / cell["label"] / "telemetry.jsonl")
            if record.kind == "step"
        ]
        assert steps[-1].lr == pytest.approx(lr * 3 / 5), "the third of five steps of warm-up"
        assert not processes_of(
            json.loads((base / cell["label"] / "run.json").read_text())["run_id"]
        )
    plans = [json.loads((base / cell["label"] / "plan.json").read_text()) for cell in cells]
    ports = [part["port"] for plan in plans for part in plan["components"] if part["port"]]
    assert len(set(ports)) == 4 and plans[0]["metrics"]["port"] != plans[1]["metrics"]["port"]
