"""The next batch is fetched and read while the present one trains. No rollout gets older, none is
lost or trained twice, and the weights are the same. With the real run-api and its auth, as a
process."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import StepRecord
from tests.atropos_envs.hosting import test_servers as envs
from tests.atropos_envs.support import Engine as AddingEngine
from tests.trainer_core.rollouts.test_registration import GROUP, REGISTRATION, RunApiProcess
from tests.trainer_core.stand_ins import TOKEN, Engine, Recorded, group, plain_model, run_config
from trainer_core.config import TrainingConfig
from trainer_core.loop import train
from trainer_core.rollouts.batch import Selection
from trainer_core.rollouts.client import RunApi
from trainer_core.rollouts.source import BatchSource, LagMeter
from trainer_core.telemetry import Telemetry

model, make, quick = envs.model, envs.make, envs.quick
STEPS = 4


@pytest.fixture(scope="module")
def process() -> Iterator[RunApiProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATROPOS_TOKEN", TOKEN)
        api = RunApiProcess("auth")
    yield api
    api.kill()


@pytest.fixture
def api(process: RunApiProcess) -> str:
    """Its URL; it knows of nothing."""
    httpx.get(f"{process.url}/reset_data", headers={TOKEN_HEADER: TOKEN})
    return process.url


def _opened(url: str, size: int) -> RunApi:
    api = RunApi(url, REGISTRATION | {"batch_size": size}, threading.Event(), timeout_s=30)
    api.open(0)
    return api


def _send(url: str, batches: list[list[dict[str, Any]]]) -> None:
    with httpx.Client(base_url=url) as http:
        for each in (each for batch in batches for each in batch):
            http.post("/scored_data", json={**each, "env_id": None}).raise_for_status()


def _batches(engine: Engine) -> list[list[dict[str, Any]]]:
    return [[group(engine, [3 + i, 12, 4, 13], 4, 3) for i in range(4)] for _ in range(STEPS)]


def _records(tmp_path: Path, kind: type[Any]) -> list[Any]:
    lines = (tmp_path / "out" / "telemetry.jsonl").read_text().splitlines()
    return [record for record in map(parse_line, lines) if isinstance(record, kind)]


def _trained(
    base: Path, folder: Path, batches: list[Any], api: Any, stops: list[int]
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Final weights and the step records of a run that is stopped, by a SIGTERM's event, while it
    trains each of `stops`; run-api holds all of `batches` from the start."""
    folder.mkdir()
    torch.manual_seed(1)
    engine = Engine(folder, plain_model(base))
    url = api if isinstance(api, str) else "http://127.0.0.1:9"
    if isinstance(api, str):
        _opened(url, 16).close()
        _send(url, batches)
    for last in [*stops, STEPS]:
        config = run_config(
            engine,
            base,
            folder,
            url,
            training_steps=STEPS,
            resume="auto",
            probe_interval=0,
            warmup_steps=3,
            api_timeout=30,
            engine_timeout=10,
        )
        stop = threading.Event()
        original = engine.answer

        def answer(
            path: str, body: Any, last: int = last, stop: Any = stop, original: Any = original
        ) -> Any:
            if path == "/bridge/pause" and (engine.version or 0) == last - 1 < STEPS - 1:
                time.sleep(0.3)  # the next batch is here by now
                stop.set()
            return original(path, body)

        engine.answer = answer  # type: ignore[method-assign]
        own = {} if isinstance(api, str) else {"api": copy.copy(api)}
        result = train(config, stop=stop, **own)
        engine.answer = original  # type: ignore[method-assign]
        assert (result.step, result.done) == (last, last == STEPS)
        if not result.done:
            engine.version, engine.held = None, True
    engine.close()
    records = [
        record.model_dump(include={"step", "loss", "reward_mean"})
        for record in _records(folder, StepRecord)
    ]
    return load_file(folder / "out" / "final_model" / "model.safetensors"), records


def test_the_same_weights_as_without_and_a_stop_loses_nothing(
    engine: Engine, base: Path, tmp_path: Path, process: RunApiProcess
) -> None:
    """A batch that was fetched ahead at a stop comes again, in its turn; a trained one does not."""
    batches = _batches(engine)
    straight, steps = _trained(base, tmp_path / "straight", batches, Recorded(batches), [])
    for name, stops in (("ahead", []), ("stopped", [2, 3])):
        httpx.get(f"{process.url}/reset_data", headers={TOKEN_HEADER: TOKEN})
        found, seen = _trained(base, tmp_path / name, batches, process.url, stops)
        assert seen == steps, name
        assert all(torch.equal(found[k], straight[k]) for k in straight), name
    status = httpx.get(f"{process.url}/status").json()
    assert (status["current_step"], status["queue_size"]) == (STEPS, 0)


