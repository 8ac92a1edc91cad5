"""The audit against a server that this project did not start: vLLM's own command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.silent_bugs import models
from benchmarks.silent_bugs.engines import vllm

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def audited(url: str, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "atropos_tui", "audit", "--engine", url, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(900)
def test_a_plain_vllm(tmp_path: Path) -> None:
    folder = models.save(models.build("qwen3"), tmp_path / "right")
    other = models.copied(
        folder, tmp_path / "rope", rope_parameters={"rope_theta": 1e4, "rope_type": "default"}
    )
    with vllm(folder, tmp_path / "vllm.log", ("--dtype", "float32")) as url:
        code, found = audited(url, "--weights", str(folder))
        assert (code, found["verdict"]) == (0, "serves"), found
        assert found["logprobs"] == "raw" and found["engine"].startswith("vLLM")
        code, found = audited(url, "--weights", str(other))
        assert (code, found["cause"]) == (1, "rotary base"), found
        assert "1,000,000" in found["evidence"]
