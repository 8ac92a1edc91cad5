"""Mode `none` on real vLLM: whole models loaded in place under load, refused, interrupted, or
loaded at a restart.

python -m pytest -m e2e tests/e2e/engine/test_none.py    # one architecture
python -m pytest -m "e2e and slow" tests/e2e/engine/test_none.py    # the others
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_common.protocol.bridge import LoadWeightsRequest
from atropos_common.protocol.trainer_records import POLICY_LAG
from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_TOKEN
from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e.engine.test_lora import EXACT, PROMPT, STEPS, Trainer, ask, own_servers
from tests.e2e.live_stack import STEPS_LIVE, LiveStack, free_ports
from tests.e2e.small_models import ARCHITECTURES, TINY, another_model, make_model
from tests.e2e.streams import Streamed, Streams
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, start_server
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone
from trainer_core.policy.logprobs import completions_logprobs
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.none_reload import Reload

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
Start_ = Callable[..., LiveStack]

TENSOR_PARALLEL = "tiny qwen3 on two ranks"
UPDATES = {
    "VLLM_ENABLE_SHARED_WEIGHTS": "0",
    "ATROPOS_WEIGHT_UPDATES": "1",
    "ATROPOS_HOLD_GENERATION": "1",
}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM binds each rank to a NUMA node of its own: there may be one only."""