def test_nobody_is_said_to_wait_while_it_trains(
    api: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("trainer_core.rollouts.client.COMPLAIN_AFTER_S", 0.3)
    client = _opened(api, 2)
    _send(api, [[GROUP]])
    assert len(client.next_batch(0)) == 1 and client.keeps_batches
    ahead = client.fetch_ahead(len)
    time.sleep(1.0)
    assert "Waiting for rollouts" not in capsys.readouterr().out
    client.await_from(1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ahead.answer)
        time.sleep(1.0)
        _send(api, [[GROUP]])
        assert found.result(10) == 1
    assert re.search(
        r"Waiting for rollouts for \d s: run-api's queue is empty", capsys.readouterr().out
    )
    client.close()


def test_after_a_reset_it_registers_with_the_step_of_now(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request for the batch was a step earlier."""
    monkeypatch.setattr("trainer_core.rollouts.client.REGISTRATION_CHECK_S", 0.1)
    client = _opened(api, 2)
    _send(api, [[GROUP]])
    client.next_batch(6)
    ahead = client.fetch_ahead(len)
    client.await_from(7)
    httpx.get(f"{api}/reset_data", headers={TOKEN_HEADER: TOKEN})
    while httpx.get(f"{api}/info").json()["batch_size"] != 2:
        time.sleep(0.02)
    assert httpx.get(f"{api}/status").json()["current_step"] == 7
    _send(api, [[GROUP]])
    assert ahead.answer() == 1
    client.close()


def test_an_outage_while_nobody_waits_ends_nothing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Longer than the trainer's patience, in the middle of a long step."""
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    process = RunApiProcess("auth")
    request.addfinalizer(process.kill)
    client = _opened(process.url, 2)
    config = TrainingConfig(model_name="m", save_path=str(tmp_path), batch_size=2)
    source = BatchSource(
        config,
        client,
        Telemetry(tmp_path / "t.jsonl"),
        selection=Selection(),
        advantage_std=True,
        lag_meter=LagMeter([]),
        while_waiting=lambda: None,
    )
    _send(process.url, [[GROUP]])
    assert len(source.next_batch(0, 0)[0].rollouts) == 2
    client.timeout_s = 0.5
    process.kill()
    time.sleep(2)
    process.start()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(source.next_batch, 1, 1)
        while httpx.get(f"{process.url}/info").json()["batch_size"] != 2:
            assert not found.done(), found.exception()
            time.sleep(0.02)
        _send(process.url, [[GROUP]])
        assert len(found.result(20)[0].rollouts) == 2
    client.close()


def _full(url: str, groups: int) -> None:
    """A slow trainer: return once run-api's queue has `groups` groups."""
    end = time.monotonic() + 20
    while httpx.get(f"{url}/status").json()["queue_size"] < groups:
        assert time.monotonic() < end
        time.sleep(0.02)


class Stamping(AddingEngine):
    """The version that begins a completion is in its logprobs: -1 - version."""

    async def generate(self, request: web.Request) -> web.Response:
        born = self.version
        answer = json.loads((await super().generate(request)).body)  # type: ignore[arg-type]
        answer["sampled_logprobs"] = [[-1.0 - born] * len(ids) for ids in answer["token_ids"]]
        return web.json_response(answer)


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.slow), 3])
async def test_lag_stays_within_max_batches_offpolicy(
    make: envs.Make, quick: None, api: str, most: int
) -> None:
    """A real environment, an engine that stamps its version, and a trainer that is slower, then
    faster than both."""
    client = await asyncio.to_thread(_opened, api, 32)
    engine = Stamping()
    engine.delay_s = 0.01
    async with engine.running() as url:
        env = make(url, api=api, steps_per_eval=0, max_batches_offpolicy=most)
        serving = asyncio.create_task(env.env_manager())
        raw = await asyncio.to_thread(client.next_batch, 0)
        lags = []
        for step in range(16):
            ahead = client.fetch_ahead(lambda raw: raw)
            born = [-round(row[-1]) - 1 for each in raw for row in each["inference_logprobs"]]
            lags.append(step - min(born))
            if step % 8 < 4:
                await asyncio.to_thread(_full, api, 4 * most)
            engine.version = step + 1
            client.await_from(step + 1)
            raw = await asyncio.to_thread(ahead.answer)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    client.close()
    assert max(lags) <= most, lags
    assert max(lags) == most, "it is the bound that holds it, not chance"
