"""A run-api that forgets the trainer, belongs to another, loses a batch, is slow or dies: the real
one, on its own port."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_api.batches import add_listing
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import StepRecord
from tests.support.json_server import JsonServer
from tests.trainer_core.stand_ins import TOKEN, Engine, RunApiThread, group, run_config
from trainer_core.errors import Stopped
from trainer_core.loop import train
from trainer_core.rollouts.client import RunApi

SIZE = 4
REGISTRATION = {
    "wandb_group": "",
    "wandb_project": "",
    "batch_size": SIZE,
    "max_token_len": 8,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 1,
    "num_steps": 9,
}
GROUP = {
    "tokens": [[5, 6], [5, 7]],
    "masks": [[-100, 6], [-100, 7]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -1.0], [1.0, -1.0]],
}


class Side:
    """A trainer's client of a run-api, waiting in a thread of its own; and anybody's plain
    requests."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trainer_core.rollouts.client.REGISTRATION_CHECK_S", 0.1)
        self.stop = threading.Event()
        self.api = RunApi(url, REGISTRATION, self.stop, timeout_s=30)
        self.http = httpx.Client(base_url=url, limits=httpx.Limits(max_keepalive_connections=0))
        self._pool = ThreadPoolExecutor(1)

    def open(self, step: int) -> Future[None]:
        return self._pool.submit(self.api.open, step)

    def wait_for_batch(self, step: int) -> Future[list[Any]]:
        """Returns once the client is waiting."""
        waits = threading.Event()
        found = self._pool.submit(self.api.next_batch, step, waits.set)
        assert waits.wait(10)
        return found

    def info(self) -> Any:
        return self.http.get("/info").json()["batch_size"]

    def send(self, *groups: dict[str, Any]) -> None:
        for each in groups:
            answer = self.http.post(
                "/scored_data",
                content=json.dumps(each),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 200

    def close(self) -> None:
        self.stop.set()
        self._pool.shutdown()
        self.api.close()
        self.http.close()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """One side of atroposlib's run-api, in a thread."""
    api = RunApiThread()
    made = Side(api.url, monkeypatch)
    yield made
    made.close()
    api.close()


def _until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def test_a_reset_in_the_middle_of_a_wait_is_seen_and_registered_anew(
    side: Side, capsys: Any
) -> None:
    side.open(0).result(10)
    waiting = side.wait_for_batch(7)
    assert side.http.get("/reset_data").status_code == 200
    _until(lambda: side.info() == SIZE)
    assert side.http.get("/status").json()["current_step"] == 7, "with the trainer's own step"
    side.send(GROUP, GROUP)
    assert [each["tokens"] for each in waiting.result(10)] == [GROUP["tokens"]] * 2
    said = capsys.readouterr().out
    again = "run-api was restarted and has no registration of this trainer. Registering again"
    assert said.count(f"{again} at step 7.") == 1
    assert "not reachable" not in said


@pytest.mark.parametrize("fresh", [False, True])
def test_groups_that_came_before_the_registration_do_not_keep_it_out(
    side: Side, fresh: bool
) -> None:
    """An environment goes on sending to a run-api that was reset, or is new: `/register` is ignored
    from then on."""
    if not fresh:
        side.open(0).result(10)
        side.http.get("/reset_data")
    side.send(GROUP)
    if fresh:
        side.open(3).result(10)
    waiting = side.wait_for_batch(3)
    _until(lambda: side.info() == SIZE)
    side.send(GROUP, GROUP)
    assert len(waiting.result(10)) == 2
    assert side.http.get("/status").json()["current_step"] == 4


def test_another_trainers_run_api_is_left_alone_and_named_until_it_is_free(
    side: Side, capsys: Any
) -> None:
    other = {**REGISTRATION, "batch_size": 2, "starting_step": 5}
    side.http.post("/register", json=other)
    side.send(GROUP)
    opening = side.open(0)
    time.sleep(0.5)
    assert not opening.done() and side.http.get("/status").json()["queue_size"] == 1, (
        "the other trainer's batch stays"
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "another trainer" in line]
    assert (
        "batches of 2 sequences, this trainer asks for 4" in line
        and "atropos-tui restart api" in line
    )
    side.http.get("/reset_data")
    opening.result(10)
    assert side.info() == SIZE
    waiting = side.wait_for_batch(1)
    side.http.get("/reset_data")
    side.http.post("/register", json=other)
    time.sleep(0.5)
    side.send(GROUP, GROUP)
    time.sleep(0.5)
    assert side.info() == 2 and not waiting.done()
    assert "another trainer's registration" in capsys.readouterr().out
    side.stop.set()
    with pytest.raises(Stopped):
        waiting.result(10)


def test_a_registration_of_the_same_size_with_another_length_is_named(
    side: Side, capsys: Any
) -> None:
    side.http.post("/register", json={**REGISTRATION, "max_token_len": 99, "starting_step": 0})
    side.open(0).result(10)
    assert "max_token_len 99, this trainer asks for 8" in capsys.readouterr().out


def test_a_batch_that_run_api_cannot_send_is_lost_alone(side: Side, capsys: Any) -> None:
    """NaN comes in and does not come out: `GET /batch` takes the batch and fails, and so does
    `/latest_example`."""
    side.open(0).result(10)
    side.send(
        {**GROUP, "scores": [float("nan"), 1.0]},
        GROUP,
        GROUP,
        GROUP,
        {**GROUP, "scores": [float("inf"), 1.0]},
    )
    found = [side.api.next_batch(0) for _ in range(2)]
    assert sorted(map(len, found)) == [0, 2], "the lost one is empty"
    began = time.monotonic()
    assert "1 groups queued" in side.api._why_empty() and time.monotonic() - began < 5, (
        "/latest_example fails, too"
    )
    assert "not reachable" not in capsys.readouterr().out


def test_an_empty_queue_is_explained_by_who_is_registered(side: Side) -> None:
    from atroposlib.api import app

    side.open(0).result(10)
    assert "check that an environment is running" in side.api._why_empty(), (
        "a run-api that lists nobody"
    )
    add_listing(app)
    try:
        assert "no environment is registered there" in side.api._why_empty()
        env = {"max_token_length": 8, "desired_name": "rg", "weight": 1.0, "group_size": 2}
        assert side.http.post("/register-env", json=env).json()["status"] == "success"
        assert "nothing since the last batch from rg" in side.api._why_empty()
    finally:
        del app.router.routes[-1]


def test_batches_are_not_compressed_and_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch leaves run-api's queue before it is sent: who gives up early has lost it."""
    monkeypatch.setattr("trainer_core.rollouts.client.REQUEST_TIMEOUT_S", 0.3)
    arrived = threading.Event()

    def answer(path: str, body: Any, token: Any) -> tuple[int, Any]:
        if path == "/batch" and registered:
            arrived.set()
            time.sleep(1.0)
            return 200, {"batch": [GROUP]}
        return 200, {"uuid": 1, "batch_size": SIZE, "max_token_len": 8, "batch": None}

    registered: list[int] = []
    server = JsonServer(answer)
    api = RunApi(server.url, REGISTRATION, threading.Event(), timeout_s=20)
    api.open(0)
    registered.append(1)
    assert api.next_batch(0) == [GROUP]
    arrived.clear()
    threading.Thread(target=lambda: (arrived.wait(5), api.stop.set()), daemon=True).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        api.next_batch(0)
    assert time.monotonic() - began < 0.9, "a stop does not wait for the answer"
    server.close()


def test_a_large_batch_comes_uncompressed(side: Side) -> None:
    side.open(0).result(10)
    response = side.api._http.get("/openapi.json")
    assert len(response.content) > 1000 and "content-encoding" not in response.headers


class RunApiProcess:
    """run-api as a program on one port, to be killed and started again there."""

    def __init__(self, module: str) -> None:
        self.words = (
            ["atropos_api"]
            if module == "auth"
            else ["uvicorn", "atroposlib.api:app", "--log-level", "error"]
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-m", *self.words, "--port", str(self.port)])
        _until(self._answers, 60)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/info").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()


class Sender:
    """An environment that knows nothing: it posts groups sampled from the engine for as long as
    somebody takes them."""

    def __init__(self, url: str, engine: Engine) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(url, engine), daemon=True)
        self.thread.start()

    def _run(self, url: str, engine: Engine) -> None:
        with httpx.Client(base_url=url) as http:
            while not self.stop.wait(0.01):
                if engine.held or engine.paused:
                    continue
                try:
                    if http.get("/status").json()["queue_size"] < 8:
                        http.post("/scored_data", json=group(engine, [3, 12, 4, 13], 4, 3))
                except httpx.TransportError:
                    time.sleep(0.05)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(5)


@pytest.mark.parametrize("module", ["auth", pytest.param("bare", marks=pytest.mark.slow)])
def test_run_api_restarted_and_reset_under_load_costs_the_trainer_no_step(
    engine: Engine, base: Path, tmp_path: Path, capsys: Any, module: str
) -> None:
    """Killed and reset while groups come in all the time: one attempt, every step once, in
    order."""
    api = RunApiProcess(module)
    sender = Sender(api.url, engine)
    config = run_config(
        engine,
        base,
        tmp_path,
        api.url,
        training_steps=20,
        engine_timeout=60,
        api_timeout=60,
        probe_interval=0,
    )
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(train, config)
        try:
            for at, trouble in ((4, "kill"), (10, "reset")):
                _until(lambda at=at: run.done() or (engine.version or 0) >= at, 60)  # type: ignore[misc]
                assert not run.done(), run.exception()
                if trouble == "kill":
                    api.kill()
                    api.start()
                else:
                    httpx.get(
                        f"{api.url}/reset_data", headers={TOKEN_HEADER: TOKEN}
                    ).raise_for_status()
            result = run.result(90)
        finally:
            sender.close()
            api.kill()
    assert (result.done, result.step, result.weight_version) == (True, 20, 20)
    records = [
        parse_line(line) for line in (tmp_path / "out" / "telemetry.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [(record.step, record.attempt) for record in steps] == [
        (step, 1) for step in range(1, 21)
    ]
    assert capsys.readouterr().out.count("✓ Registered with run-api") == 3, (
        "once at the start, once after each trouble"
    )
