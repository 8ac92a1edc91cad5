"""Advice against what limits a run: the engine's own figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atropos_common.protocol.control import GpuStatus, Role
from atropos_common.protocol.records import EngineGauges, GaugesRecord
from atropos_tui.monitor.run.run_files import PlannedComponent
from tests.atropos_tui.monitor.test_verdict import INFO, NOW, flow, said


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


AGAIN = {"generated_tokens": 5_000, "recomputed_tokens": 1_000, "weight_version": 7}


def _over_30_s(again: float | None, versions: int, **fields: Any) -> list[GaugesRecord]:
    """An engine that made 10,000 tokens, and computed `again` more than once."""
    last = flow(0.7, fields.pop("idle", 0.0), capacity_used=0.5, **fields)
    counted = None if again is None else 1_000 + again
    now = {"generated_tokens": 15_000, "recomputed_tokens": counted, "weight_version": 7 + versions}
    first = EngineGauges(**(AGAIN if again is not None else AGAIN | {"recomputed_tokens": None}))
    return [
        last.model_copy(update={"time": NOW - 30, "engines": {"vllm": first}}),
        last.model_copy(update={"engines": {"vllm": EngineGauges(**now)}}),
    ]


REUSE = 'in_flight = "reuse" (keys and values of 2.3 tokens are computed again'


@pytest.mark.parametrize(
    ("again", "versions", "advised"),
    [(23_000, 20, True), (4_000, 20, False), (0, 20, False), (None, 20, False), (23_000, 1, False)],
)
def test_an_engine_that_mostly_computes_tokens_again_should_reuse_them(
    again: float | None, versions: int, advised: bool
) -> None:
    found = said(*_over_30_s(again, versions), mode="broadcast")
    by = "engine" if advised else "environment"  # right only for an engine with room
    assert found.what.startswith(f"limited by the {by}"), found
    assert (REUSE in found.do) is advised, found.do
    assert ("in_flight" in found.do) is advised


def test_what_is_computed_again_does_not_hide_another_limit() -> None:
    outside = {"busy_workers": 8.0, "max_workers": 8, "group_size": 8, "in_engine": 2.0}
    slow = said(*_over_30_s(23_000, 20, **outside), mode="broadcast")
    assert slow.what.startswith("limited by the environment") and "in_flight" not in slow.do
    idle = said(*_over_30_s(23_000, 20, idle=0.4), mode="broadcast")
    assert not idle.what.startswith("limited by the engine")
    swapped = said(*_over_30_s(23_000, 20), mode="lora_only")
    assert "in_flight" not in swapped.text, "adapters are swapped without a pause"
    trainer = PlannedComponent("trainer", Role.TRAINER, command=("trainer", "--in-flight", "reuse"))
    info = replace(INFO, components=[trainer, *INFO.components])
    reused = said(*_over_30_s(23_000, 20), mode="broadcast", info=info)
    assert "in_flight" not in reused.text, "it does already: the cache is too small"


@pytest.mark.parametrize(
    ("mode", "engines", "advised"),
    [
        ("shared_vllm", {"vllm-0": (0,), "vllm-1": (0,)}, 3),
        ("shared_vllm", {f"vllm-{number}": (0,) for number in range(4)}, None),  # enough
        ("shared_vllm", {"vllm": (0, 1)}, None),  # tensor-parallel
        ("shared_vllm", {"vllm-0": (0,), "vllm-1": (1,)}, None),  # one gets a broadcast
        ("none", {"vllm-0": (0,), "vllm-1": (1,)}, 2),
        ("none", {"vllm": (0,), "judge": (0,)}, 2),
        ("none", {"vllm": (0,), "node": (0,)}, None),
    ],
)
def test_the_advice_is_one_that_validate_takes(
    mode: str, engines: dict[str, tuple[int, ...]], advised: int | None
) -> None:
    made = [
        PlannedComponent(name, Role.ENGINE, gpus=gpus, node="n" if name == "node" else "")
        for name, gpus in engines.items()
    ]
    info = replace(INFO, components=[INFO.components[0], *made])
    asked = " and ".join(name for name in engines if name.startswith("vllm"))
    cards = [
        GpuStatus(index=at, used_bytes=0, total_bytes=1, utilization_percent=20) for at in (0, 1)
    ]
    last = flow(0.7, 0.0, capacity_used=0.75, engine=asked).model_copy(update={"gpus": cards})
    do = said(last, mode=mode, info=info).do
    assert (f"vllm.per_gpu = {advised} (" in do) if advised else ("per_gpu" not in do), do
