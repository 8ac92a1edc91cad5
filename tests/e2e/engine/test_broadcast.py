"""Mode `broadcast` on real vLLM over gloo on the CPU: equality under load, a death on either side,
several engines.

python -m pytest -m e2e tests/e2e/engine/test_broadcast.py    # one architecture
python -m pytest -m "e2e and slow" tests/e2e/engine/test_broadcast.py    # the others
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from atropos_common.broadcast.transfer import TransferUpdate
from atropos_common.system.run_dir import ENV_TOKEN
from tests.e2e.engine.test_lora import EXACT, ask
from tests.e2e.engine.test_none import (
    TENSOR_PARALLEL,
    TWO_RANKS,
    UPDATES,
    Whole,
    twenty_steps_under_streams,
)
from tests.e2e.live_stack import LiveStack, free_ports
from tests.e2e.small_models import ARCHITECTURES, TINY, another_model, make_model
from tests.e2e.stack.test_demo import assert_aligned, assert_learned
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, start_server
from tests.support.nursery import SERVER, forked
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError
from trainer_core.weight_sync.base import Start
from trainer_core.weight_sync.broadcast import Broadcast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
Start_ = Callable[..., LiveStack]

SLOW = (*ARCHITECTURES, TENSOR_PARALLEL)


@pytest.fixture(
    scope="module", params=[TINY, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("broadcast")
    two = request.param == TENSOR_PARALLEL
    made = start_server(
        folder,
        make_model(TINY if two else request.param, folder / "model"),
        flags=("--tensor-parallel-size", "2") if two else (),
        ATROPOS_TOKEN=TOKEN,
        **UPDATES,
        **(TWO_RANKS if two else {}),
    )
    yield made
    end_of(made.process)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's token, and one thread: on two cores the servers need the other."""
    monkeypatch.setenv(ENV_TOKEN, TOKEN)
    torch.set_num_threads(1)


def config(model: Path, url: str, **fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": str(model),
            "weight_bridge_mode": "shared_vllm",
            "use_shared_memory": True,
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 1e-3,
            "engine_timeout": 120,
            "vllm_urls": [url],
            **fields,
        }
    )


def trainer_of(server: Server, start: Start | None = None) -> Whole:
    return Whole(Broadcast, config(server.model, server.url), start)  # type: ignore[arg-type]


def test_broadcasts_under_streams(server: Server) -> None:
    assert server.get("/bridge/info").json()["held"], "before the trainer has come nobody is served"
    trainer = trainer_of(server)
    twenty_steps_under_streams(server, trainer)
    trainer.sync.close()


def stuck_trainer(arguments: list[str]) -> None:
    """A trainer that stops amid its first broadcast."""
    model, url = arguments
    sync = Broadcast(config(Path(model), url), torch.device("cpu"), threading.Event())
    sync.attach(Start(version=5))
    update = TransferUpdate(weight_version=6, timeout_s=100)
    threading.Thread(target=sync.engines[0].receive, args=(update,), daemon=True).start()
    while not sync.engines[0].info().dirty:
        time.sleep(0.01)
    print("receiving", flush=True)
    time.sleep(100)


def test_a_trainer_killed_in_the_middle(server: Server, tmp_path: Path) -> None:
    """The server says so within seconds and serves nobody, until a new trainer gives it whole
    weights."""
    log = tmp_path / "trainer.log"
    trainer = forked(
        SERVER,
        "tests.e2e.engine.test_broadcast:stuck_trainer",
        [str(server.model), server.url],
        log,
    )
    while "receiving\n" not in log.read_text():
        assert trainer.poll() is None, log.read_text()
        time.sleep(0.01)
    killed = time.monotonic()
    trainer.kill()
    health = server.get("/health")
    while health.status_code == 200 and time.monotonic() - killed < 30:
        time.sleep(0.05)
        health = server.get("/health")
    print(f"\nunhealthy {time.monotonic() - killed:.1f} s after the kill: {health.text}")
    assert health.status_code == 503 and time.monotonic() - killed < 10
    assert "received only in part" in health.text and "the trainer at 127.0.0.1" in health.text, (
        health.text
    )
    refused = server.post("/generate", {"prompt": "1+", "max_tokens": 2}, token=False)
    assert refused.status_code == 503 and "received only in part" in refused.text

    again = trainer_of(server, Start(version=5))
    assert server.get("/health").status_code == 200
    assert again.gap(ask(server.url), 5) < EXACT
    again.step()
    assert again.gap(ask(server.url), 6) < EXACT
    again.sync.close()


