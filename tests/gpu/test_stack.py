"""The whole stack on one GPU: single copy over CUDA IPC with CUDA graphs and prefix cache on.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import pytest

from tests.e2e.live_stack import LiveStack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]
Start = Callable[..., LiveStack]


def test_single_copy_learns_on_the_gpu(stack: Start) -> None:
    run = stack(profile="demo-gpu")
    code, output = run.wait(timeout=500)
    assert code == 0, output[-6000:]
    assert [step.step for step in run.steps()] == list(range(1, 61))
    rewards = [step.reward_mean for step in run.steps()]
    assert mean(rewards[-5:]) >= max(0.85, mean(rewards[:5]) + 0.25), rewards
    alignment = run.telemetry("alignment")
    probes = [record.probe_diff_abs_mean for record in alignment if record.probe_diff_abs_mean is not None]
    assert len(probes) >= 55
    # bf16 on both sides, 60 in-place updates under CUDA graphs; one step's probe has only 32 tokens.
    assert mean(probes) < 0.03 and max(probes) < 0.1, probes
    assert {record.verdict for record in alignment} == {"ok"}
    assert max(step.policy_lag_max for step in run.steps()) <= 1
    log = (run.run.logs / "vllm" / "1.log").read_text()
    assert "Graph capturing finished" in log, "CUDA graphs were on"
    run.assert_nothing_left()
