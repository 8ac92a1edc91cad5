"""Adapters on real vLLM: swapped under load, loaded at a restart, equal to the trainer's numbers
throughout.

python -m pytest -m e2e tests/e2e/engine/test_lora.py    # one architecture
python -m pytest -m "e2e and slow" tests/e2e/engine/test_lora.py    # the others
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from atropos_common.protocol.bridge import ADAPTER_WEIGHTS
from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_TOKEN, MANIFEST_NAME
from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e import gate
from tests.e2e.live_stack import STEPS_LIVE, LiveStack, free_ports
from tests.e2e.small_models import ARCHITECTURES, TINY, make_model
from tests.e2e.streams import Streamed, Streams
from tests.e2e.vllm_server_live import TOKEN, Server, end_of, start_server
from tests.support.made_rollouts import rollouts_of
from tests.support.small_models import CONFIGS, SMALL, build
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import completions_logprobs, sequence_logprobs
from trainer_core.policy.lora import adapter_parameters, add_adapter, write_adapter
from trainer_core.rollouts.packing import pack
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.base import Start, SyncReport
from trainer_core.weight_sync.lora import KEPT, LoraRestart, LoraSwap

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]
Start_ = Callable[..., LiveStack]

CPU = torch.device("cpu")
EXACT = 1e-4
STEPS = 20
PROMPT = [2 + i * 7 % 12 for i in range(75)]
LORA = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2")


@pytest.fixture(
    scope="module", params=[TINY, *(pytest.param(x, marks=pytest.mark.slow) for x in ARCHITECTURES)]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lora")
    made = start_server(
        folder,
        make_model(request.param, folder / "model"),
        flags=LORA,
        VLLM_ENABLE_SHARED_WEIGHTS="0",
        ATROPOS_TOKEN=TOKEN,
        ATROPOS_HOLD_GENERATION="1",
    )
    yield made
    end_of(made.process)


class Trainer:
    """The work of the loop on made-up rollouts: a strategy, an optimizer, and copies of every
    version's adapter."""

    def __init__(
        self,
        kind: type[Any],
        config: TrainingConfig,
        start: Start | None = None,
        device: torch.device = CPU,
    ) -> None:
        torch.manual_seed(3)
        self.config = config
        self.sync = kind(config, device, threading.Event())
        self.version = (start or Start()).version
        self.model = self.sync.attach(start or Start())
        self.stepper = Stepper(self.model, config)
        self.kept = {self.version: self.copy()}

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in adapter_parameters(self.model).items()}

    def step(self) -> SyncReport:
        self.version += 1
        rows = pack(rollouts_of(8, seed=self.version), 64)
        accumulate(self.model, self.stepper, rows, Objective(self.config), self.version)
        self.stepper.compute()
        report = self.sync.publish(self.version, self.stepper.write)
        self.kept[self.version] = self.copy()
        return report

    def gap(self, done: Streamed, version: int) -> float:
        """Largest |server - trainer at `version`| over the completion's tokens."""
        return self.gaps([done], version)[0]

    @torch.no_grad()
    def gaps(self, several: list[Streamed], version: int) -> list[float]:
        """The same of each."""
        present = self.copy()
        try:
            for name, parameter in adapter_parameters(self.model).items():
                parameter.copy_(self.kept[version][name])
            ours = completions_logprobs(
                self.model, [(done.prompt, done.token_ids) for done in several]
            )
        finally:
            for name, parameter in adapter_parameters(self.model).items():
                parameter.copy_(present[name])
        pairs = zip(ours, several, strict=True)
        return [
            max(abs(a - b) for a, b in zip(own, done.logprobs, strict=True)) for own, done in pairs
        ]


def config(model: Path, tmp_path: Path, url: str = "", **fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": str(model),
            "weight_bridge_mode": "lora_only",
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 5e-3,
            "lora_r": 16,
            "lora_target_modules": ["all-linear"],
            "save_path": str(tmp_path / "out"),
            "engine_timeout": 180,
            "vllm_urls": [url] if url else None,
            **fields,
        }
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_CONTROL_SOCKET, ENV_RUN_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ENV_TOKEN, TOKEN)


def ask(server_url: str, token: str = TOKEN, tokens: int = 24) -> Streamed:
    engine = ServerClient(server_url, token)
    try:
        answer = engine.generate(PROMPT, tokens)
        return Streamed(PROMPT, False, answer.token_ids, answer.logprobs)
    finally:
        engine.close()


