"""The sentence about a run whose requests wait for a slot of the engine."""

from __future__ import annotations

from typing import Any

from atropos_common.protocol.control import Phase
from atropos_common.protocol.records import EngineGauges
from atropos_common.protocol.trainer_records import TimingRecord
from tests.atropos_tui.monitor.test_verdict import NOW, flow, said


def test_requests_that_wait_for_a_slot_of_the_engine_name_its_number_of_slots() -> None:
    queue: dict[str, Any] = {"running": 1.0, "slots": 1.0, "queued": 28.4}
    found = said(flow(0.31, 0.2, **queue))
    assert found.what == (
        "limited by the engine vllm: busy 80% of the time with at most 1 at a time, 28 more wait, "
        "while the trainer waits 31%"
    )
    assert found.do.startswith("raise max-num-seqs of [vllm.args] (now 1), ")
    assert "max-num-seqs" in said(flow(0.9, 0.2, capacity_used=0.4, **queue)).do
    assert said(flow(0.1, 0.2, **queue)).severity == "healthy"
    full = flow(0.31, 0.2, **queue)
    full.engines["vllm"] = EngineGauges(kv_use=0.97)
    assert "max-num-seqs" not in said(full).do


def test_of_two_engines_the_number_of_slots_is_that_of_each() -> None:
    queue: dict[str, Any] = {"running": 32.0, "slots": 32.0, "queued": 900.0}
    both = flow(0.31, 0.2, engine="vllm-0 and vllm-1", **queue)
    assert said(both).do.startswith("raise max-num-seqs of [vllm.args] (now 16), ")
    both.engines["vllm-1"] = EngineGauges(kv_use=0.97)
    assert "max-num-seqs" not in said(both).do


def test_after_the_end_a_queue_in_the_engine_is_named_from_a_smaller_wait_on() -> None:
    part = {"step_s": 1.0, "data_wait_s": 0.36, "train_s": 0.6, "sync_s": 0.04, "tokens_per_s": 9}
    steps = [TimingRecord(step=at, time=NOW - 38 + at, checkpoint_s=0, **part) for at in range(38)]
    over: dict[str, Any] = {"phase": Phase.ENDED, "exit_code": 0}
    queue = flow(0.36, 0.16, running=1.0, slots=1.0, queued=28.4)
    early = [one.model_copy(update={"time": one.time - 3600}) for one in (*steps, queue)]
    assert "limited by the engine vllm" in said(*early, steps=False, **over).what
    found = said(*steps, queue, **over)
    assert "in its last steps limited by the engine vllm" in found.what
    assert found.do.startswith("raise max-num-seqs")
    assert "limited" not in said(*steps, flow(0.36, 0.16), **over).text
