"""Every mode of one GPU under 16 concurrent streams, with CUDA graphs and prefix cache: 20 steps
stay aligned.

python -m pytest -m gpu tests/gpu/test_weight_sync.py -s

The real server and the real training loop, but for run-api: rollouts are sampled from the server
itself. All servers start at once; the one of `lora_restart` is the trainer's own child.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from atropos_common.protocol.records import parse_line
from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e.live_stack import free_ports
from tests.e2e.streams import Streams
from tests.e2e.vllm_server_live import Server, end_of
from tests.trainer_core.policy.test_cuda import Sampled
from tests.trainer_core.stand_ins import TOKEN
from trainer_core.config import TrainingConfig
from trainer_core.loop import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

STEPS = 20
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "shared_vllm": {"VLLM_ENABLE_SHARED_WEIGHTS": "1"},
    "lora_only": {},
    "lora_one_copy": {"VLLM_ENABLE_SHARED_WEIGHTS": "1"},
    "none": {"ATROPOS_WEIGHT_UPDATES": "1"},
}
FLAGS = {
    mode: ["--enable-lora", "--max-lora-rank", "16"] for mode in ("lora_only", "lora_one_copy")
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora_one_copy": {"weight_bridge_mode": "lora_only", "single_copy": True}
}
"""Settings of the trainer that the name of the mode does not say."""
ENGINE_FLAGS = ["--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "64"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With as many rows as vLLM 0.26 needs for adapters."""
    return save_model(
        build_tiny_model(dtype="bfloat16", vocab_rows=128),
        tmp_path_factory.mktemp("model") / "tiny",
    )


@pytest.fixture(scope="module")
def servers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One held server for each mode that does not bring its own, started together."""
    started = {mode: begin(mode, base, tmp_path_factory.mktemp(mode)) for mode in ENVIRONMENTS}
    yield started
    for server in started.values():
        server.process.terminate()
    for server in started.values():
        end_of(server.process)


def begin(mode: str, model: Path, folder: Path, *flags: str, **env: str) -> Server:
    (port,), bridge, log = free_ports(1), folder / "bridge", folder / "server.log"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ATROPOS_")},
        "LOGDIR": str(bridge),
        "ATROPOS_TOKEN": TOKEN,
        "ATROPOS_HOLD_GENERATION": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        **ENVIRONMENTS[mode],
        **env,
    }
    command = [
        sys.executable,
        "-m",
        "vllm_server",
        "--model",
        str(model),
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "256",
        "--gpu-memory-utilization",
        "0.1",
        *ENGINE_FLAGS,
        *FLAGS.get(mode, []),
        *flags,
    ]
    folder.mkdir(exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    return Server(process, f"http://127.0.0.1:{port}", bridge, log, model, TOKEN)


def until_ready(server: Server, limit_s: float = 400) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if httpx.get(server.url + "/health_generate", timeout=15).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail("no server:\n" + server.log.read_text()[-4000:])


class Loaded(Sampled):
    """Rollouts from the server while `load` streams beside them, from the first batch on."""

    def __init__(self, url: str, load: Streams) -> None:
        super().__init__(url)
        self.load, self.loaded = load, False

    def next_batch(self, step: int, on_idle: Any = None) -> list[dict[str, Any]]:
        if not self.loaded:
            self.load.__enter__()
            self.load.until(16)
            self.loaded = True
        return super().next_batch(step, on_idle)


def run(
    mode: str, base: Path, url: str, folder: Path, load: Streams, **settings: Any
) -> dict[str, list[Any]]:
    """Train `STEPS` steps; the records by kind."""
    settings = {"weight_bridge_mode": mode} | SETTINGS.get(mode, {}) | settings
    config = TrainingConfig(
        model_name=str(base),
        vllm_port=int(url.rpartition(":")[2]),
        optimizer="adamw",
        lr=2e-4,
        training_steps=STEPS,
        batch_size=4,
        gradient_accumulation_steps=4,
        checkpoint_interval=0,
        save_path=str(folder / "out"),
        log_dir=str(folder / "logs"),
        gpu_memory_utilization=0.1,
        max_model_len=256,
        lora_target_modules=["all-linear"] if mode.startswith("lora") else None,
        **settings,
    )
    result = train(config, api=Loaded(url, load))  # type: ignore[arg-type]
    assert result.done and result.weight_version == STEPS
    found: dict[str, list[Any]] = {}
    for line in (folder / "out" / "telemetry.jsonl").read_text().splitlines():
        record = parse_line(line)
        found.setdefault(record.kind, []).append(record)
    return found


def check_aligned(mode: str, records: dict[str, list[Any]], at_least: int) -> None:
    """Same weights on both sides whenever they were compared, decoding and on cached prefixes."""
    probes = [
        a.probe_diff_abs_mean for a in records["alignment"] if a.probe_diff_abs_mean is not None
    ]
    print(
        f"\n{mode}: {len(probes)} probes, mean {mean(probes):.4f}, largest {max(probes):.4f}; "
        f"publish {mean(s.seconds for s in records['sync']):.3f} s {records['sync'][-1].phases}"
    )
    assert len(probes) >= at_least
    assert mean(probes) < 0.03 and max(probes) < 0.1, probes
    verdicts = {a.step: a.verdict for a in records["alignment"]}
    assert "mismatch" not in verdicts.values(), verdicts
    fresh = {step.step for step in records["step"] if step.policy_lag_max == 0}
    assert fresh, "some rollouts are of the present weights"
    # Between two loads rollouts are of older weights, and may honestly drift from the policy.
    assert {verdicts[step] for step in fresh} == {"ok"}, verdicts
    assert [step.weight_version for step in records["step"]] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("mode", list(ENVIRONMENTS))
def test_aligned_after_every_publish(
    mode: str,
    base: Path,
    servers: dict[str, Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = servers[mode]
    until_ready(server)
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    monkeypatch.setenv(
        "VLLM_BRIDGE_CONFIG_PATH", str(server.bridge_dir / "vllm_bridge_config.json")
    )
    load = Streams(server.url, TOKEN)
    every = 5 if mode == "none" else 1
    records = run(mode, base, server.url, tmp_path, load, vllm_restart_interval=every)
    ended = time.monotonic()
    load.until(40)
    load.__exit__()
    load.assert_whole()
    check_aligned(mode, records, STEPS // every - 1)
    spans = [span for _, span in load.versions()]
    assert None not in spans, "every completion has its versions"
    after = {span for _, span in load.versions(since=ended)}
    assert after == {(STEPS, STEPS)}, after
    assert max(step.policy_lag_max for step in records["step"]) <= every
    if mode.startswith("lora"):
        assert all(span and span[0] == span[1] for span in spans), "a completion keeps its adapter"
    assert "Graph capturing finished" in server.log.read_text(), "CUDA graphs were on"


def test_aligned_after_restarts(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lora_restart` without a supervisor: the server is the trainer's own child, restarted
    twice."""
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    load = Streams(url, TOKEN, patient=True)
    records = run("lora_restart", base, url, tmp_path, load, vllm_restart_interval=STEPS // 2)
    load.__exit__()
    check_aligned("lora_restart", records, 1)
    restarts = [
        record.phases["restart"] for record in records["sync"] if "restart" in record.phases
    ]
    assert len(restarts) == 2, restarts
    assert max(step.policy_lag_max for step in records["step"]) <= STEPS // 2
