"""Restarts and kills of the engine under load, with the real stack: no step is lost in any mode.
The trainer stays, but for single copy, where it restarts with the engine. `benchmarks/restarts.py`
does it more often, and measures the seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.restarts import EVENTS, MODES, TENSOR_PARALLEL, TENSOR_PARALLEL_MODES, run_mode

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def check(mode: str, events: list[str], folder: Path, times: int, workers: int = 1) -> None:
    for row in run_mode(mode, events, times, seed=1, folder=folder, workers=workers):
        found = row.fields()
        assert not row.error, found
        touches_engine = "vllm" in row.event or row.event.startswith("SIGKILL")
        along = times if mode == "shared_vllm" and touches_engine else 0
        assert (found["lost"], found["attempts"]) == (0, along), found
        assert not touches_engine or all(each.engine_attempts for each in row.outcomes), (
            "nothing happened"
        )


def test_a_restart_by_hand_leaves_the_trainer_as_it_is(tmp_path: Path) -> None:
    check("lora_only", ["restart vllm"], tmp_path, times=2)


@pytest.mark.parametrize("mode", MODES)
def test_every_event_in_every_mode(mode: str, tmp_path: Path) -> None:
    check(mode, [event for event in EVENTS if event not in TENSOR_PARALLEL], tmp_path, times=1)


@pytest.mark.parametrize("mode", TENSOR_PARALLEL_MODES)
def test_a_tensor_parallel_worker_that_dies(mode: str, tmp_path: Path) -> None:
    check(mode, list(TENSOR_PARALLEL), tmp_path, times=1, workers=2)