@pytest.mark.slow
def test_swaps_under_load(server: Server, tmp_path: Path, alone: None) -> None:
    """20 optimizer steps under 16 streams: nothing is cut off, and each completion is its own
    version's to 1e-4."""
    assert server.get("/bridge/info").json()["held"], "before the first adapter nobody is served"
    trainer = Trainer(LoraSwap, config(server.model, tmp_path, server.url))
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
        "the adapter moved, and the server with it"
    )
    spans: dict[Any, list[Streamed]] = {}
    for done, span in load.versions():
        spans.setdefault(span, []).append(done)
    assert len(spans) > 3, "completions of several versions were recorded"
    for span, several in spans.items():
        assert span is not None and span[0] == span[1], (
            "a completion ends on the adapter that it began with"
        )
        assert max(trainer.gaps(several, span[0])) < EXACT
    streamed = [each for each in load.completions if each.streamed]
    newest = [each for each in streamed if each.sent > published]
    assert newest and max(trainer.gaps(newest[:20], STEPS)) < EXACT
    # Which adapter a stream of vLLM's own route began with is not recorded: it must be one of all,
    # start to end.
    some = streamed[:: max(1, len(streamed) // 20)]
    by_version = [trainer.gaps(some, version) for version in trainer.kept]
    assert max(min(gaps) for gaps in zip(*by_version, strict=True)) < EXACT

    status = server.get("/lora/status").json()
    assert (status["weight_version"], status["retiring"]) == (STEPS, 0)
    served = {card["id"] for card in server.get("/v1/models").json()["data"]}
    assert {name for name in served if name.startswith("atropos-v")} == {status["name"]}, (
        "older ones are unloaded"
    )
    assert len(list((tmp_path / "out" / "adapters").iterdir())) <= KEPT + 1, (
        "and removed from the disk"
    )
    swaps = [report.phases["swap"] for report in reports]
    print(
        f"\nswap under 16 streams: median {median(swaps) * 1000:.0f} ms, longest "
        f"{max(swaps) * 1000:.0f} ms"
    )
    trainer.sync.close()


@pytest.mark.slow
def test_an_adapter_that_does_not_fit(server: Server, tmp_path: Path, alone: None) -> None:
    """Refused in words, and the one before goes on serving."""
    trainer = Trainer(LoraSwap, config(server.model, tmp_path, server.url))
    trainer.step()
    engine = trainer.sync.engines[0]
    torch.manual_seed(1)
    other = build(type(CONFIGS["qwen3"])(**SMALL | {"hidden_size": 16, "head_dim": 16}))
    add_adapter(other, config(server.model, tmp_path))
    write_adapter(other, tmp_path / "smaller")
    higher = load_model(server.model, torch.float32, CPU)
    add_adapter(higher, config(server.model, tmp_path, lora_r=32))
    write_adapter(higher, tmp_path / "higher")
    for name, says in (
        ("smaller", "the model's layer needs"),
        ("higher", "rank 32 is greater"),
        ("none", "is not a folder"),
    ):
        with pytest.raises(EngineError, match=says):
            engine.load_adapter(str(tmp_path / name), 9)
    with pytest.raises(UsageError, match="--lora-r 32 is above the server's --max-lora-rank 16"):
        Trainer(LoraSwap, config(server.model, tmp_path, server.url, lora_r=32))
    assert engine.adapters().weight_version == 1
    assert trainer.gap(ask(server.url), 1) < EXACT
    trainer.sync.close()


def test_the_base_model_is_untouched(server: Server, alone: None) -> None:
    """After the adapters of the tests above."""
    assert server.post("/lora/unload").status_code == 200
    plain = load_model(server.model, torch.float32, CPU)
    done = ask(server.url)
    ours = sequence_logprobs(plain, PROMPT, done.token_ids)
    assert max(abs(a - b) for a, b in zip(ours, done.logprobs, strict=True)) < EXACT


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Server]:
    """One that exports its weights: 36 MB, so that a second copy would show."""
    model = make_model(
        "qwen2", tmp_path / "model", hidden_size=512, intermediate_size=1408, num_hidden_layers=3
    )
    made = start_server(
        tmp_path, model, flags=LORA, ATROPOS_TOKEN=TOKEN, ATROPOS_HOLD_GENERATION="1"
    )
    yield made
    end_of(made.process)


def own_bytes() -> int:
    """Return the memory that earlier tests freed to the system first: reused, it would hide new
    allocations."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_full_info().uss)


def test_adapters_over_the_one_copy(sharing: Server, tmp_path: Path, alone: None) -> None:
    """The trainer computes with the server's base model and never writes to it: no second copy, the
    same numbers. Of an rsLoRA adapter, which is trained on then."""
    shard = sharing.manifest().ranks[0]
    before = hashlib.sha256(Path(shard.shm_path or "").read_bytes()).digest()
    fields = {
        "weight_bridge_mode": "lora_only",
        "vllm_port": int(sharing.url.rpartition(":")[2]),
        "lora_r": 16,
        "lora_use_rslora": True,
        "vllm_config_path": str(sharing.bridge_dir / MANIFEST_NAME),
    }
    grown = {}
    for single_copy in (True, False):
        free = own_bytes()
        kept = Trainer(LoraSwap, gate.config(sharing, tmp_path, single_copy=single_copy, **fields))
        assert kept.gap(ask(sharing.url), 0) < EXACT
        grown[single_copy] = (own_bytes() - free) / shard.shm_bytes
        kept.sync.close()
    print(f"\nmemory of its own, in copies of {shard.shm_bytes / 1e6:.0f} MB: {grown}")
    assert grown[True] < 0.5 and grown[False] > 0.8

    records = gate.train_on(
        sharing, tmp_path, training_steps=3, lr=5e-3, single_copy=True, **fields
    )
    assert [record.verdict for record in gate.alignments(records)] == ["ok"] * 3
    assert max(record.probe_diff_abs_mean for record in gate.alignments(records)) < EXACT
    assert hashlib.sha256(Path(shard.shm_path or "").read_bytes()).digest() == before
    final = tmp_path / "out" / "final_model"
    assert (
        max(
            tensor.abs().max()
            for name, tensor in load_file(final / ADAPTER_WEIGHTS).items()
            if "lora_B" in name
        )
        > 0
    )
    again = Trainer(
        LoraSwap,
        gate.config(sharing, tmp_path, single_copy=True, lora_adapter_path=str(final), **fields),
    )
    done = ask(sharing.url)
    base = sequence_logprobs(load_model(sharing.model, torch.float32, CPU), PROMPT, done.token_ids)
    assert (
        again.gap(done, 0)
        < EXACT
        < max(abs(a - b) for a, b in zip(base, done.logprobs, strict=True))
    )
    again.sync.close()


def own_servers() -> set[psutil.Process]:
    """vLLM servers that this process has started, those of fixtures among them."""
    living = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    return {child for child in living if "vllm_server" in " ".join(child.cmdline())}


@pytest.mark.slow
def test_restarts_as_an_own_child(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone the trainer starts the server, restarts it when due, starts a dead one again, and takes
    it along."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv(ENV_TOKEN)
    (port,) = free_ports(1)
    settings = config(
        save_model(build_tiny_model(), tmp_path / "model"),
        tmp_path,
        weight_bridge_mode="lora_restart",
        vllm_port=port,
        vllm_restart_interval=2,
        max_model_len=256,
        gpu_memory_utilization=0.05,
        log_dir=str(tmp_path / "logs"),
    )
    others = own_servers()
    trainer = Trainer(LoraRestart, settings)
    try:
        engine = trainer.sync.engines[0]
        url, first = engine.base_url, engine.info().instance_id
        answer = ask(url, None)  # type: ignore[arg-type]  # the token that the trainer made
        assert trainer.gap(answer, 0) < EXACT
        assert list(trainer.step().phases) == ["write"], "not due: the server keeps its adapter"
        assert engine.info().weight_version == 0
        report = trainer.step()
        assert list(report.phases) == ["write", "save", "restart", "load"]
        second = engine.info()
        assert second.instance_id != first and (second.weight_version, second.held) == (2, False)
        assert trainer.gap(ask(url, None), 2) < EXACT  # type: ignore[arg-type]
        print(f"\nrestart: {report.phases}")

        trainer.step()
        lifecycle = trainer.sync.lifecycle
        child = psutil.Process(lifecycle._process.pid)
        child.send_signal(signal.SIGKILL)
        lifecycle._process.wait(10)
        with pytest.raises(EngineGone):
            engine.info()
        trainer.sync._checked = 0.0
        trainer.sync.check()
        again = engine.info()
        assert again.instance_id != second.instance_id and (again.weight_version, again.held) == (
            3,
            False,
        )
        assert trainer.gap(ask(url, None), 3) < EXACT  # type: ignore[arg-type]
    finally:
        trainer.sync.close()
    assert own_servers() == others


@pytest.mark.slow
@pytest.mark.parametrize("name", [TINY, *ARCHITECTURES])
def test_twenty_steps_and_a_restart(
    name: str, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every architecture, under streams: base weights before, the adapter of step 20 after."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (port,) = free_ports(1)
    settings = config(
        make_model(name, tmp_path / "model"),
        tmp_path,
        weight_bridge_mode="lora_restart",
        vllm_port=port,
        vllm_restart_interval=STEPS,
        max_model_len=256,
        gpu_memory_utilization=0.2,
        log_dir=str(tmp_path / "logs"),
    )
    trainer = Trainer(LoraRestart, settings)
    try:
        with Streams(
            trainer.sync.engines[0].base_url, prompt=PROMPT, max_tokens=24, patient=True
        ) as load:
            load.until(20)
            for _ in range(STEPS - 1):
                assert list(trainer.step().phases) == ["write"]
            old = list(load.completions)
            assert "restart" in trainer.step().phases
            back = time.monotonic()
            load.until(20)
        new = [done for done in load.completions if done.sent > back]
        assert max(trainer.gaps(old[:20], 0)) < EXACT and max(trainer.gaps(new[:20], STEPS)) < EXACT
        assert trainer.gap(new[0], 0) > EXACT, (
            "training must have changed the answers, or this test sees nothing"
        )
    finally:
        trainer.sync.close()


def assert_trained(run: LiveStack, steps: int) -> None:
    """Every step was trained once, by one trainer; the sides agreed; what was saved is an
    adapter."""
    assert [step.step for step in run.steps()] == list(range(1, steps + 1))
    assert {step.attempt for step in run.steps()} == {1}, "the trainer outlives its engines"
    alignment = run.telemetry("alignment")
    probed = [
        record.probe_diff_abs_mean for record in alignment if record.probe_diff_abs_mean is not None
    ]
    assert probed and max(probed) < 1e-5 and {record.verdict for record in alignment} == {"ok"}
    final = run.run.checkpoints / "final_model"
    assert (final / "adapter_config.json").is_file() and not (final / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("single_copy", ["false", "true"], ids=["two copies", "one copy"])
@pytest.mark.parametrize("how", ["kill", "restart"])
def test_lora_only_survives_its_engine(stack: Start_, how: str, single_copy: str) -> None:
    """The whole stack; vLLM goes in the middle: its successor holds until it has the adapter, and
    no step is lost. Over one copy the trainer goes on with the successor's base model."""
    settings = {
        "training_steps": STEPS_LIVE,
        "checkpoint_interval": STEPS_LIVE // 2,
        "single_copy": single_copy,
    }
    run = stack(mode="lora_only", **{f"trainer__{name}": value for name, value in settings.items()})
    run.until_step(3, 180)
    assert run.cli(how, "vllm", "--yes").returncode == 0
    code, output = run.wait(timeout=300)
    assert code == 0, output[-4000:]
    assert_trained(run, STEPS_LIVE)
    lags = [step.policy_lag_max for step in run.steps()]
    assert all(lag is None or lag <= 2 for lag in lags), f"no rollout is of base weights: {lags}"
    assert len([r for r in run.states("vllm") if r.new == "healthy"]) == 2
    assert (
        run.run.checkpoints / f"adapter_step_{STEPS_LIVE // 2}" / "trainer_state.json"
    ).is_file()
    assert "BENCHMARK SUMMARY (lora_only)" in output
    run.assert_nothing_left()


@pytest.mark.slow
def test_lora_restart_through_the_supervisor(stack: Start_) -> None:
    run = stack(mode="lora_restart", trainer__training_steps=4)
    code, output = run.wait(timeout=400)
    assert code == 0, output[-4000:]
    assert_trained(run, 4)
    syncs = {record.step: record.phases for record in run.telemetry("sync")}
    assert list(syncs[3]) == ["write", "save", "restart", "load"] and list(syncs[2]) == ["write"]
    lags = [step.policy_lag_max for step in run.steps()]
    assert lags[0] == 0 and max(lags) <= 3, (
        f"the engine answers with the adapter of its last restart: {lags}"
    )
    assert "asked for by the trainer" in " ".join(r.reason or "" for r in run.states("vllm"))
    (bench,) = run.telemetry("benchmark")
    assert (bench.mode, bench.steps, bench.syncs) == ("lora_restart", 4, 1)
    print(f"\nrestart {syncs[3]['restart']:.1f} s, load {syncs[3]['load']:.2f} s")
    run.assert_nothing_left()
