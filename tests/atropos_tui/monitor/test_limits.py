"""Advice against what limits a run: the engine's own figures."""

from __future__ import annotations

import pytest

from atropos_common.protocol.control import GpuStatus
from tests.atropos_tui.monitor.test_verdict import NOW, flow, said


@pytest.mark.parametrize(
    ("mode", "percent", "advised"),
    [
        ("shared_vllm", [20, 31], True),
        ("none", [20, 31], True),
        ("broadcast", [20, 31], False),  # NCCL takes one engine a GPU
        ("shared_vllm", [60, 90], False),
        ("shared_vllm", [None], False),
    ],
)
def test_an_engine_that_leaves_its_gpu_idle_needs_a_second_one_beside_it(
    mode: str, percent: list[int | None], advised: bool
) -> None:
    *before, last = [
        flow(0.7, 0.0, capacity_used=0.75).model_copy(
            update={
                "time": NOW - 3 - ago,
                "gpus": [
                    GpuStatus(index=0, used_bytes=0, total_bytes=1, utilization_percent=each),
                    GpuStatus(index=7, used_bytes=0, total_bytes=1, utilization_percent=100),
                ],
            }
        )
        for ago, each in reversed(list(enumerate(percent)))
    ]
    found = said(*before, last, mode=mode)
    advice = "vllm.per_gpu = 2 (its GPU computes 26% of the time, so one core of its Python"
    assert (advice in found.do) is advised
    assert ("per_gpu" in found.do) is advised