def test_a_server_that_takes_no_broadcast_of_this_model(server: Server, tmp_path: Path) -> None:
    """A final refusal; nobody is served until a trainer has given whole weights."""
    other = another_model(server.model, tmp_path / "other")
    with pytest.raises(EngineError, match=r"(?i)is it the same model on both sides"):
        Whole(Broadcast, config(other, server.url, engine_timeout=5))  # type: ignore[arg-type]
    assert server.get("/health").status_code == 503
    trainer = trainer_of(server)
    assert trainer.gap(ask(server.url), 0) < EXACT
    trainer.sync.close()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_four_processes_and_a_killed_server(stack: Start_, overlap: str) -> None:
    """vLLM alone comes back; the same trainer gives it the present weights and goes on."""
    run = stack(
        mode="broadcast",
        trainer__training_steps=30,
        trainer__checkpoint_interval=0,
        trainer__overlap_publish=overlap,
    )
    run.until_step(6, timeout=300)
    os.kill(run.pid_of("vllm"), signal.SIGKILL)
    code, output = run.wait(timeout=300)
    assert code == 0, output[-4000:]
    steps = run.telemetry("step")
    assert [step.step for step in steps] == list(range(1, 31))
    assert {step.attempt for step in steps} == {1}, "the trainer stayed"
    assert {record.attempt for record in run.states("vllm") if record.new == "healthy"} == {1, 2}
    alignments = run.telemetry("alignment")
    assert {record.verdict for record in alignments} == {"ok"} and any(
        each.probe_tokens for each in alignments
    )
    syncs = [record for record in run.telemetry("sync") if record.moved]
    assert [each.weight_version for each in syncs] == list(range(1, 31)), (
        "each once, also the one of the killed server"
    )
    assert {record.mode for record in syncs} == {"broadcast"}
    assert "BENCHMARK SUMMARY (broadcast)" in output
    run.assert_nothing_left()


TWO_ENGINES = """
name = "two"
extends = "demo"
mode = "broadcast"

[[vllm]]
name = "left"
port = {left}
max_model_len = 64
env = {{ OMP_NUM_THREADS = "1", VLLM_CPU_OMP_THREADS_BIND = "nobind" }}
args = {{ enforce-eager = true, kv-cache-memory-bytes = 67108864, block-size = 32, \
max-num-seqs = 128 }}

[[vllm]]
name = "right"
port = {right}
max_model_len = 64
env = {{ OMP_NUM_THREADS = "1", VLLM_CPU_OMP_THREADS_BIND = "nobind" }}
args = {{ enforce-eager = true, kv-cache-memory-bytes = 67108864, block-size = 32, \
max-num-seqs = 128 }}

[[env]]
name = "first"
module = "atropos_envs.arithmetic_server"
engine = "left"
args = {{ "env.group_size" = 8, "env.seed" = 0, "env.max_batches_offpolicy" = 1 }}

[[env]]
name = "second"
module = "atropos_envs.arithmetic_server"
engine = "right"
args = {{ "env.group_size" = 8, "env.seed" = 1, "env.max_batches_offpolicy" = 1 }}
"""


@pytest.mark.slow
def test_two_engines_with_an_environment_each(stack: Start_, tmp_path: Path) -> None:
    left, right = free_ports(2)
    profile = tmp_path / "two.toml"
    profile.write_text(TWO_ENGINES.format(left=left, right=right))
    run = stack(
        profile=str(profile),
        vllm__port=left,
        trainer__training_steps=16,
        trainer__checkpoint_interval=0,
    )
    run.until_step(4, timeout=200)
    versions = [
        httpx.get(f"http://127.0.0.1:{port}/health_generate").json()["weight_version"]
        for port in (left, right)
    ]
    assert min(versions) >= 3 and abs(versions[0] - versions[1]) <= 1, versions
    code, output = run.wait(timeout=300)
    assert code == 0, output[-4000:]
    seen: dict[str, list[Any]] = {"first": [], "second": []}
    for record in run.telemetry("rollout"):
        seen[record.env].append(record)
    assert min(len(records) for records in seen.values()) >= 8, (
        "the trainer got both environments' rollouts"
    )
    lags = [step.policy_lag_max for step in run.steps()]
    assert None not in lags, "rollouts of both engines have a known version"
    assert {record.verdict for record in run.telemetry("alignment")} == {"ok"}
    run.assert_nothing_left()


@pytest.mark.slow
def test_it_learns(stack: Start_) -> None:
    run = stack(mode="broadcast")
    code, output = run.wait(timeout=400)
    assert code == 0, output[-4000:]
    assert_learned(run)
    assert_aligned(run)