@pytest.fixture(
    scope="module",
    params=[
        TINY,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (*ARCHITECTURES, TENSOR_PARALLEL)),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that may read below its own folder alone."""
    folder = tmp_path_factory.mktemp("none")
    two = request.param == TENSOR_PARALLEL
    made = start_server(
        folder,
        make_model(TINY if two else request.param, folder / "model"),
        flags=("--tensor-parallel-size", "2") if two else (),
        ATROPOS_TOKEN=TOKEN,
        ATROPOS_RUN_DIR=str(folder),
        **UPDATES,
        **(TWO_RANKS if two else {}),
    )
    yield made
    end_of(made.process)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The machine's cores are the server's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_CONTROL_SOCKET, ENV_RUN_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ENV_TOKEN, TOKEN)


class Whole(Trainer):
    """A trainer of all weights, with copies of every version."""

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def gap(self, done: Streamed, version: int) -> float:
        return self.gaps([done], version)

    @torch.no_grad()
    def gaps(self, completions: Sequence[Streamed], version: int) -> float:
        """Largest |server - trainer at `version`| over all tokens of the completions."""
        present = self.copy()
        try:
            self._put(self.kept[version])
            ours = completions_logprobs(
                self.model, [(done.prompt, done.token_ids) for done in completions]
            )
        finally:
            self._put(present)
        theirs = [done.logprobs for done in completions]
        return max(
            abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)
        )

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


def config(model: Path, folder: Path, url: str = "", **fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": str(model),
            "weight_bridge_mode": "none",
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 1e-3,
            "vllm_restart_interval": 1,
            "save_path": str(folder / "out"),
            "engine_timeout": 180,
            "vllm_urls": [url] if url else None,
            **fields,
        }
    )


def trainer_of(server: Server, **fields: Any) -> Whole:
    return Whole(Reload, config(server.model, server.bridge_dir.parent, server.url, **fields))


def client(server: Server) -> ServerClient:
    return ServerClient(server.url, TOKEN)


def twenty_steps_under_streams(server: Server, trainer: Whole) -> None:
    """Under 16 streams: nothing is cut off, and what one version wrote alone is its own to 1e-4."""
    assert trainer.gap(ask(server.url), 0) < EXACT
    reports = []
    with Streams(server.url, TOKEN, prompt=PROMPT, max_tokens=24) as load:
        load.until(20)
        for _ in range(STEPS):
            reports.append(trainer.step())
            load.until(2)
        published = time.monotonic()
        load.until(40)
    load.assert_whole()

    final = ask(server.url)
    assert trainer.gap(final, STEPS) < EXACT < trainer.gap(final, 0), (
        "the weights moved, and the server with them"
    )
    recorded = load.versions()
    assert len({span for _, span in recorded}) > 3, "completions of several versions were recorded"
    assert None not in [span for _, span in recorded]
    for version in range(STEPS + 1):
        if alone_by := [done for done, span in recorded if span == (version, version)]:
            assert trainer.gaps(alone_by, version) < EXACT
    newest = [each for each in load.completions if each.sent > published]
    assert len(newest) >= 16
    assert trainer.gaps(newest, STEPS) < EXACT, "no prefix of older weights was used"

    for phase in reports[0].phases:
        each = [report.phases[phase] * 1000 for report in reports]
        print(
            f"\n{phase}: median {sorted(each)[STEPS // 2]:.1f} ms, longest {max(each):.1f} ms",
            end="",
        )


def test_loads_under_streams(server: Server, alone: None) -> None:
    assert server.get("/bridge/info").json()["held"], "before the trainer has come nobody is served"
    trainer = trainer_of(server)
    twenty_steps_under_streams(server, trainer)
    kept = list((server.bridge_dir.parent / "out" / "weights").iterdir())
    assert [path.name.split("-")[0] for path in kept] == [f"v{STEPS}"]
    trainer.sync.close()


def test_weights_of_another_model_and_half_written_ones(
    server: Server, tmp_path: Path, alone: None
) -> None:
    """Refused before anything is touched: those before go on serving, and nobody is interrupted."""
    trainer = trainer_of(server)
    trainer.step()
    folder = trainer.sync._present()
    other = another_model(server.model, server.bridge_dir.parent / f"other-{tmp_path.name}")
    torn = server.bridge_dir.parent / f"torn-{tmp_path.name}"
    shutil.copytree(folder, torn)
    file = torn / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    outside = save_model(build_tiny_model(), tmp_path / "outside")
    engine = client(server)
    with Streams(server.url, TOKEN, prompt=PROMPT, max_tokens=24) as load:
        load.until(8)
        cases = {
            other: "weights of another model",
            torn: "not a whole safetensors file",
            outside: "lies outside",
        }
        for path, says in cases.items():
            with pytest.raises(EngineError, match=says):
                engine.load_weights(LoadWeightsRequest(path=str(path), weight_version=9))
        load.until(24)
    load.assert_whole()
    assert {span for _, span in load.versions()} == {(1, 1)}
    assert trainer.gaps(load.completions, 1) < EXACT
    engine.close()
    trainer.sync.close()


def test_a_load_that_breaks_off_serves_nobody_until_one_is_whole(
    server: Server, alone: None
) -> None:
    trainer = trainer_of(server)
    trainer.step()
    folder = trainer.sync._present()
    engine = client(server)
    with pytest.raises(EngineGone, match="weights are mixed"):
        engine.load_weights(LoadWeightsRequest(path=str(folder), weight_version=5, lease_s=1e-6))
    assert server.get("/health", token=False).status_code == 503
    refused = server.post("/generate", {"prompt": PROMPT, "max_tokens": 2}, token=False)
    assert refused.status_code == 503
    assert "mixed" in refused.text
    assert engine.info().dirty
    trainer.step()
    assert server.get("/health", token=False).status_code == 200
    done = ask(server.url)
    assert trainer.gap(done, 2) < EXACT
    engine.close()
    trainer.sync.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in_place", "restart"])
def test_alone_the_trainer_owns_its_server(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It starts it, loads into it or restarts it, and brings a dead one back with the weights of
    now."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv(ENV_TOKEN)
    (port,) = free_ports(1)
    settings = config(
        save_model(build_tiny_model(), tmp_path / "model"),
        tmp_path,
        vllm_port=port,
        vllm_restart_interval=2,
        engine_reload=how,
        max_model_len=256,
        gpu_memory_utilization=0.05,
        log_dir=str(tmp_path / "logs"),
    )
    others = own_servers()
    trainer = Whole(Reload, settings)
    try:
        engine = trainer.sync.engines[0]
        first = engine.info()
        assert trainer.gap(ask(engine.base_url, None), 0) < EXACT
        assert list(trainer.step().phases) == ["write"], "not due: the server keeps its weights"
        assert engine.info().weight_version == 0
        report = trainer.step()
        second = engine.info()
        assert (second.instance_id == first.instance_id) == (how == "in_place")
        assert (second.weight_version, second.held) == (2, False)
        assert (second.started_from is None) == (how == "in_place")
        assert trainer.gap(ask(engine.base_url, None), 2) < EXACT
        print(f"\n{how}: {report.phases}")

        trainer.step()
        (child,) = own_servers() - others
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        with pytest.raises(EngineGone):
            engine.info()
        trainer.sync._checked = 0.0
        trainer.sync.check()
        again = engine.info()
        assert again.instance_id != second.instance_id
        assert (again.weight_version, again.held) == (3, False)
        assert trainer.gap(ask(engine.base_url, None), 3) < EXACT
    finally:
        trainer.sync.close()


@pytest.mark.slow
def test_a_server_killed_while_it_loads(tmp_path: Path, alone: None) -> None:
    """The trainer waits for the next one and gives it the weights; it was stopped with the request
    in hand."""
    model = save_model(build_tiny_model(), tmp_path / "model")
    made = start_server(tmp_path, model, ATROPOS_TOKEN=TOKEN, **UPDATES)
    trainer = trainer_of(made)
    trainer.step()
    port = made.url.rpartition(":")[2]
    made.process.send_signal(signal.SIGSTOP)  # the request is on its way, and not answered
    reports: list[Any] = []
    publish = threading.Thread(target=lambda: reports.append(trainer.step()))
    publish.start()
    time.sleep(1.0)
    assert publish.is_alive()
    end_of(made.process)
    again = start_server(tmp_path, model, port=int(port), ATROPOS_TOKEN=TOKEN, **UPDATES)
    try:
        publish.join(60)
        assert not publish.is_alive()
        assert reports[0].phases.keys() == {"write", "save", "restart"}
        assert again.get("/bridge/info").json()["weight_version"] == 2
        assert trainer.gap(ask(made.url), 2) < EXACT
    finally:
        trainer.sync.close()
        end_of(again.process)


def assert_trained(run: LiveStack, steps: int) -> None:
    """Every step was trained once, by one trainer; the sides agreed where they hold the same
    weights."""
    assert [step.step for step in run.steps()] == list(range(1, steps + 1))
    assert {step.attempt for step in run.steps()} == {1}, "the trainer outlives its engines"
    alignment = run.telemetry("alignment")
    probed = [
        record.probe_diff_abs_mean for record in alignment if record.probe_diff_abs_mean is not None
    ]
    assert len(probed) > 1
    assert max(probed) < 1e-5
    # On a busy machine rollouts are older, and may be far from the policy.
    others = [record for record in alignment if record.cause_kind not in ("", POLICY_LAG)]
    assert not others and {record.verdict for record in alignment} <= {"ok", "drift"}


@pytest.mark.slow
def test_the_whole_stack_survives_its_engine(stack: Start_) -> None:
    """vLLM is killed in the middle: its successor holds until it has the weights; no step is
    lost."""
    run = stack(mode="none", trainer__training_steps=STEPS_LIVE, trainer__vllm_restart_interval=2)
    run.until_step(3, 180)
    assert run.cli("kill", "vllm", "--yes").returncode == 0
    code, output = run.wait(timeout=300)
    assert code == 0, output[-4000:]
    assert_trained(run, STEPS_LIVE)
    lags = [step.policy_lag_max for step in run.steps()]
    assert all(lag is None or lag <= 4 for lag in lags), f"no rollout is of base weights: {lags}"
    assert len([r for r in run.states("vllm") if r.new == "healthy"]) == 2
    syncs = {record.step: record.phases for record in run.telemetry("sync")}
    assert list(syncs[1]) == ["write"]
    assert list(syncs[2]) == ["write", "save", "pause", "load", "device_sync", "resume"]
    assert "BENCHMARK SUMMARY (none)" in output
    assert not (run.run.bridge / "weights").exists()
    run.assert_nothing_left()


@pytest.mark.slow
def test_restarts_through_the_supervisor(stack: Start_) -> None:
    run = stack(
        mode="none",
        trainer__training_steps=4,
        trainer__vllm_restart_interval=2,
        trainer__engine_reload="restart",
    )
    code, output = run.wait(timeout=400)
    assert code == 0, output[-4000:]
    assert_trained(run, 4)
    syncs = {record.step: record.phases for record in run.telemetry("sync")}
    assert list(syncs[2]) == list(syncs[4]) == ["write", "save", "restart"]
    assert "asked for by the trainer" in " ".join(r.reason or "" for r in run.states("vllm"))
    starts = "".join(path.read_text() for path in run.run.logs.glob("vllm/*.log"))
    assert starts.count("starting with the weights of version 2") == 1
    print(f"\nrestart {syncs[2]['restart']:.1f} s")
    run.assert_nothing_left()
