"""A run-api that goes and comes back, and a telemetry file that is torn or not writable."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import CheckpointRecord, TimingRecord
from trainer_core.errors import Stopped
from trainer_core.rollouts.client import RunApi
from trainer_core.telemetry import Telemetry


def _client(answers: list[Any], stop: threading.Event | None = None) -> tuple[RunApi, list[str]]:
    """A client of a run-api that gives `answers` to `/batch`; an exception is raised instead."""
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        if request.url.path == "/batch":
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(200, json=answer)
        if request.url.path == "/register":
            seen[-1] += f" at {json.loads(request.content)['starting_step']}"
            return httpx.Response(200, json={"uuid": 1})
        return httpx.Response(200, json={"batch_size": 16, "max_token_len": 8})

    transport = httpx.MockTransport(handle)
    return RunApi(
        "http://x", {"batch_size": 16}, stop or threading.Event(), transport=transport
    ), seen


def test_registers_before_the_first_batch() -> None:
    api, seen = _client([{"batch": None}, {"batch": None}, {"batch": [{"tokens": []}]}])
    api.open(5)
    assert seen == ["/info", "/register at 5", "/info", "/batch"]
    assert api.next_batch(5) == [{"tokens": []}]
    assert seen[4:] == ["/info", "/batch", "/batch"], (
        "it looks whose registration it is before each batch"
    )


def test_a_restarted_run_api_gets_the_trainer_again(capsys: pytest.CaptureFixture[str]) -> None:
    lost = {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    api, seen = _client(
        [{"batch": None}, httpx.ConnectError("refused"), lost, {"batch": None}, {"batch": [1]}]
    )
    api.open(0)
    assert api.next_batch(9) == [1]
    assert "/register at 9" in seen
    assert "run-api is back" in capsys.readouterr().out


def test_a_stop_ends_the_wait_at_once() -> None:
    stop = threading.Event()
    api, _ = _client([{"batch": None}] * 50, stop)
    api.open(0)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(Stopped):
        api.next_batch(0)


def test_telemetry_repairs_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    fields = {
        "step_s": 1,
        "data_wait_s": 0,
        "train_s": 1,
        "sync_s": 0,
        "checkpoint_s": 0,
        "tokens_per_s": float("nan"),
    }
    first = Telemetry(path, run_id="r")
    first.write(TimingRecord, 1, **fields)
    first.write(TimingRecord, 2, **fields)
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "timing", "se')
    second = Telemetry(path, run_id="r", attempt=2)
    second.write(TimingRecord, 2, **fields)
    records: list[Any] = [parse_line(line) for line in path.read_text().splitlines()]
    assert [(r.seq, r.attempt, r.step) for r in records] == [(0, 1, 1), (1, 1, 2), (2, 2, 2)]


def test_a_telemetry_file_that_is_removed_begins_again(tmp_path: Path) -> None:
    stream = Telemetry(tmp_path / "telemetry.jsonl")
    fields = {"path": "p", "seconds": 1.0, "bytes": 1}
    stream.write(CheckpointRecord, 1, **fields)
    stream.path.unlink()
    stream.write(CheckpointRecord, 2, **fields)
    assert [parse_line(line).seq for line in stream.path.read_text().splitlines()] == [0]


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Telemetry(Path("/dev/full"))
    fields = {
        "step_s": 1,
        "data_wait_s": 0,
        "train_s": 1,
        "sync_s": 0,
        "checkpoint_s": 0,
        "tokens_per_s": 1,
    }
    for step in range(3):
        stream.write(TimingRecord, step, **fields)
    assert capsys.readouterr().out.count("training goes on without telemetry") == 1
