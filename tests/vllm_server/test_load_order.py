"""An engine waits for the one before it on the same GPU, for which a small server stands in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_common.protocol import stages
from atropos_common.system.run_dir import ENV_COMPONENT, ENV_RUN_DIR
from tests.support.json_server import JsonServer
from vllm_server import load_order


def test_a_worker_waits_until_the_other_engine_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits while a connection is lost, and while the engine starts."""
    answers: list[tuple[int, dict[str, str]] | None] = [None, (503, {}), (200, {})]
    asked: list[str] = []

    def answer(path: str, *_: object) -> tuple[int, dict[str, str]] | None:
        asked.append(path)
        return answers[min(len(asked), len(answers)) - 1]

    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ENV_COMPONENT, "vllm-1")
    monkeypatch.setattr(load_order, "LOOK_S", 0.01)
    other = JsonServer(answer)
    with caplog.at_level("INFO", "vllm_server"):
        load_order.wait_for_engine(other.url)
    other.close()
    assert asked == ["/health"] * 3
    assert [line.split(":")[0] for line in caplog.messages] == [
        "waits for http",
        "loads its model",
    ]
    (record,) = (tmp_path / "stages.vllm-1.jsonl").read_text().splitlines()
    assert json.loads(record)["stage"] == stages.GPU_TURN


def test_a_worker_whose_turn_it_is_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    other = JsonServer(lambda *_: (200, {}))
    with caplog.at_level("INFO", "vllm_server"):
        load_order.wait_for_engine(other.url)
    other.close()
    assert caplog.messages == []
